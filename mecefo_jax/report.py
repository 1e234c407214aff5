"""The picture of a run: loss, live nodes, degraded share and critical load over the steps, in one figure.

Reads the run directory alone (``metrics.jsonl``, ``events.jsonl``, ``config.json``, ``summary.json``), so it can be
drawn at any time, also of a run that is still going or has crashed: ``python -m mecefo_jax.report DIR``.
"""

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from mecefo_jax.console import counted
from mecefo_jax.errors import DataError
from mecefo_jax.metrics import EVENTS_FILE, METRICS_FILE, read_events, read_rows

# Okabe and Ito's palette: told apart with any kind of colour vision.
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#8A8A8A"
_MOST_MARKERS = 150
_SMOOTHED_FROM = 200


def write_report(workdir: str | pathlib.Path) -> pathlib.Path:
    """Draws ``report.png`` of a run.

    Args:
      workdir: the run directory.

    Returns:
      The path of the picture.

    Raises:
      DataError: there are no metrics yet, they cannot be read, or the picture cannot be written.
    """
    workdir = pathlib.Path(workdir)
    rows = read_rows(workdir / METRICS_FILE)
    if not rows:
        raise DataError(f"{workdir / METRICS_FILE}: no row yet, so there is nothing to draw")
    events = read_events(workdir / EVENTS_FILE) if (workdir / EVENTS_FILE).exists() else []
    config, summary = read_json(workdir / "config.json"), read_json(workdir / "summary.json")
    figure = draw(rows, events, config, summary)
    path = workdir / "report.png"
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror})") from error
    return path


def draw(
    rows: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
) -> Figure:
    """The figure itself.

    Args:
      rows: metrics by ascending step.
      events: changes by ascending step.
      config: the resolved config, or an empty mapping.
      summary: the numbers of the finished run, or an empty mapping.
    """
    figure = Figure(figsize=(10, 8.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    loss, live, degraded, load = figure.subplots(4, 1, sharex=True, height_ratios=(3, 1.3, 1, 1))
    num_nodes = config.get("mesh", {}).get("num_nodes")
    _draw_loss(loss, rows)
    _draw_live(live, rows, events, num_nodes)
    _draw_degraded(degraded, rows, events)
    _draw_load(load, rows, events)
    last = rows[-1]["step"]
    load.set_xlim(0, last + max(0.02 * last, 0.5))
    load.xaxis.set_major_locator(MaxNLocator(integer=True))
    load.set_xlabel("step")
    loss.set_title(_title(config), loc="left", fontsize=15, fontweight="bold", pad=26)
    loss.annotate(
        _subtitle(rows, summary, events),
        (0, 1),
        xytext=(0, 8),
        color="#444444",
        fontsize=10,
        xycoords="axes fraction",
        textcoords="offset points",
    )
    figure.align_ylabels()
    return figure


def _draw_loss(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    steps, losses = series(rows, "train/loss")
    many = len(steps) >= _SMOOTHED_FROM
    axes.plot(
        steps,
        losses,
        color=_BLUE,
        alpha=0.3 if many else 1.0,
        lw=0.8 if many else 1.8,
        marker=_marker(steps),
        ms=4,
        label="each row" if many else "training",
    )
    if many:
        axes.plot(steps, smoothed(losses), color=_BLUE, lw=1.8, label="training, smoothed")
    eval_steps, eval_losses = series(rows, "eval/loss")
    if len(eval_steps):
        axes.plot(eval_steps, eval_losses, color=_RED, lw=1.4, marker="D", ms=5, label="evaluation")
    axes.legend(loc="upper right" if many else "best", ncols=3)
    _finish(axes, "loss")


def _draw_live(
    axes: Axes, rows: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], num_nodes: int | None
) -> None:
    most = max((row.get("ft/live_nodes") or 0 for row in rows), default=0)
    steps, live = plan_series(rows, events, "ft/live_nodes", "live_nodes", num_nodes or most)
    if live.any():
        total = float(live.max()) if num_nodes is None else num_nodes
        low = min(live.min(), total - 1)
        pad = 0.15 * (total - low)
        axes.fill_between(steps, live, total, step="post", color=_RED, alpha=0.18, lw=0)
        axes.axhline(total, color=_GREY, lw=0.8, ls=":")
        axes.step(steps, live, where="post", color=_GREEN, lw=1.6 if len(steps) < _SMOOTHED_FROM else 0.9)
        _mark(axes, events, steps, live, low - 0.5 * pad)
        axes.set_ylim(low - pad, total + pad)
        axes.set_yticks(np.arange(total, low - 0.5, -math.ceil((total - low) / 4)))
    _finish(axes, "live nodes")


def _mark(axes: Axes, events: Iterable[Mapping[str, Any]], steps: np.ndarray, live: np.ndarray, bottom: float) -> None:
    """Marks failures and recoveries on the line of live nodes, or failures alone at the bottom where they are many."""
    marks = (("failure", "failure", "v", _RED), ("recovery", "back", "^", _BLUE))
    at = {kind: np.unique([event["step"] for event in events if event["kind"] == kind]) for kind, *_ in marks}
    if len(at["failure"]) > _MOST_MARKERS:
        x = at["failure"]
        axes.plot(x, np.full(len(x), bottom), ls="", marker="|", color=_RED, ms=6, mew=0.7, alpha=0.6)
        return
    for kind, label, marker, color in marks:
        if len(at[kind]):
            y = live[np.maximum(np.searchsorted(steps, at[kind], side="right") - 1, 0)]
            axes.plot(at[kind], y, ls="", marker=marker, color=color, ms=6.5, mec="white", mew=0.6, label=label)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.93), ncols=2, borderpad=0.1)


def _draw_degraded(axes: Axes, rows: Sequence[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> None:
    steps, fraction = plan_series(rows, events, "ft/degraded_token_fraction", "degraded_fraction", 0.0)
    top = max(1.15 * np.nanmax(fraction, initial=0.0), 0.04)
    axes.fill_between(steps, fraction, step="post", color=_ORANGE, alpha=0.35, lw=0)
    axes.step(steps, fraction, where="post", color=_ORANGE, lw=1.4 if len(steps) < _SMOOTHED_FROM else 0.9)
    axes.set_ylim(-0.03 * top, top)
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _finish(axes, "degraded\ntokens")


def _draw_load(axes: Axes, rows: Sequence[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> None:
    steps, load = plan_series(rows, events, "ft/critical_load", "critical_load", 1.0)
    axes.axhline(1.0, color=_GREY, lw=0.8, ls=":")
    axes.step(steps, load, where="post", color=_PURPLE, lw=1.4 if len(steps) < _SMOOTHED_FROM else 0.9)
    low, high = min(np.nanmin(load, initial=1.0), 1.0), max(np.nanmax(load, initial=1.0), 1.1)
    axes.set_ylim(low - 0.15 * (high - low), high + 0.2 * (high - low))
    axes.yaxis.set_major_locator(MaxNLocator(3))
    _finish(axes, "critical load\n(healthy = 1)")


def _finish(axes: Axes, label: str) -> None:
    axes.set_ylabel(label, fontsize=10)
    axes.grid(True, color="#E6E6E6", lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, length=3, color=_GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    if (legend := axes.get_legend()) is not None:
        legend.set_frame_on(False)
        for text in legend.get_texts():
            text.set_fontsize(9)


def series(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the rows that have a metric; a non-finite value is a gap."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    steps, values = np.array(points, float).reshape(-1, 2).T
    return steps, np.where(np.isfinite(values), values, np.nan)


def plan_series(
    rows: Sequence[Mapping[str, Any]], events: Iterable[Mapping[str, Any]], metric: str, field: str, healthy: float
) -> tuple[np.ndarray, np.ndarray]:
    """A property of the plans over steps, each value holding until the next one.

    Taken from the events that report a new plan, so that nothing between two rows is lost; from the rows, each of which
    tells of the step before it, if there are none.
    """
    points = {event["step"]: event[field] for event in events if isinstance(event.get(field), int | float)}
    if not points:
        points = {row["step"] - 1: row[metric] for row in rows if row.get(metric) is not None}
    points.setdefault(0, healthy)
    last = rows[-1]["step"]
    steps = sorted(step for step in points if step < last)
    values = [points[step] for step in steps]
    return np.array([*steps, last], float), np.array([*values, values[-1]], float)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Mean over a centred window of 2% of the rows, shorter at the ends; gaps are left out of the means."""
    half = max(len(values) // 100, 2)
    sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(values))])
    counts = np.concatenate([[0], np.cumsum(np.isfinite(values))])
    centre = np.arange(len(values))
    # The window shrinks evenly on both sides near an end: a one-sided one would bend the curve there.
    reach = np.minimum(half, np.minimum(centre, len(values) - 1 - centre))
    low, high = centre - reach, centre + reach + 1
    count = counts[high] - counts[low]
    return np.where(count > 0, (sums[high] - sums[low]) / np.maximum(count, 1), np.nan)


def _marker(steps: np.ndarray) -> str:
    return "o" if len(steps) <= 30 else ""


def _title(config: Mapping[str, Any]) -> str:
    faults = config.get("faults", {})
    if not faults:
        return str(config.get("name", "training run"))
    scenario = faults.get("scenario")
    failures = "no failures" if scenario == "none" else f"failures: {scenario}"
    return f"{config.get('name')}    policy: {faults.get('policy')}    {failures}"


def _subtitle(
    rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], events: Iterable[Mapping[str, Any]]
) -> str:
    _, losses = series(rows, "train/loss")
    _, perplexities = series(rows, "eval/perplexity")
    kinds = [event["kind"] for event in events]
    parts = [f"{rows[-1]['step']:,} steps"]
    initial, final = summary.get("initial_loss"), summary.get("final_loss")
    if initial is None and len(losses):
        initial, final = losses[0], losses[-1]
    if initial is not None and final is not None:
        parts.append(f"loss {initial:.3f} to {final:.3f}" if rows[1:] else f"loss {final:.3f}")
    if len(perplexities):
        parts.append(f"perplexity {perplexities[-1]:.2f}")
    parts.append(counted(summary.get("failures", kinds.count("failure")), "failure", "failures"))
    parts.append(counted(summary.get("recoveries", kinds.count("recovery")), "recovery", "recoveries"))
    if summary.get("tokens") is not None:
        parts.append(f"{summary['tokens']:,} tokens")
    return "   |   ".join(parts)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object, or nothing if there is no such file yet."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the report of a run directory; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mecefo_jax.report", description="Draws report.png of a run.")
    parser.add_argument("workdir", help="run directory")
    try:
        print(write_report(parser.parse_args(argv).workdir))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
