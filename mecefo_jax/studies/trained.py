"""Tables of trained runs: perplexities next to the failure-free ones of the same seeds, with the noise of seeds.

What costs perplexity and what costs time can be compared by what a shorter run comes to: over a small range perplexity
goes as a power of the number of steps, so that a difference in perplexity is worth so many steps.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mecefo_jax.studies.markdown import table
from mecefo_jax.studies.study import Row

Condition = tuple[Any, ...]


def compare(
    rows: Sequence[Row], by: Sequence[str], baseline: Mapping[str, Any]
) -> dict[Condition, dict[str, float | None]]:
    """What each condition comes to.

    Differences are those of runs of the same seed, which share their initialization and data: they vary much less than
    the perplexities themselves.

    Args:
        rows: of finished runs, with ``seed`` and ``eval_perplexity``.
        by: columns that make a condition; their values are its key.
        baseline: the values in some of them by which the failure-free runs differ from others that are alike.

    Returns:
        By condition: ``runs``; mean ``perplexity`` and its standard ``deviation``; mean ``difference`` from the
        baseline in percent and its ``difference_deviation``; means of load, degraded share and tokens.
    """
    grouped: dict[Condition, list[Row]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[name] for name in by), []).append(row)
    perplexity = {(*key, row["seed"]): row["eval_perplexity"] for key, group in grouped.items() for row in group}
    out: dict[Condition, dict[str, float | None]] = {}
    for key, group in grouped.items():
        reference = tuple(baseline.get(name, value) for name, value in zip(by, key, strict=True))
        differences = [
            100 * (row["eval_perplexity"] / perplexity[*reference, row["seed"]] - 1)
            for row in group
            if (*reference, row["seed"]) in perplexity
        ]
        values = [row["eval_perplexity"] for row in group]
        out[key] = {
            "runs": len(group),
            "perplexity": statistics.mean(values),
            "deviation": _deviation(values),
            "difference": statistics.mean(differences) if differences else None,
            "difference_deviation": _deviation(differences),
            **{name: statistics.mean(row[name] for row in group) for name in _MEANS},
        }
    return out


_MEANS = ("mean_critical_load", "degraded_token_fraction", "tokens", "failures")


def exponent_of_steps(shorter: Mapping[str, float | None], fraction: float) -> float:
    """Exponent with which perplexity falls with the steps of a failure-free run; negative.

    Args:
        shorter: what ``compare`` says of runs of fewer steps next to the failure-free ones.
        fraction: of the steps that they have.
    """
    assert shorter["difference"] is not None
    return math.log1p(shorter["difference"] / 100) / math.log(fraction)


def time_to_perplexity(figures: Mapping[str, float | None], exponent: float) -> tuple[float, float | None] | None:
    """Time until a run with failures has the perplexity that one without them ends with, relative to its time.

    Args:
        figures: what ``compare`` says of the runs.
        exponent: of the steps (``exponent_of_steps``).

    Returns:
        It, and its standard deviation as far as it comes from the difference's; None where it cannot be told.
    """
    difference, load, deviation = (
        figures[name] for name in ("difference", "mean_critical_load", "difference_deviation")
    )
    if difference is None or load is None or exponent >= 0:
        return None
    ratio = 1 + difference / 100
    time = load * ratio ** (-1 / exponent)
    return time, None if deviation is None else -time / exponent * deviation / 100 / ratio


def comparison_table(
    conditions: Mapping[Condition, Mapping[str, float | None]], headings: Sequence[str], exponent: float | None = None
) -> str:
    """As Markdown.

    Args:
        conditions: what ``compare`` says.
        headings: name the parts of a condition.
        exponent: of the steps, if it is known; for the times of runs with failures to the same perplexity.
    """
    lines = [
        [
            *("-" if part is None else str(part) for part in key),
            f"{figures['perplexity']:.3f}" + _plus_minus(figures["deviation"], "{:.3f}"),
            "-"
            if figures["difference"] is None
            else f"{figures['difference']:+.2f}" + _plus_minus(figures["difference_deviation"], "{:.2f}"),
            f"{figures['degraded_token_fraction']:.1%}",
            f"{figures['mean_critical_load']:.2f}",
            *(() if exponent is None else (_time(figures, exponent),)),
            f"{figures['tokens']:,.0f}",
            f"{figures['failures']:.0f}",
            str(figures["runs"]),
        ]
        for key, figures in conditions.items()
    ]
    columns = [*headings, "perplexity", "difference, %", "degraded tokens", "mean load"]
    columns += [*(() if exponent is None else ("time to the same perplexity",)), "tokens", "failures", "runs"]
    return table(columns, lines, left=len(headings))


def _time(figures: Mapping[str, float | None], exponent: float) -> str:
    found = time_to_perplexity(figures, exponent) if figures["failures"] else None
    return "-" if found is None else f"{found[0]:.2f}" + _plus_minus(found[1], "{:.2f}")


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _plus_minus(value: float | None, form: str) -> str:
    return "" if value is None else f" ± {form.format(value)}".replace("±", "+-")
