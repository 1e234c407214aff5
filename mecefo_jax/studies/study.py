"""What a study is: cells to measure, and what to make of the rows that they give."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from mecefo_jax.config import Config
from mecefo_jax.config_effects import without_effect
from mecefo_jax.config_file import flatten, to_dict

Row = Mapping[str, Any]
"""One line of a table: labels and numbers, by column."""

Measure = Callable[[Config, pathlib.Path], list[dict[str, Any]]]
"""Measures one config; may keep what it needs to go on after an interruption in the directory. Importable by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement of a study: seconds to hours of work that is done once and gives rows."""

    labels: Row
    """What tells it from the other cells; columns of each of its rows."""
    config: Config
    measure: Measure
    tries: object = None
    """What it measures beside the config, of which the text says all."""

    @property
    def key(self) -> str:
        """Equal for equal work, by which what was measured once is found; settings without effect do not count."""
        settings = {
            name: value for name, value in flatten(to_dict(self.config)) if without_effect(self.config, name) is None
        }
        what = f"{self.measure.__module__}.{self.measure.__qualname__}\0{json.dumps(settings)}"
        what += "" if self.tries is None else f"\0{self.tries}"
        return hashlib.sha256(what.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A table of docs/results."""

    title: str
    cells: Callable[[bool], Sequence[Cell]]
    """All of it, or (True) as little as shows that it works."""
    columns: tuple[str, ...]
    """Of the CSV, in order."""
    report: Callable[[Sequence[Row]], str]
    """Markdown below the title: what was done, tables, notes."""
    plot: Callable[[Sequence[Row]], Figure]
