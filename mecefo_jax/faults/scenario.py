"""Seeded failures: the paper's scenarios low, mid and high, and their like in steps.

Failures hit the whole cluster at a mean gap, each kills one live unit picked uniformly, and the unit is back
after a fixed time. With gap ``G`` and outage ``D`` the mean number of units down is ``D / G``, once ``D`` has
passed since the start, where all are live.

The events are drawn in order, in continuous time, from one seeded stream, and are remembered. So they depend
on neither the order of the queries, nor restarts, nor the length of the run. The stream is used in units of
the gap: dividing both times by a frequency replays the same failures that much faster.

Legend: N nodes, S stages of a node.
"""

import bisect
import math
from typing import Literal

import numpy as np
from jaxtyping import Bool

from mecefo_jax.errors import ConfigError

HOURS: dict[str, tuple[float, float]] = {"low": (2.0, 4.0), "mid": (1.0, 3.0), "high": (0.5, 2.0)}
"""The paper's scenarios (32 nodes): hours between failures in the whole cluster, hours until a unit is back."""

# Keeps this stream apart from others that are seeded with the run's seed alone.
_STREAM_TAG = 0xFA17


class SeededFailures:
    """Fault source that draws failures from a seed.

    Args:
      num_nodes: nodes of the cluster (N).
      num_stages: pipeline stages of a node that fail on their own (S); 1: whole nodes fail.
      fail_every: mean steps between failures in the whole cluster.
      back_after: steps until a failed unit is live again.
      timing: random: exponentially distributed gaps; regular: constant ones.
      seed: seed of gaps and victims, not negative.

    Raises:
      ConfigError: a time that is not positive and finite, a negative seed, or so many failures that each
        unit would have to fail more than once a step.
    """

    def __init__(
        self,
        num_nodes: int,
        num_stages: int,
        *,
        fail_every: float,
        back_after: float,
        timing: Literal["random", "regular"],
        seed: int,
    ) -> None:
        self.num_nodes = num_nodes
        self.num_stages = num_stages
        self.fail_every = fail_every
        self.back_after = back_after
        self.timing = timing
        assert timing in ("random", "regular"), timing
        _check(num_nodes * num_stages, fail_every, back_after, seed)
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([_STREAM_TAG, seed])))
        self._next_start = 0.0
        self._elapsed_gaps = 0.0
        # Outages by increasing start. All last equally long, so the ends increase as well.
        self._units: list[int] = []
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._draw_gap()

    def live(self, step: int) -> Bool[np.ndarray, "N S"]:
        """Units that are live at ``step``: those with no outage such that ``start <= step < end``.

        Args:
          step: index of the optimizer step, from 0; steps may be asked in any order.

        Returns:
          bool[N, S], True where live.
        """
        while self._next_start <= step:
            self._fail_one()
        live = np.ones(self.num_nodes * self.num_stages, dtype=bool)
        live[self._dead_units(step)] = False
        return live.reshape(self.num_nodes, self.num_stages)

    def _dead_units(self, time: float) -> list[int]:
        """Units dead at ``time``, of the failures drawn so far."""
        return self._units[bisect.bisect_right(self._ends, time) : bisect.bisect_right(self._starts, time)]

    def _fail_one(self) -> None:
        """Kill a live unit at the time of the next failure, if there is one, and draw the gap after it."""
        start = self._next_start
        live = np.ones(self.num_nodes * self.num_stages, dtype=bool)
        live[self._dead_units(start)] = False
        candidates = np.flatnonzero(live)
        # Drawn even if none is live, so that the gaps do not depend on the number of units.
        pick = self._generator.random()
        if candidates.size:
            self._units.append(int(candidates[int(pick * candidates.size)]))
            self._starts.append(start)
            self._ends.append(start + self.back_after)
        self._draw_gap()

    def _draw_gap(self) -> None:
        """Set the time of the next failure."""
        gap = 1.0 if self.timing == "regular" else -math.log1p(-self._generator.random())
        self._elapsed_gaps += gap
        self._next_start = self._elapsed_gaps * self.fail_every


def _check(num_units: int, fail_every: float, back_after: float, seed: int) -> None:
    """Refuse times and seeds that mean nothing."""
    if seed < 0:
        raise ConfigError(f"train.seed={seed}: must not be negative; set 0 or more")
    if not (0 < back_after < math.inf):
        raise ConfigError(f"failed units come back after {back_after:g} steps: set a positive time")
    if not (1 / num_units <= fail_every < math.inf):
        raise ConfigError(
            f"a failure each {fail_every:g} steps with {num_units} units: each unit would fail more than once a step; "
            f"set times or a frequency that give at least {1 / num_units:g} steps"
        )
