"""Show when nodes fail: ``python -m mecefo_jax.faults --scenario high --nodes 32 --steps 400``."""

import argparse
import sys

from rich.console import Console

from mecefo_jax.config import FaultsConfig
from mecefo_jax.errors import ConfigError, RunError
from mecefo_jax.faults.source import make_fault_source
from mecefo_jax.faults.timeline import draw_timeline, live_history, statistics


def main(argv: list[str] | None = None) -> int:
    """Print the timeline and statistics of a fault source; returns the exit code."""
    arguments = {name: value for name, value in vars(_parser().parse_args(argv)).items() if value is not None}
    num_nodes, steps, seed = (arguments.pop(name) for name in ("nodes", "steps", "seed"))
    if arguments.get("num_stages", 1) > 1:
        arguments["granularity"] = "stage"
    try:
        for name, value in (("--nodes", num_nodes), ("--steps", steps)):
            if value < 1:
                raise ConfigError(f"{name} {value}: set 1 or more")
        config = FaultsConfig(**arguments)
        source = make_fault_source(config, num_nodes=num_nodes, seed=seed)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    live_TU = live_history(source, steps)
    seen = statistics(live_TU)
    console = Console(highlight=False)
    units = f"{num_nodes} nodes" if config.num_stages == 1 else f"{num_nodes} nodes of {config.num_stages} stages"
    console.print(f"[bold]{config.scenario}[/bold]: {units}, {steps} steps, seed {seed}\n")
    console.print(draw_timeline(live_TU, source.num_stages, console.width))
    console.print(
        f"\nfailures {seen.failures}, recoveries {seen.recoveries}\n"
        f"units down: {seen.mean_down:.2f} on average, {seen.max_down} at most, "
        f"none in {seen.healthy_fraction:.0%} of the steps"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    """Flags named after the config's fields; one that is not given leaves the config's default."""
    parser = argparse.ArgumentParser(prog="python -m mecefo_jax.faults", description="Show which nodes fail when.")
    scenarios = ("none", "low", "mid", "high", "steps", "persistent", "trace", "script")
    parser.add_argument("--scenario", choices=scenarios, default="high", help="what fails (default: high)")
    parser.add_argument("--nodes", type=int, default=32, help="nodes of the cluster (default: 32)")
    parser.add_argument("--steps", type=int, default=400, help="steps to show (default: 400)")
    parser.add_argument("--seed", type=int, default=0, help="seed of random failures (default: 0)")
    parser.add_argument("--stages", type=int, dest="num_stages", help="stages of a node that fail on their own")
    parser.add_argument("--timing", choices=("random", "regular"), help="gaps between failures")
    for flag, text in (
        ("step-seconds", "seconds a step takes"),
        ("frequency", "divides the times of the scenario"),
        ("fail-every-steps", "mean steps between failures, for steps"),
        ("back-after-steps", "steps until a unit is back, for steps"),
    ):
        parser.add_argument(f"--{flag}", type=float, help=text)
    parser.add_argument("--persistent-nodes", type=_node_list, help="nodes dead throughout, such as 3,5")
    parser.add_argument("--trace-file", help="CSV of milliseconds,add|remove,name")
    parser.add_argument("--script", help="failures such as 'fail 3 at 20, back at 50'")
    return parser


def _node_list(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
