"""What a member holds of the run: the state, its sums for the next step, and the account of the steps so far.

It does the work and keeps the books of one process; what is to be done, and with whom, is decided elsewhere
(``node.py``).
"""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from mecefo_jax.config_file import save_config
from mecefo_jax.errors import DataError
from mecefo_jax.faults.live import LiveFailures, live_nodes
from mecefo_jax.journal import Journal, scores
from mecefo_jax.membership import plan_for, run_degraded_costs
from mecefo_jax.mesh import Work
from mecefo_jax.processes.agreement import Decision, Facts
from mecefo_jax.processes.interconnect import Packed
from mecefo_jax.processes.parts import Parts
from mecefo_jax.processes.timeline import Timeline
from mecefo_jax.progress import Progress
from mecefo_jax.report import write_report
from mecefo_jax.state import init_sharded_state
from mecefo_jax.takeover import Plan
from mecefo_jax.trained import keep_tokenizer


class Holding:
    """One process's part of the run; at first, nothing."""

    step = -1
    """Updates done to the state; -1: there is none."""
    sums: Packed | None = None
    """Of the step that begins at ``step``, as far as this process has computed them."""

    def __init__(self, parts: Parts) -> None:
        """Hold nothing yet."""
        self._parts = parts
        self._source = LiveFailures(parts.config.mesh.num_nodes)
        self._degraded_costs = run_degraded_costs(parts.config, parts.inputs.vocab_size)
        self.exact: tuple[int, ...] = ()
        self.degraded: dict[int, int] = {}
        self.evaluated: dict[str, tuple[float, int]] = {}
        self._computing_s = self._evaluating_s = 0.0
        self._was_finished = False
        self._compiled_at_first_step: int | None = None
        self._took_part: tuple[int, ...] | None = None
        self._scores: dict[str, float] = {}
        self._adopt(Progress())

    def _adopt(self, progress: Progress) -> None:
        """Go on with this account of the run."""
        parts = self._parts
        self._progress, self._adopted, self._earlier_s = progress, time.perf_counter(), progress.wall_time_s
        self._journal = Journal(parts.config, parts.inputs.vocab_size, progress, parts.log)
        self.timeline = Timeline(progress, parts.log)
        self._scores_logged = False

    def _stand_at(self, step: int) -> None:
        """Begin with a step, of which nothing is computed."""
        self.step, self.sums, self.exact, self.degraded = step, None, (), {}
        self.evaluated, self._scores_logged, self._evaluating_s = {}, False, 0.0

    # Where the state comes from

    def load(self, decision: Decision) -> None:
        """Take up the state where it was left: from shared memory, from a checkpoint, or afresh.

        A state in memory that is not whole is left alone: the next round decides without it.
        """
        parts = self._parts
        with parts.slow("reading the state"):
            if decision.loads == "memory":
                found = parts.keeper.read(decision.step)
                if found is None:
                    return
                words, progress, identity = found
                parts.snapshots.check(identity, decision.step)
                parts.worker.take_words(words)
                parts.log.event("resumed", decision.step, source="memory")
            else:
                restored = parts.snapshots.restore(parts.worker.abstract_state)
                parts.worker.state, progress = restored or (
                    init_sharded_state(parts.config, parts.inputs.vocab_size, parts.worker.mesh),
                    Progress(first_start=time.time()),
                )
        self._adopt(progress)
        self._stand_at(int(parts.worker.state.step))
        self._was_finished = self.step >= parts.config.train.steps
        if self._was_finished:  # a finished run stays what it was
            parts.log.event("already_finished", self.step, steps=parts.config.train.steps)
        else:
            save_config(parts.config, parts.workdir / "config.json")
            keep_tokenizer(parts.workdir, parts.inputs.prepared.tokenizer)
            if parts.config.eval.every and not len(parts.inputs.held_out):
                parts.log.event("not_evaluated", self.step, reason="no held-out text")

    def account(self) -> str:
        """What goes with the state to another process, as text."""
        told = {"step": self.step, "progress": dataclasses.asdict(self._progress), "took_part": self._took_part}
        return json.dumps(told)

    def receive(self, words: Packed, account: str) -> None:
        """Hold what another process held: the bits of its state, and its account."""
        told = json.loads(account)
        self._parts.worker.take_words(words)
        self._stand_at(told["step"])
        self._adopt(Progress(**told["progress"]))
        self._took_part = None if told["took_part"] is None else tuple(told["took_part"])

    # The work

    def plan(self, nodes: Collection[int]) -> Plan:
        """The policy's plan of the step for these live nodes."""
        config = self._parts.config
        return plan_for(config, live_nodes(config.mesh.num_nodes, nodes), self._degraded_costs)

    def compute_own(self, node: int, nodes: Collection[int]) -> None:
        """Compute the sums of the step, as the plan for ``nodes`` shares it out to ``node``."""
        plan, self.sums, self.exact, self.degraded = self.plan(nodes), None, (), {}
        self._source.found(self.step, nodes)
        if self.step and (self._source.live(self.step) != self._source.live(self.step - 1)).any():
            self.timeline.takeover(self.step, plan, nodes)
        self._computing_s = 0.0
        self._compute(Work(*plan.microbatches_of(node)), plan)

    def fill_in(self, missing: Collection[int], node: int, nodes: Collection[int]) -> None:
        """Add what is missing of the step, as the plan for ``nodes`` shares it out to ``node``."""
        plan, wanted = self.plan(nodes), set(missing)
        exact, degraded = (
            np.array([number for number in ids.tolist() if number in wanted], np.int64)
            for ids in plan.microbatches_of(node)
        )
        if len(exact) + len(degraded) or self.sums is None:
            self._compute(Work(exact, degraded), plan)

    def _compute(self, work: Work, plan: Plan) -> None:
        """Add microbatches to the sums."""
        parts, began = self._parts, time.monotonic()
        exact, degraded = tuple(work.exact.tolist()), tuple(work.degraded.tolist())
        parts.audit.computed(self.step, exact + degraded)
        level_ML = plan.layer_levels(parts.config.model.num_layers)
        with parts.slow("the first step") if self._compiled_at_first_step is None else contextlib.nullcontext():
            self.sums = parts.worker.sums(
                self.step,
                work,
                level_ML,
                parts.inputs.sampler.microbatch,
                onto=self.sums,
                on_part=parts.watchdog.progress,
            )
        self.exact += exact
        self.degraded = self.degraded | dict(zip(degraded, plan.level_MS[work.degraded, 0].tolist(), strict=True))
        self._computing_s += time.monotonic() - began

    def evaluate(self, numbers: Collection[int]) -> None:
        """Evaluate some of the held-out microbatches."""
        if not len(numbers):
            return
        began = time.perf_counter()
        with self._parts.slow("evaluating"):
            results = self._parts.worker.evaluate([self._parts.inputs.held_out[number] for number in numbers])
        self.evaluated = self.evaluated | {str(n): result for n, result in zip(numbers, results, strict=True)}
        self._evaluating_s += time.perf_counter() - began

    def evaluations(self, step: int) -> int:
        """Held-out microbatches to evaluate after ``step`` steps."""
        every, last = self._parts.config.eval.every, step == self._parts.config.train.steps
        due = last or (every > 0 and step > 0 and step % every == 0)
        return len(self._parts.inputs.held_out) if due else 0

    # The books

    def commit(self, decision: Decision, said: Mapping[int, Facts], total: Packed, reducing_s: float) -> None:
        """Take the step whose sums over all these are; all that have them do the same.

        Args:
            decision: who took part.
            said: what they had computed.
            total: the sums.
            reducing_s: time that the sum over processes took.
        """
        parts, step = self._parts, self.step
        parts.keeper.wait()  # a restart in place repeats one step at most
        began = time.monotonic()
        metrics = parts.worker.update(total)
        plan = self._done_plan(decision, said)
        self._tell_returned(decision)
        parts.audit.committed(step, {process: said[process].computed for process in decision.holders})
        self._stand_at(step + 1)
        if self._compiled_at_first_step is None:
            self._compiled_at_first_step = parts.worker.model_compilations
        self._progress.wall_time_s = self._earlier_s + time.perf_counter() - self._adopted
        self.timeline.committed(step, plan, self._computing_s + reducing_s + time.monotonic() - began)
        self._journal.commit(step, plan, metrics, self._progress.failures)
        parts.log.progress(self.step)

    def keep(self, *, speaks: bool) -> None:
        """Copy the state to memory and, if this process does that for all, to the disk, where it is due."""
        parts, done = self._parts, self.step
        checkpoint, cluster = parts.config.checkpoint, parts.config.cluster
        if cluster.memory_every and done % cluster.memory_every == 0:
            parts.keeper.keep(done, parts.worker.words(), self._progress)
        parts.snapshots.poll()
        last = done == parts.config.train.steps
        if speaks and checkpoint.every and done % checkpoint.every == 0 and not last:
            with parts.slow("saving"):
                parts.snapshots.save(done, parts.worker.state, self._progress)

    def save_and_wait(self) -> None:
        """Return once the state is on the disk."""
        with self._parts.slow("saving"):
            self._parts.snapshots.save_and_wait(self.step, self._parts.worker.state, self._progress)

    def log_scores(self, decision: Decision, said: Mapping[int, Facts]) -> None:
        """Once all of an evaluation is there: sum it in one order, whoever computed what."""
        due = self.evaluations(decision.step) if self.step == decision.step else 0
        if not due or decision.unevaluated or self._scores_logged:
            return
        results: dict[int, tuple[float, int]] = {}
        for process in decision.holders:
            results |= {int(number): result for number, result in said[process].evaluated.items()}
        total = float(sum(results[number][0] for number in range(due)))
        self._scores = scores(total, sum(results[number][1] for number in range(due)))
        self._scores_logged = True
        if not self._was_finished:
            self._journal.evaluated(decision.step, self._scores, self._evaluating_s)

    def finish(self) -> None:
        """Close the run: the final state on disk, the summary and the report."""
        parts = self._parts
        if not self._was_finished:
            self.save_and_wait()
            parts.log.summary(self._summary())
        try:
            with parts.slow("the report"):
                write_report(parts.workdir)
        except DataError as error:  # the run itself is done
            parts.log.event("report_failed", self.step, reason=str(error))

    def _summary(self) -> dict[str, Any]:
        first = self._compiled_at_first_step
        compiled = 0 if first is None else self._parts.worker.model_compilations - first
        return self._progress.summary(self.step) | {
            "eval_loss": self._scores.get("eval/loss"),
            "eval_perplexity": self._scores.get("eval/perplexity"),
            "model_compilations_after_first_step": compiled,
            "goodput": self._progress.goodput(time.time()),
        }

    def tell_final_state(self) -> None:
        """For the audit: which state this process ends with, if it ever received one."""
        parts = self._parts
        if not parts.config.cluster.audit or self.step < 0:
            return
        digest = hashlib.sha256()
        with parts.slow("reading the state"):
            for _, vector in sorted(jax.device_get(parts.worker.words().vectors).items()):
                digest.update(np.ascontiguousarray(vector).tobytes())
        parts.audit.ended(self.step, digest.hexdigest())

    def _done_plan(self, decision: Decision, said: Mapping[int, Facts]) -> Plan:
        """What was done in a step, as a plan: after a failure, partly that of the step's beginning."""
        nodes = {process: decision.view.members[process].node for process in decision.holders}
        return plan_of_what_was_done(self.plan(nodes.values()), {nodes[process]: said[process] for process in nodes})

    def _tell_returned(self, decision: Decision) -> None:
        """Tell of the processes that take part in this step and did not in the one before."""
        before, self._took_part = self._took_part, decision.holders
        returned = () if before is None else sorted(set(decision.holders) - set(before))
        told = self._parts.runtime.lookup("measured") if returned else {}
        for process in returned:
            node = decision.view.members[process].node
            self.timeline.returned(self.step, node, process, **json.loads(told.get(str(process), "{}")))


def plan_of_what_was_done(plan: Plan, said: Mapping[int, Facts]) -> Plan:
    """A plan with the microbatches as nodes say that they have computed them."""
    executor_M, level_M = np.full(plan.num_microbatches, -1, np.int32), np.zeros(plan.num_microbatches, np.int8)
    for node, facts in said.items():
        executor_M[list(facts.computed)] = node
        for microbatch, level in facts.degraded.items():
            level_M[microbatch] = level
    return dataclasses.replace(plan, executor_M=executor_M, assignee_MS=executor_M[:, None], level_MS=level_M[:, None])
