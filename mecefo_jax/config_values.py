"""Values of settings: parsed by their declared type, held to their range, refused in one line.

Command lines, config files and Python code all go through ``convert``, so a wrong value gets the same error from
each. Every message reads ``section.field: got X, expected Y``.
"""

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterable
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, NoReturn, Union

from mecefo_jax.errors import ConfigError

_INT64_MAX = 2**63 - 1
_INT32_MAX = 2**31 - 1
_NEAREST_SCAN = 100_000
# Python also reads digits of other scripts and 1_000, which nobody means to write here.
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def convert(value: object, declared: Any, key: str) -> Any:
    """Parses a value by the declared type of its field.

    Text is parsed (``1e4`` is an integer, ``1.5`` is not; ``null`` or ``none`` stands for an absent value of an
    optional field, and for nothing else; lists are separated by commas), anything else must already be of the type,
    as JSON gives it.

    Args:
      value: text, or a value as ``json`` returns it.
      declared: bool, int, float, str, a Literal of texts, ``tuple[T, ...]`` or ``T | None``.
      key: dotted name of the field, for the error.

    Returns:
      The value, of the declared type.

    Raises:
      ConfigError: the value is not of the declared type.
    """
    origin, inner = typing.get_origin(declared), typing.get_args(declared)
    if is_optional(declared):
        if value is None or (isinstance(value, str) and value.lower() in ("null", "none")):
            return None
        return convert(value, without_none(declared), key)
    if origin is Literal:
        if value not in inner:
            hint = f" (did you mean {nearest(value, inner)}?)" if isinstance(value, str) else ""
            _refuse(key, value, declared, hint)
        return value
    if takes_list(declared):
        items: Iterable[object] = split_list(value) if isinstance(value, str) else value  # type: ignore[assignment]
        if not isinstance(items, list | tuple):
            _refuse(key, value, declared)
        return tuple(convert(item, inner[0], key) for item in items)
    parsed = _PARSERS[declared](value)
    if parsed is None:
        _refuse(key, value, declared)
    return parsed


def describe(declared: Any) -> str:
    """Says in words what values a declared type has."""
    origin, inner = typing.get_origin(declared), typing.get_args(declared)
    if is_optional(declared):
        return f"{describe(without_none(declared))}, or none"
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if takes_list(declared):
        return f"a list ({describe(inner[0])}), separated by commas"
    return {bool: "true or false", int: "an integer", float: "a finite number", str: "text"}[declared]


def is_optional(declared: Any) -> bool:
    """Whether a declared type is ``T | None``."""
    return typing.get_origin(declared) in (Union, types.UnionType)


def without_none(declared: Any) -> Any:
    """The ``T`` of ``T | None``."""
    (inner,) = (choice for choice in typing.get_args(declared) if choice is not type(None))
    return inner


def takes_list(declared: Any) -> bool:
    """Whether a declared type is ``tuple[T, ...]``."""
    return typing.get_origin(declared) is tuple


def nearest(word: str, options: Iterable[str]) -> str:
    """The option that is spelled most like a word; its last part counts, where options are dotted."""

    def similarity(option: str) -> float:
        pairs = [(word, option), (word.rpartition(".")[2], option.rpartition(".")[2])]
        whole, last = (difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)
        return whole + last

    return max(options, key=similarity)


def split_list(text: str) -> list[str]:
    """The items of a list in text: what stands between its commas; empty items are dropped."""
    return [item for part in text.split(",") if (item := part.strip())]


@functools.cache
def field_types(section: type) -> dict[str, Any]:
    """Declared types of a dataclass's fields, by name."""
    hints = typing.get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def check_types(section: Any, prefix: str) -> None:
    """Refuses a dataclass whose values are not of their declared types, as Python code can make it.

    Integers must fit 32 bits, which is what the compiled programs count in.

    Args:
      section: a dataclass instance; one nested in it has been through this itself.
      prefix: what precedes the field names in messages, such as ``"train."``.

    Raises:
      ConfigError: a value is not of its declared type.
    """
    cls: type = type(section)
    for name, declared in field_types(cls).items():
        value = getattr(section, name)
        if dataclasses.is_dataclass(declared):
            if not isinstance(value, declared):  # type: ignore[arg-type]
                raise ConfigError(f"{prefix}{name}: got {value!r}, expected a {declared.__name__}")  # type: ignore[union-attr]
            continue
        parsed = convert(value, declared, prefix + name)
        if parsed != value or isinstance(value, list):  # "5" is not 5: text is parsed where it comes from, not here
            _refuse(prefix + name, value, declared)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int):
                check_range(prefix + name, number, at_most=_INT32_MAX)


def check_range(
    key: str,
    value: float | None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Refuses a number outside its range; None, an absent optional value, passes.

    Args:
      key: dotted name of the field.
      value: the number found.
      at_least: smallest value that is accepted.
      above: largest value that is too small.
      at_most: largest value that is accepted.
      below: smallest value that is too large.

    Raises:
      ConfigError: the number is outside.
    """
    if value is None:
        return
    inside = (
        (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
        and (below is None or value < below)
    )
    if not (inside and math.isfinite(value)):
        limits = {"at least": at_least, "above": above, "at most": at_most, "below": below}
        words = " and ".join(f"{word} {_show(limit)}" for word, limit in limits.items() if limit is not None)
        raise ConfigError(f"{key}: got {value}, expected a number {words}")


def check_named(section: object, prefix: str, choice: str, needed: dict[str, str]) -> None:
    """Refuses a choice, such as a source of data, whose own setting is empty.

    Args:
      section: a dataclass instance.
      prefix: name of the section.
      choice: the field that chooses.
      needed: the field that must not be empty, by what is chosen.

    Raises:
      ConfigError: the chosen one's field is empty.
    """
    chosen = getattr(section, choice)
    field = needed.get(chosen)
    if field is not None and not getattr(section, field):
        raise ConfigError(f"{prefix}.{field}: got nothing, expected a value, as {prefix}.{choice} is {chosen}")


def check_fits(key: str, value: int, fits: Callable[[int], bool], reason: str, *, smallest: int = 1) -> None:
    """Refuses a count that does not fit the others, and names the nearest counts that do.

    Args:
      key: dotted name of the field.
      value: the count found.
      fits: whether a count would do.
      reason: what the count must do, such as ``"a multiple of mesh.tensor (4)"``.
      smallest: smallest count to name.

    Raises:
      ConfigError: ``value`` does not fit.
    """
    if fits(value):
        return
    below = next(
        (other for other in range(value - 1, max(smallest - 1, value - _NEAREST_SCAN), -1) if fits(other)), None
    )
    above = next((other for other in range(value + 1, value + _NEAREST_SCAN) if fits(other)), None)
    others = " or ".join(str(other) for other in (below, above) if other is not None)
    raise ConfigError(f"{key}: got {value}, expected {reason}" + (f"; nearest that work: {others}" if others else ""))


def _refuse(key: str, value: object, declared: Any, hint: str = "") -> NoReturn:
    raise ConfigError(f"{key}: got {value!r}, expected {describe(declared)}{hint}")


def _show(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _parse_bool(value: object) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower())
    return value if isinstance(value, bool) else None


def _parse_int(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = Decimal(_digits(value))
    except InvalidOperation:
        return None
    # The bound comes first: turning 1e999999999 into an integer would never end.
    if not number.is_finite() or number.copy_abs() > _INT64_MAX or number != number.to_integral_value():
        return None
    return int(number)


def _parse_float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(_digits(value))
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _digits(value: object) -> str:
    """A number as plain text; empty if it is written in another way."""
    text = str(value).strip()
    return text if _NUMBER.fullmatch(text) else ""


def _parse_str(value: object) -> str | None:
    return value if isinstance(value, str) else None


_PARSERS: dict[type, Callable[[object], Any]] = {
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    str: _parse_str,
}
