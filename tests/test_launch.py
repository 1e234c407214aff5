"""The launcher: what it starts, what it refuses, and how it stops."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from mecefo_jax import cli, launch
from mecefo_jax.config_file import save_config

ROOT = pathlib.Path(__file__).parents[1]
DEADLINE = 30.0


def refusal(argv, capsys):
    """The line that a wrong command line prints."""
    assert launch.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.fixture
def started(monkeypatch):
    """Replaces the supervisor by a recorder of commands."""
    calls = []

    class Recorder:
        def __init__(self, commands, *, limits):
            calls.append((commands("127.0.0.1:4711"), limits))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def run(self):
            return 76

    monkeypatch.setattr(launch, "Supervisor", Recorder)
    return calls


def test_commands_start_a_coordinator_nodes_and_spares_that_agree_on_the_run(started, capsys):
    words = ["quickstart", "--train.steps", "7", "--data.files=", "--cluster.audit", "true"]
    assert launch.main(["--nodes", "4", "--spares", "1", "--max-restarts", "3", "--", *words]) == 76
    ((commands, limits),) = started
    assert limits.max_restarts == 3
    assert len(commands) == 6
    assert [command[0] for command in commands] == [sys.executable] * 6
    assert [command[1] for command in commands] == [str(ROOT / "train.py")] * 6
    configs = [cli.parse(command[2:])[0] for command in commands]
    named, _ = cli.parse(["quickstart"])
    for process, config in enumerate(configs):
        assert config.global_batch_size == named.global_batch_size
        assert (config.mesh.num_nodes, config.faults.scenario, config.train.steps) == (4, "live", 7)
        assert (config.cluster.coordinator, config.cluster.num_processes) == ("127.0.0.1:4711", 6)
        assert config.cluster.process_id == process
        assert config.cluster.audit
    assert "faults.scenario live instead of steps" in capsys.readouterr().out


def test_microbatches_that_are_given_are_kept_and_the_same_nodes_may_be_named(started):
    given = ["--train.microbatches_per_node=3", "--mesh.num-nodes", "5", "--faults.scenario", "live"]
    assert launch.main(["--nodes", "5", "--", "quickstart", *given]) == 76
    ((commands, _),) = started
    config, _ = cli.parse(commands[1][2:])
    assert (config.mesh.num_nodes, config.train.microbatches_per_node) == (5, 3)


def test_config_file_of_an_earlier_launch_can_be_launched_again(started, tmp_path, capsys):
    assert launch.main(["--nodes", "4", "--", "quickstart"]) == 76
    config, _ = cli.parse(started[0][0][2][2:])
    save_config(config, tmp_path / "config.json")
    assert launch.main(["--nodes", "2", "--", str(tmp_path / "config.json")]) == 76
    again, _ = cli.parse(started[1][0][1][2:])
    assert (again.mesh.num_nodes, again.train.microbatches_per_node) == (2, 8)
    assert again.cluster.num_processes == 3


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nodes", "3", "--", "quickstart"], ["--nodes: got 3", "16 microbatches", "nearest that work: 2 or 4"]),
        (["--nodes", "0", "--", "quickstart"], ["--nodes: got 0"]),
        (["--nodes", "4", "--spares", "-1", "--", "quickstart"], ["--spares: got -1"]),
        (["--nodes", "4", "--stall-seconds", "0", "--", "quickstart"], ["--stall-seconds: got 0"]),
        (["--nodes", "x", "--", "quickstart"], ["--nodes", "'x'"]),
        (["--", "quickstart"], ["--nodes"]),
        (["--nodes", "4", "quickstart"], ["got quickstart before --", "-- quickstart"]),
        (["--nodes", "4", "--train.steps", "9", "--", "quickstart"], ["got --train.steps before --"]),
        (["--nodes", "4"], ["got no run to start", "quickstart"]),
        (["--nodes", "4", "--"], ["got no run to start", "quickstart"]),
        (["--nodes", "4", "--", "quickstrt"], ["did you mean quickstart?"]),
        (["--nodes", "4", "--", "quickstart", "--train.steps", "x"], ["train.steps: got 'x'"]),
        (["--nodes", "4", "--", "quickstart", "--train.stepz", "9"], ["train.stepz"]),
        (
            ["--nodes", "4", "--", "quickstart", "--mesh.num_nodes", "8"],
            ["mesh.num_nodes: got 8", "to 4", "leave it out"],
        ),
        (["--nodes", "4", "--", "quickstart", "--faults.scenario", "low"], ["faults.scenario: got low", "live"]),
        (
            ["--nodes", "4", "--", "quickstart", "--cluster.process-id", "1"],
            ["cluster.process_id: got 1", "leave it out"],
        ),
        (["--nodes", "2", "--", "quickstart", "--faults.min_live_nodes", "3"], ["faults.min_live_nodes: got 3"]),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(argv, words, started, capsys):
    message = refusal(argv, capsys)
    for word in words:
        assert word in message
    assert not started


def test_missing_program_is_named(started, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(launch.mecefo_jax, "__file__", str(tmp_path / "mecefo_jax" / "__init__.py"))
    assert f"{tmp_path / 'train.py'}: not there" in refusal(["--nodes", "4", "--", "quickstart"], capsys)
    assert not started


def test_print_config_shows_what_a_node_would_run(started, capsys):
    assert launch.main(["--nodes", "4", "--", "quickstart", "--print-config"]) == 0
    config = json.loads(capsys.readouterr().out)
    assert (config["mesh"]["num_nodes"], config["train"]["microbatches_per_node"]) == (4, 4)
    assert not started


def test_help_and_mistakes_need_no_jax():
    program = (
        "import sys\nfrom mecefo_jax import launch\n"
        "assert launch.main(['--nodes', '3', '--', 'quickstart']) == 2\n"
        "assert 'jax' not in sys.modules and 'numpy' not in sys.modules\n"
        "launch.main(['--help'])"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for option in ("--nodes", "--spares", "--max-restarts", "--stall-seconds", "NAME", "quickstart"):
        assert option in ended.stdout


def launched(folder, node, **streams):
    """A launcher of two stand-in nodes, as a process."""
    (folder / "node.py").write_text(node)
    command = [sys.executable, str(ROOT / "tests" / "launchable.py"), str(folder)]
    return subprocess.Popen(
        [*command, "--nodes", "2", "--", "quickstart"], env={**os.environ, "PYTHONPATH": str(ROOT)}, **streams
    )


NODE = """
import signal
for signum, code in ((signal.SIGTERM, 75), (signal.SIGINT, 130)):
    signal.signal(signum, lambda signum, frame, code=code: sys.exit(code))
note("ready", PROCESS)
beat_for_ever()
"""


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)], ids=lambda value: str(value)
)
def test_signals_to_the_launcher_stop_the_run(signum, code, tmp_path):
    process = launched(tmp_path, NODE, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + DEADLINE
        ready = tmp_path / "ready"
        while not ready.exists() or len(ready.read_text().splitlines()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signum)
        output, _ = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert process.returncode == code
    assert output.splitlines()[-1].startswith(f"[launch] exit code {code}, ")


def test_closed_standard_output_does_not_end_the_run(tmp_path):
    node = "for number in range(1000): print(number)\nnote('finished', PROCESS)"
    reading, writing = os.pipe()
    os.close(reading)
    process = launched(tmp_path, node, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    _, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, errors) == (0, b"")
    assert sorted((tmp_path / "finished").read_text().split()) == ["1", "2"]
