"""The command line: ``python train.py NAME [--workdir DIR] [--section.field VALUE ...] [--print-config] [--help]``.

A value is parsed by the declared type of its field, exactly as in a config file. Nothing here imports JAX before a run
starts, so help and mistakes are answered at once.
"""

import contextlib
import dataclasses
import difflib
import os
import pathlib
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import configs
from mecefo_jax.config import Config
from mecefo_jax.config_effects import CONDITIONS, changed, must_take_effect, without_effect
from mecefo_jax.config_file import (
    fields,
    flatten,
    from_dict,
    read_config,
    to_dict,
    to_json,
    unknown_setting,
)
from mecefo_jax.config_help import help_text
from mecefo_jax.config_values import describe, split_list, takes_list
from mecefo_jax.errors import ConfigError, RunError
from mecefo_jax.terminal import tolerate_encoding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a command line says, before it is checked against a config."""

    name: str | None
    """Name of a config, or the path of a config file."""
    settings: dict[str, str | list[str]]
    """Text of each setting, by its dotted name; a list of texts where the setting is a list."""
    workdir: pathlib.Path | None
    """Run directory, if given."""
    print_config: bool
    """Whether to print the resolved config instead of running it."""
    show_help: bool
    """Whether to print help instead of running."""


def main(argv: Sequence[str]) -> int:
    """Runs what the command line asks for.

    Args:
      argv: the words after the program's name.

    Returns:
      The exit code: 0 only if the work was done; a user's mistake prints one line to standard error.
    """
    tolerate_encoding()
    try:
        arguments = scan(argv)
        if arguments.show_help:
            print(help_text(Config() if arguments.name is None else _base(arguments.name), configs.names()))
            return 0
        config = _resolve(arguments)
        if arguments.print_config:
            print(to_json(config), end="")
            return 0
        if config.cluster.is_real:
            _be_a_process(config, _workdir(arguments, config))
        else:
            _run(config, _workdir(arguments, config))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; the same command resumes from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def parse(argv: Sequence[str]) -> tuple[Config, pathlib.Path]:
    """Turns a command line into a config and a run directory.

    Args:
      argv: the words after the program's name.

    Returns:
      The validated config and the run directory, which is ``runs/NAME`` unless given.

    Raises:
      ConfigError: the command line is wrong.
    """
    arguments = scan(argv)
    config = _resolve(arguments)
    return config, _workdir(arguments, config)


def scan(argv: Sequence[str]) -> Arguments:
    """Splits a command line into its name, options and settings, without reading values.

    ``--key value`` and ``--key=value`` are the same, and so are hyphens and underscores in keys. A setting that is a
    list takes all words up to the next option; a word may hold several items, separated by commas.

    Args:
      argv: the words after the program's name.

    Returns:
      What was said.

    Raises:
      ConfigError: an unknown or repeated option, one without a value, or a word that belongs to none.
    """
    types = {key: declared for key, (_, _, declared) in fields().items()}
    name, settings, flags = None, dict[str, str | list[str]](), set[str]()
    words = list(argv)
    while words:
        word = words.pop(0)
        key, equals, text = word[2:].partition("=")
        key = key.replace("-", "_")
        if word == "-h" or (word.startswith("--") and key in ("help", "print_config") and not equals):
            flags.add("help" if word == "-h" else key)
        elif word.startswith("--"):
            if key != "workdir" and key not in types:
                raise unknown_setting(key, ("workdir", "print_config", "help"))
            if key in settings:
                raise ConfigError(f"{key}: given twice; leave one out")
            several = key != "workdir" and takes_list(types[key])
            values = [text] if equals else _take_values(words, several)
            if not values:
                raise ConfigError(f"{key}: got no value, expected {describe(types.get(key, str))}")
            settings[key] = [item for word in values for item in split_list(word)] if several else values[0]
        elif name is None:
            name = word
        else:
            raise ConfigError(f"got {word!r} after the run's name {name}; settings are written --section.field VALUE")
    workdir = settings.pop("workdir", None)
    if workdir == "":
        raise ConfigError("workdir: got '', expected a directory")
    return Arguments(
        name=name,
        settings=settings,
        workdir=None if workdir is None else pathlib.Path(os.path.expanduser(str(workdir))),
        print_config="print_config" in flags,
        show_help="help" in flags,
    )


def _take_values(words: list[str], several: bool) -> list[str]:
    """Removes an option's values from the front of the words."""
    values: list[str] = []
    while words and not words[0].startswith("--") and (several or not values):
        values.append(words.pop(0))
    return values


def _resolve(arguments: Arguments) -> Config:
    """The config that a command line describes."""
    if arguments.name is None:
        raise ConfigError(f"got no run to start; name one of {', '.join(configs.names())}, or a config file *.json")
    base = _base(arguments.name)
    config = from_dict(dict(flatten(to_dict(base))) | arguments.settings)
    _check_effects(arguments, base, config)
    return config


def _base(name: str) -> Config:
    """The config of that name, or in that file."""
    if name.endswith(".json"):
        return read_config(pathlib.Path(os.path.expanduser(name)))
    if name not in configs.names():
        close = difflib.get_close_matches(name, configs.names(), n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"unknown run {name}: did you mean {close}? There are {', '.join(configs.names())}, or *.json"
        )
    return configs.get(name)


def _check_effects(arguments: Arguments, base: Config, config: Config) -> None:
    """Refuses settings that name what to train on or what fails but have no effect; warns of others without effect.

    A file may set everything, as those of run directories do: there only what differs from the defaults counts.
    """
    from_file = changed(base) if _is_file(arguments) else set()
    for key in sorted(from_file | arguments.settings.keys()):
        message = without_effect(config, key)
        if message is None:
            continue
        # What a file names may be switched off for a run: by the other setting on the command line.
        switched_off = key not in arguments.settings and CONDITIONS[key][0] in arguments.settings
        if must_take_effect(config, key) and not switched_off:
            raise ConfigError(message)
        print(f"warning: {message}", file=sys.stderr)


def _is_file(arguments: Arguments) -> bool:
    return arguments.name is not None and arguments.name.endswith(".json")


def _workdir(arguments: Arguments, config: Config) -> pathlib.Path:
    return arguments.workdir or pathlib.Path("runs") / config.name


def _run(config: Config, workdir: pathlib.Path) -> None:
    from mecefo_jax import devices

    devices.prepare(config.mesh)
    _make_directory(workdir)
    from mecefo_jax.trainer import run

    run(config, workdir)


def _be_a_process(config: Config, workdir: pathlib.Path) -> NoReturn:
    """One process of a cluster; it ends here, since threads that wait for the others cannot be ended otherwise."""
    from mecefo_jax import devices

    devices.prepare_process(config.cluster, config.mesh)
    exit_code = 0
    try:
        _make_directory(workdir)
        from mecefo_jax.processes.start import start

        start(config, workdir)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        exit_code = error.exit_code
    except BaseException:
        traceback.print_exc()
        exit_code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)


def _make_directory(workdir: pathlib.Path) -> None:
    """Makes the run directory, or says at once that it cannot be: preparing the data may take long."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--workdir {workdir}: cannot be made ({error.strerror}); set another directory") from error
    if not os.access(workdir, os.W_OK | os.X_OK):
        raise ConfigError(f"--workdir {workdir}: cannot be written (no permission); set another directory")
