"""A picture of a fault source over time: which units are dead when, and how many.

Legend: N nodes, S stages of a node, T steps.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Int
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mecefo_jax.faults.source import FaultSource

LIVE, PARTLY, DEAD = "\u00b7", "\u2592", "\u2588"
"""What a cell shows: live throughout, dead in some of the cell's steps, dead throughout."""

MAX_ROWS = 40
"""Units that get a row of their own."""

_LEVELS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """What a fault source did over some steps, as a run would see it."""

    failures: int
    """Units that were live at the step before, or at the start, and are dead at a step."""
    recoveries: int
    """Units that were dead at the step before and are live at a step."""
    mean_down: float
    """Average number of units dead at a step."""
    max_down: int
    """Largest number of units dead at a step."""
    healthy_fraction: float
    """Fraction of the steps at which all units are live."""


def live_history(source: FaultSource, steps: int) -> Bool[np.ndarray, "T NS"]:
    """Live units at steps 0 to ``steps - 1``, a column a unit (node by node)."""
    return np.stack([source.live(step).reshape(-1) for step in range(steps)])


def statistics(live_TU: Bool[np.ndarray, "T NS"]) -> Statistics:
    """Count failures, recoveries and units down in a history of live units."""
    before_TU = np.concatenate([np.ones_like(live_TU[:1]), live_TU[:-1]])
    down_T = np.sum(~live_TU, axis=1)
    return Statistics(
        failures=int(np.sum(before_TU & ~live_TU)),
        recoveries=int(np.sum(~before_TU & live_TU)),
        mean_down=float(np.mean(down_T)),
        max_down=int(np.max(down_T)),
        healthy_fraction=float(np.mean(down_T == 0)),
    )


def draw_timeline(live_TU: Bool[np.ndarray, "T NS"], num_stages: int, width: int) -> RenderableType:
    """Draw a history: a bar of the units down, then a row for each unit that was ever down.

    Args:
      live_TU: bool[T, N*S], live units at each step, from ``live_history``.
      num_stages: stages of a node (S), to name the units.
      width: columns of the picture, at least 40.

    Returns:
      A renderable for a rich console.
    """
    names = [_unit_name(unit, num_stages) for unit in range(live_TU.shape[1])]
    label_width = max(len("units down"), *(len(name) for name in names))
    num_steps = live_TU.shape[0]
    num_cells = min(num_steps, max(1, width - label_width - 4))
    edges = np.arange(num_cells + 1) * num_steps // num_cells
    dead_CU = np.stack([np.mean(~live_TU[i:j], axis=0) for i, j in zip(edges[:-1], edges[1:], strict=True)])
    max_down_C = np.array(
        [np.max(np.sum(~live_TU[i:j], axis=1)) for i, j in zip(edges[:-1], edges[1:], strict=True)], dtype=np.int64
    )
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True, width=label_width)
    table.add_column(no_wrap=True)
    table.add_row("units down", Text(_bar(max_down_C), style="bold red"))
    ever_dead = np.flatnonzero(~live_TU.all(axis=0))
    for unit in ever_dead[:MAX_ROWS]:
        table.add_row(names[unit], _row(dead_CU[:, unit]))
    if len(ever_dead) > MAX_ROWS:
        table.add_row("...", f"and {len(ever_dead) - MAX_ROWS} more that were dead at some step")
    num_always_live = len(names) - len(ever_dead)
    if num_always_live:
        table.add_row(f"other {num_always_live}", Text(LIVE * num_cells, style="green"))
    table.add_row("step", Text(_axis(num_steps, num_cells), style="dim"))
    return Group(table, Text(_legend(num_steps / num_cells), style="dim"))


def _unit_name(unit: int, num_stages: int) -> str:
    node, stage = divmod(unit, num_stages)
    return f"node {node}" if num_stages == 1 else f"stage {node}.{stage}"


def _bar(down_C: Int[np.ndarray, " C"]) -> str:
    """The units down as a bar, its full height the most that were ever down."""
    top = max(1, int(down_C.max()))
    return "".join(_LEVELS[math.ceil(int(down) / top * (len(_LEVELS) - 1))] for down in down_C)


def _row(dead_C: np.ndarray) -> Text:
    """A unit over time, from the fraction of each cell in which it is dead."""
    text = Text()
    for dead in dead_C:
        if dead == 0:
            text.append(LIVE, style="green")
        else:
            text.append(DEAD if dead == 1 else PARTLY, style="red")
    return text


def _axis(num_steps: int, num_cells: int) -> str:
    """Step numbers under the cells in which they fall, about a dozen cells apart."""
    axis = ""
    for cell in range(0, num_cells, 12):
        label = str(-(-cell * num_steps // num_cells))
        if cell + len(label) <= num_cells:
            axis = axis.ljust(cell) + label
    return axis


def _legend(steps_per_cell: float) -> str:
    cell = "a column is a step" if steps_per_cell == 1 else f"a column is {steps_per_cell:.3g} steps"
    return f"{LIVE} live   {DEAD} dead   {PARTLY} dead for a part   {cell}"
