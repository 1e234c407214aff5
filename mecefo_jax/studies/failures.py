"""The paper's two side experiments: nodes that stay down for the whole run, and failures that come faster.

At a higher frequency failures and repairs are both that much quicker, so that as many nodes are down as before.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from mecefo_jax.studies.small_runs import (
    BACKWARDS_IN_WORDS,
    FAILURE_FREE,
    NODES,
    TRAINED_COLUMNS,
    VARIANT,
    Variant,
    small_run,
    train,
)
from mecefo_jax.studies.study import Cell, Row, Study
from mecefo_jax.studies.trained import Condition, compare, comparison_table

VARIANTS: tuple[Variant, ...] = (
    ("neighbor", "paper", "weight"),
    ("balanced", "sampled", None),
    ("drop", None, None),
)
_SEED = 0
_SIZE_AND_SEED = "1M parameters, one seed ([perplexity.md](perplexity.md) tells how much seeds differ)."
_DOWN = (1, 4)
_FREQUENCIES = (1.0, 4.0)


def persistent_cells(quick: bool) -> list[Cell]:
    """One or four of the nodes down for good, evenly spread."""
    cells = []
    for down in (0, *_DOWN[: 1 if quick else None]):
        nodes = tuple(NODES // down * index for index in range(down)) if down else ()
        faults: dict[str, Any] = {"scenario": "persistent", "persistent_nodes": nodes} if down else {}
        cells += [_cell({"down": down}, quick, variant, **faults) for variant in _variants(down > 0)]
    return cells


def frequency_cells(quick: bool) -> list[Cell]:
    """``high``, and failures four times as often."""
    cells = []
    for frequency in (0.0, *_FREQUENCIES[: 1 if quick else None]):
        faults: dict[str, Any] = {"scenario": "high", "frequency": frequency} if frequency else {}
        cells += [_cell({"frequency": frequency}, quick, variant, **faults) for variant in _variants(frequency > 0)]
    return cells


def _variants(fails: bool) -> tuple[Variant, ...]:
    return VARIANTS if fails else (FAILURE_FREE,)


def _cell(labels: Row, quick: bool, variant: Variant, **faults: Any) -> Cell:
    config = small_run("1M", "node", seed=_SEED, quick=quick, variant=variant, **faults)
    return Cell(
        labels={**labels, **dict(zip(VARIANT, variant, strict=True)), "seed": _SEED}, config=config, measure=train
    )


def _compare(rows: Sequence[Row], by: str) -> dict[Condition, dict[str, float | None]]:
    return compare(rows, (by, *VARIANT), {by: 0, **dict.fromkeys(VARIANT)})


def _report(rows: Sequence[Row], by: str, what: str) -> str:
    return f"{what}\n\n{BACKWARDS_IN_WORDS}\n\n{comparison_table(_compare(rows, by), (by, *VARIANT))}"


def _plot(rows: Sequence[Row], by: str, label: str) -> Figure:
    conditions = _compare(rows, by)
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for variant in VARIANTS:
        places = [key[0] for key in conditions if key[1:] == variant]
        figures = [conditions[place, *variant] for place in places]
        axes.errorbar(
            [str(place) for place in places],
            [figure["difference"] or 0.0 for figure in figures],
            yerr=[figure["difference_deviation"] or 0.0 for figure in figures],
            marker="o",
            capsize=3,
            label=", ".join(filter(None, variant)),
        )
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set_xlabel(label)
    axes.set_ylabel("perplexity, % above failure-free")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def persistent_report(rows: Sequence[Row]) -> str:
    """A line for each number of nodes and variant."""
    what = f"Of {NODES} nodes some are down for the whole run. {_SIZE_AND_SEED} `reroute` is exact and not shown."
    return _report(rows, "down", what)


def frequency_report(rows: Sequence[Row]) -> str:
    """A line for each frequency and variant."""
    what = f"`high` and faster: both times are divided, so that as many nodes are down. {_SIZE_AND_SEED}"
    return _report(rows, "frequency", what)


PERSISTENT = Study(
    title="Nodes that stay down",
    cells=persistent_cells,
    columns=("down", *VARIANT, "seed", *TRAINED_COLUMNS),
    report=persistent_report,
    plot=lambda rows: _plot(rows, "down", f"nodes down, of {NODES}"),
)
FREQUENCY = Study(
    title="Faster failures",
    cells=frequency_cells,
    columns=("frequency", *VARIANT, "seed", *TRAINED_COLUMNS),
    report=frequency_report,
    plot=lambda rows: _plot(rows, "frequency", "frequency of the scenario high"),
)
