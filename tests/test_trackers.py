"""Trackers: they get what a run reports, in order and once; whatever they do, the run neither stops nor waits."""

import importlib.machinery
import sys
import threading
import time
import types

import pytest

from mecefo_jax import trainer
from mecefo_jax.config import CheckpointConfig, Config, TrackConfig
from mecefo_jax.config_file import to_dict
from mecefo_jax.errors import ConfigError
from mecefo_jax.metrics import RunLog, read_events, read_rows
from mecefo_jax.processes.log import SharedLog
from mecefo_jax.tracker_threads import FINISH_SECONDS, Trackers, TrackerThread, open_trackers

CONFIG = Config(track=TrackConfig(trackers=("wandb",), project="rank"))
POINTS = ("made", "start", "scalars", "event", "finish")


class Recorder:
    """A tracker that keeps its calls, and does something bad at one of them."""

    def __init__(self, at: str = "", bad=lambda: None):
        self.calls, self.run_ids, self._at, self._bad = [], [], at, bad

    def __call__(self, run_id: str):
        self.run_ids.append(run_id)
        self._take("made")
        return self

    def start(self, workdir, config):
        self._take("start", workdir, config)

    def scalars(self, step, values):
        self._take("scalars", step, values)

    def event(self, kind, step, fields):
        self._take("event", kind, step, fields)

    def finish(self, summary):
        self._take("finish", summary)

    def steps(self) -> list[int]:
        return [arguments[0] for method, arguments in self.calls if method == "scalars"]

    def _take(self, method, *arguments):
        if method == self._at:
            self._bad()
        self.calls.append((method, arguments))


@pytest.fixture
def hang():
    """Blocks whoever calls it until the test is over."""
    over = threading.Event()
    yield over.wait
    over.set()


def threads(workdir, *recorders, **options) -> Trackers:
    return Trackers([TrackerThread(f"fake{i}", each, workdir, {}, **options) for i, each in enumerate(recorders)])


def quiet(workdir, trackers) -> RunLog:
    return RunLog(workdir, total_steps=100, console=False, tensorboard=False, trackers=trackers)


def raiser(error: BaseException):
    def bad():
        raise error

    return bad


def report_everything(workdir, trackers, rows: int = 5) -> list[dict]:
    """A short run, and the events of failed trackers that it told of."""
    with quiet(workdir, trackers) as log:
        log.event("started", 0)
        for step in range(1, rows + 1):
            log.scalars(step, {"train/loss": 1.0 / step})
        log.summary({"steps": rows})
    return [event for event in read_events(workdir / "events.jsonl") if event["kind"] == "tracker_failed"]


def test_everything_arrives_in_order(tmp_path):
    recorder = Recorder()
    with quiet(tmp_path, threads(tmp_path, recorder)) as log:
        log.event("started", 0)
        log.scalars(10, {"train/loss": 2.0, "note": "text"})
        log.event("failure", 12, node=3)
        log.summary({"steps": 12, "reason": None})
    assert recorder.calls == [
        ("made", ()),
        ("start", (tmp_path, {})),
        ("event", ("started", 0, {})),
        ("scalars", (10, {"train/loss": 2.0, "attempt": 1})),
        ("event", ("failure", 12, {"node": 3})),
        ("finish", ({"steps": 12, "reason": None},)),
    ]
    assert not any(event["kind"] == "tracker_failed" for event in read_events(tmp_path / "events.jsonl"))


@pytest.mark.parametrize("error", [RuntimeError("quota\nexceeded"), SystemExit(3), KeyboardInterrupt("leave")])
@pytest.mark.parametrize("point", POINTS)
def test_exception_is_told_once_and_reaches_nobody_else(point, error, tmp_path):
    bad, good = Recorder(point, raiser(error)), Recorder()
    (told,) = report_everything(tmp_path, threads(tmp_path, bad, good))
    assert (told["tracker"], told["reason"]) == ("fake0", f"{type(error).__name__}: {' '.join(str(error).split())}")
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5] == good.steps()
    assert good.calls[-1] == ("finish", ({"steps": 5},))
    assert ("finish", ({"steps": 5},)) not in bad.calls
    if point in ("scalars", "event"):  # it had begun, so it is ended
        assert bad.calls[-1] == ("finish", ({},))


@pytest.mark.parametrize("point", POINTS)
def test_hang_costs_the_run_nothing_but_a_wait_at_its_end(point, hang, tmp_path, monkeypatch):
    monkeypatch.setattr("mecefo_jax.metrics.FINISH_SECONDS", 0.3)
    started = time.monotonic()
    (told,) = report_everything(tmp_path, threads(tmp_path, Recorder(point, hang)))
    assert 0.3 <= time.monotonic() - started < 5  # a hang would last for ever
    assert told["tracker"] == "fake0" and "did not end in time" in told["reason"]
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 5


def test_who_does_not_keep_up_is_dropped_with_a_bounded_queue(hang, tmp_path):
    slow, good = Recorder("scalars", hang), Recorder()
    trackers = Trackers(
        [
            TrackerThread("slow", slow, tmp_path, {}, most_waiting=10),
            TrackerThread("good", good, tmp_path, {}),
        ]
    )
    started = time.monotonic()
    (told,) = report_everything(tmp_path, trackers, rows=200)
    assert time.monotonic() - started < FINISH_SECONDS, "the run waited at its end for a tracker that was dropped"
    assert (told["tracker"], told["reason"]) == ("slow", "it does not keep up: 10 calls are waiting")
    assert 10 <= told["step"] <= 12  # ten rows wait, and one hangs
    assert good.steps() == list(range(1, 201)) and slow.steps() == []


def test_resumed_run_goes_on_under_its_id_without_a_zig_zag(tmp_path):
    recorder = Recorder()
    attempts = [(0, [10, 20, 30]), (10, [20, 30, 40]), (0, [10, 20, 30, 40, 50]), (50, [60])]
    for resumed, steps in attempts:
        with quiet(tmp_path, threads(tmp_path, recorder)) as log:
            log.event("resumed" if resumed else "started", resumed)
            for step in steps:
                log.scalars(step, {"train/loss": float(step)})
    assert recorder.steps() == [10, 20, 30, 40, 50, 60]
    numbers = [arguments[1]["attempt"] for method, arguments in recorder.calls if method == "scalars"]
    assert numbers == [1, 1, 1, 2, 3, 4]
    assert len(set(recorder.run_ids)) == 1 and len(recorder.run_ids) == 4
    other = Recorder()
    with quiet(tmp_path / "other", threads(tmp_path / "other", other)) as log:
        log.scalars(10, {"train/loss": 1.0})
    assert other.run_ids[0] not in recorder.run_ids and other.steps() == [10]


def test_crash_before_the_first_row_leaves_no_second_run(tmp_path):
    recorder = Recorder()
    for _ in range(2):
        quiet(tmp_path, threads(tmp_path, recorder)).close()
    assert recorder.run_ids == recorder.run_ids[:1] * 2


def test_another_project_gets_a_run_of_its_own_from_the_start(tmp_path):
    recorder = Recorder()
    for project in ("one", "two"):
        with quiet(tmp_path, threads(tmp_path, recorder, project=project)) as log:
            log.scalars(10, {"train/loss": 1.0})
    assert recorder.steps() == [10, 10] and len(set(recorder.run_ids)) == 2


def test_evaluation_of_a_step_that_has_a_row_is_kept(tmp_path):
    recorder = Recorder()
    with quiet(tmp_path, threads(tmp_path, recorder)) as log:
        log.scalars(10, {"train/loss": 1.0})
        log.scalars(10, {"eval/loss": 1.5})
    assert recorder.steps() == [10, 10]


def test_among_processes_the_one_that_writes_tracks(tmp_path):
    recorders = Recorder(), Recorder()
    first, second = (
        SharedLog(tmp_path, total_steps=9, num_nodes=2, open_trackers=lambda each=each: threads(tmp_path, each))
        for each in recorders
    )
    first.begin()
    for step in (1, 2):
        for log in (first, second):
            log.scalars(step, {"train/loss": 1.0})
    first.close()  # the end of its process, to the other one
    second.scalars(3, {"train/loss": 1.0})
    assert recorders[1].calls == [] and recorders[1].run_ids == []
    second.take_over()
    second.scalars(4, {"train/loss": 1.0})
    second.close()
    assert recorders[0].steps() == [1, 2] and recorders[1].steps() == [3, 4]
    assert recorders[0].run_ids == recorders[1].run_ids


def test_handing_over_the_log_waits_for_no_tracker(hang, tmp_path):
    log = SharedLog(
        tmp_path, total_steps=9, num_nodes=2, open_trackers=lambda: threads(tmp_path, Recorder("start", hang))
    )
    log.begin()
    log.scalars(1, {"train/loss": 1.0})
    started = time.monotonic()
    log.close(wait_for_trackers=False)
    assert time.monotonic() - started < FINISH_SECONDS / 3
    assert not any(event["kind"] == "tracker_failed" for event in read_events(tmp_path / "events.jsonl"))


def test_damaged_record_of_the_run_id_is_a_failure_of_that_tracker(tmp_path):
    (tmp_path / "tracking").mkdir()
    (tmp_path / "tracking" / "fake0.json").write_text("{")
    recorder = Recorder()
    (told,) = report_everything(tmp_path, threads(tmp_path, recorder))
    assert told["reason"].startswith("JSONDecodeError") and recorder.calls == []


def test_missing_package_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^track.trackers: got wandb, which is not installed; pip install '.\[wandb"):
        trainer.run(CONFIG, tmp_path / "run")
    assert not (tmp_path / "run").exists()


class FakeRun:
    def __init__(self):
        self.rows, self.summary, self.finished = [], {}, False

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture(params=["wandb", "trackio"])
def fake_module(request, monkeypatch):
    """A package of that name that is installed, and the arguments and runs of its init."""
    module = types.ModuleType(request.param)
    module.__spec__ = importlib.machinery.ModuleSpec(request.param, None)
    module.Settings = lambda **settings: settings
    module.setup = lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode="online"))
    module.login = lambda prompt: module.logged_in
    module.logged_in, module.inits = True, []

    def init(**arguments):
        module.inits.append((arguments, FakeRun()))
        return module.inits[-1][1]

    module.init = init
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def test_run_as_the_packages_see_it(fake_module, tmp_path):
    config = Config(name="tiny", track=TrackConfig(trackers=(fake_module.__name__,)))
    for attempt in range(2):
        with quiet(tmp_path / "seed0", open_trackers(config, tmp_path / "seed0")) as log:
            log.event("resumed" if attempt else "started", 10 * attempt)
            log.scalars(10 * attempt + 10, {"train/loss": 1.0})
            log.event("failure", 12, node=3)
            log.event("failure", 12, node=4)
            log.scalars(10 * attempt + 15, {"train/loss": 0.5})
            log.summary({"steps": 15, "eval_loss": None})
    (first, run), (second, _) = fake_module.inits
    assert first == second and first["resume"] == "allow"
    assert first["project"] == "tiny" and first["name"].startswith("seed0") and first["config"] == to_dict(config)
    assert run.rows[:2] == [
        (10, {"train/loss": 1.0, "attempt": 1, "events/started": 1}),
        (15, {"train/loss": 0.5, "attempt": 1, "events/failure": 2}),
    ]
    told = run.summary if fake_module.__name__ == "wandb" else run.rows[2][1]
    assert told["final/steps"] == 15 and run.finished


def test_wandb_without_a_login_asks_nobody(fake_module, tmp_path):
    if fake_module.__name__ == "wandb":
        fake_module.logged_in = False
        config = Config(track=TrackConfig(trackers=("wandb",)))
        (told,) = report_everything(tmp_path, open_trackers(config, tmp_path))
        assert "not logged in; set WANDB_API_KEY" in told["reason"] and not fake_module.inits


def test_tracker_of_a_real_run_gets_its_rows(tmp_path, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr("mecefo_jax.trainer.open_trackers", lambda config, workdir: threads(workdir, recorder))
    monkeypatch.setattr("mecefo_jax.trainer.Trainer", _FakeTrainer)
    (tmp_path / "text.txt").write_text("word " * 4000)
    config = Config(checkpoint=CheckpointConfig(every=0))
    monkeypatch.setattr("mecefo_jax.trainer.open_inputs", lambda config: types.SimpleNamespace(prepared=None))
    trainer.run(config, tmp_path / "run")
    assert recorder.steps() == [7] and recorder.calls[-1] == ("finish", ({"steps": 7},))


class _FakeTrainer:
    """Stands for the training, which has tests of its own: one row and a summary."""

    is_finished = True

    def __init__(self, config, workdir, inputs, log):
        self._log = log

    def run(self, stop):
        self._log.scalars(7, {"train/loss": 1.0})
        self._log.summary({"steps": 7})
        return {}

    def close(self):
        pass
