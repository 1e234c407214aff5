"""Perplexity under the paper's scenarios, by policy and backward pass, where whole nodes fail and where stages do."""

import itertools
from collections.abc import Sequence

from matplotlib.figure import Figure

from mecefo_jax.studies.small_runs import (
    BACKWARDS_IN_WORDS,
    FAILURE_FREE,
    HOURS,
    NODES,
    REPLICAS,
    SLACK,
    STAGES,
    TRAINED_COLUMNS,
    VARIANT,
    Granularity,
    Size,
    Variant,
    small_run,
    train,
)
from mecefo_jax.studies.study import Cell, Row, Study
from mecefo_jax.studies.trained import compare, comparison_table

SCENARIOS = ("none", "low", "mid", "high")
VARIANTS: tuple[Variant, ...] = (
    ("neighbor", "paper", "weight"),
    ("balanced", "paper", "weight"),
    ("balanced", "low_rank", "momentum"),
    ("balanced", "unbiased", "momentum"),
    ("reroute", None, None),
    ("drop", None, None),
)
_BY = ("size", "fails", "scenario", *VARIANT)
_BASELINE = {"scenario": "none", **dict.fromkeys(VARIANT)}


def cells(quick: bool) -> list[Cell]:
    """1M under all scenarios, 5M without failures and under the worst; three seeds.

    ``reroute`` is exact, whatever fails: one seed at 1M shows it.
    """
    sizes: tuple[Size, ...] = ("1M",) if quick else ("1M", "5M")
    granularities: tuple[Granularity, ...] = ("node", "stage")
    found = []
    for size, fails, scenario in itertools.product(sizes, granularities, SCENARIOS):
        if (quick or size == "5M") and scenario in ("low", "mid"):
            continue
        for variant in (FAILURE_FREE,) if scenario == "none" else VARIANTS:
            is_exact = variant[0] == "reroute"
            if is_exact and size == "5M":
                continue
            seeds = 1 if quick or is_exact else 3
            found += [_cell(size, fails, scenario, variant, seed, quick) for seed in range(seeds)]
    return found


def _cell(size: Size, fails: Granularity, scenario: str, variant: Variant, seed: int, quick: bool) -> Cell:
    config = small_run(size, fails, seed=seed, quick=quick, scenario=scenario, variant=variant)
    labels = {"size": size, "fails": fails, "scenario": scenario, "seed": seed}
    return Cell(labels=labels | dict(zip(VARIANT, variant, strict=True)), config=config, measure=train)


def report(rows: Sequence[Row]) -> str:
    """A table for each size and kind of unit."""
    conditions = compare(rows, _BY, _BASELINE)
    parts = [
        f"Each run is declared to last {HOURS:g} hours, as the paper's longest by estimate. Under `low`, `mid` and "
        "`high` a sixteenth, 3/32 and an eighth of the units are down on average. Perplexity is that of all held-out "
        "text after the last step; +- is the standard deviation over seeds; differences are to the failure-free run "
        "of the same seed. The load is that of the busiest unit, 1 being a healthy step; `balanced` may take "
        f"{SLACK:.0%} more than that.",
        BACKWARDS_IN_WORDS,
    ]
    for size, fails in dict.fromkeys((row["size"], row["fails"]) for row in rows):
        chosen = {key[2:]: figures for key, figures in conditions.items() if key[:2] == (size, fails)}
        what = f"whole nodes fail, of {NODES}"
        if fails == "stage":
            what = f"pipeline stages fail, {STAGES} in each of {REPLICAS} nodes"
        parts += [f"### {size} parameters; {what}", comparison_table(chosen, _BY[2:])]
    return "\n\n".join(parts)


def plot(rows: Sequence[Row]) -> Figure:
    """Differences from the failure-free run, by scenario, a line for each policy."""
    conditions = compare(rows, _BY, _BASELINE)
    panels = list(dict.fromkeys((row["size"], row["fails"]) for row in rows))
    figure = Figure(figsize=(3.6 * len(panels), 3.8), layout="constrained")
    for axes, (size, fails) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        scenarios = [name for name in SCENARIOS[1:] if any(key[:3] == (size, fails, name) for key in conditions)]
        for variant in VARIANTS:
            shown = [name for name in scenarios if (size, fails, name, *variant) in conditions]
            figures = [conditions[size, fails, name, *variant] for name in shown]
            axes.errorbar(
                shown,
                [figure["difference"] or 0.0 for figure in figures],
                yerr=[figure["difference_deviation"] or 0.0 for figure in figures],
                marker="o",
                capsize=3,
                label=", ".join(filter(None, variant)),
            )
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.set_title(f"{size}, {fails}s fail", fontsize=10)
        axes.set_xlabel("scenario")
        axes.grid(axis="y", alpha=0.3)
    figure.axes[0].set_ylabel("perplexity, % above failure-free")
    figure.axes[0].legend(fontsize=8)
    return figure


STUDY = Study(
    title="Perplexity under failures",
    cells=cells,
    columns=(*_BY, "seed", *TRAINED_COLUMNS),
    report=report,
    plot=plot,
)
