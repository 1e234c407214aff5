"""Named runs: each is a function that returns a complete config; its docstring says on what it runs and for how long.

Settings are changed on the command line, not here: ``python train.py llama_1b --faults.scenario high``.
"""

from collections.abc import Callable

from configs.llama import llama_1b, llama_7b, llama_350m
from configs.quickstart import quickstart
from mecefo_jax.config import Config

_RUNS: dict[str, Callable[[], Config]] = {run.__name__: run for run in (quickstart, llama_350m, llama_1b, llama_7b)}


def get(name: str) -> Config:
    """The config of a named run.

    Args:
      name: one of ``names()``.

    Returns:
      A complete, validated config.

    Raises:
      KeyError: there is no such run.
    """
    return _RUNS[name]()


def names() -> list[str]:
    """Names of all runs, the smallest first."""
    return list(_RUNS)
