"""What failures and returns cost: one event for each, and the share of time that went into committed steps."""

import dataclasses
import time
from collections.abc import Collection
from typing import Any

from mecefo_jax.journal import Log
from mecefo_jax.membership import takeover_fields
from mecefo_jax.processes.agreement import Decision, Member
from mecefo_jax.progress import Progress
from mecefo_jax.takeover import Plan


@dataclasses.dataclass
class _Loss:
    """A member that died, until the first step after it is committed."""

    process: int
    member: Member
    noticed: float
    waited_s: float
    recomputed: int = 0


class Timeline:
    """Follows the decisions of a run and tells, once a step is committed, what came of them."""

    def __init__(self, progress: Progress, log: Log) -> None:
        """Begin with the first decision."""
        self._progress, self._log = progress, log
        self._losses: list[_Loss] = []
        self._step_began = time.monotonic()
        self._usual_s: list[float] = []

    def decided(self, decision: Decision, waited_s: float) -> None:
        """Note what a round brought.

        Args:
            decision: of the round.
            waited_s: time that this process spent in the round's barrier.
        """
        for process, member in decision.lost.items():
            self._losses.append(_Loss(process, member, time.time(), waited_s))
        for loss in self._losses:
            loss.recomputed = max(loss.recomputed, len(decision.missing))
        for process, member in decision.left.items():
            self._log.event("left", decision.step, node=member.node, process=process)

    def committed(self, step: int, plan: Plan, productive_s: float) -> None:
        """Tell of the failures since the step before.

        Args:
            step: number of the committed step.
            plan: who computed what in it.
            productive_s: time of the work that went into it: everything else since the step before was lost.
        """
        now = time.monotonic()
        took_s, self._step_began = now - self._step_began, now
        self._progress.productive_s += productive_s
        usual = sorted(self._usual_s)[len(self._usual_s) // 2] if self._usual_s else productive_s
        losses, self._losses = self._losses, []
        for loss in losses:
            self._progress.failures += 1
            self._log.event(
                "failure",
                step,
                node=loss.member.node,
                process=loss.process,
                covered_by=plan.assignees_of(loss.member.node, 0).tolist(),
                noticed=round(loss.noticed, 3),
                waited_s=round(loss.waited_s, 3),
                takeover_s=round(time.time() - loss.noticed, 3),
                cost_s=round(max(took_s - usual, 0.0), 3),
                recomputed=loss.recomputed,
            )
        if not losses:
            self._usual_s = [*self._usual_s[-49:], took_s]

    def returned(self, step: int, node: int, process: int, **measured: Any) -> None:
        """Tell of a process that takes part again, or for the first time.

        Args:
            step: the step that it takes part in first.
            node: the node that it is.
            process: its number.
            measured: parts of its way in, in seconds, and bytes.
        """
        self._progress.recoveries += 1
        self._log.event("recovery", step, node=node, process=process, **measured)

    def takeover(self, step: int, plan: Plan, nodes: Collection[int]) -> None:
        """Tell of the plan for other nodes than in the step before."""
        self._log.event("takeover", step, live_nodes=len(nodes), **takeover_fields(plan))
