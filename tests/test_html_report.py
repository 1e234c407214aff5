"""The page that compares runs: it shows each run's own numbers, needs nothing else, and takes any run directory."""

import datetime
import html.parser
import json
import math
import pathlib
import re
import shlex

import numpy as np
import pytest

from mecefo_jax import cli
from mecefo_jax.config_file import save_config
from mecefo_jax.html_chart import Curve, Marks, chart, short, thinned, timeline
from mecefo_jax.html_report import page
from mecefo_jax.metrics import RunLog
from mecefo_jax.recorded_run import command, open_runs
from scripts.report import main

NOW = datetime.datetime(2026, 11, 30, 12, 0, tzinfo=datetime.UTC)
VOID = {"meta", "br", "hr", "img", "input", "link"}
CONFIG = {"name": "sample", "mesh": {"num_nodes": 8}, "train": {"steps": 40}, "faults": {"policy": "neighbor"}}


class Page(html.parser.HTMLParser):
    """Reads a page strictly: every element is closed, in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.elements, self.cells, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data
        if "td" in self.open or "th" in self.open:
            self.cells[-1][-1] += data

    def row(self, name: str) -> list[str]:
        """The cells beside the first row header of that name."""
        return next(cells[1:] for cells in self.cells if cells[0] == name)


def record(workdir, *, rows: int = 4, failures=(), summary=None, config=CONFIG, rate: float = 100.0):
    """A run with a row each ten steps of half a second, and one node down for five steps after each failure."""
    workdir.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (workdir / "config.json").write_text(json.dumps(config))
    due: dict[int, list[int]] = {}
    for at in failures:
        due.setdefault(at - at % 10 + 10, []).append(at)
    with RunLog(workdir, total_steps=10 * rows, console=False, tensorboard=False) as log:
        log.event("started", 0)
        for step in range(10, 10 * rows + 1, 10):
            for at in due.get(step, []):
                down = {"live_nodes": 7, "degraded_fraction": 0.25, "critical_load": 1.5}
                log.event("failure", at, node=3, covered_by=4)
                log.event("takeover", at, policy="neighbor", **down)
                log.event("recovery", at + 5, node=3)
                log.event(
                    "takeover", at + 5, **down | {"live_nodes": 8, "degraded_fraction": 0.0, "critical_load": 1.0}
                )
            log.scalars(step, {"train/loss": 50 / step, "perf/step_time_s": 0.5, "perf/tokens_per_s": rate + step})
        log.scalars(10 * rows, {"eval/loss": 1.5, "eval/perplexity": math.exp(1.5)})
        if summary is not None:
            log.summary({"steps": 10 * rows, **summary})
    return workdir


def read(*directories) -> Page:
    return Page(page(open_runs([pathlib.Path(directory) for directory in directories]), NOW))


def test_numbers_of_each_run_stand_under_its_name(tmp_path):
    summary = {
        "initial_loss": 5.5,
        "final_loss": 2.25,
        "eval_loss": 2.125,
        "eval_perplexity": 8.375,
        "failures": 1234,
        "recoveries": 1233,
        "tokens": 987654,
        "degraded_token_fraction": 0.125,
        "mean_critical_load": 1.0625,
        "goodput": 0.875,
        "wall_time_s": 3725.4,
    }
    finished = record(tmp_path / "alpha", summary=summary)
    going_on = record(tmp_path / "beta", rows=2, failures=(12,))
    found = read(finished, going_on)
    assert ["", "alpha", "beta"] in found.cells
    tokens = 0.5 * 10 * (110 + 120)  # seconds a step, steps a row, tokens a second
    for name, cells in {
        "state": ["finished", "not finished: step 20 of 40"],
        "steps": ["40", "20"],
        "tokens": ["987,654", f"{tokens:,.0f}"],
        "first loss": ["5.5000", "5.0000"],
        "last loss": ["2.2500", "2.5000"],
        "evaluation loss": ["2.1250", "1.5000"],
        "perplexity": ["8.375", "4.482"],
        "failures": ["1,234", "1"],
        "recoveries": ["1,233", "1"],
        "degraded tokens": ["12.5%", "6.2%"],  # 5 of 20 steps with a quarter
        "mean load": ["1.062", "1.125"],  # 5 of 20 steps with 1.5
        "goodput": ["87.5%", "-"],
        "wall time": ["1:02:05", "-"],
    }.items():
        assert found.row(name) == cells, name


def test_page_needs_nothing_but_itself(tmp_path):
    text = page(open_runs([record(tmp_path / "a", failures=(3,)), record(tmp_path / "b")]), NOW)
    for tag, attributes in Page(text).elements:
        assert tag not in ("script", "link", "img", "iframe", "object") and not {"src", "href"} & attributes.keys()
    assert not re.search(r"https?:|url\(|@import|//", text)


def test_names_and_contents_are_escaped(tmp_path):
    evil = "<script>alert(1)<b>\"&'$title"
    run = record(tmp_path / evil, config=CONFIG | {"name": evil, "faults": {"policy": evil}})
    with RunLog(run, total_steps=40, console=False, tensorboard=False) as log:
        log.event("resumed", 40)
        log.event("save_failed", 40, reason=evil, **{"<i>": ["<u>"]})
    found = read(run, record(tmp_path / "plain"))
    assert not {"script", "u"} & {tag for tag, _ in found.elements}
    assert ["", evil, "plain"] in found.cells
    assert found.row("faults.policy") == [json.dumps(evil), '"neighbor"']
    assert any(cells[-1] == f"reason {evil}, <i> <u>" for cells in found.cells)


def test_only_differing_settings_are_compared(tmp_path):
    other = CONFIG | {"mesh": {"num_nodes": 8, "fsdp": 2}, "train": {"steps": 50}}
    found = read(record(tmp_path / "a"), record(tmp_path / "b", config=other))
    rows = found.cells[found.cells.index(["setting", "a", "b"]) + 1 :][:3]
    assert rows[:2] == [["train.steps", "40", "50"], ["mesh.fsdp", "-", "2"]]
    assert rows[2][0] == "step", "more than the two settings that differ"
    assert "all settings are the same" in read(record(tmp_path / "c"), record(tmp_path / "d")).text
    assert "Different settings" not in read(tmp_path / "a").text


def test_attempts_are_counted_and_what_was_undone_is_left_out(tmp_path):
    record(tmp_path / "run", rows=4, failures=(35,))
    with RunLog(tmp_path / "run", total_steps=40, console=False, tensorboard=False) as log:
        log.event("resumed", 20)
        log.scalars(30, {"train/loss": 7.25})
    found = read(tmp_path / "run")
    assert found.row("attempts") == ["2"] and found.row("steps") == ["30"]
    assert found.row("last loss") == ["7.2500"] and found.row("failures") == ["0"]


def test_summary_of_an_earlier_end_is_not_taken_for_the_run(tmp_path):
    record(tmp_path / "run", rows=2, summary={"final_loss": 9.0})
    with RunLog(tmp_path / "run", total_steps=40, console=False, tensorboard=False) as log:
        log.event("resumed", 20)
        log.scalars(30, {"train/loss": 7.25})
    found = read(tmp_path / "run")
    assert found.row("state") == ["not finished: step 30 of 40"] and found.row("last loss") == ["7.2500"]


@pytest.mark.parametrize("value", [2.5, math.nan, math.inf])
def test_one_row_of_a_run_without_anything_else(tmp_path, value):
    with RunLog(tmp_path / "run", total_steps=1, console=False, tensorboard=False) as log:
        log.scalars(1, {"train/loss": value})
    (tmp_path / "run" / "events.jsonl").unlink()
    found = read(tmp_path / "run")
    assert found.row("first loss") == ["2.5000" if value == 2.5 else "nan"]
    assert found.row("failures") == ["0"] and found.row("tokens") == ["-"]


def test_same_directory_names_are_told_apart(tmp_path):
    paths = record(tmp_path / "x" / "run"), record(tmp_path / "y" / "run")
    assert [run.name for run in open_runs(paths)] == [str(path) for path in paths]


@pytest.mark.slow
def test_long_runs_give_a_small_page(tmp_path):
    run = record(tmp_path / "long", rows=10_000, failures=range(3, 100_000, 100), summary={})
    text = page(open_runs([run]) * 4, NOW)
    assert len(text.encode()) < 1_000_000
    found = Page(text)
    assert "3,701 more are in" in found.text  # of 4,001 events, 300 are listed
    assert found.row("failures") == ["1,000"] * 4


def test_command_gives_the_same_config(tmp_path):
    argv = ["quickstart", "--train.steps", "9", "--data.source", "files", "--data.files", "a b.txt,c.txt"]
    argv += ["--optim.clip_norm", "none", "--mesh.num_submeshes", "1", "--data.repeat", "true"]
    config, _ = cli.parse(argv)
    save_config(config, record(tmp_path / "run") / "config.json")
    (run,) = open_runs([tmp_path / "run"])
    words = shlex.split(command(run))
    assert words[:2] == ["python", "train.py"] and cli.parse(words[2:])[0] == config


def test_command_of_processes_goes_through_the_launcher(tmp_path):
    config = CONFIG | {"name": "quickstart", "cluster": {"coordinator": "h:1", "process_id": 1, "num_processes": 10}}
    (run,) = open_runs([record(tmp_path / "run", config=config | {"faults": {"scenario": "live", "policy": "drop"}})])
    assert command(run) == (
        "python -m mecefo_jax.launch --nodes 8 --spares 1 -- quickstart --workdir NEW --train.steps 40 "
        "--faults.policy drop"
    )


def test_script_writes_the_page_and_refuses_what_is_no_run(tmp_path, capsys):
    run, out = record(tmp_path / "run"), tmp_path / "out.html"
    assert main([str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n" and Page(out.read_text()).row("steps") == ["40"]
    assert main([str(run), str(tmp_path)]) == 2
    assert re.fullmatch(r"error: .*: holds no metrics\.jsonl, so it is not a run.*\n", capsys.readouterr().err)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    assert main([str(tmp_path / "empty")]) == 3
    assert "no row yet" in capsys.readouterr().err
    assert main([str(run), "--out", str(tmp_path / "missing" / "out.html")]) == 2
    assert "--out" in capsys.readouterr().err


def drawn(figure: str) -> tuple[list[tuple[float, float]], dict[str, float], dict[str, float]]:
    """Points of a figure's curve in percent of the plot, and where its labels are, by their text."""
    path = re.search(r'<path class="c0[^"]*" d="(M[^h"]*L[^h"]*)"', figure)[1]
    points = [tuple(map(float, point.split())) for point in re.split("[ML]", path)[1:]]
    labels = {
        side: {text: float(at) for at, text in re.findall(rf'style="{side}:([\d.]+)%">([^<]*)<', figure)}
        for side in ("left", "bottom")
    }
    return [(x / 10, 100 - y / 3) for x, y in points], labels["left"], labels["bottom"]


@pytest.mark.parametrize("log", [False, True])
def test_points_lie_where_the_labels_say(log):
    x, y = np.array([10.0, 20, 40, 60]), np.array([1.0, 5, 10, 20])
    figure = chart("t", "u", [Curve(run=0, x=x, y=y)], x_label="step", x_max=60.0, log=log)
    points, left, bottom = drawn(figure)
    checked = 0
    for value, at in zip(x, [point[0] for point in points], strict=True):
        if short(value) in left:
            assert abs(at - left[short(value)]) <= 0.1  # both are rounded to a tenth
            checked += 1
    for value, at in zip(y, [point[1] for point in points], strict=True):
        if short(value) in bottom:
            assert abs(at - bottom[short(value)]) <= 0.1
            checked += 1
    assert checked >= 5


def test_gaps_stay_gaps_and_a_chart_without_values_says_so():
    y = np.array([1.0, math.nan, 2.0, 3.0])
    figure = chart("t", "u", [Curve(run=0, x=np.arange(4.0), y=y, steps=True)], x_label="step", x_max=3.0)
    path = re.search(r'<path class="c0[^"]*" d="([^"]*)"', figure)[1]
    assert path.count("M") == 2 and path.count("H") == 1
    nothing = chart("t", "u", [Curve(run=0, x=np.arange(1.0), y=y[1:2])], x_label="step", x_max=3.0)
    assert "no values" in nothing and "<svg" not in nothing


def test_failures_are_below_the_line_and_returns_above():
    marks = Marks(run=0, down=np.array([0.0, 30.0]), up=np.array([60.0]))
    figure = timeline("t", "u", [marks], x_label="step", x_max=60.0)
    ticks = re.search(r'<path class="c0[^"]*" d="([^"]*)"', figure)[1]
    places = [(int(at), float(reach)) for at, reach in re.findall(r"M(\d+) [\d.]+v([-\d.]+)", ticks)]
    (first, down), (second, _), (third, up) = places
    assert down > 0 > up  # downwards in SVG
    assert first == 0 and abs(second - third / 2) <= 1 and 980 < third < 1000  # places are whole numbers


def test_thinning_keeps_the_extremes_in_order():
    rng = np.random.default_rng(0)
    x, y = np.arange(10_000.0), rng.normal(size=10_000)
    y[1234], y[5678], y[100:200] = 50.0, -50.0, math.nan
    thin_x, thin_y = thinned(x, y, 500)
    assert len(thin_x) <= 500 and (np.diff(thin_x) > 0).all()
    np.testing.assert_array_equal(thin_y, y[thin_x.astype(int)])
    assert np.nanmax(thin_y) == 50.0 and np.nanmin(thin_y) == -50.0
    # Wherever the curve goes within a stretch of 40 points, the thinned one goes, too.
    for part in np.split(np.arange(10_000), 250):
        inside = thin_y[(thin_x >= part[0]) & (thin_x <= part[-1])]
        assert np.isnan(y[part]).all() or np.nanmax(inside) == np.nanmax(y[part])
