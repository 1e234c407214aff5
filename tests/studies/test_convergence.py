"""The exponent is read off the norms, and failures degrade what they should."""

import math

import numpy as np
import pytest

from mecefo_jax.studies import convergence


def rows(exponent: float, failures: str) -> list[dict]:
    return [
        {"nodes": n, "steps": t, "failures": failures, "squared_norm": 3.0 * (n * t) ** exponent}
        for n in (1, 4)
        for t in (50, 800)
    ]


def test_exponent():
    both = rows(-0.5, "no") + rows(-0.25, "yes")
    assert convergence.slope(both, "no") == pytest.approx(-0.5)
    assert convergence.slope(both, "yes") == pytest.approx(-0.25)
    assert math.isnan(convergence.slope(rows(-0.5, "no")[:1], "no"))


def test_failures_are_compared_at_equal_nodes_and_steps():
    both = rows(-0.5, "no") + [row | {"squared_norm": row["squared_norm"] * row["nodes"]} for row in rows(-0.5, "yes")]
    assert convergence.ratios(both) == pytest.approx([1, 1, 4, 4])
    assert convergence.ratios(rows(-0.5, "yes")) == []
    assert "it is 2.50 times that without in the median, 1.00 to 4.00." in convergence.report(
        [row | {"degraded": 0.25} for row in both]
    )


def test_rates_and_failures_of_the_cells():
    cells = convergence.cells(False)
    assert {(c.labels["nodes"], c.labels["failures"]) for c in cells} >= {(1, "no"), (2, "yes"), (8, "no")}
    assert (1, "yes") not in {(c.labels["nodes"], c.labels["failures"]) for c in cells}
    for cell in cells:
        faults, steps, nodes = cell.config.faults, cell.labels["steps"], cell.labels["nodes"]
        assert cell.config.num_microbatches == 4 * nodes
        if cell.labels["failures"] == "yes":
            assert nodes * faults.fail_every_steps / faults.back_after_steps == pytest.approx(8), "an eighth is down"
            assert steps / faults.fail_every_steps == pytest.approx(5 * nodes)


@pytest.mark.slow
def test_a_run_descends_and_is_degraded_where_nodes_fail(tmp_path, monkeypatch):
    found = {cell.labels["failures"]: cell for cell in convergence.cells(True)}
    results = {name: convergence.measure(cell.config, tmp_path)[0] for name, cell in found.items()}
    assert results["no"]["degraded"] == 0 < results["yes"]["degraded"] <= 1
    assert all(np.isfinite(row["squared_norm"]) and row["squared_norm"] > 0 for row in results.values())
    # T is 8 in place of the shortest 50: the rate is that much higher.
    assert results["no"]["learning_rate"] == pytest.approx(0.002 * math.sqrt(2 * 50 / 8))
