"""Perplexity under the paper's scenarios, by policy and backward pass, where whole nodes fail and where stages do."""

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from mecefo_jax.studies.small_runs import (
    BACKWARDS_IN_WORDS,
    FAILURE_FREE,
    HOURS,
    NODES,
    REPLICAS,
    SLACK,
    STAGES,
    STEPS_IN_WORDS,
    TRAINED_COLUMNS,
    VARIANT,
    Granularity,
    Size,
    Variant,
    size_in_words,
    small_run,
    train,
)
from mecefo_jax.studies.study import Cell, Row, Study
from mecefo_jax.studies.trained import Condition, compare, comparison_table, exponent_of_steps

SCENARIOS = ("low", "mid", "high")
_DROP: Variant = ("drop", None, None)
_NEIGHBOR: Variant = ("neighbor", "paper", "weight")
_MAIN: tuple[Variant, ...] = (("balanced", "sampled", None), _NEIGHBOR, _DROP)
_TO_QUARTER: Variant = ("balanced", "sampled to 1/4", None)
_FFN_TO_QUARTER: Variant = ("balanced", "sampled to 1/4 with ffn", None)
_OTHERS: tuple[Variant, ...] = (
    ("balanced", "sampled 1/2", None),
    ("balanced", "sampled 3/8", None),
    ("balanced", "sampled to 1/8", None),
)
_OF_MOMENTUM: Variant = ("balanced", "paper", "momentum")
_PAPER: tuple[Variant, ...] = (("balanced", "paper", "weight"), _OF_MOMENTUM)
_AUTO: Variant = ("auto", "paper", "momentum")
_EXACT: Variant = ("reroute", None, None)
_LONGER = (_DROP, _FFN_TO_QUARTER, _TO_QUARTER, _OF_MOMENTUM, _NEIGHBOR)
VARIANTS = (*_MAIN, *_OTHERS, _TO_QUARTER, _FFN_TO_QUARTER, *_PAPER, _AUTO, _EXACT)
_FAILS: tuple[Granularity, ...] = ("node", "stage")
_BY = ("size", "fails", "scenario", *VARIANT)
_SHORTER = 2 / 3
"""Fraction of the steps of a failure-free run that shows what steps are worth."""
_COLORS = 10
"""Of matplotlib's cycle; after them another marker."""
_BASELINE = {"scenario": "none", "fails": "node", **dict.fromkeys(VARIANT)}


def cells(quick: bool) -> list[Cell]:
    """1M under all scenarios, 5M without failures and under the worst; three seeds of 1M under the worst, else one.

    Failure-free runs of 1M come in two lengths. Longer runs try what takes the time of a healthy step or little more,
    and the paper's policy; the longest one, with one seed, what came out best.

    Without failures it does not matter what could fail. ``reroute`` is exact, whatever fails: one seed shows it. Where
    stages fail, other fractions and bases have one seed too. There alone is ``auto``: where whole nodes fail it does,
    with the paper's pass, what ``balanced`` does.
    """
    seeds = range(1 if quick else 3)
    found = [_cell("1M", "node", "none", FAILURE_FREE, seed, quick) for seed in seeds]
    found += [_cell("1M", "node", "shorter", FAILURE_FREE, seed, quick) for seed in seeds]
    for variants in (_MAIN, _PAPER, _OTHERS):
        found += [
            _cell("1M", "node", "high", variant, seed, quick) for seed, variant in itertools.product(seeds, variants)
        ]
    found += [_cell("1M", fails, "high", _EXACT, 0, quick) for fails in _FAILS]
    if not quick:
        found.append(_cell("5M", "node", "none", FAILURE_FREE, 0, quick))
        found += [_cell("5M", "node", "high", variant, 0, quick) for variant in _MAIN]
    at_stages = itertools.product(seeds, (*_MAIN, _AUTO))
    found += [_cell("1M", "stage", "high", variant, seed, quick) for seed, variant in at_stages]
    found += [_cell("1M", "stage", "high", variant, 0, quick) for variant in (*_OTHERS, *_PAPER)]
    if quick:
        return found
    found += [_cell("1M", *rest, 0, quick) for rest in itertools.product(_FAILS, ("low", "mid"), _MAIN)]
    for seed in seeds:
        found.append(_cell("1M longer", "node", "none", FAILURE_FREE, seed, quick))
        found.append(_cell("1M longer", "node", "shorter", FAILURE_FREE, seed, quick))
    for seed in seeds:
        found += [_cell("1M longer", "node", "high", variant, seed, quick) for variant in _LONGER]
    found.append(_cell("1M longest", "node", "none", FAILURE_FREE, 0, quick))
    found.append(_cell("1M longest", "node", "high", _FFN_TO_QUARTER, 0, quick))
    return found


def _cell(size: Size, fails: Granularity, scenario: str, variant: Variant, seed: int, quick: bool) -> Cell:
    is_shorter = scenario == "shorter"
    config = small_run(
        size,
        fails,
        seed=seed,
        quick=quick,
        scenario="none" if is_shorter else scenario,
        fraction=_SHORTER if is_shorter else 1.0,
        variant=variant,
    )
    labels = {"size": size, "fails": fails, "scenario": scenario, "seed": seed}
    return Cell(labels=labels | dict(zip(VARIANT, variant, strict=True)), config=config, measure=train)


def report(rows: Sequence[Row]) -> str:
    """A table for each size and kind of unit."""
    conditions = compare(rows, _BY, _BASELINE)
    parts = [
        f"{STEPS_IN_WORDS} Each run is declared to last {HOURS:g} hours, as the paper's longest by estimate. "
        "Under `low`, `mid` and "
        "`high` a sixteenth, 3/32 and an eighth of the units are down on average. Perplexity is that of all held-out "
        "text after the last step; +- is the standard deviation over seeds; differences are to the failure-free run "
        "of the same seed. The load is that of the busiest unit, 1 being a healthy step; `balanced` may take "
        f"{SLACK:.0%} more than that, but nothing more where it samples down to 1/4 or 1/8. Steps that a policy has no "
        "plan for (`drop`, where every replica is cut) are waited out, and not counted.",
        BACKWARDS_IN_WORDS,
        "`shorter` runs have two thirds of the steps. What they come to says how many steps a difference is worth; the "
        "time to the same perplexity as without failures is the load times the steps that this takes, relative "
        "to a cluster without failures. What is waited out, under `drop` where stages fail, is not in it.",
    ]
    for size, fails in _panels(rows):
        chosen = {key[2:]: conditions[key] for key in sorted(conditions, key=_order) if _is_in(key, size, fails)}
        what = f"whole nodes fail, of {NODES}"
        if fails == "stage":
            what = f"pipeline stages fail, {STAGES} in each of {REPLICAS} nodes"
        parts += [f"### {size_in_words(size)}; {what}", comparison_table(chosen, _BY[2:], _exponent(conditions, size))]
    return "\n\n".join(parts)


def _exponent(conditions: Mapping[Condition, Mapping[str, float | None]], size: str) -> float | None:
    """What steps are worth at a size, if that is measured."""
    shorter = (size, "node", "shorter", *FAILURE_FREE)
    if shorter not in conditions or conditions[shorter]["difference"] is None:
        return None
    return exponent_of_steps(conditions[shorter], _SHORTER)


def _panels(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Sizes, and what fails in runs of them; those without failures alone, if there are no others yet."""
    failing = {(row["size"], row["fails"]) for row in rows if row["scenario"] in SCENARIOS}
    return sorted(failing or {(row["size"], row["fails"]) for row in rows})


def _is_in(key: Condition, size: str, fails: str) -> bool:
    """The failure-free runs are in both of a size's tables."""
    return key[0] == size and (key[1] == fails or key[2] in ("none", "shorter"))


def _order(key: Condition) -> tuple[int, int]:
    scenarios, variants = ("none", "shorter", *SCENARIOS), (FAILURE_FREE, *VARIANTS)
    return scenarios.index(key[2]), variants.index(key[3:])


def plot(rows: Sequence[Row]) -> Figure:
    """Differences from the failure-free run, by scenario, a line for each policy."""
    conditions = compare(rows, _BY, _BASELINE)
    panels = _panels(rows)
    figure = Figure(figsize=(3.6 * len(panels) + 2, 3.8), layout="constrained")
    for axes, (size, fails) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        scenarios = [name for name in SCENARIOS if any(key[:3] == (size, fails, name) for key in conditions)]
        for place, variant in enumerate(VARIANTS):
            keys = [(size, fails, name, *variant) for name in scenarios]
            shown = [key for key in keys if key in conditions and conditions[key]["difference"] is not None]
            figures = [conditions[key] for key in shown]
            axes.errorbar(
                [scenarios.index(key[2]) + 0.06 * (place - len(VARIANTS) / 2) for key in shown],  # side by side
                [figure["difference"] for figure in figures],
                yerr=[figure["difference_deviation"] or 0.0 for figure in figures],
                marker="os"[place // _COLORS],
                capsize=3,
                label=", ".join(filter(None, variant)),
            )
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.set_title(f"{size}, {fails}s fail", fontsize=10)
        axes.set_xticks(range(len(scenarios)), scenarios)
        axes.set_xlim(-0.5, len(scenarios) - 0.5)
        axes.set_xlabel("scenario")
        axes.grid(axis="y", alpha=0.3)
    figure.axes[0].set_ylabel("perplexity, % above failure-free")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    return figure


STUDY = Study(
    title="Perplexity under failures",
    cells=cells,
    columns=(*_BY, "seed", *TRAINED_COLUMNS),
    report=report,
    plot=plot,
)
