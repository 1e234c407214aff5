"""The policies that make plans (``auto`` chooses among them): from the live units to who computes what, and how.

A unit is one stage of one node (with whole nodes failing there is one stage, and a unit is a node). Each
policy returns, for each microbatch and stage, the node that computes it (-1: nobody) and how far its backward
pass is degraded there: by level, 0 being exact, and each level cheaper than the one before. Stages are the columns
of these arrays; ``reroute`` and ``balanced`` treat each column by itself. All but ``balanced`` know one level.

A node whose stage is dead but which has other live stages may still compute that stage, on its next live stage
(``covering_stage``): only ``neighbor`` makes use of it.

Legend: N nodes, S stages, M microbatches (``microbatches_per_node`` consecutive ids a node).
"""

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

    Where there are several levels, no two microbatches of a unit are more than one level apart.

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
        level_N, needed_N = levels_needed(count_N, microbatches_per_node, degraded_costs=degraded_costs, slack=slack)
        order = np.lexsort((assignee_M == home_M, assignee_M))
        node_of = assignee_M[order]
        rank = np.arange(order.size) - (np.cumsum(count_N) - count_N)[node_of]
        level_MS[order, stage] = level_N[node_of] - (rank >= needed_N[node_of])
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
    count_N: Int[np.ndarray, " N"], microbatches_per_node: int, *, degraded_costs: Sequence[float], slack: float
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
    """How far nodes must degrade to bring their loads to the limit, or as near to it as can be.

    A node takes the least level at which all its microbatches together are within ``(1 + slack)
    microbatches_per_node``, and of these the fewest that suffice; the others are one level less. With one level of
    cost ``c`` that is the least ``d`` with ``(count - d) + c d`` within the limit. Where errors grow ever faster with
    what is saved, as those of sampling do, their sum is least so.

    Args:
      count_N: microbatches that each node computes.
      microbatches_per_node: microbatches of a healthy step's slice.
      degraded_costs: cost of a degraded microbatch at each level from 1 on, in exact ones; decreasing, each in
        (0, 1]. One of 1 saves nothing, and is not used.
      slack: load above a healthy step that is accepted, as a fraction of a healthy step.

    Returns:
      int64[N] twice: the furthest level, 1 or more, and how many of the node's microbatches are at it, maybe none.
    """
    cost_J = np.array([1.0, *degraded_costs])
    if cost_J[1] >= 1:
        return np.ones_like(count_N), np.zeros_like(count_N)
    limit = (1 + slack) * microbatches_per_node * (1 + _ROUNDING)
    fits_NJ = count_N[:, None] * cost_J <= limit
    furthest = cost_J.size - 1
    level_N = np.where(fits_NJ.any(axis=1), np.maximum(fits_NJ.argmax(axis=1), 1), furthest)
    before_N, at_N = cost_J[level_N - 1], cost_J[level_N]
    needed_N = np.ceil((count_N * before_N - limit) / (before_N - at_N))
    return level_N, np.clip(needed_N, 0, count_N).astype(np.int64)


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
