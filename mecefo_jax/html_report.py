"""A page that compares runs: curves, summaries, differences of their configs, events; one HTML file, without a network.

Reads run directories alone, also of runs that are going on or have crashed. ``html_chart.py`` draws the curves,
``html_report.html`` is the page.
"""

import dataclasses
import datetime
import html
import json
import pathlib
import shlex
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import configs
from mecefo_jax.config_file import to_dict
from mecefo_jax.console import counted
from mecefo_jax.errors import ConfigError, DataError
from mecefo_jax.html_chart import Curve, Marks, chart, short, swatch, timeline
from mecefo_jax.metrics import EVENTS_FILE, METRICS_FILE, read_events, read_rows
from mecefo_jax.report import plan_series, read_json, series, smoothed

_PAGE = pathlib.Path(__file__).with_name("html_report.html")
_SMOOTHED_FROM = 200
_MOST_EVENTS = 300
_MINUS = "-"
_OF_LAUNCHER = {
    "cluster.coordinator",
    "cluster.process_id",
    "cluster.num_processes",
    "cluster.listen_on",
    "faults.scenario",
    "mesh.num_nodes",
    "train.microbatches_per_node",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run directory says."""

    name: str
    """Of the directory; the whole path where several runs would have the same name."""
    directory: pathlib.Path
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    config: dict[str, Any]
    summary: dict[str, Any]
    """Of the finished run; else empty."""

    @property
    def last_step(self) -> int:
        """Updates done when the last row was written."""
        return self.rows[-1]["step"]

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, if they are known."""
        return self.config.get("train", {}).get("steps")

    def events_of(self, kind: str) -> np.ndarray:
        """Steps of the events of a kind."""
        return np.array([event["step"] for event in self.events if event["kind"] == kind], float)

    def plan(self, metric: str, field: str, healthy: float) -> tuple[np.ndarray, np.ndarray]:
        """A property of the plans over steps, each value holding until the next one (``report.plan_series``)."""
        return plan_series(self.rows, self.events, metric, field, healthy)

    def tokens_at(self, steps: np.ndarray) -> np.ndarray:
        """Tokens trained on after some steps; between rows, each row's rate holds since the row before it."""
        points = [(0, 0.0)]
        for row in self.rows:
            rate, seconds = row.get("perf/tokens_per_s"), row.get("perf/step_time_s")
            if rate is not None and seconds is not None:
                before, tokens = points[-1]
                points.append((row["step"], tokens + rate * seconds * (row["step"] - before)))
        known_steps, known_tokens = np.array(points, float).T
        return np.where(steps <= known_steps[-1], np.interp(steps, known_steps, known_tokens), np.nan)


def open_runs(directories: Sequence[pathlib.Path]) -> list[Run]:
    """Read runs.

    Args:
      directories: of the runs, finished or not.

    Raises:
      ConfigError: one is not a run directory.
      DataError: one has no metrics yet, or they cannot be read.
    """
    names = [directory.resolve().name for directory in directories]
    return [
        _open_run(directory, name if names.count(name) == 1 else str(directory))
        for directory, name in zip(directories, names, strict=True)
    ]


def _open_run(directory: pathlib.Path, name: str) -> Run:
    if not (directory / METRICS_FILE).exists():
        raise ConfigError(
            f"{directory}: holds no {METRICS_FILE}, so it is not a run directory; name one, such as runs/quickstart"
        )
    rows = read_rows(directory / METRICS_FILE)
    if not rows:
        raise DataError(f"{directory / METRICS_FILE}: no row yet, so there is nothing to report")
    events = read_events(directory / EVENTS_FILE) if (directory / EVENTS_FILE).exists() else []
    summary = read_json(directory / "summary.json")
    if summary.get("steps", -1) < rows[-1]["step"]:  # of an earlier end; the run has been given more steps since
        summary = {}
    config = read_json(directory / "config.json")
    return Run(name=name, directory=directory, rows=rows, events=events, config=config, summary=summary)


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
    flat = [dict(_flat(run.config)) for run in runs]
    rows = []
    for key in dict.fromkeys(key for settings in flat for key in settings):
        shown = [json.dumps(settings[key]) if key in settings else _MINUS for settings in flat]
        if len(set(shown)) > 1:
            rows.append((key, shown))
    table = _table("setting", runs, rows) if rows else "<p>None: all settings are the same.</p>"
    return f"<h2>Different settings</h2>{table}"


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in config.items():
        pairs += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return pairs


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
        f"<p>The same settings again: <code>{_text(_command(run))}</code></p>"
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


def _command(run: Run) -> str:
    """The command that gives the run's settings today."""
    config, name = dict(_flat(run.config)), str(run.config.get("name"))
    if name not in configs.names():
        return f"python train.py {shlex.quote(str(run.directory / 'config.json'))} --workdir NEW"
    named = dict(_flat(to_dict(configs.get(name))))
    program, given = "python train.py", set[str]()
    if config.get("cluster.coordinator"):
        nodes, processes = config.get("mesh.num_nodes"), config.get("cluster.num_processes")
        spares = "" if processes is None else f" --spares {processes - 1 - nodes}"
        program = f"python -m mecefo_jax.launch --nodes {nodes}{spares} --"
        given = _OF_LAUNCHER
    options = "".join(
        f" --{key} {shlex.quote(_as_option(value))}"
        for key, value in config.items()
        if key in named and value != named[key] and key not in given
    )
    return f"{program} {name} --workdir NEW{options}"


def _as_option(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    return html.escape(value)


def _number(value: float | None, form: str) -> str:
    return _MINUS if value is None else format(value, form)


def _duration(seconds: float | None) -> str:
    return _MINUS if seconds is None else str(datetime.timedelta(seconds=round(seconds)))


def _date(seconds: float, *, seconds_too: bool = False) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}" if seconds_too else f"{moment:%Y-%m-%d %H:%M}"
