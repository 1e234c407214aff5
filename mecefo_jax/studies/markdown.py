"""Results as Markdown: tables, and what they hold for."""

import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

from mecefo_jax.studies.study import Row


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> str:
    """A table; the first ``left`` columns are flush left, the others right."""
    alignment = ["---"] * left + ["---:"] * (len(columns) - left)
    lines = [columns, alignment, *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(rows: Sequence[Row], command: str) -> str:
    """What the numbers hold for: dates, commits, machine, versions, command."""
    dates = _span(sorted({str(row["date"]) for row in rows}))
    commits = ", ".join(f"`{commit}`" for commit in sorted({str(row["commit"]) for row in rows}))
    machines = "; ".join(sorted({str(row["machine"]) for row in rows}))
    return f"{dates}, commit {commits}, {machines}: `{command}`"


def machine() -> str:
    """Cores and processor of this machine, and version of JAX."""
    return f"{os.cpu_count()} cores, {_processor()}, jax {importlib.metadata.version('jax')}"


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or platform.machine()


def _span(dates: Sequence[str]) -> str:
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
