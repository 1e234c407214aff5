"""The plan of a step: which node computes which microbatches, and which of them degraded.

A plan is data: a pure function of the live units, the policy and the costs. A new plan never recompiles
anything. The invariants (each a test): every microbatch is computed exactly once (``drop`` apart), dead units
get nothing, and a healthy plan is every node computing its own slice exactly.

Legend: N nodes, S stages of a node (1 where whole nodes fail), M microbatches, L layers, J levels.
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Sequence
from typing import get_args, get_type_hints

import numpy as np
from jaxtyping import Bool, Float, Int

from mecefo_jax.config import AutoConfig, DegradedConfig, FaultsConfig
from mecefo_jax.errors import ConfigError, TooFewLiveNodesError
from mecefo_jax.takeover import policies
from mecefo_jax.takeover.auto import Choice, Errors, choose, estimate, expected_errors

POLICIES: tuple[str, ...] = get_args(get_type_hints(FaultsConfig)["policy"])
"""Names of the policies."""

_AUTO = AutoConfig()

_CANDIDATES = ("reroute", "balanced", "neighbor", "drop")
"""What auto chooses among, of equals the first."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Who computes what in one step. The arrays are read-only."""

    live_NS: Bool[np.ndarray, "N S"]
    """Live units."""
    microbatches_per_node: int
    """Microbatches of a node's slice: node n is home to ids from n times this number on."""
    policy: str
    """Policy that made the plan; under auto the one that it chose, reroute where there was nothing to choose."""
    assignee_MS: Int[np.ndarray, "M S"]
    """int32: the node that computes a stage of a microbatch; -1: dropped."""
    level_MS: Int[np.ndarray, "M S"]
    """int8: how far the backward pass of a stage of a microbatch is degraded; 0: exact, each level cheaper."""
    degraded_costs: tuple[float, ...]
    """Cost of a degraded microbatch at each level from 1 on, in exact ones."""
    executor_M: Int[np.ndarray, " M"]
    """int32: the node on whose sub-mesh the microbatch runs: its home if any stage of it lives, else the assignee
    of stage 0; -1: dropped."""
    choice: Choice | None = None
    """Why this policy: under auto, where there was something to choose."""

    def __post_init__(self) -> None:
        for array in (self.live_NS, self.assignee_MS, self.level_MS, self.executor_M):
            _read_only(array)

    @property
    def num_nodes(self) -> int:
        """Nodes, live or dead (N)."""
        return self.live_NS.shape[0]

    @property
    def num_stages(self) -> int:
        """Stages of a node (S)."""
        return self.live_NS.shape[1]

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the step, dropped ones included (M)."""
        return self.assignee_MS.shape[0]

    @functools.cached_property
    def home_M(self) -> Int[np.ndarray, " M"]:
        """int32: the node that computes a microbatch while all nodes are healthy."""
        return np.repeat(np.arange(self.num_nodes, dtype=np.int32), self.microbatches_per_node)

    @functools.cached_property
    def degraded_MS(self) -> Bool[np.ndarray, "M S"]:
        """Whether the backward pass of a stage of a microbatch is degraded, at any level."""
        return _read_only(self.level_MS > 0)

    @functools.cached_property
    def any_degraded_M(self) -> Bool[np.ndarray, " M"]:
        """Whether a microbatch is degraded in any stage."""
        return np.any(self.degraded_MS, axis=1)

    @functools.cached_property
    def covering_stage_NS(self) -> Int[np.ndarray, "N S"]:
        """The live stage of a node that does the work of each of its stages; -1 on nodes with none."""
        return policies.covering_stage(self.live_NS)

    @property
    def dropped(self) -> Int[np.ndarray, " K"]:
        """Ids of the microbatches that nobody computes."""
        return np.flatnonzero(self.executor_M < 0)

    @property
    def degraded(self) -> Int[np.ndarray, " K"]:
        """Ids of the microbatches that are degraded in any stage."""
        return np.flatnonzero(self.any_degraded_M)

    @property
    def taken_over(self) -> Int[np.ndarray, " K"]:
        """Ids of the microbatches of which some stage is computed away from home."""
        away_MS = (self.assignee_MS != self.home_M[:, None]) & (self.assignee_MS >= 0)
        return np.flatnonzero(away_MS.any(axis=1))

    def microbatches_of(self, node: int) -> tuple[Int[np.ndarray, " E"], Int[np.ndarray, " K"]]:
        """Microbatches that run on a node's sub-mesh.

        Args:
          node: index of the node.

        Returns:
          int64 ids, ascending: those that are exact in all stages, and those degraded in any.
        """
        order, starts = self._by_executor
        ids = order[starts[node] : starts[node + 1]]
        degraded = self.any_degraded_M[ids]
        return ids[~degraded], ids[degraded]

    def assignees_of(self, node: int, stage: int) -> Int[np.ndarray, " K"]:
        """Nodes that compute a stage of a node's microbatches, maybe itself; none if they are dropped."""
        assignees = np.unique(self.assignee_MS[self.home_M == node, stage])
        return assignees[assignees >= 0]

    @functools.cached_property
    def load_NS(self) -> Float[np.ndarray, "N S"]:
        """float64: work of each unit, 1.0 being its healthy step; 0 for units that are dead or idle."""
        unit_MS = self.assignee_MS * np.int64(self.num_stages)
        unit_MS += self.covering_stage_NS[self.assignee_MS, np.arange(self.num_stages)]
        # Counted by level, so that a load is a rounded product a level and not a sum of rounded costs.
        place_MS = unit_MS + self.live_NS.size * self.level_MS.astype(np.int64)
        cost_J = np.array([1.0, *self.degraded_costs])
        counts = np.bincount(place_MS[self.assignee_MS >= 0], minlength=cost_J.size * self.live_NS.size)
        work_NS = np.sum(cost_J[:, None, None] * counts.reshape(-1, *self.live_NS.shape), axis=0)
        return _read_only(work_NS / self.microbatches_per_node)

    @property
    def critical_load(self) -> float:
        """Largest load of a unit: the time of the step, in healthy steps."""
        return float(self.load_NS.max())

    @property
    def degraded_share(self) -> float:
        """Share of what is computed, by microbatch and stage, that is degraded."""
        return float(self.degraded_MS[self.executor_M >= 0].mean())

    @property
    def degradation(self) -> float:
        """The same, where a microbatch counts by what its level saves, one at the first level in full."""
        first, *others = self.degraded_costs
        return self.mean_over_levels([1.0, *((1 - cost) / (1 - first) if first < 1 else 1.0 for cost in others)])

    def mean_over_levels(self, values: Sequence[float]) -> float:
        """Mean over what is computed, by microbatch and stage.

        Args:
          values: of each level from 1 on; what is exact has 0.
        """
        return float(np.array([0.0, *values])[self.level_MS[self.executor_M >= 0]].mean())

    def layer_levels(self, num_layers: int) -> Int[np.ndarray, "M L"]:
        """How far the backward pass of each layer of each microbatch is degraded, as ``level_MS``.

        Args:
          num_layers: layers of the model (L), at least as many as stages.
        """
        return self.level_MS[:, stage_of_layers(num_layers, self.num_stages)]

    @functools.cached_property
    def _by_executor(self) -> tuple[Int[np.ndarray, " M"], Int[np.ndarray, " N1"]]:
        """Microbatch ids sorted by executor, and where each node's begin."""
        order = np.argsort(self.executor_M, kind="stable")
        return order, np.searchsorted(self.executor_M[order], np.arange(self.num_nodes + 1))


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def make_plan(
    live_NS: Bool[np.ndarray, "N S"],
    policy: str,
    *,
    microbatches_per_node: int,
    degraded_costs: Sequence[float],
    slack: float,
    auto: AutoConfig = _AUTO,
    errors: Errors | None = None,
) -> Plan:
    """Make the plan of a step.

    Args:
      live_NS: live units.
      policy: neighbor, reroute, balanced, drop, or auto, which chooses among these.
      microbatches_per_node: microbatches of a node's slice, at least 1.
      degraded_costs: cost of a degraded microbatch at each level from 1 on, in exact ones; positive, and one at
        most 1 for balanced, which degrades in order to save time, and alone goes beyond the first level.
      slack: load above a healthy step that balanced accepts, as a fraction of a healthy step; not negative.
      auto: the limits of auto; the plan of balanced that it considers has its max_slowdown as slack.
      errors: what auto expects of degrading and dropping; None: what its settings say of the paper's pass.

    Returns:
      The plan: the same for the same arguments.

    Raises:
      ConfigError: an argument is out of its range, or the policy is unknown.
      TooFewLiveNodesError: the live units cannot compute the step under this policy.
    """
    assert live_NS.ndim == 2 and live_NS.dtype == bool and live_NS.size, (live_NS.shape, live_NS.dtype)
    _check_arguments(policy, microbatches_per_node, degraded_costs, slack)
    if policy == "auto":
        if not live_NS.all():
            errors = errors or expected_errors(auto, DegradedConfig())
            return _choose_plan(live_NS, microbatches_per_node, degraded_costs, auto, errors)
        policy = _CANDIDATES[0]  # there is nothing to choose
    assignee_MS, level_MS = _assign(live_NS, policy, microbatches_per_node, degraded_costs, slack)
    home_M = np.repeat(np.arange(live_NS.shape[0], dtype=np.int32), microbatches_per_node)
    first_M = assignee_MS[:, 0]
    return Plan(
        live_NS=live_NS.copy(),
        microbatches_per_node=microbatches_per_node,
        policy=policy,
        assignee_MS=assignee_MS,
        level_MS=level_MS,
        degraded_costs=tuple(degraded_costs),
        executor_M=np.where(np.any(live_NS, axis=1)[home_M] & (first_M >= 0), home_M, first_M),
    )


def _assign(
    live_NS: Bool[np.ndarray, "N S"],
    policy: str,
    microbatches_per_node: int,
    degraded_costs: Sequence[float],
    slack: float,
) -> tuple[Int[np.ndarray, "M S"], Int[np.ndarray, "M S"]]:
    """What a fixed policy makes of the live units."""
    match policy:
        case "neighbor":
            return policies.neighbor(live_NS, microbatches_per_node)
        case "reroute":
            return policies.reroute(live_NS, microbatches_per_node)
        case "balanced":
            return policies.balanced(live_NS, microbatches_per_node, degraded_costs=degraded_costs, slack=slack)
        case "drop":
            return policies.drop(live_NS, microbatches_per_node)
    raise AssertionError(policy)


def _choose_plan(
    live_NS: Bool[np.ndarray, "N S"],
    microbatches_per_node: int,
    degraded_costs: Sequence[float],
    auto: AutoConfig,
    errors: Errors,
) -> Plan:
    """The plan of the policy that ``auto`` chooses; what others would cost is told beside, also if they may not be."""
    plans: dict[str, Plan] = {}
    impossible: TooFewLiveNodesError | None = None
    for policy in _CANDIDATES:
        if policy == "balanced" and min(degraded_costs) > 1:
            continue
        try:
            plans[policy] = make_plan(
                live_NS,
                policy,
                microbatches_per_node=microbatches_per_node,
                degraded_costs=degraded_costs,
                slack=auto.max_slowdown,
            )
        except TooFewLiveNodesError as error:
            impossible = impossible or error
    if not plans:
        assert impossible is not None
        raise impossible
    prospects = {
        policy: estimate(
            critical_load=plan.critical_load,
            degradation=plan.degradation,
            level_variance=plan.mean_over_levels(errors.level_variances) if errors.level_variances else 0.0,
            num_dropped=len(plan.dropped),
            num_microbatches=plan.num_microbatches,
            errors=errors,
        )
        for policy, plan in plans.items()
    }
    candidates = [policy for policy in plans if auto.may_drop or policy != "drop"]
    choice = choose(prospects, candidates, auto.max_slowdown)
    return dataclasses.replace(plans[choice.policy], choice=choice)


def stage_of_layers(num_layers: int, num_stages: int) -> Int[np.ndarray, " L"]:
    """Stage of each layer: contiguous ranges whose sizes differ by one at most.

    Args:
      num_layers: layers of the model (L).
      num_stages: stages, at most as many as layers.

    Returns:
      int64[L], ascending.
    """
    assert 1 <= num_stages <= num_layers, (num_layers, num_stages)
    return np.arange(num_layers) * num_stages // num_layers


def _check_arguments(policy: str, microbatches_per_node: int, degraded_costs: Sequence[float], slack: float) -> None:
    """Refuse what no plan can be made of, in the words of the config."""
    if policy not in POLICIES:
        nearest = difflib.get_close_matches(policy, POLICIES, n=1)
        hint = f"did you mean {nearest[0]}? " if nearest else ""
        raise ConfigError(f"faults.policy={policy!r}: unknown; {hint}set one of {', '.join(POLICIES)}")
    if microbatches_per_node < 1:
        raise ConfigError(f"train.microbatches_per_node={microbatches_per_node}: set 1 or more")
    assert degraded_costs, "one level at least"
    for cost in degraded_costs:
        if not (0 < cost < math.inf):
            raise ConfigError(f"faults.degraded_cost={cost:g}: set a number above 0 and at most 1")
    if policy == "balanced" and min(degraded_costs) > 1:
        raise ConfigError(
            f"a degraded microbatch costs {min(degraded_costs):.3g} of an exact one, so faults.policy=balanced has "
            "nothing to gain; set another policy, a faults.degraded_cost of at most 1, or cheaper switches in degraded"
        )
    if not (0 <= slack < math.inf):
        raise ConfigError(f"faults.slack={slack:g}: set 0 or more")
