"""The paper's two side experiments: nodes that stay down for the whole run, and failures that come faster.

At a higher frequency failures and repairs are both that much quicker, so that as many nodes are down as before.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from mecefo_jax.studies.small_runs import NODES, TRAINED_COLUMNS, small_run, train
from mecefo_jax.studies.study import Cell, Row, Study
from mecefo_jax.studies.trained import compare, comparison_table

POLICIES = ("neighbor", "balanced", "drop")
_DOWN = (1, 2, 4)
_FREQUENCIES = (1.0, 2.0, 4.0)


Settings = dict[str, Any]


def persistent_cells(quick: bool) -> list[Cell]:
    """1, 2 and 4 of the nodes down for good, evenly spread; two seeds."""
    cells = []
    for seed, down in itertools.product(range(1 if quick else 2), (0, *_DOWN[:1]) if quick else (0, *_DOWN)):
        nodes = tuple(NODES // down * index for index in range(down)) if down else ()
        for policy in POLICIES if down else ("-",):
            faults: Settings = {"scenario": "persistent", "persistent_nodes": nodes, "policy": policy} if down else {}
            config = small_run("1M", "node", seed=seed, quick=quick, **faults)
            labels = {"down": down, "policy": policy, "seed": seed}
            cells.append(Cell(labels=labels, config=config, measure=train))
    return cells


def frequency_cells(quick: bool) -> list[Cell]:
    """``high`` at one to four times its frequency; two seeds."""
    cells = []
    for seed, frequency in itertools.product(range(1 if quick else 2), (0.0, *_FREQUENCIES[: 1 if quick else None])):
        for policy in POLICIES if frequency else ("-",):
            scenario: Settings = {"scenario": "high", "frequency": frequency, "policy": policy} if frequency else {}
            config = small_run("1M", "node", seed=seed, quick=quick, **scenario)
            labels = {"frequency": frequency, "policy": policy, "seed": seed}
            cells.append(Cell(labels=labels, config=config, measure=train))
    return cells


def _report(rows: Sequence[Row], by: str, baseline: float, what: str) -> str:
    conditions = compare(rows, (by, "policy"), {by: baseline, "policy": "-"})
    return f"{what}\n\n{comparison_table(conditions, (by, 'policy'))}"


def _plot(rows: Sequence[Row], by: str, baseline: float, label: str) -> Figure:
    conditions = compare(rows, (by, "policy"), {by: baseline, "policy": "-"})
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for policy in POLICIES:
        places = [key[0] for key in conditions if key[1] == policy]
        figures = [conditions[place, policy] for place in places]
        axes.errorbar(
            [str(place) for place in places],
            [figure["difference"] or 0.0 for figure in figures],
            yerr=[figure["difference_deviation"] or 0.0 for figure in figures],
            marker="o",
            capsize=3,
            label=policy,
        )
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set_xlabel(label)
    axes.set_ylabel("perplexity, % above failure-free")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def persistent_report(rows: Sequence[Row]) -> str:
    """A line for each number of nodes and policy."""
    what = f"Of {NODES} nodes some are down for the whole run; 1M parameters. `reroute` is exact and not shown."
    return _report(rows, "down", 0, what)


def frequency_report(rows: Sequence[Row]) -> str:
    """A line for each frequency and policy."""
    what = "`high` at other frequencies: both times are divided, so that as many nodes are down; 1M parameters."
    return _report(rows, "frequency", 0, what)


PERSISTENT = Study(
    title="Nodes that stay down",
    cells=persistent_cells,
    columns=("down", "policy", "seed", *TRAINED_COLUMNS),
    report=persistent_report,
    plot=lambda rows: _plot(rows, "down", 0, f"nodes down, of {NODES}"),
)
FREQUENCY = Study(
    title="Faster failures",
    cells=frequency_cells,
    columns=("frequency", "policy", "seed", *TRAINED_COLUMNS),
    report=frequency_report,
    plot=lambda rows: _plot(rows, "frequency", 0, "frequency of the scenario high"),
)
