"""Rounds as a model: processes die, fail and come back at any moment; what is committed stays right."""

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from mecefo_jax.processes.agreement import Decision, Facts, Member, Rules, View, decide, first_view

NODES, PER_NODE, STEPS = 4, 2, 5
MICROBATCHES = NODES * PER_NODE


def executors(nodes):
    """Each microbatch by its home, or the next live node around the ring."""
    live = sorted(nodes)
    homes = [number // PER_NODE for number in range(MICROBATCHES)]
    return [home if home in live else next((n for n in live if n > home), live[0]) for home in homes]


RULES = Rules(
    num_nodes=NODES, min_live_nodes=1, last_step=STEPS, executors=executors, evaluations=lambda step: 3 * (step == 2)
)


def facts(**changes) -> Facts:
    return dataclasses.replace(Facts(life=7, held=1, exact=(), prepared=0), **changes)


def round_of(said: dict[int, Facts], view: View | None = None, rules: Rules = RULES, live=None) -> Decision:
    live = dict.fromkeys(said, 7) if live is None else live
    return decide(view or first_view(NODES), live, said, rules)


def healthy(**changes) -> dict[int, Facts]:
    return {p: facts(exact=(2 * p - 2, 2 * p - 1), **changes) for p in range(1, NODES + 1)}


def test_a_complete_step_is_reduced_by_all():
    decision = round_of(healthy())
    assert decision.action == "step" and decision.reduces and decision.holders == (1, 2, 3, 4)
    assert decision.view.round == 1 and decision.view.epoch == 0 and not decision.missing


def test_what_died_with_a_node_is_computed_by_the_others_first():
    said = healthy()
    del said[3]
    decision = round_of(said)
    assert decision.action == "prepare" and decision.missing == (4, 5) and decision.lost == {3: Member(node=2)}
    assert decision.view.epoch == 1 and set(decision.view.members) == {1, 2, 4}
    said[4] = facts(exact=(6, 7), degraded={4: 1, 5: 1}, prepared=1)
    said |= {p: dataclasses.replace(said[p], prepared=1) for p in (1, 2)}
    decision = round_of(said, decision.view)
    assert decision.action == "step" and decision.reduces and decision.view.epoch == 1


def test_a_new_life_of_a_process_is_not_the_member_it_was():
    said = healthy()
    view = round_of(said).view
    after = {1: 7, 2: 8, 3: 7, 4: 7}
    assert set(round_of(said, live=after).lost) == {2}  # who published is dead, already in the first round
    said[2] = dataclasses.replace(said[2], life=8)
    assert set(round_of(said, view, live=after).lost) == {2}  # who published is not the member that it was
    assert not round_of(said, live=after).lost


def test_whoever_is_ahead_has_committed_and_hands_over():
    said = healthy(failed=True)
    said[2] = facts(held=2, exact=(2, 3), failed=True)
    decision = round_of(said)
    assert decision.step == 2 and decision.holders == (2,) and decision.newcomers == (1, 3, 4) and decision.source == 2
    assert decision.missing == (0, 1, 4, 5, 6, 7) and decision.view.epoch == 1


def test_waiting_processes_get_the_vacant_nodes_once_each():
    said = healthy(waiting=((5, 50), (6, 60), (3, 30)))
    del said[3]
    decision = round_of(said)
    assert decision.joined == {3: Member(node=2, life=30)}
    assert round_of(healthy(waiting=((5, 50),))).joined == {}
    assert round_of({p: facts(held=STEPS, waiting=((5, 50),)) for p in (1, 2)}).joined == {}


def test_a_life_that_is_over_is_not_admitted_again():
    view = round_of(healthy()).view
    said = healthy(waiting=((3, 7), (5, 50)))
    del said[3]
    assert round_of(said, view).joined == {5: Member(node=2, life=50)}


def test_the_newest_memory_is_loaded_unless_the_disk_is_newer():
    fresh = {p: facts(held=-1, exact=None, in_memory=m, on_disk=3) for p, m in ((1, 6), (2, 7), (3, 7), (4, -1))}
    decision = round_of(fresh)
    assert (decision.action, decision.loads, decision.step, decision.holders) == ("load", "memory", 7, (2,))
    fresh[1] = dataclasses.replace(fresh[1], on_disk=8)
    decision = round_of(fresh)
    assert (decision.action, decision.loads, decision.step, decision.holders) == ("load", "disk", 8, (1,))


def test_the_ends():
    done = {p: facts(held=STEPS, exact=None) for p in range(1, 5)}
    assert round_of(done).action == "finish"
    done[2] = dataclasses.replace(done[2], finished=True)
    assert round_of(done).action == "exit"
    assert round_of(healthy(leaving=True)).action == "stop"
    one_goes = healthy()
    one_goes[4] = dataclasses.replace(one_goes[4], leaving=True)
    assert set(round_of(one_goes).left) == {4} and round_of(one_goes).missing == (6, 7)
    alone = {1: facts(exact=(0, 1), leaving=True), 2: facts(held=-1, exact=None)}
    assert not round_of(alone).left and round_of(alone).newcomers == (2,)  # it hands over before it goes
    assert round_of({1: healthy()[1]}, rules=dataclasses.replace(RULES, min_live_nodes=2)).action == "too_few"


def test_an_evaluation_is_complete_before_the_next_step():
    said = {p: facts(held=2, exact=(2 * p - 2, 2 * p - 1)) for p in range(1, 5)}
    said[1] = dataclasses.replace(said[1], evaluated={"0": (1.0, 2), "2": (1.0, 2)})
    assert round_of(said).action == "prepare" and round_of(said).unevaluated == (1,)
    said[3] = dataclasses.replace(said[3], evaluated={"1": (1.0, 2)})
    assert round_of(said).action == "step"


@pytest.mark.parametrize(
    "said",
    [facts(degraded={4: 2, 5: 1}), facts(exact=None), facts(waiting=((5, 50),), evaluated={"3": (0.5, 7)})],
)
def test_facts_and_views_survive_the_way_through_text(said):
    assert Facts.from_json(said.to_json()) == said
    view = round_of(healthy()).view
    assert View.from_json(view.to_json()) == view


@dataclasses.dataclass
class Process:
    """A process of the model: what ``node.py`` keeps, without the arrays."""

    life: int
    held: int = -1
    exact: tuple[int, ...] | None = None
    evaluated: dict = dataclasses.field(default_factory=dict)
    prepared: int = -1
    failed: bool = False
    finished: bool = False
    memory: int = -1


class Model:
    """A cluster whose collectives may fail in any subset of those that take part."""

    def __init__(self, data):
        self.data, self.lives, self.view = data, 0, first_view(NODES)
        self.processes = {p: self.born() for p in range(1, NODES + 1)}
        self.waiting: dict[int, Process] = {NODES + 1: self.born()}
        self.committed: dict[int, list[tuple[int, ...]]] = {}
        self.newest = -1

    def born(self, memory: int = -1) -> Process:
        self.lives += 1
        return Process(life=self.lives, memory=memory)

    def some(self, of, at_most: int) -> set[int]:
        return self.data.draw(st.sets(st.sampled_from(sorted(of)), max_size=at_most)) if of else set()

    def round(self, calm: bool) -> Decision | None:
        members = {p: self.processes[p] for p in self.view.members if p in self.processes}
        said = {p: self.facts(process) for p, process in members.items()}
        dying = set() if calm else self.some(members, len(members) - 1)
        for p in dying:  # after they published, before the barrier is through
            self.waiting[p] = self.born()
            del self.processes[p]
        live = {p: process.life for p, process in self.processes.items() if p in members}
        back = set() if calm else self.some(dying, 1)
        live |= {p: self.waiting[p].life for p in back}  # connected again, and answered the barrier
        decision = decide(self.view, live, said, RULES)
        assert decision == decide(self.view, dict(reversed(live.items())), said, RULES)
        self.view = decision.view
        for p in decision.joined:
            self.processes[p] = self.waiting.pop(p)
        assert set(decision.view.members) <= set(self.processes)
        nodes = [member.node for member in decision.view.members.values()]
        assert len(nodes) == len(set(nodes)) <= NODES
        if any(process.held >= 0 for process in self.processes.values()):
            assert decision.step == max(process.held for process in self.processes.values())
        self.act(decision, said, calm)
        return decision

    def facts(self, process: Process) -> Facts:
        return Facts(
            life=process.life,
            held=process.held,
            in_memory=process.memory,
            exact=process.exact,
            evaluated=process.evaluated,
            waiting=tuple((p, waiting.life) for p, waiting in self.waiting.items()),
            failed=process.failed,
            prepared=process.prepared,
            finished=process.finished,
        )

    def act(self, decision: Decision, said, calm: bool) -> None:
        members = {p: self.processes[p] for p in decision.view.members}
        for process in members.values():
            process.failed = False
        if decision.action in ("load", "prepare"):
            for p, process in members.items():
                if decision.action == "load" and p in decision.holders:
                    process.held = max(decision.step, 0)
                process.prepared = decision.view.epoch
                if decision.action == "prepare" and p in decision.holders:
                    self.fill_in(decision, p)
        elif decision.action == "finish":
            members[decision.source].finished = True
        elif decision.action == "step":
            self.step(decision, said, members, calm)

    def fill_in(self, decision: Decision, p: int) -> None:
        process, node = self.processes[p], decision.view.members[p].node
        plan = executors([decision.view.members[h].node for h in decision.holders])
        mine = tuple(number for number in decision.missing if plan[number] == node)
        if mine:
            process.exact = (process.exact or ()) + mine
        process.evaluated |= {str(n): (0.0, 1) for n in decision.unevaluated if decision.holders[0] == p}

    def step(self, decision: Decision, said, members, calm: bool) -> None:
        if decision.reduces:
            taken = tuple(sorted(number for p in decision.holders for number in said[p].computed))
            assert taken == tuple(range(MICROBATCHES)), "a microbatch was lost or counted twice"
            stuck = set() if calm else self.some(decision.holders, len(decision.holders))
            for p in decision.holders:
                process = members[p]
                if p in stuck:
                    process.failed = True
                    continue
                process.held, process.exact, process.evaluated = process.held + 1, None, {}
                process.memory = process.held
                self.committed.setdefault(process.held, []).append(taken)
        arrived = decision.newcomers if calm or self.data.draw(st.booleans()) else ()
        source = members[decision.source]
        if not source.failed:
            for p in decision.newcomers:
                members[p].failed = p not in arrived
                if p in arrived:
                    members[p].held, members[p].exact, members[p].evaluated = source.held, None, {}
            source.failed = source.failed or len(arrived) < len(decision.newcomers)
        else:
            for p in decision.newcomers:
                members[p].failed = True
        plan = executors([member.node for member in decision.view.members.values()])
        for p, process in members.items():
            stuck_in_reduction = decision.reduces and process.failed and p in decision.holders and process.exact
            if 0 <= process.held < STEPS and not stuck_in_reduction:
                node = decision.view.members[p].node
                process.exact = tuple(number for number in range(MICROBATCHES) if plan[number] == node)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=300)
def test_whatever_happens_every_committed_step_has_every_microbatch_once_and_the_run_ends(data):
    model = Model(data)
    for _ in range(data.draw(st.integers(0, 25))):
        decision = model.round(calm=False)
        if decision.action == "exit":
            break
    for _ in range(80):
        decision = model.round(calm=True)
        if decision.action == "exit":
            break
    assert decision.action == "exit"
    holders = [process for process in model.processes.values() if process.held == STEPS]
    assert holders and set(model.committed) >= {STEPS}
