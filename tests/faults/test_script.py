"""Scripted failures: the grammar, the boundaries, and errors that quote the clause."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mecefo_jax.config import FaultsConfig
from mecefo_jax.errors import ConfigError
from mecefo_jax.faults.source import make_fault_source


def dead(script, step, *, num_nodes=8, num_stages=1):
    granularity = "stage" if num_stages > 1 else "node"
    config = FaultsConfig(scenario="script", script=script, granularity=granularity, num_stages=num_stages)
    live = make_fault_source(config, num_nodes=num_nodes, seed=0).live(step)
    assert live.shape == (num_nodes, num_stages)
    return [tuple(int(i) for i in unit) for unit in np.argwhere(~live)]


@pytest.mark.parametrize(("step", "nodes"), [(19, []), (20, [3]), (24, [3]), (25, [3, 4]), (49, [3, 4]), (50, [4])])
def test_dead_from_the_failure_until_just_before_it_is_back(step, nodes):
    assert dead("fail 3 at 20, back at 50; fail 4 at 25", step) == [(node, 0) for node in nodes]


def test_without_back_a_node_stays_dead():
    assert dead("fail 4 at 25", 10**9) == [(4, 0)]


def test_one_clause_may_name_several_nodes():
    assert dead("fail 3 4 at 20, back at 30", 20) == [(3, 0), (4, 0)]


def test_stage_form_kills_one_stage_and_node_form_all():
    assert dead("fail 3.1 at 20; fail 2 at 20", 20, num_stages=3) == [(2, 0), (2, 1), (2, 2), (3, 1)]


def test_spaces_case_line_breaks_and_a_last_semicolon_do_not_matter():
    assert dead(" FAIL  3 at 20 ,back at 22;\n fail 4 at 20 ; ", 21) == [(3, 0), (4, 0)]


def test_a_node_may_fail_again_once_it_is_back():
    script = "fail 3 at 20, back at 30; fail 3 at 30, back at 40; fail 3 at 5, back at 20"
    assert [bool(dead(script, step)) for step in (4, 5, 20, 30, 39, 40)] == [False, True, True, True, True, False]


@pytest.mark.parametrize(
    ("script", "quoted", "reason"),
    [
        ("fail 3 at 20; explode 4 at 25", "explode 4 at 25", "fail NODE"),
        ("fail at 20", "fail at 20", "fail NODE"),
        ("fail -1 at 20", "fail -1 at 20", "fail NODE"),
        ("fail 3 at 2.5", "fail 3 at 2.5", "fail NODE"),
        ("fail 3 at 20 back 30", "fail 3 at 20 back 30", "fail NODE"),
        ("fail 3 at 20, back at 20", "fail 3 at 20, back at 20", "not after"),
        ("fail 8 at 20", "fail 8 at 20", "0 to 7"),
        ("fail 3.0 at 20", "fail 3.0 at 20", "granularity=stage"),
        ("fail 3 at 20, back at 50; fail 3 at 49", "fail 3 at 49", "already dead from step 20 until step 50"),
        ("fail 3 at 20; fail 3 at 90", "fail 3 at 90", "for good"),
        ("fail 3 at 20; fail 3 at 1, back at 21", "fail 3 at 1, back at 21", "already dead"),
        ("fail 3 3 at 20", "fail 3 3 at 20", "already dead"),
        ("fail 3 at " + "9" * 400, "9" * 400, "fail NODE"),
        ("fail \u0663 at 20", "fail \u0663 at 20", "fail NODE"),
        (";;", "", "empty"),
    ],
)
def test_bad_scripts_are_refused_with_the_clause(script, quoted, reason):
    with pytest.raises(ConfigError) as caught:
        dead(script, 0)
    message = str(caught.value)
    assert quoted in message and reason in message and "\n" not in message


def test_overlap_is_found_between_a_node_and_its_stage():
    with pytest.raises(ConfigError, match=r"stage 3\.1 is already dead"):
        dead("fail 3 at 20, back at 30; fail 3.1 at 25", 0, num_stages=2)


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"no stage 2; faults\.num_stages=2"):
        dead("fail 3.2 at 20", 0, num_stages=2)


@settings(deadline=None)
@given(st.text(alphabet="fail bck0123.,;t\n", max_size=60))
def test_no_text_gives_anything_but_outages_or_a_config_error(text):
    try:
        dead(text, 5)
    except ConfigError as error:
        assert str(error).startswith("faults.script")


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 10)), min_size=1, max_size=6),
    st.integers(0, 40),
)
def test_scripts_mean_the_union_of_their_clauses(failures, step):
    script = "; ".join(f"fail {node} at {start}, back at {start + length}" for node, start, length in failures)
    spans = {node: set() for node in range(4)}
    overlap = False
    for node, start, length in failures:
        span = set(range(start, start + length))
        overlap |= bool(spans[node] & span)
        spans[node] |= span
    if overlap:
        with pytest.raises(ConfigError, match="already dead"):
            dead(script, step, num_nodes=4)
    else:
        assert dead(script, step, num_nodes=4) == [(node, 0) for node in range(4) if step in spans[node]]
