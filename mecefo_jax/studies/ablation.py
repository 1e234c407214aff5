"""The paper's three techniques, one by one: what each makes of a degraded microbatch's time, operations and memory.

Times are measured at a small size on this machine; operations and temporary memory are those that XLA counts in the
compiled gradient of one microbatch, at the paper's sizes too, which this machine could not run.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from configs import get
from mecefo_jax.bench.compiled import microbatch_flops, microbatch_temp_memory, with_variant
from mecefo_jax.bench.timing import degraded_time
from mecefo_jax.config import BYTE_ENTRIES, Config, DegradedConfig
from mecefo_jax.mesh import make_cluster
from mecefo_jax.state import init_sharded_state
from mecefo_jax.studies.markdown import table
from mecefo_jax.studies.small_runs import Size, small_run
from mecefo_jax.studies.study import Cell, Row, Study

TECHNIQUES = ("none", "m", "mr", "ml", "mrl", "l", "s", "sf")
"""Letters: attention (m)issing from the backward pass, feed-forward (r)ecomputed, (l)ow rank; (s)ampled weight
gradients, and the (f)eed-forward's input gradients too."""
_SAMPLED = 0.5
_SECONDS = 20.0


def cells(quick: bool) -> list[Cell]:
    """1M and 5M with times; the paper's sizes by compilation."""
    sizes: tuple[Size, ...] = ("1M",) if quick else ("1M", "5M")
    small = [small_run(size, "node", seed=0, quick=quick) for size in sizes]
    large = [] if quick else [_on_one_submesh(get(name)) for name in ("llama_350m", "llama_1b", "llama_7b")]
    tries = [switches(letters) for letters in TECHNIQUES]
    measured = [Cell(labels={"run": config.name}, config=config, measure=measure, tries=tries) for config in small]
    analyzed = [Cell(labels={"run": config.name}, config=config, measure=analyze, tries=tries) for config in large]
    return measured + analyzed


def _on_one_submesh(config: Config) -> Config:
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, num_submeshes=1))


def switches(letters: str) -> DegradedConfig:
    """The techniques that the letters name."""
    return DegradedConfig(
        skip_attention="m" in letters,
        remat_ffn="r" in letters,
        low_rank="l" in letters,
        sampled_fractions=(_SAMPLED,) if "s" in letters else (),
        sample_ffn="f" in letters,
    )


def analyze(config: Config, workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Operations relative to an exact microbatch, and MiB of temporary memory."""
    del workdir
    vocab_size = config.model.vocab_size or BYTE_ENTRIES
    mesh = make_cluster(config.mesh).submeshes[0]
    exact = with_variant(config, config.degraded, "none")
    exact_flops = microbatch_flops(exact, vocab_size, mesh, degraded=False)
    rows = []
    for letters in TECHNIQUES:
        variant = with_variant(config, switches("" if letters == "none" else letters), "none")
        flops = microbatch_flops(variant, vocab_size, mesh, degraded=True)
        memory = microbatch_temp_memory(variant, vocab_size, mesh, degraded=True)
        rows.append({"techniques": letters, "flops": flops / exact_flops, "temp_mib": memory / 2**20})
    return rows


def measure(config: Config, workdir: pathlib.Path) -> list[dict[str, Any]]:
    """The same, with the time relative to an exact microbatch."""
    rows = analyze(config, workdir)
    mesh = make_cluster(config.mesh).submeshes[0]
    vocab_size = config.model.vocab_size or BYTE_ENTRIES
    state = init_sharded_state(config, vocab_size, mesh)
    for row in rows:
        letters = "" if row["techniques"] == "none" else row["techniques"]
        variant = with_variant(config, switches(letters), "none")
        row["time"] = degraded_time(variant, state, mesh, vocab_size, _SECONDS)
    return rows


def report(rows: Sequence[Row]) -> str:
    """A line for each run and set of techniques."""
    lines = [
        [
            row["run"],
            row["techniques"],
            "-" if row["time"] is None else f"{row['time']:.2f}",
            f"{row['flops']:.2f}",
            f"{row['temp_mib']:,.1f}",
        ]
        for row in rows
    ]
    what = (
        "A degraded microbatch next to an exact one that recomputes nothing. m: no attention in the backward pass; r: "
        "the feed-forward is recomputed; l: its weight gradients are of low rank; s: all weight gradients are made "
        "of half the tokens, sampled (not in the paper); f: the feed-forward's input gradients of three quarters. "
        "Times are measured on one core at 1M and 5M parameters; operations are those that XLA counts; temporary "
        "memory is that of one microbatch's gradient."
    )
    return f"{what}\n\n{table(['run', 'techniques', 'time', 'operations', 'temporary memory, MiB'], lines, left=2)}"


def plot(rows: Sequence[Row]) -> Figure:
    """Operations and memory, relative to no technique."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    runs = list(dict.fromkeys(row["run"] for row in rows))
    for place, run in enumerate(runs):
        chosen = [row for row in rows if row["run"] == run]
        places = [index + 0.8 * place / len(runs) for index in range(len(chosen))]
        memory = [row["temp_mib"] / chosen[0]["temp_mib"] for row in chosen]
        for axes, values in ((left, [row["flops"] for row in chosen]), (right, memory)):
            axes.bar(places, values, 0.8 / len(runs), label=run)
    for axes, title in ((left, "operations"), (right, "temporary memory")):
        axes.set_xticks([index + 0.3 for index in range(len(TECHNIQUES))], TECHNIQUES)
        axes.set_title(f"{title}, relative to no technique", fontsize=10)
        axes.grid(axis="y", alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    return figure


STUDY = Study(
    title="The three techniques, one by one",
    cells=cells,
    columns=("run", "techniques", "time", "flops", "temp_mib"),
    report=report,
    plot=plot,
)
