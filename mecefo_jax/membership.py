"""Who is alive, what the others do about it, and what is said of it: fault source -> live set -> plan -> events."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool

from mecefo_jax.config import Config
from mecefo_jax.errors import TooFewLiveNodesError
from mecefo_jax.faults import make_fault_source
from mecefo_jax.progress import Progress
from mecefo_jax.takeover import Plan, degraded_costs, make_plan, scaled_costs
from mecefo_jax.takeover.auto import expected_errors


class Events(Protocol):
    """Where events go, such as ``metrics.RunLog``."""

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Record one."""


class Membership:
    """The plans of a run, and what is told and counted of their changes."""

    def __init__(
        self, config: Config, degraded_costs: Sequence[float], progress: Progress, log: Events, first_step: int
    ):
        """Set up.

        Args:
            config: of the run.
            degraded_costs: cost of a degraded microbatch at each level, in exact ones.
            progress: its failures and recoveries are counted here.
            log: told of every change.
            first_step: step that this attempt begins with.
        """
        self._config, self._progress, self._log, self._first_step = config, progress, log, first_step
        self._source = make_fault_source(config.faults, num_nodes=config.mesh.num_nodes, seed=config.train.seed)
        self._degraded_costs = degraded_costs

    def plan(self, step: int) -> Plan:
        """The plan of a step.

        Raises:
            TooFewLiveNodesError: fewer nodes live than configured, or than the policy needs.
        """
        config, live_NS = self._config, self._source.live(step)
        live_nodes = int(live_NS.any(axis=1).sum())
        if live_nodes < config.faults.min_live_nodes:
            raise TooFewLiveNodesError(
                f"{live_nodes} of {config.mesh.num_nodes} nodes are live at step {step}, "
                f"faults.min_live_nodes is {config.faults.min_live_nodes}"
            )
        return plan_for(config, live_NS, self._degraded_costs)

    def report(self, step: int, plan: Plan | None) -> None:
        """Tell of what a step changes: units that failed or came back, and the plan made of it.

        Args:
            step: number of the step; after a resume, units that are still down are told too.
            plan: of the step; None where none could be made, whose changes do not count: the step was not done.
        """
        live_NS, before_NS = self._source.live(step), self._live_before(step)
        if step == self._first_step and step and not live_NS.all():
            self._log.event("still_down", step, nodes=np.flatnonzero(~live_NS.all(axis=1)).tolist())
        if (live_NS == before_NS).all():
            return
        failed_NS, back_NS = before_NS & ~live_NS, live_NS & ~before_NS
        for node, stage in np.argwhere(failed_NS):
            covered = {} if plan is None else {"covered_by": plan.assignees_of(int(node), int(stage)).tolist()}
            self._log.event("failure", step, **self._unit(node, stage), **covered)
        for node, stage in np.argwhere(back_NS):
            self._log.event("recovery", step, **self._unit(node, stage))
        if plan is None:
            return
        self._progress.failures += int(failed_NS.sum())
        self._progress.recoveries += int(back_NS.sum())
        fields = takeover_fields(plan)
        self._log.event("takeover", step, live_nodes=int(live_NS.any(axis=1).sum()), **fields)

    def failures_through(self, step: int) -> int:
        """Failures of the run up to and including a step that has not been reported yet."""
        return self._progress.failures + int((self._live_before(step) & ~self._source.live(step)).sum())

    def _live_before(self, step: int) -> np.ndarray:
        """Live units of the step before; all of them before the first step."""
        live_NS = self._source.live(max(step - 1, 0))
        return live_NS if step else np.ones_like(live_NS)

    def _unit(self, node: int, stage: int) -> dict[str, int]:
        by_stage = self._config.faults.granularity == "stage"
        return {"node": int(node)} | ({"stage": int(stage)} if by_stage else {})


def plan_for(config: Config, live_NS: Bool[np.ndarray, "N S"], degraded_costs: Sequence[float]) -> Plan:
    """The plan that a run's policy makes of the live units.

    Args:
        config: of the run.
        live_NS: live units.
        degraded_costs: cost of a degraded microbatch at each level, in exact ones.

    Raises:
        ConfigError, TooFewLiveNodesError: as ``make_plan``.
    """
    return make_plan(
        live_NS,
        config.faults.policy,
        microbatches_per_node=config.train.microbatches_per_node,
        degraded_costs=degraded_costs,
        slack=config.faults.slack,
        auto=config.faults.auto,
        errors=expected_errors(config.faults.auto, config.degraded),
    )


def takeover_fields(plan: Plan) -> dict[str, Any]:
    """What the event of a takeover says of its plan; under ``auto`` also why, and what there was to choose from."""
    fields: dict[str, Any] = {
        "policy": plan.policy,
        "taken_over": len(plan.taken_over),
        "degraded": len(plan.degraded),
        "dropped": len(plan.dropped),
        "degraded_fraction": plan.degraded_share,
        "critical_load": plan.critical_load,
    }
    if len(plan.degraded_costs) > 1:
        fields["levels"] = np.bincount(plan.level_MS.max(axis=1), minlength=len(plan.degraded_costs) + 1)[1:].tolist()
    if plan.choice is not None:
        fields["chosen_for"] = plan.choice.reason
        fields["prospects"] = {name: dataclasses.asdict(found) for name, found in plan.choice.prospects.items()}
    return fields


def run_degraded_costs(config: Config, vocab_size: int) -> tuple[float, ...]:
    """Cost of a degraded microbatch at each level, in exact ones: the ratio of their FLOPs.

    Where the first level's is configured, the others are as far below it as their FLOPs are.
    """
    costs = degraded_costs(
        config.model,
        config.degraded,
        rank=config.basis.rank,
        microbatch_tokens=config.train.microbatch_size * config.data.seq_len,
        seq_len=config.data.seq_len,
        vocab_size=vocab_size,
    )
    first = config.faults.degraded_cost
    return costs if first is None else scaled_costs(costs, first)
