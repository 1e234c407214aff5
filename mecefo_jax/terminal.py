"""What the command-line programs share: output that any terminal takes, numbers and messages in their own flags."""

import io
import os
import re
import sys
from collections.abc import Mapping

from mecefo_jax.config_file import fields
from mecefo_jax.config_values import convert


def tolerate_encoding() -> None:
    """Lets standard output replace characters that its encoding lacks, instead of ending the program."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def give_up_unwritable_output() -> None:
    """Flush standard output; if it cannot be written, drop what it holds, which Python would try again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def in_flags(message: str, renamed: Mapping[str, str]) -> str:
    """Puts a message about the config into the words of a program whose flags are named after its fields.

    Args:
      message: names settings, such as ``faults.step_seconds`` or ``--faults.step_seconds``.
      renamed: words for settings whose flags have other names, by the setting's dotted name or ``name=value``.

    Returns:
      The message with each setting's flag, such as ``--step-seconds``.
    """
    for setting, words in renamed.items():
        message = re.sub(rf"(?:--)?\b{re.escape(setting)}\b", words, message)
    flags = {key: "--" + key.rpartition(".")[2].replace("_", "-") for key in fields()}
    return re.sub(r"(?:--)?\b(\w+\.\w+)\b", lambda found: flags.get(found[1], found[0]), message)


def integer(text: str) -> int:
    """Parses a flag's integer as a config does."""
    return convert(text, int, "")


def number(text: str) -> float:
    """Parses a flag's number as a config does."""
    return convert(text, float, "")
