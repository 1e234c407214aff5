"""The fault source that a config asks for.

Legend: N nodes, S stages of a node.
"""

import os
import pathlib
from typing import Protocol

import numpy as np
from jaxtyping import Bool

from mecefo_jax.config import FaultsConfig
from mecefo_jax.errors import ConfigError
from mecefo_jax.faults.outages import KnownOutages, persistent_outages
from mecefo_jax.faults.scenario import HOURS, SeededFailures
from mecefo_jax.faults.script import script_outages
from mecefo_jax.faults.trace import read_trace, trace_outages


class FaultSource(Protocol):
    """Answers who is alive at a step."""

    num_nodes: int
    """Nodes of the cluster (N)."""
    num_stages: int
    """Stages of a node that fail on their own (S); 1: whole nodes fail."""

    def live(self, step: int) -> Bool[np.ndarray, "N S"]:
        """Units live at ``step``, a pure function of it; steps (from 0) may be asked in any order."""
        ...


def make_fault_source(config: FaultsConfig, *, num_nodes: int, seed: int) -> FaultSource:
    """Make the fault source of a config.

    Args:
      config: scenario, granularity and the fields of the scenario.
      num_nodes: nodes of the cluster (N).
      seed: seed of random failures.

    Returns:
      A source with S = num_stages for granularity=stage, else S = 1.

    Raises:
      ConfigError: a field of the scenario is malformed, or does not fit the cluster or the scenario.
      DataError: the trace cannot be read.
    """
    num_stages = config.num_stages if config.granularity == "stage" else 1
    if config.scenario in (*HOURS, "steps"):
        return _seeded_failures(config, num_nodes, num_stages, seed)
    if config.scenario == "none":
        return KnownOutages(num_nodes, num_stages)
    if config.scenario == "trace":
        rows = read_trace(pathlib.Path(os.path.expanduser(config.trace_file)))
        milliseconds_per_step = 1000 * config.step_seconds * config.frequency
        outages = trace_outages(rows, num_nodes * num_stages, milliseconds_per_step)
        return KnownOutages(num_nodes, num_stages, outages)
    if config.frequency != 1:
        raise ConfigError(
            f"faults.frequency={config.frequency:g} has no meaning for faults.scenario={config.scenario}: set 1"
        )
    if config.scenario == "persistent":
        _check_persistent(config.persistent_nodes, num_nodes)
        return KnownOutages(num_nodes, num_stages, persistent_outages(config.persistent_nodes, num_stages))
    assert config.scenario == "script", config.scenario
    outages = script_outages(config.script, num_nodes, num_stages, stages_fail=config.granularity == "stage")
    return KnownOutages(num_nodes, num_stages, outages)


def _seeded_failures(config: FaultsConfig, num_nodes: int, num_stages: int, seed: int) -> SeededFailures:
    """Scenarios in hours or in steps, at the config's frequency."""
    if config.scenario == "steps":
        fail_every, back_after = config.fail_every_steps, config.back_after_steps
    else:
        fail_every, back_after = (hours * 3600 / config.step_seconds for hours in HOURS[config.scenario])
    return SeededFailures(
        num_nodes,
        num_stages,
        fail_every=fail_every / config.frequency,
        back_after=back_after / config.frequency,
        timing=config.timing,
        seed=seed,
    )


def _check_persistent(nodes: tuple[int, ...], num_nodes: int) -> None:
    """Refuse nodes that do not exist."""
    for node in nodes:
        if not 0 <= node < num_nodes:
            raise ConfigError(
                f"faults.persistent_nodes={node}: there is no such node; mesh.num_nodes={num_nodes}, "
                f"so set nodes from 0 to {num_nodes - 1}"
            )
