"""Rows of studies as CSV: the result, and the memory by which a study goes on where it was interrupted."""

import csv
import io
import pathlib
from collections.abc import Sequence
from typing import Any

from mecefo_jax.config_file import replace_file
from mecefo_jax.errors import DataError

KEY, COMMIT, DATE, MACHINE = "key", "commit", "date", "machine"
"""Columns that every row has besides the study's own: its cell, and when it was measured, with what and where."""


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file; none where there is no file.

    Numbers are numbers again, what was empty is None. Keys and commits are words, even if all of their digits are
    decimal.

    Raises:
        DataError: it is no CSV of a study.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if rows and KEY not in rows[0]:
        raise DataError(f"{path}: has no column {KEY}, so it is not a study's; delete it, or set another --out")
    words = (KEY, COMMIT, DATE, MACHINE)
    return [{name: text if name in words else _value(text) for name, text in row.items()} for row in rows]


def write(path: pathlib.Path, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Replace the file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns, KEY, COMMIT, DATE, MACHINE], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _text(value) for name, value in row.items()} for row in rows)
    replace_file(path, text.getvalue().encode())


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _value(text: str) -> Any:
    if text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
