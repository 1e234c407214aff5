"""Comparisons pair runs of one seed, and tables say what they compare."""

import statistics

import pytest

from mecefo_jax.studies.trained import compare, comparison_table, exponent_of_steps, time_to_perplexity


def row(policy: str, seed: int, perplexity: float, **changes) -> dict:
    figures = {"mean_critical_load": 1.5, "degraded_token_fraction": 0.25, "tokens": 1000, "failures": 3}
    return {"policy": policy, "seed": seed, "eval_perplexity": perplexity} | figures | changes


ROWS = [row("-", 0, 10.0), row("-", 1, 20.0), row("drop", 0, 10.1), row("drop", 1, 20.6, tokens=800), row("x", 7, 5.0)]


def test_differences_are_those_of_the_same_seed():
    found = compare(ROWS, ("policy",), {"policy": "-"})
    drop = found[("drop",)]
    assert drop["difference"] == pytest.approx((1.0 + 3.0) / 2)
    assert drop["difference_deviation"] == pytest.approx(statistics.stdev([1.0, 3.0]))
    assert drop["perplexity"] == pytest.approx(15.35)
    assert (drop["tokens"], drop["runs"]) == (900, 2)
    assert found[("-",)]["difference"] == 0
    assert found[("x",)]["difference"] is None, "there is no failure-free run of its seed"
    assert found[("x",)]["deviation"] is None, "one run has no spread"


def test_table_shows_them():
    lines = comparison_table(compare(ROWS, ("policy",), {"policy": "-"}), ("policy",)).splitlines()
    assert lines[0].split(" | ")[:3] == ["| policy", "perplexity", "difference, %"]
    assert "| drop | 15.350 +- 7.425 | +2.00 +- 1.41 | 25.0% | 1.50 | 900 | 3 | 2 |" in lines
    assert "| x | 5.000 | - | 25.0% | 1.50 | 1,000 | 3 | 1 |" in lines


def test_what_a_difference_in_perplexity_is_worth_in_time():
    """Perplexity as the steps to the power of -1/2: a quarter of them is twice as much, 10% more is 21% of steps."""
    exponent = exponent_of_steps({"difference": 100.0}, 0.25)
    assert exponent == pytest.approx(-0.5)
    slower = {"difference": 10.0, "mean_critical_load": 1.5, "difference_deviation": 1.0}
    time, deviation = time_to_perplexity(slower, exponent)
    assert time == pytest.approx(1.5 * 1.21)
    worse = time_to_perplexity(slower | {"difference": 10.01}, exponent)[0]
    assert deviation == pytest.approx((worse - time) * 100, rel=1e-3)
    assert time_to_perplexity(slower | {"difference": 0.0, "difference_deviation": None}, exponent) == (1.5, None)
    assert time_to_perplexity(slower | {"difference": None}, exponent) is None
    lines = comparison_table(compare(ROWS, ("policy",), {"policy": "-"}), ("policy",), exponent).splitlines()
    assert lines[0].split(" | ")[5] == "time to the same perplexity"
    assert "| 1.50 | 1.56 +- 0.04 | 900 |" in lines[3]
    assert "| 1.50 | - | 1,000 |" in lines[4]
