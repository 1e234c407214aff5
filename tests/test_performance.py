"""Throughput: committed tokens over the time from one dispatch to another."""

import pytest

from mecefo_jax.performance import Throughput


def test_reading_late_or_early_changes_no_rate():
    """Ten seconds a step; the results are read one step late, or two at once before a save."""
    throughput = Throughput(flops_per_token=3.0, num_devices=2, device_peak=60.0)
    start = throughput._start
    throughput.committed(400, ended=start + 10)
    assert throughput.read() == pytest.approx({"perf/step_time_s": 10, "perf/tokens_per_s": 40, "perf/mfu": 1.0})
    throughput.committed(400, ended=start + 20)
    throughput.committed(400, ended=start + 30)
    assert throughput.read()["perf/tokens_per_s"] == pytest.approx(40)


def test_pauses_are_left_out_and_nothing_committed_is_no_reading():
    throughput = Throughput(flops_per_token=3.0, num_devices=1, device_peak=None)
    assert throughput.read() == {}
    start = throughput._start
    throughput.pause(5)
    throughput.committed(100, ended=start + 15)
    assert throughput.read() == pytest.approx({"perf/step_time_s": 10, "perf/tokens_per_s": 10})
