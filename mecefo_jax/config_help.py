"""Help for the command line, made from the config's own types, defaults and field documentation."""

import ast
import functools
import inspect
import json
import shutil
import textwrap
import typing
from collections.abc import Sequence
from typing import Any, Literal

from mecefo_jax.config import Config
from mecefo_jax.config_file import fields, sections, to_dict
from mecefo_jax.config_values import is_optional, takes_list, without_none

_MAX_WIDTH = 110

_INTRODUCTION = """\
usage: python train.py NAME [--workdir DIR] [--section.field VALUE ...] [--print-config] [--help]

NAME            a named run ({names}), or the path of a config file *.json
--workdir DIR   run directory (default: runs/NAME); a run that was stopped resumes from it
--print-config  print the resolved config, which can serve as a config file, and stop
--help          print this and stop; with a NAME, the defaults shown are those of that run

Values: true or false for BOOL; 1e4 is an integer, too; none (or null) where the type says |none;
a LIST is separated by commas or spaces. Hyphens in names count as underscores.
"""


def help_text(config: Config, names: Sequence[str]) -> str:
    """The help of ``train.py``: every setting with its type, its default and what it means.

    Args:
      config: gives the defaults.
      names: names of the named runs.

    Returns:
      Text of several lines, as wide as the terminal.
    """
    width = min(_MAX_WIDTH, shutil.get_terminal_size().columns)
    settings = to_dict(config)
    parts = [_INTRODUCTION.format(names=", ".join(names))]
    for prefix, section in sections().items():
        parts.append(f"{prefix[:-1] or 'run'}: {inspect.getdoc(section)}\n")
        documentation = field_documentation(section)
        for key, (owner, field, declared) in fields().items():
            if owner is section:
                value = functools.reduce(lambda values, name: values[name], key.split("."), settings)
                shown = f"{documentation[field.name]} (default: {_show(value)})"
                lines = textwrap.fill(shown, width - 8, break_on_hyphens=False)  # no flag in two
                parts.append(f"  --{key} {_metavar(declared)}\n{textwrap.indent(lines, ' ' * 8)}\n")
    return "\n".join(parts).replace("\n\n  --", "\n  --")


def field_documentation(section: type) -> dict[str, str]:
    """The string below each field of a dataclass, by the field's name.

    Args:
      section: a dataclass whose source can be read.

    Returns:
      Documentation in one line each.
    """
    (body,) = (node.body for node in ast.parse(inspect.getsource(section)).body if isinstance(node, ast.ClassDef))
    found = {}
    for field, text in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name), ast.dump(field)
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def _metavar(declared: Any) -> str:
    if is_optional(declared):
        return f"{_metavar(without_none(declared))}|none"
    if takes_list(declared):
        return f"LIST of {_metavar(typing.get_args(declared)[0])}"
    if typing.get_origin(declared) is Literal:
        return "|".join(typing.get_args(declared))
    return {bool: "BOOL", int: "INT", float: "FLOAT", str: "TEXT"}[declared]


def _show(value: object) -> str:
    """A default as it is written on the command line."""
    if isinstance(value, list):
        return ",".join(str(item) for item in value) or "empty"
    if isinstance(value, str):
        return value or "empty"
    return "none" if value is None else json.dumps(value)
