"""The policies that make plans (``auto`` chooses among them): from the live units to who computes what, and how.

A unit is one stage of one node (with whole nodes failing there is one stage, and a unit is a node). Each
policy returns, for each microbatch and stage, the node that computes it (-1: nobody) and how far its backward
pass is degraded there: by level, 0 being exact, and each level cheaper than the one before. Stages are the columns
of these arrays; ``reroute`` and ``balanced`` treat each column by itself. All but ``balanced`` know one level.

A node whose stage is dead but which has other live stages may still compute that stage, on its next live stage
(``covering_stage``): only ``neighbor`` makes use of it.

Legend: N nodes, S stages, M microbatches (``microbatches_per_node`` consecutive ids a node).
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from mecefo_jax.errors import TooFewLiveNodesError

# Loads are sums of rounded products: a load this much (relatively) above its limit is the limit.
_ROUNDING = 1e-9


def neighbor(
    live_NS: Bool[np.ndarray, "N S"], microbatches_per_node: int
) -> tuple[Int[np.ndarray, "M S"], Int[np.ndarray, "M S"]]:
    """The paper's policy: the next live one around the ring does both slices, all of both degraded.

    A dead stage is covered by the next live stage of its node, and the layers of both stages are degraded for
    that node's microbatches. A node with no live stage is covered by the next node that has one, and both
    nodes' microbatches are degraded in all layers.

    Args:
      live_NS: live units.
      microbatches_per_node: microbatches of a node's slice.

    Returns:
      Nodes int32[M, S] and levels int8[M, S].

    Raises:
      TooFewLiveNodesError: no unit is live.
    """
    num_nodes, num_stages = live_NS.shape
    live_N = np.any(live_NS, axis=1)
    coverer_N = _next_live(live_N)
    covers_other_N = np.zeros(num_nodes, dtype=bool)
    covers_other_N[coverer_N[~live_N]] = True
    degraded_NS = np.broadcast_to((~live_N | covers_other_N)[:, None], live_NS.shape) | ~live_NS
    nodes, stages = np.nonzero(~live_NS & live_N[:, None])
    degraded_NS[nodes, covering_stage(live_NS)[nodes, stages]] = True
    assignee_M = np.repeat(coverer_N, microbatches_per_node)
    assignee_MS = np.broadcast_to(assignee_M[:, None], (assignee_M.size, num_stages))
    return assignee_MS.astype(np.int32), np.repeat(degraded_NS, microbatches_per_node, axis=0).astype(np.int8)


def reroute(
    live_NS: Bool[np.ndarray, "N S"], microbatches_per_node: int
) -> tuple[Int[np.ndarray, "M S"], Int[np.ndarray, "M S"]]:
    """The dead units' microbatches are spread evenly over the live units of the same stage, all exact.

    Args:
      live_NS: live units.
      microbatches_per_node: microbatches of a node's slice.

    Returns:
      Nodes int32[M, S] and levels int8[M, S], all 0.

    Raises:
      TooFewLiveNodesError: a stage is dead on every node.
    """
    _require_every_stage(live_NS)
    home_M = np.repeat(np.arange(live_NS.shape[0], dtype=np.int32), microbatches_per_node)
    assignee_MS = np.repeat(home_M[:, None], live_NS.shape[1], axis=1)
    for stage, live_N in enumerate(live_NS.T):
        live = np.flatnonzero(live_N)
        orphans = np.flatnonzero(~live_N[home_M])
        assignee_MS[orphans, stage] = live[np.arange(orphans.size) % live.size]
    return assignee_MS, np.zeros(assignee_MS.shape, dtype=np.int8)


def balanced(
    live_NS: Bool[np.ndarray, "N S"], microbatches_per_node: int, *, degraded_costs: Sequence[float], slack: float
) -> tuple[Int[np.ndarray, "M S"], Int[np.ndarray, "M S"]]:
    """As ``reroute``, but each unit degrades as many microbatches as its load needs, those taken over first.

    Where there are several levels, a unit's microbatches are as near to each other as can be (``levels_needed``).

    Args:
      live_NS: live units.
      microbatches_per_node: microbatches of a node's slice.
      degraded_costs: cost of a degraded microbatch at each level from 1 on, in exact ones; decreasing.
      slack: load above a healthy step that is accepted, as a fraction of a healthy step.

    Returns:
      Nodes int32[M, S] and levels int8[M, S].

    Raises:
      TooFewLiveNodesError: a stage is dead on every node.
    """
    assignee_MS, level_MS = reroute(live_NS, microbatches_per_node)
    num_nodes = live_NS.shape[0]
    home_M = np.repeat(np.arange(num_nodes), microbatches_per_node)
    for stage, assignee_M in enumerate(assignee_MS.T):
        count_N = np.bincount(assignee_M, minlength=num_nodes)
        order = np.lexsort((assignee_M == home_M, assignee_M))
        node_of = assignee_M[order]
        rank = np.arange(order.size) - (np.cumsum(count_N) - count_N)[node_of]
        for count in np.unique(count_N[count_N > 0]).tolist():
            levels = levels_needed(count, microbatches_per_node, degraded_costs=degraded_costs, slack=slack)
            mine = count_N[node_of] == count
            level_MS[order[mine], stage] = levels[rank[mine]]
    return assignee_MS, level_MS


def drop(
    live_NS: Bool[np.ndarray, "N S"], microbatches_per_node: int
) -> tuple[Int[np.ndarray, "M S"], Int[np.ndarray, "M S"]]:
    """The microbatches of every node with a dead stage are left out: its pipeline is cut.

    Args:
      live_NS: live units.
      microbatches_per_node: microbatches of a node's slice.

    Returns:
      Nodes int32[M, S], -1 where left out, and levels int8[M, S], all 0.

    Raises:
      TooFewLiveNodesError: a stage is dead on every node, or no node has all its stages.
    """
    _require_every_stage(live_NS)
    complete_N = np.all(live_NS, axis=1)
    if not complete_N.any():
        raise TooFewLiveNodesError(
            "every node has a dead stage, so faults.policy=drop leaves no microbatch; set another policy"
        )
    assignee_N = np.where(complete_N, np.arange(live_NS.shape[0]), -1)
    assignee_M = np.repeat(assignee_N, microbatches_per_node)
    assignee_MS = np.repeat(assignee_M[:, None], live_NS.shape[1], axis=1)
    return assignee_MS.astype(np.int32), np.zeros(assignee_MS.shape, dtype=np.int8)


def levels_needed(
    count: int, microbatches_per_node: int, *, degraded_costs: Sequence[float], slack: float
) -> Int[np.ndarray, " K"]:
    """How far a node must degrade to bring its load to the limit, or as near to it as can be.

    All its microbatches at the least level that suffices, then the fewest that suffice, the others one level less, and
    of these as many another level less as there is room for, and so on. With one level of cost ``c`` that are the
    fewest ``d`` with ``(count - d) + c d`` within the limit. Levels near each other are best where errors grow ever
    faster with what is saved, as those of sampling do.

    Args:
      count: microbatches that the node computes (K).
      microbatches_per_node: microbatches of a healthy step's slice.
      degraded_costs: cost of a degraded microbatch at each level from 1 on, in exact ones; positive. A level that
        costs as much as an exact one, or as a level before it, is not used.
      slack: load above a healthy step that is accepted, as a fraction of a healthy step.

    Returns:
      int8[K], descending.
    """
    useful, costs = [0], [1.0]
    for level, cost in enumerate(degraded_costs, start=1):
        if cost < costs[-1]:
            useful.append(level)
            costs.append(cost)
    limit = (1 + slack) * microbatches_per_node * (1 + _ROUNDING)
    at = next((place for place, cost in enumerate(costs) if count * cost <= limit), len(costs) - 1)
    if at == 0:
        return np.zeros(count, np.int8)
    needed = math.ceil((count * costs[at - 1] - limit) / (costs[at - 1] - costs[at]))
    numbers = [0] * len(costs)
    numbers[at] = min(max(needed, 0), count)
    numbers[at - 1] = count - numbers[at]
    room = limit - sum(number * cost for number, cost in zip(numbers, costs, strict=True))
    for place in range(at - 1, 0, -1):
        more = costs[place - 1] - costs[place]
        numbers[place - 1] = min(max(math.floor(room / more), 0), numbers[place])
        numbers[place] -= numbers[place - 1]
        room -= numbers[place - 1] * more
    return np.repeat(np.array(useful, np.int8), numbers)[::-1]


def covering_stage(live_NS: Bool[np.ndarray, "N S"]) -> Int[np.ndarray, "N S"]:
    """The live stage of each node that does the work of each of its stages.

    Args:
      live_NS: live units.

    Returns:
      int64[N, S]: the stage itself if it is live, else the next live one around the node's ring; -1 on nodes
      with none.
    """
    num_stages = live_NS.shape[1]
    # Twice around the ring, so that the next live stage is the least live index from here on.
    index_N2S = np.where(np.tile(live_NS, 2), np.arange(2 * num_stages), 2 * num_stages)
    next_NS = np.minimum.accumulate(index_N2S[:, ::-1], axis=1)[:, ::-1][:, :num_stages]
    return np.where(live_NS.any(axis=1, keepdims=True), next_NS % num_stages, -1)


def _next_live(live_N: Bool[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """The node itself if it is live, else the next live one around the ring."""
    live = np.flatnonzero(live_N)
    if live.size == 0:
        raise TooFewLiveNodesError("no node is live, so nobody can take over")
    return live[np.searchsorted(live, np.arange(live_N.size)) % live.size]


def _require_every_stage(live_NS: Bool[np.ndarray, "N S"]) -> None:
    """Raise if a stage is dead on every node."""
    if not live_NS.any():
        raise TooFewLiveNodesError("no node is live, so nobody can take over")
    missing = np.flatnonzero(~live_NS.any(axis=0))
    if missing.size:
        raise TooFewLiveNodesError(
            f"stage {missing[0]} is dead on every node, so no node can compute its layers; "
            "set faults.policy=neighbor, which covers it by another stage"
        )
