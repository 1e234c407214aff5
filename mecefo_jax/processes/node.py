"""A node's process: round after round, it does what all of them decided, until the run is done.

One round: the body of the decision, the facts, the barrier, the next decision (``agreement.py``). The body of an
ordinary round reduces the sums of a step with the others, updates, and computes the sums of the next step; so most of
the time is spent computing, where a death costs no time-out, only the work of the dead.
"""

import json
import sys
import time
from collections.abc import Collection, Mapping

import jax

from mecefo_jax.errors import NonFiniteError, RestartInPlaceError, RunError, TooFewLiveNodesError, raise_for_end
from mecefo_jax.processes.agreement import Decision, Facts, Rules, View, decide, first_view
from mecefo_jax.processes.holding import Holding
from mecefo_jax.processes.interconnect import Packed
from mecefo_jax.processes.parts import Parts
from mecefo_jax.processes.runtime import Runtime
from mecefo_jax.stopping import StopRequest

_FAILED_ROUNDS = 20


class Node:
    """One life of a node."""

    def __init__(self, parts: Parts, stop: StopRequest) -> None:
        """Hold no state yet."""
        self._parts, self._stop, self._holding = parts, stop, Holding(parts)
        self._me = parts.runtime.process
        self._rules = Rules(
            num_nodes=parts.config.mesh.num_nodes,
            min_live_nodes=parts.config.faults.min_live_nodes,
            last_step=parts.config.train.steps,
            executors=lambda nodes: self._holding.plan(nodes).executor_M.tolist(),
            evaluations=self._holding.evaluations,
        )
        self._prepared = self._expected = -1
        self._failed = self._finished = False
        self._failed_rounds, self._newest_step, self._waited_s = 0, -1, 0.0
        self._dead: set[tuple[int, int | None]] = set()

    def run(self, view: View) -> None:
        """Take part from ``view`` on, to the end of the run.

        Raises:
            RunError: with its exit code, where the run or this process's part in it ends early.
        """
        while True:
            decision, said = self._round(view)
            view = decision.view
            self._take_note(decision, said)
            if decision.action == "exit":
                self._holding.tell_final_state()
                return
            if decision.action in ("stop", "too_few") or self._me in decision.left:
                self._end_early(decision)
            self._act(decision, said)

    # Rounds

    def _round(self, view: View) -> tuple[Decision, dict[int, Facts]]:
        """Say what there is to say, wait for the others, and decide."""
        runtime, folder = self._parts.runtime, f"facts/{view.round}"
        runtime.publish(f"{folder}/{self._me}", self._facts(view).to_json())
        began = time.monotonic()
        with self._parts.slow("waiting for the other nodes", times=2):  # who holds them up ends first
            live = runtime.live(view.round, view.members)
        self._waited_s = time.monotonic() - began
        said = {int(process): Facts.from_json(text) for process, text in runtime.lookup(folder).items()}
        if self._me not in live or self._me not in said or said[self._me].life != live[self._me]:
            raise RunError("this process was taken for dead while it was not; it starts again")
        decision = decide(view, live, said, self._rules)
        for process, member in decision.joined.items():
            runtime.publish(f"admit/{process}/{member.life}", decision.view.to_json())
        if self._me == min(said.keys() & decision.view.members.keys()) and view.round >= 2:
            runtime.forget(f"facts/{view.round - 2}")
        return decision, said

    def _facts(self, view: View) -> Facts:
        parts, holding = self._parts, self._holding
        fresh, sums = holding.step < 0, holding.sums is not None
        return Facts(
            life=parts.runtime.life,
            members={process: member.life for process, member in view.members.items()},
            epoch=view.epoch,
            held=holding.step,
            in_memory=parts.keeper.newest_step() if fresh else -1,
            on_disk=parts.snapshots.newest_step() if fresh else -1,
            exact=holding.exact if sums else None,
            degraded=holding.degraded if sums else {},
            evaluated=holding.evaluated,
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
        log = self._parts.log
        self._parts.watchdog.progress()
        self._dead |= {(process, member.life) for process, member in decision.lost.items()}
        self._failed_rounds = self._failed_rounds + decision.failed if decision.step <= self._newest_step else 0
        self._newest_step = max(self._newest_step, decision.step)
        if self._failed_rounds > _FAILED_ROUNDS:
            raise RestartInPlaceError(f"{_FAILED_ROUNDS} rounds failed at step {decision.step}")
        self._failed = False
        self._holding.timeline.decided(decision, self._waited_s)
        if decision.holders and self._speaks(decision) and not log.writes:
            log.begin() if decision.action == "load" else log.take_over()
        elif decision.holders and not self._speaks(decision) and log.writes:
            log.close(wait_for_trackers=False)  # the others of the round would wait, too
        if self._me in decision.holders:
            self._holding.log_scores(decision, said)

    def _speaks(self, decision: Decision) -> bool:
        """Whether this process writes the log, saves, and sends the state."""
        return self._me == decision.source

    # What was decided

    def _act(self, decision: Decision, said: Mapping[int, Facts]) -> None:
        """Do this process's part."""
        if decision.action == "finish":
            if self._speaks(decision):
                self._holding.finish()
                self._finished = True
            return
        if decision.action == "step":
            self._step(decision, said)
            return
        if decision.action == "load" and self._me in decision.holders:
            self._holding.load(decision)
        self._prepare(decision)
        if decision.action == "prepare" and self._me in decision.holders:
            self._fill_in(decision)

    def _prepare(self, decision: Decision) -> None:
        """Compile what the next rounds need of the interconnect, so that nobody waits for it inside a reduction."""
        epoch, worker, interconnect = decision.view.epoch, self._parts.worker, self._parts.interconnect
        if self._prepared >= epoch and not decision.joined:
            return
        everybody = tuple(sorted(decision.view.members))
        interconnect.forget_before(epoch)
        with self._parts.slow("compiling reductions"):
            for group in {decision.holders, everybody}:
                if self._me in group:
                    interconnect.compile(epoch, group, worker.like_sums)
            group = (decision.source, *decision.newcomers)
            if decision.newcomers and self._me in group:
                interconnect.compile(epoch, group, worker.like_words)
        self._prepared = epoch

    def _fill_in(self, decision: Decision) -> None:
        """Compute this process's share of what died with others, and of what is not evaluated."""
        holding, holders, members = self._holding, decision.holders, decision.view.members
        if decision.missing:
            holding.fill_in(decision.missing, members[self._me].node, [members[process].node for process in holders])
        holding.evaluate(decision.unevaluated[holders.index(self._me) :: len(holders)])

    def _step(self, decision: Decision, said: Mapping[int, Facts]) -> None:
        """Reduce and update; hand the state to newcomers; compute the sums of the next step."""
        parts, holding, members = self._parts, self._holding, decision.view.members
        if decision.reduces and self._me in decision.holders:
            assert holding.sums is not None
            began = time.monotonic()
            total = self._total(holding.sums, decision, decision.holders, "reduction")
            if total is None:
                if self._speaks(decision) and decision.newcomers:  # they need not wait for the state
                    parts.runtime.publish(_handover_key(decision), "")
                return
            holding.commit(decision, said, total, time.monotonic() - began)
            holding.keep(speaks=self._speaks(decision))
        if decision.newcomers and (self._speaks(decision) or self._me in decision.newcomers):
            self._hand_over(decision)
        if holding.step < decision.step:  # the state did not arrive
            return
        everybody = tuple(sorted(members))
        if holding.step < self._rules.last_step:
            holding.compute_own(members[self._me].node, sorted(member.node for member in members.values()))
        holding.evaluate(range(everybody.index(self._me), holding.evaluations(holding.step), len(everybody)))
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

    def _hand_over(self, decision: Decision) -> None:
        """Move the state from one that holds it to all that do not."""
        parts, sends, began = self._parts, self._speaks(decision), time.monotonic()
        account = self._holding.account() if sends else self._wait_for_handover(decision)
        if not account:
            self._failed = True
            return
        if sends:
            parts.runtime.publish(_handover_key(decision), account)
        words = parts.worker.words() if sends else parts.worker.no_words()
        moved = self._total(words, decision, (decision.source, *decision.newcomers), "handing over the state")
        if moved is None or sends:
            return
        self._holding.receive(moved, account)
        transfer = {"transfer_s": round(time.monotonic() - began, 3), "bytes": parts.worker.state_bytes}
        parts.runtime.publish(f"measured/{self._me}", json.dumps(parts.measured | transfer))

    def _wait_for_handover(self, decision: Decision) -> str | None:
        cluster = self._parts.config.cluster
        with self._parts.slow("waiting for the state"):
            return wait_for_handover(
                self._parts.runtime, decision, cluster.progress_seconds, cluster.collective_seconds
            )

    # Ends

    def _end_early(self, decision: Decision) -> None:
        """Save, if it is on this process to save, and go."""
        error: RunError = self._stop.error(decision.step)
        if decision.action == "too_few":
            error = TooFewLiveNodesError(
                f"{len(decision.view.members)} of {self._rules.num_nodes} nodes are live at step {decision.step}, "
                f"faults.min_live_nodes is {self._rules.min_live_nodes}; the state of step {decision.step} is saved"
            )
        if decision.action in ("stop", "too_few") and self._speaks(decision):
            self._holding.save_and_wait()
            self._parts.runtime.publish("run/ended", str(error.exit_code))
        raise error


def take_part(parts: Parts, stop: StopRequest) -> None:
    """Enter the cluster as a node or a spare, and stay to the end.

    Raises:
        RunError: see ``Node.run``.
    """
    num_nodes = parts.config.mesh.num_nodes
    view: View | None = first_view(num_nodes)

    def is_stopped() -> bool:
        parts.watchdog.progress()  # it may wait as long as the run takes
        return stop.received is not None

    if parts.runtime.process > num_nodes or parts.arrival.cluster_runs:
        view = parts.arrival.wait(is_stopped)
    if view is None:
        if stop.received is not None:
            raise stop.error(None)
        raise_for_end(int(parts.runtime.lookup("run")["ended"]))
        return
    try:
        Node(parts, stop).run(view)
    except NonFiniteError as error:  # all nodes see it at once
        parts.runtime.publish("run/ended", str(error.exit_code))
        raise
    parts.runtime.publish("run/ended", "0")


def wait_for_handover(runtime: Runtime, decision: Decision, longest_seconds: float, alone_seconds: float) -> str | None:
    """What the source says once it is about to send the state; None if it will not.

    Args:
        runtime: of a newcomer.
        decision: of the round in which the state is sent.
        longest_seconds: how long to wait for the source.
        alone_seconds: how long to wait once all others have ended the round.
    """
    others = set(decision.view.members) - {decision.source, *decision.newcomers}
    deadline = time.monotonic() + longest_seconds
    while time.monotonic() < deadline:
        text = runtime.wait_for(_handover_key(decision), 0.25)
        if text is not None:
            return text
        ended = {int(process) for process in runtime.lookup(f"facts/{decision.view.round}")}
        if decision.source in ended:
            return None
        if others and others <= ended:
            deadline = min(deadline, time.monotonic() + alone_seconds)
    return None


def _handover_key(decision: Decision) -> str:
    return f"handover/{decision.view.round}"
