"""Tables of trained runs: perplexities next to the failure-free ones of the same seeds, with the noise of seeds."""

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


def comparison_table(conditions: Mapping[Condition, Mapping[str, float | None]], headings: Sequence[str]) -> str:
    """As Markdown; ``headings`` name the parts of a condition."""
    lines = [
        [
            *("-" if part is None else str(part) for part in key),
            f"{figures['perplexity']:.3f}" + _plus_minus(figures["deviation"], "{:.3f}"),
            "-"
            if figures["difference"] is None
            else f"{figures['difference']:+.2f}" + _plus_minus(figures["difference_deviation"], "{:.2f}"),
            f"{figures['degraded_token_fraction']:.1%}",
            f"{figures['mean_critical_load']:.2f}",
            f"{figures['tokens']:,.0f}",
            f"{figures['failures']:.0f}",
            str(figures["runs"]),
        ]
        for key, figures in conditions.items()
    ]
    columns = [*headings, "perplexity", "difference, %", "degraded tokens", "mean load", "tokens", "failures", "runs"]
    return table(columns, lines, left=len(headings))


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _plus_minus(value: float | None, form: str) -> str:
    return "" if value is None else f" ± {form.format(value)}".replace("±", "+-")
