"""Perplexity under the paper's scenarios, for each policy, where whole nodes fail and where pipeline stages do."""

import itertools
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from mecefo_jax.studies.small_runs import HOURS, TRAINED_COLUMNS, Granularity, Size, small_run, train
from mecefo_jax.studies.study import Cell, Row, Study
from mecefo_jax.studies.trained import compare, comparison_table

SCENARIOS = ("none", "low", "mid", "high")
POLICIES = ("neighbor", "balanced", "reroute", "drop")
_BY = ("size", "fails", "scenario", "policy")


def cells(quick: bool) -> list[Cell]:
    """1M under all scenarios, 5M without failures and under the worst; three seeds.

    ``reroute`` is exact, whatever fails: one seed shows it.
    """
    sizes: tuple[Size, ...] = ("1M",) if quick else ("1M", "5M")
    granularities: tuple[Granularity, ...] = ("node", "stage")
    found = []
    for size, fails, scenario in itertools.product(sizes, granularities, SCENARIOS):
        if (quick or size == "5M") and scenario in ("low", "mid"):
            continue
        for policy in ("neighbor",) if scenario == "none" else POLICIES:
            seeds = 1 if quick or (policy == "reroute" and scenario != "none") else 3
            found += [_cell(size, fails, scenario, policy, seed, quick) for seed in range(seeds)]
    return found


def _cell(size: Size, fails: Granularity, scenario: Any, policy: Any, seed: int, quick: bool) -> Cell:
    config = small_run(size, fails, seed=seed, quick=quick, scenario=scenario, policy=policy)
    shown = "-" if scenario == "none" else policy
    labels = {"size": size, "fails": fails, "scenario": scenario, "policy": shown, "seed": seed}
    return Cell(labels=labels, config=config, measure=train)


def report(rows: Sequence[Row]) -> str:
    """A table for each size and kind of unit."""
    conditions = compare(rows, _BY, {"scenario": "none", "policy": "-"})
    parts = [
        f"Each run is declared to last {HOURS:g} hours, as the paper's longest by estimate. Under `low`, `mid` and "
        "`high` a sixteenth, 3/32 and an eighth of the units are down on average. Perplexity is that of all held-out "
        "text after the last step; +- is the standard deviation over seeds; differences are to the failure-free run "
        "of the same seed. The load is that of the busiest unit, 1 being a healthy step."
    ]
    for size, fails in dict.fromkeys((row["size"], row["fails"]) for row in rows):
        chosen = {key[2:]: figures for key, figures in conditions.items() if key[:2] == (size, fails)}
        what = "whole nodes fail, of 32" if fails == "node" else "pipeline stages fail, 8 in each of 4 nodes"
        parts += [f"### {size} parameters; {what}", comparison_table(chosen, ("scenario", "policy"))]
    return "\n\n".join(parts)


def plot(rows: Sequence[Row]) -> Figure:
    """Differences from the failure-free run, by scenario, a line for each policy."""
    conditions = compare(rows, _BY, {"scenario": "none", "policy": "-"})
    panels = list(dict.fromkeys((row["size"], row["fails"]) for row in rows))
    figure = Figure(figsize=(3.4 * len(panels), 3.4), layout="constrained")
    for axes, (size, fails) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        scenarios = [name for name in SCENARIOS[1:] if any(key[:3] == (size, fails, name) for key in conditions)]
        for policy in POLICIES:
            figures = [conditions[size, fails, name, policy] for name in scenarios]
            axes.errorbar(
                scenarios,
                [figure["difference"] or 0.0 for figure in figures],
                yerr=[figure["difference_deviation"] or 0.0 for figure in figures],
                marker="o",
                capsize=3,
                label=policy,
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
