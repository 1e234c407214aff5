"""What a person sees of a run while it trains: a table of rows, short lines for events, a progress bar.

On a terminal the bar stays at the bottom. Elsewhere (a pipe, a file) there are plain lines without control codes.
Rows fit in 80 columns.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

_HEADER = "   step      loss   learn.rate   tokens/s     live  degraded    load      left"
_ROWS_PER_HEADER = 20


def _names(fields: Mapping[str, Any], singular: str) -> str:
    """``node 3``, ``nodes 3, 4``, or ``node 3 stage 1``; from the fields ``node`` or ``nodes``, and ``stage``."""
    nodes = fields["nodes"] if "nodes" in fields else fields["node"]
    nodes = nodes if isinstance(nodes, list) else [nodes]
    text = f"{singular}{'' if len(nodes) == 1 else 's'} {', '.join(str(node) for node in nodes)}"
    return f"{text} stage {fields['stage']}" if fields.get("stage") is not None else text


def _failure(step: int, fields: Mapping[str, Any]) -> str:
    covered = fields.get("covered_by")
    covered = covered if isinstance(covered, list) or covered is None else [covered]
    return _names(fields, "node") + " failed" + (f" -> {_names({'nodes': covered}, 'node')}" if covered else "")


def _recovery(step: int, fields: Mapping[str, Any]) -> str:
    names = _names(fields, "node")
    return f"{names} {'are' if names.startswith('nodes') else 'is'} back"


def _takeover(step: int, fields: Mapping[str, Any]) -> str:
    parts = [
        f"{fields[name]} {text}"
        for name, text in (("taken_over", "taken over"), ("degraded", "degraded"), ("dropped", "dropped"))
        if fields[name]
    ]
    what = f"microbatches: {', '.join(parts)}" if parts else "every node computes its own microbatches"
    policy = f"auto: {fields['policy']}" if "chosen_for" in fields else fields["policy"]
    return f"{policy} on {fields['live_nodes']} nodes, load {fields['critical_load']:.2f}; {what}"


def _resumed(step: int, fields: Mapping[str, Any]) -> str:
    if fields.get("source") == "memory":
        return f"resumed from step {step}, kept in memory"
    return f"resumed from checkpoint {step}"


def _saved(step: int, fields: Mapping[str, Any]) -> str:
    return f"saved checkpoint {step} ({_bytes(fields['bytes'])} in {fields['seconds']:.1f} s)"


_Line = Callable[[int, Mapping[str, Any]], str]
_EVENTS: dict[str, tuple[str, _Line]] = {
    "failure": ("red", _failure),
    "recovery": ("green", _recovery),
    "saved": ("dim", _saved),
    "save_failed": ("yellow", lambda step, fields: f"warning: checkpoint {step} was not saved: {fields['reason']}"),
    "checkpoint_unreadable": (
        "yellow",
        lambda step, fields: f"warning: checkpoint {step} cannot be used: {fields['reason']}",
    ),
    "checkpoint_not_deleted": (
        "yellow",
        lambda step, fields: f"warning: an old checkpoint was not deleted: {fields['reason']}",
    ),
    "resumed": ("cyan", _resumed),
    "already_finished": ("cyan", lambda step, fields: "this run is finished; evaluating and reporting once more"),
    "config_changed": ("yellow", lambda step, fields: f"warning: changed since the checkpoint: {fields['change']}"),
    "takeover": ("", _takeover),
    "still_down": ("red", lambda step, fields: f"still down: {_names(fields, 'node')}"),
    "tracker_failed": (
        "yellow",
        lambda step, fields: f"warning: {fields['tracker']} gets no more data: {fields['reason']}",
    ),
    "skipped": ("yellow", lambda step, fields: f"not finite: update skipped ({fields['in_a_row']} in a row)"),
}
"""Style and line of the kinds of events that are more than their name and fields."""
_UNPRINTED = {"started", "basis_refresh"}
"""Regular events that are in the files alone."""


class _StayingConsole(Console):
    """Goes silent when its reader is gone (``| head``), where rich would end the process."""

    def on_broken_pipe(self) -> None:
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()


class RunConsole:
    """Prints a run; goes silent instead of failing when nobody can read any more.

    Args:
      console: whether to print, or the rich console to print on.
      total_steps: steps of the whole run.
      num_nodes: nodes of the run, if known.
    """

    def __init__(self, console: bool | Console, *, total_steps: int, num_nodes: int | None) -> None:
        self._console: Console | None = None
        if console:
            self._console = _StayingConsole(file=sys.stdout) if console is True else console
        self._total_steps = total_steps
        self._num_nodes = num_nodes
        self._num_rows = 0
        self._first: tuple[int, float] | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def row(self, step: int, values: Mapping[str, Any]) -> None:
        """Prints one row of metrics, under a header now and then; evaluation gets a line of its own."""
        self.progress(step)
        if "train/loss" in values:
            if self._num_rows % _ROWS_PER_HEADER == 0:
                self._print(_HEADER, "bold")
            self._num_rows += 1
            self._print(self._table_row(step, values))
        if "eval/loss" in values:
            perplexity = values.get("eval/perplexity")
            shown = "" if perplexity is None else f", perplexity {perplexity:.2f}"
            self._print(f"{step:7d}  evaluation: loss {values['eval/loss']:.4f}{shown}", "cyan")

    def event(self, kind: str, step: int, fields: Mapping[str, Any]) -> None:
        """Prints one event as a short line."""
        if kind in _UNPRINTED:
            return
        style, line = _EVENTS.get(kind, ("", None))
        listed = ", ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in fields.items())
        text = kind.replace("_", " ") + (f": {listed}" if listed else "")
        if line is not None:
            with contextlib.suppress(LookupError):  # an event with other fields than usual keeps its plain form
                text = line(step, fields)
        self._print(f"{step:7d}  {text}", style)

    def warning(self, text: str) -> None:
        """Prints a warning that belongs to no step."""
        self._print(f"warning: {text}", "yellow")

    def progress(self, step: int) -> None:
        """Moves the bar, which appears with the first step."""
        if self._first is None:
            self._first = (step, time.monotonic())
        if self._console is None or not self._console.is_terminal:
            return
        if self._progress is None:
            columns = (TextColumn("training"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, expand=True)
            # Starting at the first step seen, not at 0, keeps the steps before a resume out of the speed.
            self._task = self._progress.add_task("training", total=self._total_steps, completed=step)
            self._guarded(self._progress.start)
        assert self._task is not None
        self._progress.update(self._task, completed=step)

    def summary(self, values: Mapping[str, Any], workdir: os.PathLike[str]) -> None:
        """Prints the outcome of the run in a few words."""
        self.close()
        parts = [f"{values['steps']} steps"] if "steps" in values else []
        if "final_loss" in values:
            parts.append(f"loss {_number(values.get('initial_loss'), '.3f')} -> {_number(values['final_loss'], '.3f')}")
        if "eval_perplexity" in values:
            parts.append(f"perplexity {_number(values['eval_perplexity'], '.2f')}")
        if "failures" in values:
            failures = counted(values["failures"], "failure", "failures")
            parts.append(f"{failures}, {counted(values.get('recoveries', 0), 'recovery', 'recoveries')}")
        if "wall_time_s" in values:
            parts.append(_duration(values["wall_time_s"]))
        self._print("; ".join(parts), "bold")
        self._print(f"results in {os.fspath(workdir)}")

    def close(self) -> None:
        """Takes the bar off the terminal."""
        if self._progress is not None:
            self._guarded(self._progress.stop)
            self._progress = None

    def _table_row(self, step: int, values: Mapping[str, Any]) -> str:
        live = values.get("ft/live_nodes")
        nodes = "-" if live is None else f"{live:g}" + (f"/{self._num_nodes}" if self._num_nodes else "")
        cells = (
            (f"{step}", 7),
            (_number(values["train/loss"], ".4f"), 10),
            (_number(values.get("train/learning_rate"), ".3e"), 13),
            (_thousands(values.get("perf/tokens_per_s")), 11),
            (nodes, 9),
            (_number(values.get("ft/degraded_token_fraction"), ".1%"), 10),
            (_number(values.get("ft/critical_load"), ".2f"), 8),
            (self._time_left(step), 10),
        )
        return "".join(text.rjust(width) for text, width in cells)

    def _time_left(self, step: int) -> str:
        assert self._first is not None
        first_step, started = self._first
        if step <= first_step:
            return "-"
        return _duration((time.monotonic() - started) / (step - first_step) * (self._total_steps - step))

    def _print(self, text: str, style: str = "") -> None:
        console = self._console
        if console is not None:
            self._guarded(lambda: console.print(Text(text, style=style), soft_wrap=True))

    def _guarded(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError:  # a closed pipe or terminal: the files still have everything
            self._console = None


def counted(count: int, singular: str, plural: str) -> str:
    """``1 failure``, ``2 failures``."""
    return f"{count} {singular if count == 1 else plural}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _thousands(value: float | None) -> str:
    if value is None:
        return "-"
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.1f}{unit}"
    return f"{value:.0f}"


def _bytes(value: float) -> str:
    text = _thousands(value)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(_short, value)) if isinstance(value, list) else str(value)
