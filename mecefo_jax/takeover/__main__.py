"""Show a plan: ``python -m mecefo_jax.takeover --nodes 8 --failed 3 --policy balanced``.

Without ``--policy`` all policies are shown: side by side, or with stages one after the other.
"""

import argparse
import re
import sys

import numpy as np
from rich.console import Console

from mecefo_jax.config import MAX_NODES, AutoConfig
from mecefo_jax.config_values import check_range
from mecefo_jax.errors import ConfigError, RunError, TooFewLiveNodesError
from mecefo_jax.takeover.picture import choice_of, draw_comparison, draw_plan
from mecefo_jax.takeover.plan import POLICIES, Plan, make_plan
from mecefo_jax.terminal import in_flags, integer, number, tolerate_encoding

_MAX_MICROBATCHES = 2**24
"""Most microbatches to show, each stage counted: what a plan of all policies fits into memory."""


def main(argv: list[str] | None = None) -> int:
    """Print the picture of a plan, or of all policies' plans; returns the exit code."""
    tolerate_encoding()
    arguments = _parser().parse_args(argv)
    try:
        live_NS = _live_units(arguments.failed, arguments.nodes, arguments.stages)
        most = _MAX_MICROBATCHES // live_NS.size
        check_range("--microbatches-per-node", arguments.microbatches_per_node, at_least=1, at_most=most)
        plans = {
            policy: _plan_or_reason(live_NS, policy, arguments)
            for policy in (POLICIES if arguments.policy is None else [arguments.policy])
        }
    except RunError as error:
        print(f"error: {in_flags(str(error), {})}", file=sys.stderr)
        return error.exit_code
    console = Console(highlight=False)
    failed = ", ".join(arguments.failed.split(",")) or "nothing"
    console.print(f"{arguments.nodes} nodes, failed: {failed}", style="bold")
    per_node, costs = arguments.microbatches_per_node, " or ".join(f"{cost:g}" for cost in arguments.degraded_cost)
    console.print(f"{per_node} microbatches a node; a degraded one costs {costs} of an exact one\n")
    if arguments.stages == 1 and len(plans) > 1:
        console.print(draw_comparison(plans))
        return 0
    for policy, plan in plans.items():
        console.print(choice_of(plan) if isinstance(plan, Plan) and plan.choice else policy, style="bold")
        console.print(draw_plan(plan) if isinstance(plan, Plan) else f"impossible: {plan}")
        console.print()
    return 0


def _plan_or_reason(live_NS: np.ndarray, policy: str, arguments: argparse.Namespace) -> Plan | str:
    """The policy's plan; in a comparison, also why there is none."""
    try:
        return make_plan(
            live_NS,
            policy,
            microbatches_per_node=arguments.microbatches_per_node,
            degraded_costs=arguments.degraded_cost,
            slack=arguments.slack,
            auto=AutoConfig(max_slowdown=arguments.max_slowdown, degraded_error=arguments.degraded_error),
        )
    except TooFewLiveNodesError as error:
        if arguments.policy is not None:
            raise
        return in_flags(str(error), {})


def _live_units(failed: str, num_nodes: int, num_stages: int) -> np.ndarray:
    """Live units bool[N, S] when the units named in ``failed`` (NODE or NODE.STAGE, by commas) are dead."""
    check_range("--nodes", num_nodes, at_least=1, at_most=MAX_NODES)
    check_range("--stages", num_stages, at_least=1, at_most=MAX_NODES // num_nodes)
    live_NS = np.ones((num_nodes, num_stages), dtype=bool)
    for name in filter(None, (part.strip() for part in failed.split(","))):
        match = re.fullmatch(r"(\d{1,9})(?:\.(\d{1,9}))?", name, re.ASCII)
        if match is None:
            raise ConfigError(f"--failed {name}: write nodes or node.stage, separated by commas, such as 3,4")
        node, stage = int(match[1]), None if match[2] is None else int(match[2])
        if node >= num_nodes:
            raise ConfigError(
                f"--failed {name}: there is no node {node}; with --nodes {num_nodes} write 0 to {num_nodes - 1}"
            )
        if stage is not None and stage >= num_stages:
            raise ConfigError(f"--failed {name}: there is no stage {stage}; set --stages {stage + 1} or more")
        live_NS[node, slice(None) if stage is None else stage] = False
    return live_NS


def _numbers(text: str) -> list[float]:
    return [number(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mecefo_jax.takeover", description="Show who computes what when nodes are dead."
    )
    parser.add_argument("--nodes", type=integer, default=8, help="nodes of the cluster (default: 8)")
    parser.add_argument("--failed", default="", help="dead nodes, such as 3 or 3,4; with --stages also node.stage")
    parser.add_argument("--policy", help=f"{', '.join(POLICIES)} (default: all of them)")
    parser.add_argument("--microbatches-per-node", type=integer, default=4, help="a node's slice (default: 4)")
    parser.add_argument(
        "--degraded-cost",
        type=_numbers,
        default=[0.6],
        metavar="COST[,COST]",
        help="in exact microbatches, of each level (default: 0.6)",
    )
    parser.add_argument("--slack", type=number, default=0.1, help="extra load that balanced accepts (default: 0.1)")
    parser.add_argument(
        "--max-slowdown", type=number, default=0.01, help="extra time of a step that auto accepts (default: 0.01)"
    )
    parser.add_argument(
        "--degraded-error",
        type=number,
        default=1.2,
        metavar="ERROR",
        help="relative error of the gradient, were all microbatches degraded, that auto expects (default: 1.2)",
    )
    parser.add_argument(
        "--stages", type=integer, default=1, help="stages of a node that fail on their own (default: 1)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
