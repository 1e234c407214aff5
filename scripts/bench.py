"""Measures what fault tolerance costs: ``python scripts/bench.py NAME [--analyze] [--json FILE]``.

Settings of the config follow as for ``train.py``. Prints a table, and with ``--json`` writes the same numbers
(docs/benchmarks.md explains them). ``--analyze`` compiles from shapes alone, for sizes that this machine could not run,
and gives operations and memory only.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mecefo_jax import devices  # first, for it sets what JAX reads when it is imported

# isort: split
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from mecefo_jax.bench.compiled import REMATS, TECHNIQUES, Remat, microbatch_flops, microbatch_temp_memory, with_variant
from mecefo_jax.bench.timing import compile_seconds, degraded_time, healthy_step_times, refresh_times
from mecefo_jax.cli import parse, scan
from mecefo_jax.config import BYTE_ENTRIES, Config, DegradedConfig, check_vocab_size
from mecefo_jax.errors import ConfigError, RunError
from mecefo_jax.membership import run_degraded_costs
from mecefo_jax.mesh import make_cluster
from mecefo_jax.model import compute_dtype
from mecefo_jax.state import init_sharded_state
from mecefo_jax.takeover import make_plan, scaled_costs
from mecefo_jax.takeover.auto import expected_errors
from mecefo_jax.takeover.plan import POLICIES

_FAILED_OF_EIGHT = {"1": (3,), "2": (3, 4)}  # two neighbours: the worst case of the policy neighbor


def main(argv: Sequence[str]) -> int:
    """Run the bench; returns the exit code, 2 with one line on standard error for a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="bench.py",
        usage="%(prog)s NAME [--analyze] [--json FILE] [--seconds S] [--section.field VALUE ...]",
        description="Measure what fault tolerance costs a named config; train.py --help lists its settings.",
        allow_abbrev=False,
    )
    parser.add_argument("--analyze", action="store_true", help="compile from shapes; allocate and time nothing")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the numbers there")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each timing (default: 15)")
    arguments, rest = parser.parse_known_args(argv)
    try:
        given = scan(rest)
        if given.workdir is not None or given.print_config or given.show_help:
            raise ConfigError("a bench has no run directory and prints no config; leave --workdir and the like out")
        config, _ = parse(rest)
        vocab_size = vocabulary_size(config)
        devices.prepare(one_node(config).mesh if arguments.analyze else config.mesh)
        if arguments.analyze:
            results = analyze(config, vocab_size)
        else:
            results = measure(config, vocab_size, arguments.seconds)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    Console().print(table(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


def analyze(config: Config, vocab_size: int) -> dict[str, Any]:
    """Operations and memory of a microbatch, without allocating anything.

    Args:
        config: what is measured; one node of it.
        vocab_size: rows of the embedding table.

    Returns:
        ``run``, ``degraded_cost`` (``flops`` alone) and ``temp_memory``; JSON-able.
    """
    config = one_node(config)
    costs: dict[str, dict[str, dict[str, float]]] = {name: {} for name in TECHNIQUES}
    memory: dict[str, dict[str, int]] = {name: {} for name in ("exact", *TECHNIQUES)}
    mesh = make_cluster(config.mesh).submeshes[0]
    for remat in REMATS:
        exact = with_variant(config, config.degraded, remat)
        exact_flops = microbatch_flops(exact, vocab_size, mesh, degraded=False)
        memory["exact"][remat] = microbatch_temp_memory(exact, vocab_size, mesh, degraded=False)
        for name, switches in TECHNIQUES.items():
            variant = with_variant(config, switches, remat)
            flops = microbatch_flops(variant, vocab_size, mesh, degraded=True)
            costs[name][remat] = {"flops": flops / exact_flops}
            memory[name][remat] = microbatch_temp_memory(variant, vocab_size, mesh, degraded=True)
    return {"run": _facts(config), "degraded_cost": costs, "temp_memory": memory}


def measure(config: Config, vocab_size: int, seconds: float) -> dict[str, Any]:
    """Everything: times on this machine, operations, memory and the loads of plans.

    Args:
        config: what is measured.
        vocab_size: rows of the embedding table.
        seconds: duration of each timing.

    Returns:
        ``run``, the keys of docs/benchmarks.md, and ``step_s`` (median seconds of a step); JSON-able.
    """
    steps = healthy_step_times(config, vocab_size, seconds)
    refreshes = refresh_times(config, vocab_size, seconds)
    compiled = analyze(config, vocab_size)
    own_cost = _time_degraded(config, vocab_size, seconds, compiled["degraded_cost"])
    return {
        "run": _facts(config),
        "healthy_overhead": float(np.median(steps["ours"] / steps["plain"])),
        "step_s": {name: float(np.median(times)) for name, times in steps.items()},
        "degraded_cost": compiled["degraded_cost"],
        "own_degraded_cost": own_cost,
        "refresh_cost": {name: float(np.median(refreshes[name] / refreshes["step"])) for name in ("svd", "subspace")},
        "critical_load": critical_loads(config, _level_costs(config, vocab_size, own_cost)),
        "temp_memory": compiled["temp_memory"],
        "compile_s": compile_seconds(config, vocab_size),
    }


def critical_loads(config: Config, degraded_costs: Sequence[float]) -> dict[str, dict[str, float]]:
    """Critical load of each policy's plan with one and with two neighbouring nodes of eight failed.

    Args:
        config: its slice, slack, techniques and what it says of auto count.
        degraded_costs: of a degraded microbatch at each level, in exact ones. Above 1 one is planned as 1, but loads as
            it is.
    """
    loads: dict[str, dict[str, float]] = {}
    for policy in POLICIES:
        loads[policy] = {}
        for count, failed in _FAILED_OF_EIGHT.items():
            live_NS = np.ones((8, 1), bool)
            live_NS[list(failed)] = False
            plan = make_plan(
                live_NS,
                policy,
                microbatches_per_node=config.train.microbatches_per_node,
                degraded_costs=[min(cost, 1.0) for cost in degraded_costs],
                slack=config.faults.slack,
                auto=config.faults.auto,
                errors=expected_errors(config.faults.auto, config.degraded),
            )
            loads[policy][count] = dataclasses.replace(plan, degraded_costs=tuple(degraded_costs)).critical_load
    return loads


def table(results: dict[str, Any]) -> Table:
    """The numbers, a row each."""
    run = results["run"]
    shown = Table(title=f"{run['name']}: {run['dtype']} on {run['devices']}", title_justify="left", pad_edge=False)
    for column in ("quantity", "of"):
        shown.add_column(column)
    shown.add_column("value", justify="right")
    for quantity, value in results.items():
        if quantity == "run":
            continue
        for index, (path, number) in enumerate(_leaves(value)):
            text = f"{number / 2**20:,.1f} MiB" if quantity == "temp_memory" else f"{number:.3g}"
            if quantity == "refresh_cost":
                text += f" ({number / run['refresh_every']:.2%} of each step)"
            shown.add_row("" if index else quantity, " ".join(path), text)
        shown.add_section()
    return shown


def vocabulary_size(config: Config) -> int:
    """Rows of the embedding table, without preparing data.

    Raises:
        ConfigError: only the tokenizer file would tell.
    """
    sizes = {"bytes": BYTE_ENTRIES, "bpe": config.data.bpe_vocab_size}
    size = config.model.vocab_size or sizes.get(config.data.tokenizer)
    if size is None:
        raise ConfigError(f"model.vocab_size: not set, and not known from {config.data.tokenizer}; set it for a bench")
    check_vocab_size(size, config.mesh)
    return size


def one_node(config: Config) -> Config:
    """The config on a single sub-mesh, of a node's shape."""
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, num_submeshes=1))


def _time_degraded(config: Config, vocab_size: int, seconds: float, costs: dict[str, dict[str, Any]]) -> float:
    """Add ``time`` to the costs of all variants; returns that of the config's own techniques and remat."""
    config = one_node(config)
    mesh = make_cluster(config.mesh).submeshes[0]
    state = init_sharded_state(config, vocab_size, mesh)

    def cost(switches: DegradedConfig, remat: Remat) -> float:
        return degraded_time(with_variant(config, switches, remat), state, mesh, vocab_size, seconds)

    for name, switches in TECHNIQUES.items():
        for remat in REMATS:
            costs[name][remat]["time"] = cost(switches, remat)
    own = next((name for name, switches in TECHNIQUES.items() if switches == config.degraded), None)
    if own is not None and config.model.remat in costs[own]:
        return costs[own][config.model.remat]["time"]
    return cost(config.degraded, config.model.remat)


def _level_costs(config: Config, vocab_size: int, measured: float) -> tuple[float, ...]:
    """Cost at each level, where the first level's is measured; the others are as far below it as operations are."""
    return scaled_costs(run_degraded_costs(config, vocab_size), measured)


def _facts(config: Config) -> dict[str, Any]:
    """What the numbers hold for."""
    return {
        "name": config.name,
        "date": time.strftime("%Y-%m-%d"),
        "devices": f"{config.mesh.num_devices} x {jax.devices()[0].device_kind}",
        "cpu_cores": os.cpu_count(),
        "jax": jax.__version__,
        "dtype": str(compute_dtype(config.model)),
        "microbatch_tokens": config.train.microbatch_size * config.data.seq_len,
        "rank": config.basis.rank,
        "refresh_every": config.basis.refresh_every,
    }


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Numbers of nested dicts, with their keys."""
    if not isinstance(tree, dict):
        yield path, tree
        return
    for key, value in tree.items():
        yield from _leaves(value, (*path, key))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
