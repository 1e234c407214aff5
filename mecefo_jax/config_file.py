"""Configs as dictionaries and JSON files, with the same types and errors as the command line.

A config file is what a run directory holds as ``config.json``: one object a section. Sections and fields that it
leaves out take their defaults.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mecefo_jax.config import Config
from mecefo_jax.config_values import convert, field_types, nearest
from mecefo_jax.errors import ConfigError


def fields() -> dict[str, tuple[type, dataclasses.Field, Any]]:
    """Every setting by its dotted name: the section it belongs to, its field, its declared type."""
    found = {}
    for prefix, section in sections().items():
        declared = field_types(section)
        for field in dataclasses.fields(section):
            if not dataclasses.is_dataclass(declared[field.name]):
                found[prefix + field.name] = (section, field, declared[field.name])
    return found


def sections(root: type = Config, prefix: str = "") -> dict[str, type]:
    """The dataclasses of a config by the prefix of their settings; the config itself has none."""
    found = {prefix: root}
    for name, declared in field_types(root).items():
        if isinstance(declared, type) and dataclasses.is_dataclass(declared):
            found |= sections(declared, f"{prefix}{name}.")
    return found


def to_dict(config: Config) -> dict[str, Any]:
    """A config as JSON holds it: nested dictionaries, lists for tuples.

    Args:
      config: any config.

    Returns:
      A dictionary that ``from_dict`` turns into an equal config, also by way of JSON.
    """
    return _plain(config)


def to_json(config: Config) -> str:
    """A config as the text of a config file."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def from_dict(settings: Mapping[str, Any]) -> Config:
    """The config that nested dictionaries describe.

    Args:
      settings: section name to its settings, and ``name``; values as JSON has them, or text to be parsed.

    Returns:
      A validated config; what the dictionaries leave out has its default.

    Raises:
      ConfigError: an unknown name (the nearest one is named), a value of another type, or one that does not fit.
    """
    known, values = fields(), in_todays_terms(dict(flatten(settings)))
    for key in values:
        if key not in known:
            raise unknown_setting(key)
    parsed = {key: convert(value, known[key][2], key) for key, value in values.items()}

    def build(prefix: str) -> Any:
        section = sections()[prefix]
        own = {key.rpartition(".")[2]: value for key, value in parsed.items() if known[key][0] is section}
        nested = {name: build(f"{prefix}{name}.") for name in field_types(section) if f"{prefix}{name}." in sections()}
        return section(**own, **nested)

    return build("")


REMOVED = ("degraded.low_rank_attention", "degraded.complement")
"""Settings that there were once, and that config files of that time hold."""


def in_todays_terms(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by their dotted names, as a config of an earlier time holds them, under the names that they have now.

    Raises:
      ConfigError: one that was taken out is on.
    """
    for key in REMOVED:
        if settings.get(key):
            raise ConfigError(f"{key}: this setting was taken out again; such a run cannot go on, start a new one")
    kept = {key: value for key, value in settings.items() if key not in REMOVED}
    fraction = kept.pop("degraded.sampled_fraction", 0)
    return {"degraded.sampled_fractions": [fraction] if fraction else []} | kept


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of nested dictionaries by their dotted names."""
    for name, value in settings.items():
        key = prefix + name
        if f"{key}." not in sections():
            yield key, value
        elif isinstance(value, Mapping):
            yield from flatten(value, f"{key}.")
        else:
            raise ConfigError(f"{key}: got {value!r}, expected a section of settings, such as {nearest(key, fields())}")


def unknown_setting(key: str, others: Iterable[str] = ()) -> ConfigError:
    """The error for a setting that does not exist; ``others`` may be written in its place, besides the settings."""
    return ConfigError(f"unknown setting {key}: did you mean {nearest(key, [*fields(), *others])}?")


def read_config(path: pathlib.Path) -> Config:
    """Reads a config file.

    Args:
      path: a JSON file as ``save_config`` writes it, or with fewer settings.

    Returns:
      The validated config.

    Raises:
      ConfigError: the file cannot be read, or what it says is not a config.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_refuse_repeats)
    except OSError as error:
        raise ConfigError(f"config file {path}: cannot be read ({error.strerror})") from error
    except ConfigError as error:
        raise ConfigError(f"config file {path}: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"config file {path}: nested too deeply, expected an object of sections") from error
    except ValueError as error:
        raise ConfigError(f"config file {path}: not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"config file {path}: got {type(settings).__name__}, expected an object of sections")
    return from_dict(settings)


def save_config(config: Config, path: pathlib.Path) -> None:
    """Writes a config file in one piece: a reader finds the old one or the new one.

    Args:
      config: the config to save.
      path: where; its directory is made if there is none.

    Raises:
      ConfigError: the file cannot be written.
    """
    replace_file(path, to_json(config).encode())


def replace_file(path: pathlib.Path, content: bytes) -> None:
    """Writes a small file in one piece, or raises ConfigError and leaves the old one."""
    torn = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn.write_bytes(content)
        torn.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            torn.unlink()
        raise ConfigError(
            f"run directory {path.parent}: cannot be written ({error.strerror}); set --workdir"
        ) from error


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ConfigError(f"{next(name for name in names if names.count(name) > 1)} is set twice")
    return found
