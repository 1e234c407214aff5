"""The report picture: drawn from any run directory, showing what happened."""

import json
import math

import numpy as np
import pytest
from PIL import Image

from mecefo_jax.errors import DataError
from mecefo_jax.metrics import RunLog, read_events, read_rows
from mecefo_jax.report import draw, write_report

CONFIG = {"name": "sample", "mesh": {"num_nodes": 8}, "faults": {"policy": "balanced", "scenario": "steps"}}


def sample_run(workdir, num_rows: int, failures: int) -> None:
    """Rows each 10 steps; ``failures`` failures spread over the run, each node back 7 steps later."""
    (workdir / "config.json").write_text(json.dumps(CONFIG))
    failed_at = {int(step) for step in np.linspace(3, 10 * num_rows - 8, failures)} if failures else set()
    with RunLog(workdir, total_steps=10 * num_rows, console=False, tensorboard=False) as log:
        live = 8
        for step in range(1, 10 * num_rows + 1):
            if step - 7 in failed_at:
                live += 1
                log.event("recovery", step, node=0)
            if step in failed_at:
                live -= 1
                log.event("failure", step, node=0)
            if step in failed_at or step - 7 in failed_at:
                plan = {"live_nodes": live, "degraded_fraction": (8 - live) / 8, "critical_load": 1 + (8 - live) / 8}
                log.event("takeover", step, policy="balanced", taken_over=0, degraded=0, dropped=0, **plan)
            if step % 10 == 0:
                row = {"train/loss": 2 + math.exp(-step), "ft/live_nodes": live, "ft/critical_load": 1 + (8 - live) / 8}
                row |= {"ft/degraded_token_fraction": (8 - live) / 8}
                if step % 50 == 0:
                    row |= {"eval/loss": 2.1, "eval/perplexity": 8.2}
                log.scalars(step, row)


def panels(workdir):
    rows, events = read_rows(workdir / "metrics.jsonl"), read_events(workdir / "events.jsonl")
    return draw(rows, events, CONFIG, {}).axes


@pytest.mark.parametrize("num_rows, failures", [(1, 0), (1, 1), (20, 6), (20, 0), (2000, 0), (2000, 1000)])
def test_the_picture_is_made_at_any_length(tmp_path, num_rows, failures):
    sample_run(tmp_path, num_rows, failures)
    path = write_report(tmp_path)
    assert path == tmp_path / "report.png"
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape[0] > 1000 and pixels.shape[1] > 1000
    assert 0.01 < np.mean(pixels.min(axis=2) < 250) < 0.5, "blank, or black"


def test_the_panels_show_the_data(tmp_path):
    sample_run(tmp_path, 20, 6)
    loss, live, degraded, load = panels(tmp_path)
    rows = read_rows(tmp_path / "metrics.jsonl")
    training = next(line for line in loss.lines if line.get_label() == "training")
    np.testing.assert_array_equal(training.get_xdata(), [row["step"] for row in rows])
    np.testing.assert_array_equal(training.get_ydata(), [row["train/loss"] for row in rows])
    evaluation = next(line for line in loss.lines if line.get_label() == "evaluation")
    np.testing.assert_array_equal(evaluation.get_xdata(), [50, 100, 150, 200])
    marks = {line.get_label(): line for line in live.lines}
    events = read_events(tmp_path / "events.jsonl")
    for kind, label, level in (("failure", "failure", 7), ("recovery", "back", 8)):
        steps = [event["step"] for event in events if event["kind"] == kind]
        assert len(steps) == 6
        np.testing.assert_array_equal(marks[label].get_xdata(), steps)
        np.testing.assert_array_equal(marks[label].get_ydata(), [level] * 6)
    assert {axes.get_xlim() for axes in (loss, live, degraded, load)} == {load.get_xlim()}
    title = loss.get_title(loc="left")
    assert all(word in title for word in ("sample", "balanced", "steps"))
    subtitle = loss.texts[0].get_text()
    assert "6 failures" in subtitle and "200 steps" in subtitle and "perplexity 8.20" in subtitle


def test_failures_between_two_rows_are_not_lost(tmp_path):
    sample_run(tmp_path, 20, 6)
    _, live, degraded, load = panels(tmp_path)
    for axes, healthy, one_down in ((live, 8, 7), (degraded, 0, 1 / 8), (load, 1, 9 / 8)):
        line = max(axes.lines, key=lambda line: len(line.get_xdata()))
        seen = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
        assert (seen[0], seen[3], seen[10]) == (healthy, one_down, healthy)


def test_many_failures_are_marked_without_hiding_the_line(tmp_path):
    sample_run(tmp_path, 300, 200)
    live = panels(tmp_path)[1]
    (marks,) = (line for line in live.lines if line.get_marker() == "|")
    assert len(marks.get_xdata()) == 200
    assert max(marks.get_ydata()) < 7


def test_a_long_noisy_run_is_smoothed_without_bias():
    rng = np.random.default_rng(0)
    rows = [{"step": step, "train/loss": 5 - step / 500 + rng.normal() * 0.1} for step in range(1, 1001)]
    rows[500]["train/loss"] = math.nan
    smoothed = next(
        line for line in draw(rows, [], {}, {}).axes[0].lines if line.get_label() == "training, smoothed"
    ).get_ydata()
    error = smoothed - (5 - np.arange(1, 1001) / 500)
    # A mean of 21 values has a standard deviation of 0.1 / sqrt(21) = 0.022; 5 of them cover 1,000 values.
    assert np.max(np.abs(error[20:-20])) < 0.11 and abs(error.mean()) < 0.01


def test_without_config_events_or_fault_metrics_it_still_draws(tmp_path):
    with RunLog(tmp_path, total_steps=2, console=False, tensorboard=False) as log:
        log.scalars(1, {"train/loss": math.nan})
        log.scalars(2, {"train/loss": math.inf})
    (tmp_path / "events.jsonl").unlink()
    assert write_report(tmp_path).stat().st_size > 10_000


def test_a_run_without_rows_and_an_unreadable_config_are_data_errors(tmp_path):
    with RunLog(tmp_path, total_steps=2, console=False, tensorboard=False) as log:
        with pytest.raises(DataError, match="no row yet"):
            write_report(tmp_path)
        log.scalars(1, {"train/loss": 1.0})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match=r"config\.json: cannot be read"):
        write_report(tmp_path)
