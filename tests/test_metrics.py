"""The run log: files that survive crashes and resumes, and what a person sees."""

import io
import json
import math
import os
import pathlib
import re
import struct
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event, SessionLog

from mecefo_jax.errors import ConfigError, DataError
from mecefo_jax.metrics import RunLog, read_events, read_rows

ROW = {
    "train/loss": 3.25,
    "train/learning_rate": 9.8e-4,
    "perf/tokens_per_s": 12345.0,
    "ft/live_nodes": 7,
    "ft/degraded_token_fraction": 0.125,
    "ft/critical_load": 1.1,
}


def quiet(workdir, **options) -> RunLog:
    return RunLog(workdir, total_steps=1000, console=False, tensorboard=False, **options)


def terminal(width: int = 80, *, is_terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=is_terminal)


def test_rows_come_back_as_logged(tmp_path):
    with quiet(tmp_path) as log:
        log.scalars(10, ROW)
        log.scalars(20, {"train/loss": jnp.float32(2.5), "ft/live_nodes": np.int64(8)})
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {"step": 10, "attempt": 1, **ROW},
        {"step": 20, "attempt": 1, "train/loss": 2.5, "ft/live_nodes": 8},
    ]


def test_events_come_back_in_order_with_their_fields(tmp_path):
    with quiet(tmp_path) as log:
        log.event("failure", 4, nodes=np.array([3, 5]), live_nodes=6)
        log.event("recovery", 4, nodes=(3,), gap=float("nan"), parts={"a": [float("inf")]})
    first, second = read_events(tmp_path / "events.jsonl")
    assert (first["kind"], first["step"], first["nodes"], first["attempt"]) == ("failure", 4, [3, 5], 1)
    assert second["nodes"] == [3] and math.isnan(second["gap"]) and second["parts"] == {"a": ["inf"]}
    assert second["time"] >= first["time"] > 1.5e9


def test_non_finite_values_are_valid_json_and_come_back(tmp_path):
    with quiet(tmp_path) as log:
        log.scalars(1, {"train/loss": jnp.float32(jnp.nan), "train/grad_norm": float("-inf"), "ok": 1.5})
        log.summary({"final_loss": float("nan"), "steps": 1})

    def refuse(constant):
        raise AssertionError(constant)

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row["train/loss"] is None and row["nonfinite"] == {"train/loss": "nan", "train/grad_norm": "-inf"}
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert summary == {"final_loss": None, "steps": 1, "nonfinite": {"final_loss": "nan"}}
    (read,) = read_rows(tmp_path / "metrics.jsonl")
    assert math.isnan(read["train/loss"]) and read["train/grad_norm"] == -math.inf and read["ok"] == 1.5
    assert "nonfinite" not in read


def test_a_resumed_run_has_no_zig_zag(tmp_path):
    with quiet(tmp_path) as log:
        for step in range(10, 151, 10):
            log.scalars(step, {"train/loss": 1.0 * step})
        log.event("failure", 95, node=1)
        log.event("failure", 140, node=2)
    with quiet(tmp_path) as log:
        assert log.attempt == 2
        log.event("checkpoint_unreadable", 140, reason="torn")
        log.event("resumed", 100)
        for step in (110, 120):
            log.scalars(step, {"train/loss": 2.0 * step})
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(10, 101, 10), 110, 120]
    assert [row["attempt"] for row in rows] == [1] * 10 + [2] * 2
    assert rows[-1]["train/loss"] == 240.0
    kept = [(event["kind"], event["step"]) for event in read_events(tmp_path / "events.jsonl")]
    assert kept == [("failure", 95), ("checkpoint_unreadable", 140), ("resumed", 100)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 17, "rows were removed, not only left out"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=5))
def test_whatever_the_crashes_the_curve_is_that_of_the_surviving_updates(tmp_path_factory, attempts):
    """A model of resuming: each attempt starts from some step already reached, and logs every step after it."""
    workdir = tmp_path_factory.mktemp("run")
    curve: dict[int, float] = {}
    for number, (resume, length) in enumerate(attempts, start=1):
        start = min(resume, max(curve, default=0))
        curve = {step: value for step, value in curve.items() if step <= start}
        with quiet(workdir) as log:
            if start:
                log.event("resumed", start)
            for step in range(start + 1, start + length + 1):
                curve[step] = float(number)
                log.scalars(step, {"train/loss": float(number)})
    rows = read_rows(workdir / "metrics.jsonl")
    assert {row["step"]: row["train/loss"] for row in rows} == curve
    assert [row["step"] for row in rows] == sorted(curve)


def test_a_fresh_start_after_a_crash_replaces_what_it_logs_again(tmp_path):
    for loss in (1.0, 2.0):
        with quiet(tmp_path) as log:
            for step in (10, 20, 30)[: 3 if loss == 1.0 else 2]:
                log.scalars(step, {"train/loss": loss})
    assert [(row["step"], row["train/loss"]) for row in read_rows(tmp_path / "metrics.jsonl")] == [(10, 2.0), (20, 2.0)]


def test_rows_of_the_same_step_are_one_row(tmp_path):
    with quiet(tmp_path) as log:
        log.scalars(100, {"train/loss": 3.0})
        log.scalars(100, {"eval/loss": 3.5})
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert row == {"step": 100, "attempt": 1, "train/loss": 3.0, "eval/loss": 3.5}


@given(cut=st.integers(1, 60))
@settings(max_examples=20, deadline=None)
def test_a_line_cut_by_a_crash_is_tolerated_and_the_next_one_is_whole(tmp_path_factory, cut):
    workdir = tmp_path_factory.mktemp("run")
    with quiet(workdir) as log:
        log.scalars(1, {"train/loss": 1.0})
        log.scalars(2, {"train/loss": 2.0})
    path = workdir / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:-1][: -cut if cut < len(second) - 1 else 1])
    assert [row["step"] for row in read_rows(path)] == [1]
    with quiet(workdir) as log:
        log.event("resumed", 1)
        log.scalars(2, {"train/loss": 3.0})
    assert [row["train/loss"] for row in read_rows(path)] == [1.0, 3.0]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    with quiet(tmp_path) as log:
        log.scalars(1, {"train/loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert [row["step"] for row in read_rows(path)] == [1]
    with quiet(tmp_path) as log:
        log.event("resumed", 1)
        log.scalars(2, {"train/loss": 2.0})
    assert [row["step"] for row in read_rows(path)] == [1, 2]


@pytest.mark.parametrize("content", [b"no json\n{}\n", b'[1]\n{"step": 1, "attempt": 1}\n', b'{"step": 1}\n\n'])
def test_another_file_in_its_place_is_named(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1: not a row"):
        read_rows(tmp_path / "metrics.jsonl")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1"):
        quiet(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot be read"):
        read_rows(tmp_path / "metrics.jsonl")


def test_a_run_directory_that_cannot_be_made_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written.*--workdir"):
        quiet(tmp_path / "file" / "run")


def test_a_full_disk_keeps_rows_until_they_can_be_written(tmp_path, monkeypatch):
    console = terminal()
    log = RunLog(tmp_path, total_steps=10, console=console, tensorboard=False)
    write, room = os.write, [12]

    def limited(descriptor, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        written = write(descriptor, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    log.scalars(1, {"train/loss": 1.0})
    log.scalars(2, {"train/loss": 2.0})
    assert read_rows(tmp_path / "metrics.jsonl") == []
    assert console.file.getvalue().count("No space left on device") == 1
    room[0] = 10**9
    log.scalars(3, {"train/loss": 3.0})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    room[0] = 0
    log.scalars(4, {"train/loss": 4.0})
    log.close()
    assert "1 rows could not be written" in console.file.getvalue()


def tensorboard_events(workdir) -> list[list[Event]]:
    """The events of each file, oldest file first; a record is length, its CRC, data, their CRC."""
    files = []
    for path in sorted((workdir / "tensorboard").iterdir(), key=lambda path: int(path.suffix[1:])):
        content, events = path.read_bytes(), []
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            events.append(Event.FromString(content[12 : 12 + size]))
            content = content[12 + size + 4 :]
        files.append(events)
    return files


def scalars_of(events: list[Event]) -> list[tuple[int, str, float]]:
    return [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]


def test_tensorboard_is_purged_beyond_the_checkpoint(tmp_path):
    with RunLog(tmp_path, total_steps=300, console=False) as log:
        log.scalars(100, {"train/loss": 1.0})
        log.scalars(150, {"train/loss": 2.0, "ft/live_nodes": 7})
    with RunLog(tmp_path, total_steps=300, console=False) as log:
        log.event("resumed", 100)
        log.scalars(110, {"train/loss": 3.0})
    first, second = tensorboard_events(tmp_path)
    assert scalars_of(first) == [(100, "train/loss", 1.0), (150, "train/loss", 2.0), (150, "ft/live_nodes", 7.0)]
    assert not any(event.session_log.status == SessionLog.START for event in first)
    assert [event.step for event in second if event.session_log.status == SessionLog.START] == [101]
    assert scalars_of(second) == [(110, "train/loss", 3.0)]


def test_a_failing_tensorboard_is_said_once_and_training_goes_on(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    console = terminal(200)
    with RunLog(tmp_path, total_steps=10, console=console) as log:
        log.scalars(1, {"train/loss": 1.0})
        log.scalars(2, {"train/loss": 2.0})
    assert console.file.getvalue().count("TensorBoard gets no more data") == 1
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 2


def test_the_summary_replaces_an_older_one(tmp_path):
    with quiet(tmp_path) as log:
        log.summary({"steps": 1})
        log.summary({"steps": 2, "final_loss": 2.5})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 2, "final_loss": 2.5}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl", "summary.json"]


def run_everything(workdir, console: Console) -> str:
    with RunLog(workdir, total_steps=60000, console=console, tensorboard=False, num_nodes=32) as log:
        log.event("resumed", 59000)
        log.event("resumed", 59000, source="memory")
        log.progress(59001)
        log.event("failure", 59010, node=3, covered_by=4)
        log.event("failure", 59011, nodes=[5, 6], covered_by=[7])
        log.event("recovery", 59012, nodes=[3])
        log.event("saved", 59100, seconds=0.13, bytes=7762030)
        log.event("save_failed", 59100, reason="No space left on device")
        log.event("saved", 59100)
        log.event("basis_refresh", 59100, refreshed=12)
        log.event("skipped_step", 59101, loss=float("nan"))
        log.scalars(59110, ROW | {"ft/live_nodes": 31, "perf/tokens_per_s": 999_949.0})
        log.scalars(60000, ROW | {"eval/loss": 3.5, "eval/perplexity": 33.115})
        log.scalars(60000, {"eval/loss": 3.5})
        log.summary({"steps": 60000, "initial_loss": 10.4, "final_loss": 2.5, "failures": 3, "wall_time_s": 7325.0})
    return console.file.getvalue()


def test_plain_lines_without_a_terminal(tmp_path):
    output = run_everything(tmp_path, terminal())
    assert "\x1b" not in output and "\r" not in output
    lines = output.splitlines()
    for expected in (
        "  59000  resumed from checkpoint 59000",
        "  59000  resumed from step 59000, kept in memory",
        "  59010  node 3 failed -> node 4",
        "  59011  nodes 5, 6 failed -> node 7",
        "  59012  node 3 is back",
        "  59100  saved checkpoint 59100 (7.8 MB in 0.1 s)",
        "  59100  warning: checkpoint 59100 was not saved: No space left on device",
        "  59100  saved",
        "  59101  skipped step: loss nan",
        "  60000  evaluation: loss 3.5000, perplexity 33.12",
        "60000 steps; loss 10.400 -> 2.500; 3 failures, 0 recoveries; 2h02m",
    ):
        assert expected in lines
    assert not any("basis" in line for line in lines)
    header, row = (line for line in lines if re.match(r" +(step|59110) ", line))
    assert header.split() == "step loss learn.rate tokens/s live degraded load left".split()
    assert row.split()[:-1] == "59110 3.2500 9.800e-04 999.9k 31/32 12.5% 1.10".split()
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)
    for label, cell in zip(re.finditer(r"\S+", header), re.finditer(r"\S+", row), strict=True):
        assert label.end() == cell.end(), "columns are not aligned"


def test_a_terminal_gets_a_bar(tmp_path):
    output = run_everything(tmp_path, terminal(is_terminal=True))
    assert "59001/60000" in output and "60000/60000" in output
    assert "node 3 failed -> node 4" in output


def test_a_closed_terminal_silences_the_console_and_nothing_else(tmp_path):
    class Closed(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    with RunLog(tmp_path, total_steps=10, console=Console(file=Closed()), tensorboard=False) as log:
        log.scalars(1, ROW)
        log.scalars(2, ROW)
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 2


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path):
    script = """
import pathlib, sys, time
from mecefo_jax.metrics import RunLog
with RunLog(sys.argv[1], total_steps=2000, tensorboard=False) as log:
    for step in range(1, 2001):
        log.scalars(step, {"train/loss": 1.0})
    log.summary({"steps": 2000})
"""
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[1])}
    command = [sys.executable, "-c", script, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdout.readline().split()[0] == b"step"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 0
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 2000
