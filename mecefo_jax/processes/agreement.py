"""What the living make of a round: a pure function from what all of them know to what all of them do next.

Processes go through rounds in step. In each, a process does what was decided (its body), publishes its facts, and
waits in the barrier of the round. All that pass it see the same live processes and the same facts, so that all come
to the same decision, without a vote and without a leader. Nothing here talks to anybody; ``node.py`` does.

A step is committed once one live process holds the state after it: whoever is behind gets that state. Until then all
keep their sums, so that a step whose reduction fails is reduced again, and only the microbatches of the dead are
computed anew.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Self

Action = Literal["load", "prepare", "step", "finish", "stop", "exit", "too_few"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A process that takes part."""

    node: int
    """The node that it is."""
    life: int | None = None
    """The runtime's name for its present life (incarnation); None until its first round has shown it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """Who takes part, as all of them see it."""

    round: int
    epoch: int
    """Grows with changes of membership and failed bodies: communicators belong to one epoch."""
    members: dict[int, Member]

    def to_json(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """From ``to_json``."""
        fields = json.loads(text)
        members = {int(process): Member(**member) for process, member in fields.pop("members").items()}
        return cls(members=members, **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What a member says at the end of a round."""

    life: int
    """The runtime's name for this life of the process."""
    members: dict[int, int | None] = dataclasses.field(default_factory=dict)
    """Members of its view, with their lives: the processes that this round's barrier waits for."""
    epoch: int = 0
    """Epoch of its view."""
    held: int = -1
    """Step of the state that it holds (updates done); -1: none."""
    in_memory: int = -1
    """Step of the newest state in the shared memory of its machine; -1: none."""
    on_disk: int = -1
    """Step of the newest checkpoint that it sees; -1: none."""
    exact: tuple[int, ...] | None = None
    """Microbatches in its sums for the step that begins at ``held``, computed exactly; None: it has no sums."""
    degraded: dict[int, int] = dataclasses.field(default_factory=dict)
    """Those computed with the degraded backward pass, and how far each is degraded (``Plan.level_MS``)."""
    evaluated: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)
    """Loss and tokens of the evaluation's microbatches that it has seen to at ``held``, by number."""
    waiting: tuple[tuple[int, int], ...] = ()
    """Processes that it has seen ready to take part, with their lives."""
    failed: bool = False
    """Whether its body did not succeed."""
    leaving: bool = False
    """Whether it was asked to stop."""
    prepared: int = -1
    """Epoch for which it has everything compiled."""
    finished: bool = False
    """Whether it has closed the run: final state saved, summary written."""

    def to_json(self) -> str:
        """As text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """From ``to_json``."""
        fields: dict[str, Any] = json.loads(text)
        fields["members"] = {int(process): life for process, life in fields["members"].items()}
        fields["exact"] = None if fields["exact"] is None else tuple(fields["exact"])
        fields["degraded"] = {int(microbatch): level for microbatch, level in fields["degraded"].items()}
        fields["waiting"] = tuple((process, life) for process, life in fields["waiting"])
        fields["evaluated"] = {number: (loss, tokens) for number, (loss, tokens) in fields["evaluated"].items()}
        return cls(**fields)

    @property
    def computed(self) -> tuple[int, ...]:
        """Microbatches in its sums."""
        return (*(self.exact or ()), *self.degraded)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What decisions depend on apart from facts; equal in all processes."""

    num_nodes: int
    min_live_nodes: int
    last_step: int
    """Steps of the run."""
    executors: Callable[[Collection[int]], Sequence[int]]
    """For the live nodes: the node that computes each microbatch, -1 where it is dropped."""
    evaluations: Callable[[int], int]
    """Microbatches to evaluate at a step; 0: no evaluation is due."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What all do next."""

    action: Action
    view: View
    """Who takes part from here on."""
    step: int
    """Step of the newest state that a live process holds (or can load); -1: none."""
    holders: tuple[int, ...] = ()
    """Processes that hold it."""
    newcomers: tuple[int, ...] = ()
    """Members that do not."""
    reduces: bool = False
    """Whether the holders' sums make up the step, so that ``step`` reduces them first."""
    missing: tuple[int, ...] = ()
    """Microbatches that are in nobody's sums."""
    unevaluated: tuple[int, ...] = ()
    """Microbatches of the evaluation that nobody has seen to."""
    lost: dict[int, Member] = dataclasses.field(default_factory=dict)
    """Members that died, with the nodes that they were."""
    left: dict[int, Member] = dataclasses.field(default_factory=dict)
    """Members that leave because they were asked to."""
    joined: dict[int, Member] = dataclasses.field(default_factory=dict)
    """Processes that are members from here on."""
    failed: bool = False
    """Whether the last body failed in some process."""
    loads: Literal["memory", "disk", "nothing"] = "nothing"
    """Where ``holders`` load the state from."""

    @property
    def source(self) -> int:
        """The holder that speaks for all: sends the state, writes the log, saves."""
        return min(self.holders)


def first_view(num_nodes: int) -> View:
    """The view with which a cluster starts: processes 1 to N are the nodes, later ones are spares."""
    return View(round=0, epoch=0, members={node + 1: Member(node=node) for node in range(num_nodes)})


def decide(view: View, live: Mapping[int, int], facts: Mapping[int, Facts], rules: Rules) -> Decision:
    """What follows from a round.

    Args:
        view: who took part in it.
        live: lives (incarnations) of the members that passed its barrier.
        facts: what members published before it.
        rules: of the run.

    Returns:
        The decision; equal arguments give equal decisions.
    """
    alive = {
        process: dataclasses.replace(member, life=live[process])
        for process, member in view.members.items()
        if process in live and process in facts and _is_same_life(member, facts[process], live[process])
    }
    lost = {process: member for process, member in view.members.items() if process not in alive}
    assert alive, "whoever decides is alive"
    left = {process: member for process, member in alive.items() if facts[process].leaving}
    newest = max(facts[process].held for process in alive)
    if all(facts[process].held < newest for process in alive if process not in left):
        left = {}  # nobody stays that holds the state: all save and go together, or somebody receives it first
    staying = {process: member for process, member in alive.items() if process not in left}
    said = {process: facts[process] for process in staying}
    step = max(fact.held for fact in said.values())
    over = step >= rules.last_step or all(fact.leaving for fact in said.values())
    joined = {} if over else _admitted(staying, said, lost, rules.num_nodes)
    failed = any(fact.failed for fact in said.values())
    members = staying | joined
    changed = bool(lost or left or joined or failed)
    next_view = View(round=view.round + 1, epoch=view.epoch + changed, members=members)

    common: dict[str, Any] = {"view": next_view, "lost": lost, "left": left, "joined": joined, "failed": failed}
    if step < 0:
        return _load(said, common)
    holders = tuple(sorted(process for process, fact in said.items() if fact.held == step))
    common |= {
        "step": step,
        "holders": holders,
        "newcomers": tuple(sorted(set(members) - set(holders))),
        "unevaluated": _unevaluated(said, holders, rules.evaluations(step)),
    }
    if any(fact.finished for fact in said.values()):
        return Decision(action="exit", **common)
    if all(fact.leaving for fact in said.values()):
        return Decision(action="stop", **common)
    if len(members) < rules.min_live_nodes:
        return Decision(action="too_few", **common)
    return _go_on(said, rules, common)


def _is_same_life(member: Member, fact: Facts, life: int) -> bool:
    """Whether a process that is alive is the one that published the fact, and the member that it was."""
    return fact.life == life and member.life in (None, life)


def _admitted(
    staying: Mapping[int, Member], said: Mapping[int, Facts], lost: Mapping[int, Member], num_nodes: int
) -> dict[int, Member]:
    """Waiting processes for the vacant nodes, as the first of the members has seen them, if they live."""
    vacant = sorted(set(range(num_nodes)) - {member.node for member in staying.values()})
    dead = {(process, member.life) for process, member in lost.items()}
    seen = set(said[min(said)].waiting) - dead
    waiting = sorted((process, life) for process, life in seen if process not in staying)
    return {process: Member(node=node, life=life) for node, (process, life) in zip(vacant, waiting, strict=False)}


def _load(said: Mapping[int, Facts], common: dict[str, Any]) -> Decision:
    """Nobody holds a state: the first one that sees the newest loads it, from memory or disk, or makes a new one."""
    in_memory = max(fact.in_memory for fact in said.values())
    on_disk = max(fact.on_disk for fact in said.values())
    if in_memory >= 0 and in_memory >= on_disk:
        loader = min(process for process, fact in said.items() if fact.in_memory == in_memory)
        return Decision(action="load", loads="memory", step=in_memory, holders=(loader,), **common)
    return Decision(action="load", loads="disk", step=on_disk, holders=(min(said),), **common)


def _unevaluated(said: Mapping[int, Facts], holders: Collection[int], number: int) -> tuple[int, ...]:
    seen = {int(done) for process in holders for done in said[process].evaluated}
    return tuple(sorted(set(range(number)) - seen))


def _go_on(said: Mapping[int, Facts], rules: Rules, common: dict[str, Any]) -> Decision:
    """Training goes on: what is missing is computed, or the step is taken."""
    view, step, holders = common["view"], common["step"], common["holders"]
    unprepared = any(said[process].prepared < view.epoch for process in said) or bool(common["joined"])
    if step >= rules.last_step:
        waits = bool(common["unevaluated"]) or unprepared
        return Decision(action="prepare" if waits else "finish", **common)
    summing = [process for process in holders if said[process].exact is not None]
    if not summing:  # the state was just loaded or handed over: there is nothing to reduce yet
        return Decision(action="prepare" if unprepared else "step", **common)
    nodes = [view.members[process].node for process in holders]
    computed = {microbatch for process in summing for microbatch in said[process].computed}
    wanted = (microbatch for microbatch, node in enumerate(rules.executors(nodes)) if node >= 0)
    missing = tuple(microbatch for microbatch in wanted if microbatch not in computed)
    if unprepared or missing or common["unevaluated"]:
        return Decision(action="prepare", missing=missing, **common)
    return Decision(action="step", reduces=True, **common)
