"""Recorded traces: who takes which slot when, and malformed rows by file and line."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mecefo_jax.config import FaultsConfig
from mecefo_jax.errors import ConfigError, DataError
from mecefo_jax.faults.source import make_fault_source
from mecefo_jax.faults.trace import TraceRow, trace_outages

MINUTE = 60_000


def source(tmp_path, text, *, num_nodes=2, **changes):
    path = tmp_path / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    config = FaultsConfig(scenario="trace", trace_file=str(path), **changes)
    return make_fault_source(config, num_nodes=num_nodes, seed=0)


def live_nodes(fault_source, step):
    return list(np.flatnonzero(fault_source.live(step)[:, 0]))


def test_the_run_starts_when_the_cluster_is_complete_and_slots_go_by_arrival(tmp_path):
    # x is gone before two are present together, so the slots are y (0) and z (1), from minute 5 on.
    text = f"0,add,x\n{MINUTE},remove,x\n{2 * MINUTE},add,y\n{5 * MINUTE},add,z\n{8 * MINUTE},remove,y\n"
    trace = source(tmp_path, text)
    assert [live_nodes(trace, step) for step in (0, 2, 3, 10**6)] == [[0, 1], [0, 1], [1], [1]]


def test_a_later_instance_takes_the_slot_that_was_dead_for_longest(tmp_path):
    text = (
        f"0,add,a\n0,add,b\n0,add,c\n{MINUTE},remove,c\n{2 * MINUTE},remove,a\n{4 * MINUTE},add,d\n{6 * MINUTE},add,e\n"
    )
    trace = source(tmp_path, text, num_nodes=3)
    assert [live_nodes(trace, step) for step in (0, 1, 2, 3, 4, 5, 6)] == [
        [0, 1, 2], [0, 1], [1], [1], [1, 2], [1, 2], [0, 1, 2]
    ]  # fmt: skip


def test_a_waiting_spare_takes_over_at_once_and_in_turn_kills_its_slot(tmp_path):
    text = (
        f"0,add,a\n0,add,b\n0,add,spare1\n0,add,spare2\n{MINUTE},remove,spare1\n"
        f"{2 * MINUTE},remove,a\n{3 * MINUTE},remove,spare2\n"
    )
    trace = source(tmp_path, text)
    assert [live_nodes(trace, step) for step in (1, 2, 3)] == [[0, 1], [0, 1], [1]]


def test_a_name_may_come_back_into_another_slot(tmp_path):
    text = f"0,add,a\n0,add,b\n{MINUTE},remove,a\n{2 * MINUTE},remove,b\n{3 * MINUTE},add,b\n"
    trace = source(tmp_path, text)
    assert live_nodes(trace, 3) == [0]


def test_step_seconds_and_frequency_scale_time(tmp_path):
    text = f"0,add,a\n0,add,b\n{10 * MINUTE},remove,a\n{20 * MINUTE},add,c\n"
    slow = source(tmp_path, text, step_seconds=30.0)
    assert [live_nodes(slow, step) for step in (19, 20, 39, 40)] == [[0, 1], [1], [1], [0, 1]]
    fast = source(tmp_path, text, step_seconds=60.0, frequency=2.0)
    assert [live_nodes(fast, step) for step in (4, 5, 9, 10)] == [[0, 1], [1], [1], [0, 1]]


def test_stages_take_instances_as_nodes_do(tmp_path):
    text = "".join(f"0,add,n{i}\n" for i in range(4)) + f"{MINUTE},remove,n2\n"
    live = source(tmp_path, text, granularity="stage", num_stages=2).live(1)
    np.testing.assert_array_equal(live, [[True, True], [False, True]])


def test_carriage_returns_blank_lines_spaces_and_a_byte_order_mark_are_fine(tmp_path):
    trace = source(tmp_path, b"\xef\xbb\xbf0,add,a\r\n\r\n0 , add , b\r\n60000,remove,a")
    assert live_nodes(trace, 1) == [1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("0,add", "expected milliseconds,add|remove,name"),
        ("0,add,b,c", "expected milliseconds,add|remove,name"),
        ("0,add,", "expected milliseconds,add|remove,name"),
        ("1.5,add,b", "whole number"),
        ("-1,add,b", "whole number"),
        ("9" * 5000 + ",add,b", "whole number"),
        ("time,action,name", "whole number"),
        ("7,gone,b", "expected add or remove; got 'gone'"),
        ("7,add,a", "a is added twice"),
        ("7,remove,b", "b is removed while it is absent"),
        ("4,add,b", "time runs backwards, from 5 to 4 ms"),
    ],
)
def test_malformed_rows_are_refused_with_file_and_line(tmp_path, line, reason):
    with pytest.raises(DataError) as caught:
        source(tmp_path, f"5,add,a\n\n{line}\n")
    assert reason in str(caught.value)
    assert f"{tmp_path / 'trace.csv'}:3: " in str(caught.value)


def test_bytes_that_are_no_text_are_refused_with_file_and_line(tmp_path):
    with pytest.raises(DataError, match=r"trace\.csv:2: not UTF-8"):
        source(tmp_path, b"0,add,a\n0,add,\xff\n")


def test_missing_and_empty_files_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"trace\.csv: the trace is empty"):
        source(tmp_path, "\n")
    config = FaultsConfig(scenario="trace", trace_file=str(tmp_path / "absent.csv"))
    with pytest.raises(DataError, match=r"absent\.csv: cannot read"):
        make_fault_source(config, num_nodes=2, seed=0)


def test_a_cluster_larger_than_the_trace_is_refused_with_the_largest_that_works(tmp_path):
    with pytest.raises(ConfigError, match=r"at most 2 .* 3 units; set mesh\.num_nodes .* to 2 or less"):
        source(tmp_path, "0,add,a\n0,add,b\n", num_nodes=3)


@st.composite
def traces(draw):
    rows, present, time = [], [], 0
    for number in range(draw(st.integers(3, 40))):
        time += draw(st.integers(0, 3))
        if present and draw(st.booleans()):
            name = present.pop(draw(st.integers(0, len(present) - 1)))
            rows.append(TraceRow(time, False, name))
        else:
            present.append(f"n{number}")
            rows.append(TraceRow(time, True, f"n{number}"))
    return rows


@settings(max_examples=200, deadline=None)
@given(rows=traces(), num_units=st.integers(1, 4))
def test_as_many_units_live_as_instances_are_present_up_to_the_cluster(rows, num_units):
    try:
        outages = trace_outages(rows, num_units, 1.0)
    except ConfigError:
        return
    present, origin = 0, None
    for row in rows:
        present += 1 if row.added else -1
        if origin is None and present == num_units:
            origin = row.milliseconds
    for time in range(origin, rows[-1].milliseconds + 2):
        present = sum((1 if row.added else -1) for row in rows if row.milliseconds <= time)
        dead = [outage.unit for outage in outages if outage.start <= time - origin < outage.end]
        assert len(dead) == len(set(dead))
        assert num_units - len(dead) == min(present, num_units)
