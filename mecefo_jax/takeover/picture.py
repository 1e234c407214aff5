"""Pictures of plans for a terminal: one plan in detail, or several policies side by side.

Readable without colour: shapes and brackets say what the colours say.

Legend: N nodes, S stages of a node.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mecefo_jax.takeover.plan import Plan

MAX_ROWS = 40
"""Nodes that get a row of their own; past that, only those that a failure concerns."""

MAX_BOXES = 10
"""Boxes drawn in a cell; more are given as counts."""

_BAR_CELLS = 12
_BAR = "\u2588"
_DEAD = "\u00d7"
_COVERED_BY = "\u2192"
_SHAPES = {(False, False): "\u25a0", (True, False): "\u25a1", (False, True): "\u25c6", (True, True): "\u25c7"}
_STYLES = {False: "green", True: "yellow"}


class Box(NamedTuple):
    """A microbatch's stage, as computed by a unit."""

    microbatch: int
    """Id of the microbatch."""
    degraded: bool
    """Whether its backward pass is degraded there."""
    source: str
    """Unit whose work it is while all are healthy; empty: this one's own."""


def boxes_of(plan: Plan, node: int, stage: int) -> list[Box]:
    """What a live unit computes, in the order of ids.

    Args:
      plan: the plan.
      node: node of the unit.
      stage: stage of the unit.

    Returns:
      A box for each microbatch and stage that it computes: under neighbor also those of stages it covers.
    """
    found: list[Box] = []
    for covered in np.flatnonzero(plan.covering_stage_NS[node] == stage):
        for microbatch in np.flatnonzero(plan.assignee_MS[:, covered] == node):
            home = int(plan.home_M[microbatch])
            source = "" if (home, covered) == (node, stage) else _unit_name(plan, home, int(covered))
            found.append(Box(int(microbatch), bool(plan.degraded_MS[microbatch, covered]), source))
    return sorted(found)


def draw_plan(plan: Plan) -> RenderableType:
    """Draw one plan: a row a node with its load and its microbatches, then a summary and a legend.

    Args:
      plan: the plan.

    Returns:
      A renderable for a rich console.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("node", justify="right", no_wrap=True)
    if plan.num_stages == 1:
        table.add_column("load", no_wrap=True)
        table.add_column("microbatches")
    for stage in range(plan.num_stages if plan.num_stages > 1 else 0):
        table.add_column(f"stage {stage}")
    shown = _nodes_shown([plan])
    load_NS = plan.load_NS
    for node in shown:
        if plan.num_stages == 1:
            table.add_row(str(node), _load(load_NS[node, 0], load_NS.max()), _microbatches(plan, node))
        else:
            table.add_row(str(node), *(_cell(plan, node, stage, load_NS) for stage in range(plan.num_stages)))
    legend = _detail_legend() if plan.num_stages == 1 else _shape_legend()
    return Group(table, *_others(plan, len(shown)), _summary(plan), legend)


def draw_comparison(plans: Mapping[str, Plan | str]) -> RenderableType:
    """Draw several plans of the same live nodes side by side: a column a policy, a row a node.

    Args:
      plans: by policy, its plan, or why there is none; whole nodes fail (S = 1).

    Returns:
      A renderable for a rich console.
    """
    made = [plan for plan in plans.values() if isinstance(plan, Plan)]
    if not made:
        return Text("\n".join(f"{policy}: {plan}" for policy, plan in plans.items()))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 0))
    table.add_column("node", justify="right", no_wrap=True)
    for policy in plans:
        table.add_column(policy)
    shown = _nodes_shown(made)
    loads = {policy: plan.load_NS for policy, plan in plans.items() if isinstance(plan, Plan)}
    for index, node in enumerate(shown):
        cells = (
            _cell(plan, node, 0, loads[policy]) if isinstance(plan, Plan) else Text("impossible", style="red")
            for policy, plan in plans.items()
        )
        table.add_row(str(node), *cells, end_section=index == len(shown) - 1)
    for name, value in (
        ("load", lambda plan: f"<= {plan.critical_load:.2f}"),
        ("degraded", lambda plan: f"{len(plan.degraded)} of {plan.num_microbatches}"),
        ("dropped", lambda plan: f"{len(plan.dropped)} of {plan.num_microbatches}"),
    ):
        table.add_row(name, *(value(plan) if isinstance(plan, Plan) else "" for plan in plans.values()))
    reasons = [Text(f"{policy}: {plan}", style="red") for policy, plan in plans.items() if isinstance(plan, str)]
    chosen = [Text(choice_of(plan)) for plan in made if plan.choice is not None]
    return Group(table, *_others(made[0], len(shown)), *reasons, *chosen, _shape_legend())


def choice_of(plan: Plan) -> str:
    """What ``auto`` chose, and why."""
    assert plan.choice is not None
    return f"auto: {plan.policy}, {plan.choice.reason}"


def _nodes_shown(plans: list[Plan]) -> list[int]:
    """All nodes, or where there are many, the first ones that a failure concerns in any plan."""
    num_nodes = plans[0].num_nodes
    if num_nodes <= MAX_ROWS:
        return list(range(num_nodes))
    concerned_N = ~np.all(plans[0].live_NS, axis=1)
    for plan in plans:
        concerned_N[plan.assignee_MS[plan.taken_over].reshape(-1)] = True
        concerned_N[plan.home_M[plan.degraded]] = True
    return [int(node) for node in np.flatnonzero(concerned_N)[:MAX_ROWS]]


def _others(plan: Plan, num_shown: int) -> list[Text]:
    """A line about the nodes that have no row."""
    hidden = plan.num_nodes - num_shown
    return [Text(f"and {hidden} more nodes, not shown\n", style="dim")] if hidden else []


def _unit_name(plan: Plan, node: int, stage: int) -> str:
    return str(node) if plan.num_stages == 1 else f"{node}.{stage}"


def _load(load: float, largest: float) -> Text:
    """A load as a number and a bar; the largest load, or a healthy one, is the full width."""
    if load == 0:
        return Text("")
    style = "green" if load <= 1 else "yellow"
    return Text(f"{load:.2f} ").append(_BAR * max(1, round(load / max(largest, 1.0) * _BAR_CELLS)), style=style)


def _microbatches(plan: Plan, node: int) -> Text:
    """A node's microbatches in brackets, or where those of a dead node went."""
    if not plan.live_NS[node, 0]:
        takers = np.unique(plan.assignee_MS[plan.home_M == node, 0])
        fate = "dropped" if takers[0] < 0 else f"taken over by {_join(takers)}"
        return Text(f"{_DEAD} dead, {fate}", style="bold red")
    text = Text()
    for item in boxes_of(plan, node, 0):
        label = f"{item.microbatch}<{item.source}" if item.source else f"{item.microbatch}"
        style = _STYLES[item.degraded] + (" bold" if item.source else "")
        text.append(f"({label})" if item.degraded else f"[{label}]", style=style).append(" ")
    return text


def _join(nodes: np.ndarray) -> str:
    """The first few nodes by name."""
    names = [str(node) for node in nodes[:MAX_BOXES]]
    return ", ".join(names) + (", ..." if len(nodes) > MAX_BOXES else "")


def _cell(plan: Plan, node: int, stage: int, load_NS: np.ndarray) -> Text:
    """A unit in few characters: a shape a microbatch, and its load; or who covers it."""
    if not plan.live_NS[node, stage]:
        covering = int(plan.covering_stage_NS[node, stage])
        covered_here = covering >= 0 and plan.assignee_MS[node * plan.microbatches_per_node, stage] == node
        return Text(f"{_DEAD} {_COVERED_BY} {covering}" if covered_here else _DEAD, style="bold red")
    found = boxes_of(plan, node, stage)
    if not found:
        return Text("idle", style="dim")
    text = Text()
    kinds = [(item.degraded, bool(item.source)) for item in found]
    if len(kinds) <= MAX_BOXES:
        for kind in kinds:
            text.append(_SHAPES[kind], style=_STYLES[kind[0]])
    else:
        for kind in _SHAPES:
            if kind in kinds:
                text.append(f"{kinds.count(kind)}{_SHAPES[kind]} ", style=_STYLES[kind[0]])
    return text.append(f" {load_NS[node, stage]:.2f}".rstrip(), style="dim")


def _summary(plan: Plan) -> Text:
    """What the step costs and what its gradient is, in a line or two."""
    num_exact = plan.num_microbatches - len(plan.degraded) - len(plan.dropped)
    parts = [f"{num_exact} exact", f"{len(plan.degraded)} degraded (cost {_join_costs(plan)})"]
    if len(plan.dropped):
        parts.append(f"{len(plan.dropped)} dropped")
    return Text(
        f"{plan.num_microbatches} microbatches: {', '.join(parts)}\n"
        f"critical load {plan.critical_load:.2f} (1.00 is a healthy step)\n"
    )


def _join_costs(plan: Plan) -> str:
    return " or ".join(f"{cost:g}" for cost in plan.degraded_costs)


def _detail_legend() -> Text:
    text = Text("[7] exact", style=_STYLES[False])
    text.append("   (7) degraded", style=_STYLES[True])
    text.append("   7<3 taken over from node 3", style="bold")
    return text.append(f"   {_DEAD} dead", style="bold red")


def _shape_legend() -> Text:
    text = Text()
    for (degraded, taken_over), shape in _SHAPES.items():
        meaning = ("degraded" if degraded else "exact") + (", taken over" if taken_over else "")
        text.append(f"{shape} {meaning}   ", style=_STYLES[degraded])
    return text.append(f"{_DEAD} dead", style="bold red")
