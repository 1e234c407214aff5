"""Show when nodes fail: ``python -m mecefo_jax.faults --scenario high --nodes 32 --steps 400``."""

import argparse
import sys
from typing import Any

from rich.console import Console

from mecefo_jax.config import MAX_NODES, Config, FaultsConfig, MeshConfig, ModelConfig, TrainConfig
from mecefo_jax.config_effects import without_effect
from mecefo_jax.config_values import check_range, convert
from mecefo_jax.errors import ConfigError, RunError
from mecefo_jax.faults.source import make_fault_source
from mecefo_jax.faults.timeline import draw_timeline, live_history, statistics
from mecefo_jax.terminal import in_flags, integer, number, tolerate_encoding

_MAX_SHOWN = 2**28
"""Most units times steps: a byte each in memory."""
_RENAMED = {
    "mesh.num_nodes": "--nodes",
    "faults.num_stages": "--stages",
    "faults.granularity=stage": "--stages 2 or more",
}


def main(argv: list[str] | None = None) -> int:
    """Print the timeline and statistics of a fault source; returns the exit code."""
    tolerate_encoding()
    arguments = {name: value for name, value in vars(_parser().parse_args(argv)).items() if value is not None}
    num_nodes, steps, seed = (arguments.pop(name) for name in ("nodes", "steps", "seed"))
    try:
        config = _faults(arguments, num_nodes, seed)
        num_units = num_nodes * config.num_stages
        check_range("--steps", steps, at_least=1, at_most=_MAX_SHOWN // num_units)
        source = make_fault_source(config, num_nodes=num_nodes, seed=seed)
    except RunError as error:
        print(f"error: {in_flags(str(error), _RENAMED)}", file=sys.stderr)
        return error.exit_code
    live_TU = live_history(source, steps)
    seen = statistics(live_TU)
    console = Console(highlight=False)
    units = f"{num_nodes} nodes" if config.num_stages == 1 else f"{num_nodes} nodes of {config.num_stages} stages"
    console.print(f"[bold]{config.scenario}[/bold]: {units}, {steps} steps, seed {seed}{_times(config)}\n")
    console.print(draw_timeline(live_TU, source.num_stages, console.width))
    console.print(
        f"\nfailures {seen.failures}, recoveries {seen.recoveries}\n"
        f"units down: {seen.mean_down:.2f} on average, {seen.max_down} at most, "
        f"none in {seen.healthy_fraction:.0%} of the steps"
    )
    return 0


def _faults(arguments: dict[str, Any], num_nodes: int, seed: int) -> FaultsConfig:
    """The faults that the flags describe, held to the rules of a run's config."""
    num_stages = arguments.get("num_stages", 1)
    check_range("--nodes", num_nodes, at_least=1, at_most=MAX_NODES)
    check_range("--stages", num_stages, at_least=1, at_most=MAX_NODES)
    faults = FaultsConfig(**arguments, granularity="stage" if num_stages > 1 else "node")
    config = Config(
        mesh=MeshConfig(num_nodes=num_nodes),
        model=ModelConfig(num_layers=num_stages),
        train=TrainConfig(seed=seed),
        faults=faults,
    )
    for name in arguments.keys() - {"num_stages"}:
        message = without_effect(config, f"faults.{name}")
        if message is not None:
            raise ConfigError(message)
    return faults


def _times(config: FaultsConfig) -> str:
    """What decides when things happen, where it is not in the scenario's name."""
    if config.scenario == "steps":
        return f"; a failure each {config.fail_every_steps:g} steps, back after {config.back_after_steps:g}"
    if config.scenario in ("low", "mid", "high", "trace"):
        return f"; a step takes {config.step_seconds:g} s"
    return ""


def _parser() -> argparse.ArgumentParser:
    """Flags named after the config's fields; one that is not given leaves the config's default."""
    parser = argparse.ArgumentParser(prog="python -m mecefo_jax.faults", description="Show which nodes fail when.")
    scenarios = ("none", "low", "mid", "high", "steps", "persistent", "trace", "script")
    parser.add_argument("--scenario", choices=scenarios, default="high", help="what fails (default: high)")
    parser.add_argument("--nodes", type=integer, default=32, help="nodes of the cluster (default: 32)")
    parser.add_argument("--steps", type=integer, default=400, help="steps to show (default: 400)")
    parser.add_argument("--seed", type=integer, default=0, help="seed of random failures (default: 0)")
    parser.add_argument("--stages", type=integer, dest="num_stages", help="stages of a node that fail on their own")
    parser.add_argument("--timing", choices=("random", "regular"), help="gaps between failures")
    for flag, text in (
        ("step-seconds", "seconds a step takes"),
        ("frequency", "divides the times of the scenario"),
        ("fail-every-steps", "mean steps between failures, for steps"),
        ("back-after-steps", "steps until a unit is back, for steps"),
    ):
        parser.add_argument(f"--{flag}", type=number, help=text)
    parser.add_argument("--persistent-nodes", type=_node_list, help="nodes dead throughout, such as 3,5")
    parser.add_argument("--trace-file", help="CSV of milliseconds,add|remove,name")
    parser.add_argument("--script", help="failures such as 'fail 3 at 20, back at 50'")
    return parser


def _node_list(text: str) -> tuple[int, ...]:
    return convert(text, tuple[int, ...], "")


if __name__ == "__main__":
    sys.exit(main())
