"""Recorded preemption traces: a CSV with a row for each instance that came or went.

A row is ``milliseconds,add|remove,name``, in the order of time. The run starts (step 0) at the moment when as
many instances as the cluster has units are present together for the first time; they take the units 0, 1, ...
in the order in which they came. An instance that is removed kills its unit. Instances beyond those are spares:
in the order of their arrival they take the units that are dead, the one dead for longest first, at once. After
the last row nothing changes any more.
"""

import math
import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from mecefo_jax.errors import ConfigError, DataError
from mecefo_jax.faults.outages import Outage


class TraceRow(NamedTuple):
    """An instance came or went."""

    milliseconds: int
    """Time since the start of the recording."""
    added: bool
    """True: it came; False: it went."""
    name: str
    """Name of the instance."""


def read_trace(path: pathlib.Path) -> list[TraceRow]:
    """Read a trace and check that it can have happened.

    Args:
      path: CSV of ``milliseconds,add|remove,name``; blank lines are skipped.

    Returns:
      The rows in the order of time.

    Raises:
      DataError: unreadable file, malformed row, time running backwards, an instance added twice or removed
        while absent, no row at all; with file and line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot read the trace: {error.strerror}; set --faults.trace_file") from error
    rows: list[TraceRow] = []
    present: set[str] = set()
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = _parse_row(line)
            _check_row(row, rows[-1].milliseconds if rows else 0, present)
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}") from error
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: the trace is empty; expected rows such as '60000,add,node1'")
    return rows


def trace_outages(rows: Iterable[TraceRow], num_units: int, milliseconds_per_step: float) -> list[Outage]:
    """Turn a trace into the outages of ``num_units`` units, by the rules in the module's docstring.

    Args:
      rows: the trace, in the order of time.
      num_units: units of the cluster, num_nodes * num_stages.
      milliseconds_per_step: time of the trace that passes in a step.

    Returns:
      The outages, in steps from the start of the run.

    Raises:
      ConfigError: fewer than ``num_units`` instances are ever present together.
    """
    remaining = iter(rows)
    waiting, origin = _first_full_cluster(remaining, num_units)
    unit_of = {name: unit for unit, name in enumerate(waiting)}
    spares: dict[str, None] = {}
    dead_since: dict[int, float] = {}
    outages: list[Outage] = []
    for row in remaining:
        time = (row.milliseconds - origin) / milliseconds_per_step
        if row.added:
            spares[row.name] = None
        elif row.name in unit_of:
            dead_since[unit_of.pop(row.name)] = time
        else:
            del spares[row.name]
        while spares and dead_since:
            name, unit = next(iter(spares)), next(iter(dead_since))
            del spares[name]
            unit_of[name] = unit
            start = dead_since.pop(unit)
            if start < time:
                outages.append(Outage(unit, start, time))
    outages += [Outage(unit, start, math.inf) for unit, start in dead_since.items()]
    return outages


def _first_full_cluster(rows: Iterable[TraceRow], num_units: int) -> tuple[list[str], int]:
    """Consume rows until ``num_units`` instances are present; their names by arrival, and the time."""
    present: dict[str, None] = {}
    peak = 0
    for row in rows:
        if row.added:
            present[row.name] = None
        else:
            del present[row.name]
        peak = max(peak, len(present))
        if len(present) == num_units:
            return list(present), row.milliseconds
    raise ConfigError(
        f"faults.trace_file: at most {peak} instances are ever present together, but the cluster has {num_units} "
        f"units; set mesh.num_nodes (times faults.num_stages) to {peak} or less"
    )


def _parse_row(line: bytes) -> TraceRow:
    """Parse one line; ValueError says what is wrong."""
    try:
        text = line.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text: {error.reason}") from error
    fields = [field.strip() for field in text.split(",")]
    if len(fields) != 3 or not all(fields):
        raise ValueError(f"expected milliseconds,add|remove,name; got {text!r}")
    milliseconds, action, name = fields
    if not re.fullmatch("[0-9]{1,15}", milliseconds):
        raise ValueError(f"expected a whole number of milliseconds from 0, of at most 15 digits; got {milliseconds!r}")
    if action not in ("add", "remove"):
        raise ValueError(f"expected add or remove; got {action!r}")
    return TraceRow(int(milliseconds), action == "add", name)


def _check_row(row: TraceRow, previous_milliseconds: int, present: set[str]) -> None:
    """Check a row against those before it and update ``present``; ValueError says what is wrong."""
    if row.milliseconds < previous_milliseconds:
        raise ValueError(f"time runs backwards, from {previous_milliseconds} to {row.milliseconds} ms")
    if row.added == (row.name in present):
        raise ValueError(f"{row.name} is {'added twice' if row.added else 'removed while it is absent'}")
    if row.added:
        present.add(row.name)
    else:
        present.remove(row.name)
