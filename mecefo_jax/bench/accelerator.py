"""One part of the check of an accelerator, in a process of its own: writes what it finds to a file as it goes."""

import argparse
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mecefo_jax import devices
from mecefo_jax.bench import numerics
from mecefo_jax.bench.compiled import microbatch_temp_memory, with_variant
from mecefo_jax.bench.timing import degraded_time, healthy_step_times, refresh_times
from mecefo_jax.cli import parse
from mecefo_jax.config import BYTE_ENTRIES, Config, MeshConfig
from mecefo_jax.mesh import make_cluster
from mecefo_jax.model import compute_dtype
from mecefo_jax.performance import peak_flops
from mecefo_jax.state import init_sharded_state
from mecefo_jax.takeover.cost import degraded_costs, exact_flops


def main(argv: Sequence[str]) -> None:
    """``FILE numerics [--hidden-size N]`` or ``FILE speed NAME [--seconds S] [train.py settings]``."""
    parser = argparse.ArgumentParser(prog="accelerator")
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("part", choices=("numerics", "speed"))
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=6.0)
    options, rest = parser.parse_known_args(argv)
    found: dict[str, Any] = {}

    def note(**results: Any) -> None:
        found.update(results)
        options.file.write_text(json.dumps(found))

    if options.part == "numerics":
        devices.prepare(MeshConfig(num_nodes=1))
        note(device=jax.devices()[0].device_kind, jax=jax.__version__)
        for dtype in ("float32", "bfloat16"):
            note(**{dtype: numerics.check(dtype, options.hidden_size)})
        return
    config, _ = parse(rest)
    devices.prepare(config.mesh)
    note(device=jax.devices()[0].device_kind, jax=jax.__version__)
    measure(config, options.seconds, note)


def measure(config: Config, seconds: float, note: Callable[..., None]) -> None:
    """Times of one node's step and of its parts, the most important first.

    Args:
        config: a node of it, on this device.
        seconds: duration of each measurement.
        note: told ``step_s``, ``mfu`` (of the exact step's operations, without what is recomputed; where the peak is
            known), ``healthy_overhead``, ``degraded_cost`` (time), ``degraded_flops`` (counted by hand) and their
            ratio, ``refresh_cost`` and temporary memory, as they come.
    """
    vocab_size = config.model.vocab_size or BYTE_ENTRIES
    sizes = {
        "microbatch_tokens": config.train.microbatch_size * config.data.seq_len,
        "seq_len": config.data.seq_len,
        "vocab_size": vocab_size,
    }
    note(dtype=compute_dtype(config.model).name, model=config.name, layers=config.model.num_layers)
    steps = healthy_step_times(config, vocab_size, seconds)
    step_s = float(np.median(steps["ours"]))
    note(step_s=step_s, healthy_overhead=float(np.median(steps["ours"] / steps["plain"])))
    peak = peak_flops(jax.devices()[0])
    flops = config.num_microbatches * exact_flops(with_variant(config, config.degraded, "none").model, **sizes)
    note(tokens_per_s=config.num_microbatches * sizes["microbatch_tokens"] / step_s)
    if peak is not None:
        note(mfu=flops / step_s / peak)
    mesh = make_cluster(config.mesh).submeshes[0]
    state = init_sharded_state(config, vocab_size, mesh)
    cost = degraded_time(config, state, mesh, vocab_size, seconds)
    by_hand = degraded_costs(config.model, config.degraded, rank=config.basis.rank, **sizes)[0]
    note(degraded_cost=cost, degraded_flops=by_hand, cost_over_flops=cost / by_hand)
    del state
    for name, degraded in (("exact", False), ("degraded", True)):
        memory = microbatch_temp_memory(config, vocab_size, mesh, degraded=degraded)
        note(**{f"{name}_temp_gib": memory / 2**30})
    refreshes = refresh_times(config, vocab_size, seconds)
    for method in ("subspace", "svd"):
        note(**{f"refresh_cost_{method}": float(np.median(refreshes[method] / refreshes["step"]))})
