"""A page that compares runs: curves, summaries, differences of their configs, events; one HTML file, without a network.

Reads run directories alone, also of runs that are going on or have crashed. ``html_chart.py`` draws the curves,
``html_report.html`` is the page.
"""

import dataclasses
import datetime
import html
import json
import pathlib
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mecefo_jax.console import counted
from mecefo_jax.html_chart import Curve, Marks, chart, short, swatch, timeline
from mecefo_jax.metrics import EVENTS_FILE
from mecefo_jax.recorded_run import Run, command, flat_settings
from mecefo_jax.report import series, smoothed

_PAGE = pathlib.Path(__file__).with_name("html_report.html")
_SMOOTHED_FROM = 200
_MOST_EVENTS = 300
_MINUS = "-"


def page(runs: Sequence[Run], now: datetime.datetime) -> str:
    """The whole page.

    Args:
      runs: at least one.
      now: when it is made.
    """
    names = ", ".join(run.name for run in runs)
    return string.Template(_PAGE.read_text(encoding="utf-8")).substitute(
        title=_text(names if len(runs) < 4 else f"{len(runs)} runs"),
        subtitle=_text(f"{counted(len(runs), 'run', 'runs')}, {now:%Y-%m-%d %H:%M} UTC"),
        legend="".join(_legend(index, run) for index, run in enumerate(runs)),
        summary=_table("", runs, _summary_rows(runs)),
        differences=_differences(runs),
        charts=_charts(runs),
        events="".join(_events(index, run) for index, run in enumerate(runs)),
    )


def _charts(runs: Sequence[Run]) -> str:
    """All figures, in the order of reading."""
    last = max(run.last_step for run in runs)
    tokens = max(1.0, *(float(np.nanmax(run.tokens_at(np.array([0.0, run.last_step])))) for run in runs))
    marks = [
        Marks(run=index, down=run.events_of("failure"), up=run.events_of("recovery")) for index, run in enumerate(runs)
    ]
    over_steps: dict[str, Any] = {"x_label": "step", "x_max": float(last)}
    over_tokens: dict[str, Any] = {"x_label": "tokens trained on", "x_max": tokens}
    loss = [curve for index, run in enumerate(runs) for curve in _loss(index, run)]
    perplexity = _each(runs, lambda run: series(run.rows, "eval/perplexity"), dots=True)
    in_tokens = lambda curves: [dataclasses.replace(c, x=runs[c.run].tokens_at(c.x)) for c in curves]  # noqa: E731
    whole = [run.config.get("mesh", {}).get("num_nodes") or np.nanmax(_live(run)[1]) for run in runs]
    nodes = float(max(whole))
    return "".join(
        (
            chart("Loss", "nats a token; dots: evaluation; ticks: failures", loss, **over_steps, marked=marks),
            chart("Loss over tokens", "nats a token; dots: evaluation", in_tokens(loss), **over_tokens),
            chart("Perplexity", "of the evaluation", perplexity, **over_steps, log=True),
            chart("Perplexity over tokens", "of the evaluation", in_tokens(perplexity), **over_tokens, log=True),
            timeline("Failures and returns", "below the line: failed; above: back", marks, **over_steps),
            chart(
                "Live nodes", "", _each(runs, _live, steps=True), **over_steps, whole=True, at_least=(nodes - 1, nodes)
            ),
            chart(
                "Degraded tokens",
                "share of a step",
                _each(runs, _degraded, steps=True),
                **over_steps,
                percent=True,
                at_least=(0.0, 0.04),
            ),
            chart(
                "Load of the busiest node",
                "1: healthy",
                _each(runs, _load, steps=True),
                **over_steps,
                at_least=(1.0, 1.1),
            ),
            chart("Step time", "seconds", _metric(runs, "perf/step_time_s"), **over_steps, log=True),
            chart("Speed", "tokens a second", _metric(runs, "perf/tokens_per_s"), **over_steps, at_least=(0.0, 0.0)),
            chart("Gradient norm", "before clipping", _metric(runs, "train/grad_norm"), **over_steps, log=True),
            chart("Learning rate", "", _metric(runs, "train/learning_rate"), **over_steps, at_least=(0.0, 0.0)),
        )
    )


def _loss(index: int, run: Run) -> list[Curve]:
    """The training's loss, smoothed where there are many rows, and the evaluations."""
    x, y = series(run.rows, "train/loss")
    curves = [Curve(run=index, x=x, y=y)]
    if len(x) >= _SMOOTHED_FROM:
        curves = [Curve(run=index, x=x, y=y, faint=True), Curve(run=index, x=x, y=smoothed(y))]
    eval_x, eval_y = series(run.rows, "eval/loss")
    return [*curves, Curve(run=index, x=eval_x, y=eval_y, dots=True, faint=True)]


def _each(runs: Sequence[Run], read: Callable[[Run], tuple[np.ndarray, np.ndarray]], **how: bool) -> list[Curve]:
    curves = []
    for index, run in enumerate(runs):
        x, y = read(run)
        curves.append(Curve(run=index, x=x, y=y, **how))
    return curves


def _metric(runs: Sequence[Run], name: str) -> list[Curve]:
    return _each(runs, lambda run: series(run.rows, name))


def _live(run: Run) -> tuple[np.ndarray, np.ndarray]:
    most = max((row.get("ft/live_nodes") or 0 for row in run.rows), default=0)
    return run.plan("ft/live_nodes", "live_nodes", run.config.get("mesh", {}).get("num_nodes") or most)


def _degraded(run: Run) -> tuple[np.ndarray, np.ndarray]:
    return run.plan("ft/degraded_token_fraction", "degraded_fraction", 0.0)


def _load(run: Run) -> tuple[np.ndarray, np.ndarray]:
    return run.plan("ft/critical_load", "critical_load", 1.0)


def _summary_rows(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Figures of each run: from its summary, or else from its rows and events, as far as they say."""
    found = [_figures(run) for run in runs]
    return [(name, [figures[name] for figures in found]) for name in found[0]]


def _figures(run: Run) -> dict[str, str]:
    summary = run.summary
    losses, eval_losses = series(run.rows, "train/loss")[1], series(run.rows, "eval/loss")[1]
    perplexities, speeds = series(run.rows, "eval/perplexity")[1], series(run.rows, "perf/tokens_per_s")[1]
    times = [event["time"] for event in run.events if "time" in event]

    def known(name: str, otherwise: float | None) -> float | None:
        return summary[name] if summary.get(name) is not None else None if name in summary else otherwise

    last_of = lambda values: float(values[-1]) if len(values) else None  # noqa: E731
    tokens = float(run.tokens_at(np.array([float(run.last_step)]))[0])
    state = "finished" if summary else f"not finished: step {run.last_step:,} of {_number(run.total_steps, ',')}"
    return {
        "state": state,
        "started": _date(times[0]) if times else _MINUS,
        "last event": _date(times[-1]) if times else _MINUS,
        "attempts": f"{max(line['attempt'] for line in (*run.rows, *run.events))}",
        "steps": f"{run.last_step:,}",
        "tokens": _number(known("tokens", round(tokens) if np.isfinite(tokens) else None), ",.0f"),
        "first loss": _number(known("initial_loss", float(losses[0]) if len(losses) else None), ".4f"),
        "last loss": _number(known("final_loss", last_of(losses)), ".4f"),
        "evaluation loss": _number(known("eval_loss", last_of(eval_losses)), ".4f"),
        "perplexity": _number(known("eval_perplexity", last_of(perplexities)), ".3f"),
        "failures": _number(known("failures", len(run.events_of("failure"))), ",.0f"),
        "recoveries": _number(known("recoveries", len(run.events_of("recovery"))), ",.0f"),
        "degraded tokens": _number(known("degraded_token_fraction", _mean(*_degraded(run))), ".1%"),
        "mean load": _number(known("mean_critical_load", _mean(*_load(run))), ".3f"),
        "skipped steps": _number(known("skipped_steps", run.rows[-1].get("train/skipped_steps")), ",.0f"),
        "goodput": _number(known("goodput", None), ".1%"),
        "tokens a second (median)": _number(float(np.nanmedian(speeds)) if np.isfinite(speeds).any() else None, ",.0f"),
        "wall time": _duration(known("wall_time_s", None)),
    }


def _mean(steps: np.ndarray, values: np.ndarray) -> float | None:
    """The mean over steps of values that hold until the next one."""
    lengths = np.diff(steps)
    return float(values[:-1] @ lengths / lengths.sum()) if lengths.sum() else None


def _differences(runs: Sequence[Run]) -> str:
    """The settings in which the runs differ."""
    if len(runs) < 2:
        return ""
    flat = [dict(flat_settings(run.config)) for run in runs]
    rows = []
    for key in dict.fromkeys(key for settings in flat for key in settings):
        shown = [json.dumps(settings[key]) if key in settings else _MINUS for settings in flat]
        if len(set(shown)) > 1:
            rows.append((key, shown))
    table = _table("setting", runs, rows) if rows else "<p>None: all settings are the same.</p>"
    return f"<h2>Different settings</h2>{table}"


def _legend(index: int, run: Run) -> str:
    faults = run.config.get("faults", {})
    what = f"{run.config.get('name', 'run')}, {faults.get('policy', '?')}, failures: {faults.get('scenario', '?')}"
    return f"<li>{swatch(index)}<b>{_text(run.name)}</b> <small>{_text(what)}</small></li>"


def _table(corner: str, runs: Sequence[Run], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    head = "".join(f"<th scope=col>{swatch(index)}{_text(run.name)}</th>" for index, run in enumerate(runs))
    body = "".join(
        f"<tr><th scope=row>{_text(name)}</th>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>\n"
        for name, cells in rows
    )
    return (
        f'<div class="box"><table><thead><tr><th scope=col>{corner}</th>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _events(index: int, run: Run) -> str:
    """A folded list of what happened; of a long one the beginning and the end."""
    events, left_out = run.events, max(len(run.events) - _MOST_EVENTS, 0)
    rows = [_event(event) for event in events]
    if left_out:
        half = _MOST_EVENTS // 2
        note = f"<tr><td colspan=5>{left_out:,} more are in {_text(str(run.directory / EVENTS_FILE))}</td></tr>\n"
        rows = [*rows[:half], note, *rows[-half:]]
    return (
        f"<h3>{swatch(index)}{_text(run.name)}</h3><p>{_text(str(run.directory))}</p>"
        f"<p>The same settings again: <code>{_text(command(run))}</code></p>"
        f"<details><summary>{counted(len(events), 'event', 'events')}</summary>"
        '<div class="box"><table class="events"><thead><tr><th scope=col>step</th><th scope=col>attempt</th>'
        "<th scope=col>time (UTC)</th><th scope=col>what</th><th scope=col></th></tr></thead>\n"
        f"<tbody>{''.join(rows)}</tbody></table></div></details>\n"
    )


def _event(event: Mapping[str, Any]) -> str:
    fields = {name: value for name, value in event.items() if name not in ("step", "attempt", "kind", "time")}
    said = ", ".join(f"{name} {_shown(value)}" for name, value in fields.items())
    time = _date(event["time"], seconds_too=True) if "time" in event else _MINUS
    cells = (f"{event['step']:,}", str(event["attempt"]), time, str(event["kind"]), said)
    return f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>\n"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_shown(item) for item in value)
    return short(value) if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    return html.escape(value)


def _number(value: float | None, form: str) -> str:
    return _MINUS if value is None else format(value, form)


def _duration(seconds: float | None) -> str:
    return _MINUS if seconds is None else str(datetime.timedelta(seconds=round(seconds)))


def _date(seconds: float, *, seconds_too: bool = False) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}" if seconds_too else f"{moment:%Y-%m-%d %H:%M}"
