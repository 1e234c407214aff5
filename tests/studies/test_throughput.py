"""Predicted throughput: what it is where it can be told by hand."""

import dataclasses

import pytest

from mecefo_jax.studies import throughput
from mecefo_jax.studies.throughput import predict


def rows_of(fails: str, **faults) -> dict[tuple, dict]:
    cells = [cell for cell in throughput.cells(True) if cell.labels["fails"] == fails]
    config = next(cell.config for cell in cells if cell.labels["scenario"] == "high")
    config = dataclasses.replace(config, faults=dataclasses.replace(config.faults, **faults))
    return {(row["policy"], row["slack"], row["techniques"], row["pieces"]): row for row in predict(config, None)}


def test_a_node_that_is_always_down():
    rows = rows_of("node", scenario="persistent", persistent_nodes=(5,))
    neighbor = rows["neighbor", None, "mrl", 1]
    assert neighbor["step_time"] == pytest.approx(max(1.0, 2 * neighbor["degraded_cost"]))
    assert neighbor["degraded_fraction"] == pytest.approx(2 / 32)
    assert rows["drop", None, None, 1]["drop_percent"] == pytest.approx(100 / 32)
    # Eight orphans on 31 nodes: some have nine in place of eight.
    assert rows["reroute", None, None, 1]["step_time"] == pytest.approx(9 / 8)
    # Divided in four, 32 orphans on 31 nodes: one has two more than 32.
    assert rows["reroute", None, None, 4]["step_time"] == pytest.approx(34 / 32)
    balanced = rows["balanced", 0.01, "mrl", 1]
    assert balanced["step_time"] <= 1.01 and balanced["tokens"] == 1
    assert balanced["drop_percent"] == pytest.approx(100 * (1 - 1 / balanced["step_time"]))


def test_a_stage_cuts_its_replica_for_those_who_drop():
    rows = rows_of("stage", scenario="script", script="fail 1.3 at 0")
    assert rows["drop", None, None, 1]["tokens"] == pytest.approx(3 / 4)
    assert rows["neighbor", None, "mrl", 1]["degraded_fraction"] == pytest.approx(2 / 32)
    assert rows["reroute", None, None, 1]["step_time"] == pytest.approx(4 / 3, rel=0.02)


def test_what_saves_less_costs_more_and_the_exact_ones_degrade_nothing():
    rows = rows_of("node", scenario="persistent", persistent_nodes=(5,))
    ml, mrl, s = (rows["balanced", 0.01, techniques, 1]["degraded_cost"] for techniques in ("ml", "mrl", "sampled 1/2"))
    assert ml < mrl < s < 1
    levels = rows["balanced", 0.0, "sampled to 1/8", 1]
    assert levels["least_cost"] < s < levels["degraded_cost"] and levels["step_time"] == 1
    auto = rows["auto", None, "sampled to 1/4", 4]
    assert 1 < auto["step_time"] <= 1.01 and 0 < auto["degraded_fraction"] < 1
    for exact in ("reroute", "drop"):
        assert rows[exact, None, None, 1]["degraded_fraction"] == 0
