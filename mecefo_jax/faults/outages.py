"""Outages known in advance, and the fault source that they make.

A *unit* is what fails: a node, or one pipeline stage of a node. Units are numbered node by node,
``unit = node * num_stages + stage``. Time is counted in steps and is continuous: a unit is dead at step
``t`` if ``start <= t < end`` for one of its outages.

Legend: N nodes, S stages of a node.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool


class Outage(NamedTuple):
    """One unit dead for a while."""

    unit: int
    """Index of the unit, node * num_stages + stage."""
    start: float
    """First moment at which the unit is dead, in steps."""
    end: float
    """First moment at which it is live again, in steps; infinity: never."""


class KnownOutages:
    """Fault source whose outages are all known when it is made.

    Args:
      num_nodes: nodes of the cluster (N).
      num_stages: pipeline stages of a node that fail on their own (S); 1: whole nodes fail.
      outages: what fails when, in any order; outages of one unit may overlap.
    """

    def __init__(self, num_nodes: int, num_stages: int, outages: Sequence[Outage] = ()) -> None:
        self.num_nodes = num_nodes
        self.num_stages = num_stages
        self._units = np.array([outage.unit for outage in outages], dtype=np.int64)
        self._starts = np.array([outage.start for outage in outages], dtype=np.float64)
        self._ends = np.array([outage.end for outage in outages], dtype=np.float64)
        assert np.all((self._units >= 0) & (self._units < num_nodes * num_stages))

    def live(self, step: int) -> Bool[np.ndarray, "N S"]:
        """Units that are live at ``step`` (a pure function of it).

        Args:
          step: index of the optimizer step, from 0.

        Returns:
          bool[N, S], True where live.
        """
        live = np.ones(self.num_nodes * self.num_stages, dtype=bool)
        live[self._units[(self._starts <= step) & (step < self._ends)]] = False
        return live.reshape(self.num_nodes, self.num_stages)


def persistent_outages(nodes: Sequence[int], num_stages: int) -> list[Outage]:
    """Outages that keep all stages of ``nodes`` dead at every step."""
    return [Outage(node * num_stages + stage, -math.inf, math.inf) for node in nodes for stage in range(num_stages)]
