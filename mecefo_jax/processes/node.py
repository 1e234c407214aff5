"""A node's process: round after round, it does what all of them decided, until the run is done.

One round: the body of the decision, the facts, the barrier, the next decision (``agreement.py``). The body of an
ordinary round reduces the sums of a step with the others, updates, and computes the sums of the next step; so most of
the time is spent computing, where a death costs no time-out, only the work of the dead.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from mecefo_jax.config import Config
from mecefo_jax.config_file import save_config
from mecefo_jax.errors import DataError, RestartInPlaceError, TooFewLiveNodesError
from mecefo_jax.faults.live import LiveFailures
from mecefo_jax.inputs import Inputs
from mecefo_jax.journal import Journal, scores
from mecefo_jax.membership import run_degraded_cost
from mecefo_jax.mesh import Work
from mecefo_jax.processes.agreement import Decision, Facts, Rules, View, decide, first_view
from mecefo_jax.processes.arrival import Arrival
from mecefo_jax.processes.audit import Audit
from mecefo_jax.processes.interconnect import Interconnect, Packed
from mecefo_jax.processes.keeper import StateKeeper
from mecefo_jax.processes.log import SharedLog
from mecefo_jax.processes.runtime import Runtime
from mecefo_jax.processes.timeline import Timeline
from mecefo_jax.processes.watchdog import Watchdog
from mecefo_jax.processes.worker import Worker
from mecefo_jax.progress import Progress
from mecefo_jax.report import write_report
from mecefo_jax.snapshots import Snapshots
from mecefo_jax.state import init_sharded_state
from mecefo_jax.step import StepMetrics
from mecefo_jax.stopping import StopRequest
from mecefo_jax.takeover import Plan, make_plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a node is made of."""

    config: Config
    workdir: pathlib.Path
    inputs: Inputs
    runtime: Runtime
    arrival: Arrival
    interconnect: Interconnect
    worker: Worker
    snapshots: Snapshots
    keeper: StateKeeper
    log: SharedLog
    audit: Audit
    watchdog: Watchdog
    measured: dict[str, float]
    """Parts of the way from the start of the process to here, in seconds."""


_FAILURES_IN_ROW = 20


class Node:
    """One life of a node."""

    def __init__(self, parts: Parts, stop: StopRequest) -> None:
        """Hold no state yet."""
        self._parts, self._stop = parts, stop
        config = parts.config
        self._me = parts.runtime.process
        self._source = LiveFailures(config.mesh.num_nodes)
        self._degraded_cost = run_degraded_cost(config, parts.inputs.vocab_size)
        self._rules = Rules(
            num_nodes=config.mesh.num_nodes,
            min_live_nodes=config.faults.min_live_nodes,
            last_step=config.train.steps,
            executors=lambda nodes: self._plan(nodes).executor_M.tolist(),
            evaluations=self._evaluations,
        )
        self._held = -1
        self._sums: Packed | None = None
        self._done_ids = (np.arange(0), np.arange(0))
        self._computing_s = 0.0
        self._evaluated: dict[str, tuple[float, int]] = {}
        self._prepared, self._expected, self._failed, self._finished = -1, -1, False, False
        self._failures_in_row = 0
        self._dead: set[tuple[int, int | None]] = set()
        self._evaluation_began = 0.0
        self._nodes: tuple[int, ...] | None = None
        self._compiled_at_first_step: int | None = None
        self._took_part: tuple[int, ...] | None = None
        self._scores: dict[str, float] = {}
        self._adopt(Progress())

    def run(self, view: View) -> dict[str, Any]:
        """Take part from ``view`` on, to the end of the run.

        Returns:
            The summary, in the process that wrote it; empty in the others.

        Raises:
            RunError: with its exit code, where the run or this process's part in it ends early.
        """
        summary: dict[str, Any] = {}
        while True:
            decision, said = self._round(view)
            view = decision.view
            self._take_note(decision, said)
            if decision.action == "exit":
                self._tell_final_state()
                return summary
            if decision.action in ("stop", "too_few") or self._me in decision.left:
                self._end_early(decision)
            summary = self._act(decision, said) or summary

    # Rounds

    def _round(self, view: View) -> tuple[Decision, dict[int, Facts]]:
        """Say what there is to say, wait for the others, and decide."""
        runtime, watchdog = self._parts.runtime, self._parts.watchdog
        folder = f"facts/{view.round}"
        runtime.publish(f"{folder}/{self._me}", self._facts(view).to_json())
        began = time.monotonic()
        with watchdog.allow(self._parts.config.cluster.first_step_seconds, "waiting for the other nodes"):
            live = runtime.live(view.round, view.members)
        self._waited_s = time.monotonic() - began
        said = {int(process): Facts.from_json(text) for process, text in runtime.lookup(folder).items()}
        if self._me not in live or self._me not in said or said[self._me].life != live[self._me]:
            raise RestartInPlaceError("this process was taken for dead while it was not")
        decision = decide(view, live, said, self._rules)
        for process, member in decision.joined.items():
            runtime.publish(f"admit/{process}/{member.life}", decision.view.to_json())
        if self._me == min(said.keys() & decision.view.members.keys()) and view.round >= 2:
            runtime.forget(f"facts/{view.round - 2}")
        return decision, said

    def _facts(self, view: View) -> Facts:
        parts, exact, degraded = self._parts, *self._done_ids
        fresh = self._held < 0
        return Facts(
            life=parts.runtime.life,
            members={process: member.life for process, member in view.members.items()},
            epoch=view.epoch,
            held=self._held,
            in_memory=parts.keeper.newest_step() if fresh else -1,
            on_disk=parts.snapshots.newest_step() if fresh else -1,
            exact=None if self._sums is None else tuple(exact.tolist()),
            degraded=() if self._sums is None else tuple(degraded.tolist()),
            evaluated=self._evaluated,
            waiting=self._waiting(),
            failed=self._failed,
            leaving=self._stop.received is not None,
            prepared=self._prepared,
            finished=self._finished,
        )

    def _waiting(self) -> tuple[tuple[int, int], ...]:
        """Processes that are ready to take part, apart from those that have died since they said so."""
        runtime = self._parts.runtime
        waiting = {(int(process), int(life)) for process, life in runtime.lookup("waiting").items()}
        if waiting:
            waiting &= {(int(process), int(life)) for process, life in runtime.lookup("life").items()}
        return tuple(sorted(waiting - self._dead))

    def _take_note(self, decision: Decision, said: Mapping[int, Facts]) -> None:
        """Keep the accounts that depend on what was decided."""
        parts = self._parts
        parts.watchdog.progress()
        self._dead |= {(process, member.life) for process, member in decision.lost.items()}
        self._failures_in_row = self._failures_in_row + 1 if decision.failed else 0
        if self._failures_in_row > _FAILURES_IN_ROW:
            raise RestartInPlaceError(f"{_FAILURES_IN_ROW} rounds in a row failed")
        self._failed = False
        self._timeline.decided(decision, self._waited_s)
        log = parts.log
        if decision.holders and self._me == decision.source and not log.writes:
            log.begin() if decision.action == "load" else log.take_over()
        elif decision.holders and self._me != decision.source and log.writes:
            log.close()
        due = self._evaluations(decision.step) if self._me in decision.holders else 0
        if due and not decision.unevaluated and not self._scores_logged:
            self._log_scores(decision, said, due)

    # What was decided

    def _act(self, decision: Decision, said: Mapping[int, Facts]) -> dict[str, Any] | None:
        """Do this process's part; returns the summary if that was to finish the run."""
        if decision.action == "finish":
            if self._me == decision.source:
                return self._finish()
            return None
        if decision.action == "load":
            self._load(decision)
            self._prepare(decision)
        elif decision.action == "prepare":
            self._prepare(decision)
            self._fill_in(decision)
        else:
            self._step(decision, said)
        return None

    def _load(self, decision: Decision) -> None:
        """Take up the state where it was left: from shared memory, from a checkpoint, or afresh."""
        if self._me not in decision.holders:
            return
        parts = self._parts
        with self._slow("reading the state"):
            if decision.loads == "memory":
                found = parts.keeper.read(decision.step)
                if found is None:  # not whole: the next round decides without it
                    return
                words, progress, identity = found
                parts.snapshots.check(identity, decision.step)
                parts.worker.take_words(words)
                if self._me == decision.source:
                    parts.log.event("resumed", decision.step, source="memory")
            else:
                restored = parts.snapshots.restore(parts.worker.abstract_state)
                state, progress = restored or (
                    init_sharded_state(parts.config, parts.inputs.vocab_size, parts.worker.mesh),
                    Progress(first_start=time.time()),
                )
                parts.worker.state = state
        self._adopt(progress)
        self._held = int(parts.worker.state.step)
        if self._held >= parts.config.train.steps:
            parts.log.event("already_finished", self._held, steps=parts.config.train.steps)
        elif self._me == decision.source:
            save_config(parts.config, parts.workdir / "config.json")
            if parts.config.eval.every and not len(parts.inputs.held_out):
                parts.log.event("not_evaluated", self._held, reason="no held-out text")

    def _prepare(self, decision: Decision) -> None:
        """Compile what the next rounds need of the interconnect, so that nobody waits for it inside a reduction."""
        epoch, worker, interconnect = decision.view.epoch, self._parts.worker, self._parts.interconnect
        if self._prepared >= epoch and not decision.joined:
            return
        everybody = tuple(sorted(decision.view.members))
        with self._slow("compiling reductions"):
            for group in {decision.holders, everybody}:
                if self._me in group:
                    interconnect.compile(epoch, group, worker.like_sums)
            group = (decision.source, *decision.newcomers)
            if decision.newcomers and self._me in group:
                interconnect.compile(epoch, group, worker.like_words)
        self._prepared = epoch

    def _fill_in(self, decision: Decision) -> None:
        """Compute this process's share of what died with others, and of what is not evaluated."""
        if self._me not in decision.holders:
            return
        nodes = [decision.view.members[process].node for process in decision.holders]
        plan = self._plan(nodes)
        mine = set(decision.missing)
        exact, degraded = (
            np.array([number for number in ids.tolist() if number in mine], np.int64)
            for ids in plan.microbatches_of(decision.view.members[self._me].node)
        )
        if len(exact) + len(degraded):
            self._compute(Work(exact, degraded), plan)
        self._evaluate(decision.unevaluated[decision.holders.index(self._me) :: len(decision.holders)])

    def _step(self, decision: Decision, said: Mapping[int, Facts]) -> None:
        """Reduce and update; hand the state to newcomers; compute the sums of the next step."""
        parts, began = self._parts, time.monotonic()
        if decision.reduces and self._me in decision.holders:
            assert self._sums is not None
            total = self._total(self._sums, decision, decision.holders, "reduction")
            if total is None:  # those that wait for the state need not
                if self._me == decision.source and decision.newcomers:
                    parts.runtime.publish(_handover_key(decision), "")
                return
            self._commit(decision, said, total, began)
        if decision.newcomers and self._me in (decision.source, *decision.newcomers):
            self._hand_over(decision)
        if self._held < 0:
            return
        if self._held < parts.config.train.steps:
            nodes = sorted(member.node for member in decision.view.members.values())
            plan = self._plan(nodes)
            self._tell_plan(plan, nodes)
            self._sums = None
            self._compute(Work(*plan.microbatches_of(decision.view.members[self._me].node)), plan)
        due, everybody = self._evaluations(self._held), tuple(sorted(decision.view.members))
        self._evaluate(range(everybody.index(self._me), due, len(everybody)))
        if self._expected < decision.view.epoch:
            self._expected = decision.view.epoch
            parts.interconnect.expect_a_death(self._expected, everybody, parts.worker.like_sums)

    def _total(self, packed: Packed, decision: Decision, group: Collection[int], what: str) -> Packed | None:
        """A sum over processes; None where it fails, which the next round then deals with."""
        try:
            return self._parts.interconnect.total(packed, decision.view.epoch, sorted(group))
        except jax.errors.JaxRuntimeError as error:
            self._failed = True
            reason = " ".join(str(error).split())[:160]
            print(f"round {decision.view.round}: {what} failed: {reason}", file=sys.stderr, flush=True)
            return None

    def _commit(self, decision: Decision, said: Mapping[int, Facts], total: Packed, began: float) -> None:
        """Take the step: all that reduced it do the same."""
        parts, step = self._parts, self._held
        metrics = parts.worker.update(total)
        plan = self._done_plan(decision, said)
        self._tell_returned(decision)
        parts.audit.committed(step, {process: said[process].computed for process in decision.holders})
        self._held, self._sums, self._evaluated, self._scores_logged = step + 1, None, {}, False
        self._evaluation_began = time.perf_counter()
        if self._compiled_at_first_step is None:
            self._compiled_at_first_step = parts.worker.model_compilations
        self._progress.wall_time_s = self._earlier_s + time.perf_counter() - self._adopted
        self._timeline.committed(step, plan, self._computing_s + time.monotonic() - began)
        self._computing_s = 0.0
        self._journal.commit(step, plan, metrics, self._progress.failures)
        parts.log.progress(self._held)
        self._keep(decision, metrics)

    def _keep(self, decision: Decision, metrics: StepMetrics) -> None:
        """Copy the state to memory and disk, where that is due."""
        parts, done = self._parts, self._held
        checkpoint, cluster = parts.config.checkpoint, parts.config.cluster
        if cluster.memory_every and done % cluster.memory_every == 0:
            parts.keeper.keep(done, parts.worker.words(), self._progress)
        parts.snapshots.poll()
        last = done == parts.config.train.steps
        if self._me == decision.source and checkpoint.every and done % checkpoint.every == 0 and not last:
            with self._slow("saving"):
                parts.snapshots.save(done, parts.worker.state, self._progress)

    def _hand_over(self, decision: Decision) -> None:
        """Move the state from one that holds it to all that do not."""
        parts, group = self._parts, (decision.source, *decision.newcomers)
        began = time.monotonic()
        if self._me == decision.source:
            told: dict[str, Any] = {"step": self._held, "progress": dataclasses.asdict(self._progress)}
            told["took_part"] = self._took_part
            words = parts.worker.words()
            parts.runtime.publish(_handover_key(decision), json.dumps(told))
        else:
            text = self._wait_for_handover(decision)
            if not text:
                self._failed = True
                return
            told, words = json.loads(text), parts.worker.no_words()
        moved = self._total(words, decision, group, "handing over the state")
        if moved is None:
            return
        seconds = time.monotonic() - began
        if self._me != decision.source:
            parts.worker.take_words(moved)
            self._held, self._sums, self._evaluated, self._scores_logged = told["step"], None, {}, False
            self._adopt(Progress(**told["progress"]))
            self._took_part = None if told["took_part"] is None else tuple(told["took_part"])
            measured = parts.measured | {"transfer_s": round(seconds, 3), "bytes": parts.worker.state_bytes}
            parts.runtime.publish(f"measured/{self._me}", json.dumps(measured))

    def _wait_for_handover(self, decision: Decision) -> str | None:
        """What the source says once it is about to send; None if it has died or all others have got on without it."""
        runtime, cluster = self._parts.runtime, self._parts.config.cluster
        others = set(decision.view.members) - {decision.source, *decision.newcomers}
        deadline = time.monotonic() + cluster.progress_seconds
        while time.monotonic() < deadline:
            text = runtime.wait_for(_handover_key(decision), 0.25)
            if text is not None:
                return text
            ended = {int(process) for process in runtime.lookup(f"facts/{decision.view.round}")}
            if decision.source in ended:
                return None
            if others and others <= ended:
                deadline = min(deadline, time.monotonic() + cluster.collective_seconds)
        return None

    def _tell_returned(self, decision: Decision) -> None:
        """Tell of the processes that take part in this step and did not in the one before."""
        before, self._took_part = self._took_part, decision.holders
        returned = () if before is None else sorted(set(decision.holders) - set(before))
        told = self._parts.runtime.lookup("measured") if returned else {}
        for process in returned:
            node = decision.view.members[process].node
            self._timeline.returned(self._held, node, process, **json.loads(told.get(str(process), "{}")))

    # The work itself

    def _compute(self, work: Work, plan: Plan) -> None:
        """Add microbatches to this process's sums."""
        parts, step = self._parts, self._held
        began = time.monotonic()
        parts.audit.computed(step, np.concatenate([work.exact, work.degraded]).tolist())
        degraded_ML = plan.degraded_layers(parts.config.model.num_layers)
        kept, before = self._sums, self._done_ids
        with self._slow("the first step") if self._compiled_at_first_step is None else contextlib.nullcontext():
            self._sums = parts.worker.sums(step, work, degraded_ML, parts.inputs.sampler.microbatch, onto=kept)
        if kept is None:
            self._done_ids, self._computing_s = (work.exact, work.degraded), 0.0
        else:
            self._done_ids = (np.concatenate([before[0], work.exact]), np.concatenate([before[1], work.degraded]))
        self._computing_s += time.monotonic() - began
        parts.watchdog.progress()

    def _evaluate(self, numbers: Collection[int]) -> None:
        """Evaluate some of the held-out microbatches."""
        if not len(numbers):
            return
        with self._slow("evaluating"):
            results = self._parts.worker.evaluate([self._parts.inputs.held_out[number] for number in numbers])
        self._evaluated = self._evaluated | {str(n): result for n, result in zip(numbers, results, strict=True)}

    def _evaluations(self, step: int) -> int:
        """Held-out microbatches to evaluate after ``step`` steps."""
        every, last = self._parts.config.eval.every, step == self._parts.config.train.steps
        due = last or (every > 0 and step > 0 and step % every == 0)
        return len(self._parts.inputs.held_out) if due else 0

    def _log_scores(self, decision: Decision, said: Mapping[int, Facts], due: int) -> None:
        """All of the evaluation is there: sum it in one order, whoever computed what."""
        results: dict[int, tuple[float, int]] = {}
        for process in decision.holders:
            results |= {int(number): result for number, result in said[process].evaluated.items()}
        total = float(sum(results[number][0] for number in range(due)))
        self._scores = scores(total, sum(results[number][1] for number in range(due)))
        self._scores_logged = True
        self._journal.evaluated(decision.step, self._scores, time.perf_counter() - self._evaluation_began)

    # Plans

    def _plan(self, nodes: Collection[int]) -> Plan:
        """The policy's plan for these live nodes."""
        config = self._parts.config
        return make_plan(
            self._source.found(self._held, nodes),
            config.faults.policy,
            microbatches_per_node=config.train.microbatches_per_node,
            degraded_cost=self._degraded_cost,
            slack=config.faults.slack,
        )

    def _done_plan(self, decision: Decision, said: Mapping[int, Facts]) -> Plan:
        """What was done in a step, as a plan: after a failure, partly that of the step's beginning."""
        nodes = {process: decision.view.members[process].node for process in decision.holders}
        plan = self._plan(nodes.values())
        executor_M = np.full(plan.num_microbatches, -1, np.int32)
        degraded_M = np.zeros(plan.num_microbatches, bool)
        for process, node in nodes.items():
            executor_M[list(said[process].computed)] = node
            degraded_M[list(said[process].degraded)] = True
        return dataclasses.replace(
            plan, executor_M=executor_M, assignee_MS=executor_M[:, None], degraded_MS=degraded_M[:, None]
        )

    def _tell_plan(self, plan: Plan, nodes: Collection[int]) -> None:
        """Log the plan if the nodes are others than in the step before."""
        before, self._nodes = self._nodes, tuple(nodes)
        if before is not None and before != self._nodes:
            self._timeline.takeover(self._held, plan, self._degraded_cost, self._nodes)

    # Ends

    def _finish(self) -> dict[str, Any]:
        """Close the run: the final state on disk, the summary and the report."""
        parts = self._parts
        with self._slow("the final save"):
            parts.snapshots.save_and_wait(self._held, parts.worker.state, self._progress)
            first = self._compiled_at_first_step
            compiled = 0 if first is None else parts.worker.model_compilations - first
            summary = self._progress.summary(self._held) | {
                "eval_loss": self._scores.get("eval/loss"),
                "eval_perplexity": self._scores.get("eval/perplexity"),
                "model_compilations_after_first_step": compiled,
                "goodput": self._progress.goodput(time.time()),
            }
            parts.log.summary(summary)
            try:
                write_report(parts.workdir)
            except DataError as error:  # the run itself is done
                parts.log.event("report_failed", self._held, reason=str(error))
        self._finished = True
        return summary

    def _tell_final_state(self) -> None:
        """For the audit: which state this process ends with, if it ever received one."""
        parts = self._parts
        if not parts.config.cluster.audit or self._held < 0:
            return
        digest = hashlib.sha256()
        with self._slow("reading the state"):
            for _, vector in sorted(jax.device_get(parts.worker.words().vectors).items()):
                digest.update(np.ascontiguousarray(vector).tobytes())
        parts.audit.ended(self._held, digest.hexdigest())

    def _end_early(self, decision: Decision) -> None:
        """Save, if it is on this process to save, and go."""
        parts, saved = self._parts, decision.action in ("stop", "too_few")
        if saved and self._me == decision.source:
            with self._slow("saving"):
                parts.snapshots.save_and_wait(self._held, parts.worker.state, self._progress)
        if saved:
            parts.runtime.publish("run/ended", decision.action)
        if decision.action == "too_few":
            raise TooFewLiveNodesError(
                f"{len(decision.view.members)} of {self._rules.num_nodes} nodes are live at step {decision.step}, "
                f"faults.min_live_nodes is {self._rules.min_live_nodes}; the state of step {decision.step} is saved"
            )
        raise self._stop.error(decision.step)

    def _adopt(self, progress: Progress) -> None:
        """Go on with this account of the run."""
        parts = self._parts
        self._progress, self._adopted, self._earlier_s = progress, time.perf_counter(), progress.wall_time_s
        self._journal = Journal(parts.config, parts.inputs.vocab_size, self._degraded_cost, progress, parts.log)
        self._timeline = Timeline(progress, parts.log)
        self._scores_logged, self._waited_s = False, 0.0

    @contextlib.contextmanager
    def _slow(self, what: str) -> Iterator[None]:
        """For what may take longer than a step."""
        with self._parts.watchdog.allow(self._parts.config.cluster.first_step_seconds, what):
            yield


def _handover_key(decision: Decision) -> str:
    return f"handover/{decision.view.round}"


def take_part(parts: Parts, stop: StopRequest) -> dict[str, Any]:
    """Enter the cluster as a node or a spare, and stay to the end.

    Returns:
        The summary, in the process that wrote it.

    Raises:
        RunError: see ``Node.run``.
    """
    config, runtime = parts.config, parts.runtime
    num_nodes = config.mesh.num_nodes
    if runtime.process <= num_nodes and not parts.arrival.cluster_runs:
        view = first_view(num_nodes)
    else:
        with parts.watchdog.allow(10 * 365 * 86400.0, "waiting to be needed"):
            found = parts.arrival.wait(lambda: stop.received is not None)
        if found is None:
            if stop.received is not None:
                raise stop.error(0)
            return {}
        view = found
    summary = Node(parts, stop).run(view)
    runtime.publish("run/ended", "done")
    return summary
