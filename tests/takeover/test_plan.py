"""Invariants of plans, for every policy and any set of live units."""

import dataclasses
import fractions
import math
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mecefo_jax.config import AutoConfig, DegradedConfig
from mecefo_jax.errors import ConfigError, TooFewLiveNodesError
from mecefo_jax.takeover import Plan, make_plan, stage_of_layers
from mecefo_jax.takeover.auto import Errors, Prospect, choose, estimate, expected_errors
from mecefo_jax.takeover.plan import POLICIES

LIVE_NODES = st.integers(1, 12).flatmap(lambda n: hnp.arrays(bool, (n, 1)))
LIVE_UNITS = st.tuples(st.integers(1, 8), st.integers(1, 5)).flatmap(lambda shape: hnp.arrays(bool, shape))
SLICES = st.integers(1, 5)
POLICY = st.sampled_from(POLICIES)


def plan_of(live_NS, policy, microbatches_per_node=4, degraded_costs=(0.6,), slack=0.1) -> Plan:
    return make_plan(
        np.asarray(live_NS, dtype=bool),
        policy,
        microbatches_per_node=microbatches_per_node,
        degraded_costs=degraded_costs,
        slack=slack,
    )


def load_at(plan: Plan, degraded_cost: float) -> np.ndarray:
    return dataclasses.replace(plan, degraded_costs=(degraded_cost,)).load_NS


def plan_or_skip(live_NS, policy, microbatches_per_node, **costs) -> Plan:
    try:
        return plan_of(live_NS, policy, microbatches_per_node, **costs)
    except TooFewLiveNodesError:
        enough = {
            "neighbor": live_NS.any(),
            "reroute": live_NS.any(axis=0).all(),
            "balanced": live_NS.any(axis=0).all(),
            "drop": live_NS.all(axis=1).any(),
            "auto": live_NS.any(),
        }
        assert not enough[policy]
        assume(False)
        raise


def nodes_alive(num_nodes, *dead):
    live_NS = np.ones((num_nodes, 1), dtype=bool)
    live_NS[list(dead)] = False
    return live_NS


def test_the_policies_are_those_of_the_config():
    assert POLICIES == ("neighbor", "reroute", "balanced", "drop", "auto")


@settings(deadline=None)
@given(live_NS=LIVE_UNITS, policy=POLICY, per_node=SLICES)
def test_every_microbatch_runs_exactly_once_on_a_node_with_a_live_stage(live_NS, policy, per_node):
    plan = plan_or_skip(live_NS, policy, per_node)
    runs = [np.concatenate(plan.microbatches_of(node)) for node in range(plan.num_nodes)]
    ids = np.sort(np.concatenate([*runs, plan.dropped]))
    np.testing.assert_array_equal(ids, np.arange(len(live_NS) * per_node))
    for node, run in enumerate(runs):
        assert live_NS[node].any() or run.size == 0
    if policy != "drop":
        assert plan.dropped.size == 0 and np.all(plan.assignee_MS >= 0)


@settings(deadline=None)
@given(live_NS=LIVE_UNITS, policy=POLICY, per_node=SLICES)
def test_dead_units_get_nothing_and_the_work_adds_up(live_NS, policy, per_node):
    plan = plan_or_skip(live_NS, policy, per_node)
    load_NS = load_at(plan, 1.0)
    assert load_NS.shape == live_NS.shape
    np.testing.assert_array_equal(load_NS[~live_NS], 0)
    computed = plan.num_microbatches - len(plan.dropped)
    assert load_NS.sum() * per_node == pytest.approx(computed * plan.num_stages)
    # A half-price degraded microbatch shows how many of them there are.
    saved = (load_NS - load_at(plan, 0.5)).sum() * per_node * 2
    assert saved == pytest.approx(plan.degraded_MS.sum())


@settings(deadline=None)
@given(live_NS=LIVE_UNITS, policy=POLICY, per_node=SLICES)
def test_a_plan_is_a_pure_function_and_read_only(live_NS, policy, per_node):
    plan = plan_or_skip(live_NS, policy, per_node)
    again = plan_of(live_NS.copy(), policy, per_node)
    for name in ("live_NS", "assignee_MS", "level_MS", "executor_M"):
        np.testing.assert_array_equal(getattr(plan, name), getattr(again, name))
        assert not getattr(plan, name).flags.writeable
    assert plan.assignee_MS.dtype == plan.executor_M.dtype == np.int32 and plan.level_MS.dtype == np.int8
    live_NS[:] = ~live_NS
    np.testing.assert_array_equal(plan.live_NS, again.live_NS)


@settings(deadline=None)
@given(shape=st.tuples(st.integers(1, 8), st.integers(1, 5)), policy=POLICY, per_node=SLICES)
def test_when_all_are_healthy_each_node_does_its_slice_exactly(shape, policy, per_node):
    plan = plan_of(np.ones(shape), policy, per_node)
    assert plan.degraded.size == plan.taken_over.size == plan.dropped.size == 0
    for node in range(shape[0]):
        exact, degraded = plan.microbatches_of(node)
        np.testing.assert_array_equal(exact, np.arange(node * per_node, (node + 1) * per_node))
        assert degraded.size == 0
    np.testing.assert_array_equal(plan.load_NS, np.ones(shape))
    assert plan.critical_load == 1.0


@settings(deadline=None)
@given(live_NS=LIVE_UNITS, policy=POLICY, per_node=SLICES)
def test_the_executor_is_home_while_a_stage_of_it_lives(live_NS, policy, per_node):
    plan = plan_or_skip(live_NS, policy, per_node)
    for microbatch in range(plan.num_microbatches):
        home = microbatch // per_node
        assert plan.home_M[microbatch] == home
        if plan.assignee_MS[microbatch, 0] < 0:
            assert plan.executor_M[microbatch] == -1
        elif live_NS[home].any():
            assert plan.executor_M[microbatch] == home
        else:
            assert plan.executor_M[microbatch] == plan.assignee_MS[microbatch, 0]


@settings(deadline=None)
@given(live_NS=LIVE_NODES, policy=POLICY, per_node=SLICES)
def test_whole_nodes_are_the_case_of_one_stage(live_NS, policy, per_node):
    plan = plan_or_skip(live_NS, policy, per_node)
    np.testing.assert_array_equal(plan.executor_M, plan.assignee_MS[:, 0])
    np.testing.assert_array_equal(plan.degraded, np.flatnonzero(plan.degraded_MS[:, 0]))
    for node in range(plan.num_nodes):
        for ids, degraded in zip(plan.microbatches_of(node), (False, True), strict=True):
            expected = np.flatnonzero((plan.executor_M == node) & (plan.degraded_MS[:, 0] == degraded))
            np.testing.assert_array_equal(ids, expected)


@settings(deadline=None)
@given(live_NS=LIVE_UNITS, per_node=SLICES)
def test_neighbor_equals_a_walk_around_the_rings(live_NS, per_node):
    plan = plan_or_skip(live_NS, "neighbor", per_node)
    num_nodes, num_stages = live_NS.shape
    assignee, degraded, count = {}, set(), np.zeros(live_NS.shape)
    for home in range(num_nodes):
        node = home
        while not live_NS[node].any():
            node = (node + 1) % num_nodes
        assignee[home] = node
        if node != home:
            degraded |= {(n, s) for n in (home, node) for s in range(num_stages)}
        for stage in range(num_stages):
            cover = stage
            while not live_NS[node, cover]:
                cover = (cover + 1) % num_stages
            count[node, cover] += 1
            if cover != stage and node == home:
                degraded |= {(home, stage), (home, cover)}
    for microbatch in range(plan.num_microbatches):
        home = microbatch // per_node
        assert set(plan.assignee_MS[microbatch]) == {assignee[home]}
        for stage in range(num_stages):
            assert plan.degraded_MS[microbatch, stage] == ((home, stage) in degraded)
    np.testing.assert_allclose(load_at(plan, 1.0), count)


@settings(deadline=None)
@given(live_NS=LIVE_UNITS, per_node=SLICES)
def test_reroute_is_exact_even_and_leaves_the_living_their_own(live_NS, per_node):
    plan = plan_or_skip(live_NS, "reroute", per_node)
    assert not plan.degraded_MS.any()
    for stage in range(plan.num_stages):
        counts = np.bincount(plan.assignee_MS[:, stage], minlength=plan.num_nodes)[live_NS[:, stage]]
        assert counts.max() - counts.min() <= 1
        keeps = live_NS[plan.home_M, stage]
        np.testing.assert_array_equal(plan.assignee_MS[keeps, stage], plan.home_M[keeps])


@settings(deadline=None)
@given(live_NS=LIVE_UNITS, per_node=SLICES)
def test_drop_leaves_out_the_slices_of_cut_nodes_and_nothing_else(live_NS, per_node):
    plan = plan_or_skip(live_NS, "drop", per_node)
    cut_M = np.repeat(~live_NS.all(axis=1), per_node)
    np.testing.assert_array_equal(plan.dropped, np.flatnonzero(cut_M))
    np.testing.assert_array_equal(
        plan.assignee_MS, np.where(cut_M, -1, plan.home_M)[:, None].repeat(plan.num_stages, 1)
    )
    assert not plan.degraded_MS.any()
    assert set(plan.load_NS.reshape(-1)) <= {0.0, 1.0}


@settings(max_examples=200, deadline=None)
@given(
    live_NS=LIVE_UNITS,
    per_node=SLICES,
    cost_percent=st.integers(1, 100),
    slack_percent=st.integers(0, 250),
)
def test_balanced_degrades_the_fewest_that_keep_each_unit_within_its_slack(
    live_NS, per_node, cost_percent, slack_percent
):
    # In exact arithmetic, so that a limit that is met to the last bit counts as met.
    cost, slack = fractions.Fraction(cost_percent, 100), fractions.Fraction(slack_percent, 100)
    plan = plan_or_skip(live_NS, "balanced", per_node, degraded_costs=[cost_percent / 100], slack=slack_percent / 100)
    np.testing.assert_array_equal(plan.assignee_MS, plan_of(live_NS, "reroute", per_node).assignee_MS)
    limit = (1 + slack) * per_node
    for node, stage in np.argwhere(live_NS):
        mine_M = plan.assignee_MS[:, stage] == node
        count, num_degraded = int(mine_M.sum()), int(plan.degraded_MS[mine_M, stage].sum())
        enough = [d for d in range(count + 1) if count - d + cost * d <= limit]
        impossible = 0 if cost == 1 else count
        assert num_degraded == (min(enough) if enough else impossible)
        if enough:
            assert plan.load_NS[node, stage] <= (1 + float(slack)) * (1 + 1e-9)


@settings(deadline=None)
@given(
    live_NS=LIVE_UNITS,
    per_node=SLICES,
    cost_percents=st.lists(st.integers(1, 110), min_size=2, max_size=4, unique=True),
    slack_percent=st.integers(0, 100),
)
def test_balanced_goes_no_further_down_the_levels_than_a_unit_needs(live_NS, per_node, cost_percents, slack_percent):
    cost_percents.sort(reverse=True)
    assume(cost_percents[-1] <= 100)
    costs = [fractions.Fraction(percent, 100) for percent in (100, *cost_percents)]
    useful = [0, *(level for level, cost in enumerate(costs) if cost < 1)]
    degraded_costs = [percent / 100 for percent in cost_percents]
    plan = plan_or_skip(live_NS, "balanced", per_node, degraded_costs=degraded_costs, slack=slack_percent / 100)
    limit = (1 + fractions.Fraction(slack_percent, 100)) * per_node
    for node, stage in np.argwhere(live_NS):
        mine_M = plan.assignee_MS[:, stage] == node
        levels = sorted(plan.level_MS[mine_M, stage].tolist())
        work = sum(costs[level] for level in levels)
        assert plan.load_NS[node, stage] * per_node == pytest.approx(float(work))
        if work > limit:
            assert set(levels) <= {useful[-1]}  # all as far as can be
            continue
        assert set(levels) <= set(useful)
        for level in set(levels) - {0}:  # no other one can be a level less
            assert work - costs[level] + costs[useful[useful.index(level) - 1]] > limit


def test_levels_by_hand():
    """Five microbatches in the time of four: at 0.9 all are 4.5, at 0.8 they are 4; then 4.4 with one at 0.8."""
    live_NS = nodes_alive(5, 0)
    assert plan_of(live_NS, "balanced", degraded_costs=[0.9, 0.8, 0.5], slack=0.0).load_NS.max() == 1.0
    plan = plan_of(live_NS, "balanced", degraded_costs=[0.9, 0.8, 0.5], slack=0.1)
    assert plan.critical_load == pytest.approx(1.1)
    assert list(plan.level_MS[:, 0]) == [2] * 4 + [1] * 16  # those taken over first
    plan = plan_of(nodes_alive(8, 0), "balanced", 8, degraded_costs=[0.95, 0.5], slack=0.01)
    exact, degraded = plan.microbatches_of(2)
    assert (len(exact), len(degraded)) == (7, 2) and set(plan.level_MS[degraded, 0]) == {2}, "7 + 2 / 2 is 8"
    for useless in ([1.0, 0.8], [1.2, 0.8], [0.8, 0.8]):
        plan = plan_of(live_NS, "balanced", degraded_costs=useless, slack=0.0)
        assert plan.critical_load == pytest.approx(1.0)
        assert set(plan.level_MS[plan.degraded, 0]) == ({1} if useless[0] == 0.8 else {2})
    assert plan_of(live_NS, "neighbor", degraded_costs=[0.9, 0.8, 0.5]).level_MS.max() == 1


@settings(deadline=None)
@given(live_NS=LIVE_NODES, per_node=SLICES)
def test_balanced_with_endless_slack_is_reroute(live_NS, per_node):
    plan = plan_or_skip(live_NS, "balanced", per_node, slack=1000.0)
    assert plan.degraded.size == 0


def test_one_of_eight_by_hand():
    live_NS = nodes_alive(8, 3)
    neighbor = plan_of(live_NS, "neighbor")
    exact, degraded = neighbor.microbatches_of(4)
    assert exact.size == 0 and list(degraded) == [12, 13, 14, 15, 16, 17, 18, 19]
    assert neighbor.critical_load == pytest.approx(1.2)
    reroute = plan_of(live_NS, "reroute")
    assert list(reroute.taken_over) == [12, 13, 14, 15] and reroute.critical_load == 1.25
    balanced = plan_of(live_NS, "balanced")
    # Five microbatches against a limit of 4.4: one degraded leaves 4.6, two leave 4.2.
    assert len(balanced.degraded) == 8 and balanced.critical_load == pytest.approx(1.05)
    drop = plan_of(live_NS, "drop")
    assert list(drop.dropped) == [12, 13, 14, 15] and drop.critical_load == 1.0


@pytest.mark.parametrize(
    ("dead", "takers"),
    [
        ((3, 4), {3: 5, 4: 5}),  # adjacent
        ((7,), {7: 0}),  # around the ring
        ((7, 0), {7: 1, 0: 1}),
        ((0, 1, 2, 3, 4, 6, 7), {0: 5, 4: 5, 6: 5, 7: 5}),  # all but one
    ],
)
def test_case_15_the_next_live_node_takes_adjacent_failures(dead, takers):
    plan = plan_of(nodes_alive(8, *dead), "neighbor", 2)
    for node, taker in takers.items():
        assert set(plan.executor_M[2 * node : 2 * node + 2]) == {taker}
    taker = set(takers.values()).pop()
    assert len(plan.microbatches_of(taker)[1]) == 2 * (1 + len(dead))


@pytest.mark.parametrize("policy", POLICIES)
def test_case_15_a_failing_neighbor_all_but_one_dead_and_recovery_in_sequence(policy):
    for dead in [(), (3,), (3, 4), (3, 4, 5), (0, 1, 2, 3, 4, 5, 6), (3,), ()]:
        plan = plan_of(nodes_alive(8, *dead), policy)
        for node in range(8):
            run = np.concatenate(plan.microbatches_of(node))
            assert (run.size == 0) == (node in dead)
        if not dead:
            assert plan.degraded.size == plan.taken_over.size == 0


def test_stage_neighbor_degrades_just_the_dead_stage_and_its_cover():
    live_NS = np.ones((3, 4), dtype=bool)
    live_NS[1, 3] = False
    plan = plan_of(live_NS, "neighbor", 2)
    expected_MS = np.zeros((6, 4), dtype=bool)
    expected_MS[2:4, [3, 0]] = True
    np.testing.assert_array_equal(plan.degraded_MS, expected_MS)
    np.testing.assert_allclose(plan.load_NS, [[1, 1, 1, 1], [1.2, 1, 1, 0], [1, 1, 1, 1]])
    expected_ML = np.zeros((6, 8), dtype=int)
    expected_ML[2:4, [6, 7, 0, 1]] = 1
    np.testing.assert_array_equal(plan.layer_levels(8), expected_ML)


@settings(deadline=None)
@given(num_layers=st.integers(1, 64), data=st.data())
def test_stages_are_contiguous_even_ranges_of_layers(num_layers, data):
    num_stages = data.draw(st.integers(1, num_layers))
    stages = stage_of_layers(num_layers, num_stages)
    assert stages.shape == (num_layers,) and np.all(np.diff(stages) >= 0)
    counts = np.bincount(stages, minlength=num_stages)
    assert counts.size == num_stages and counts.max() - counts.min() <= 1


@pytest.mark.parametrize("policy", POLICIES)
def test_no_live_node_is_too_few(policy):
    with pytest.raises(TooFewLiveNodesError, match="no node is live"):
        plan_of(np.zeros((4, 2)), policy)


@pytest.mark.parametrize("policy", ["reroute", "balanced", "drop"])
def test_a_stage_dead_everywhere_is_named(policy):
    live_NS = np.ones((4, 3))
    live_NS[:, 1] = 0
    with pytest.raises(TooFewLiveNodesError, match="stage 1 is dead on every node"):
        plan_of(live_NS, policy)
    assert plan_of(live_NS, "neighbor").dropped.size == 0


def test_drop_with_every_node_cut_is_too_few():
    with pytest.raises(TooFewLiveNodesError, match="leaves no microbatch"):
        plan_of(~np.eye(3, dtype=bool), "drop")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "neighbour"}, "did you mean neighbor"),
        ({"policy": "xyz"}, "unknown; set one of neighbor, reroute"),
        ({"degraded_costs": [0.0]}, "degraded_cost=0"),
        ({"degraded_costs": [-0.5]}, "degraded_cost=-0.5"),
        ({"degraded_costs": [math.nan]}, "degraded_cost=nan"),
        ({"degraded_costs": [1.5], "policy": "balanced"}, "costs 1.5 of an exact one"),
        ({"slack": -0.1}, "slack=-0.1"),
        ({"slack": math.inf}, "slack=inf"),
        ({"microbatches_per_node": 0}, "microbatches_per_node=0"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(**({"live_NS": np.ones((4, 1)), "policy": "reroute"} | changes))


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_for_16384_nodes_take_milliseconds(policy):
    live_NS = np.random.default_rng(0).random((16384, 1)) > 0.1
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        plan_of(live_NS, policy)
        seconds.append(time.perf_counter() - start)
    # About 2 ms, 20 where auto makes four plans and weighs them; a Python loop over nodes would take more.
    assert min(seconds) < (0.08 if policy == "auto" else 0.02)


def test_auto_reroutes_where_that_costs_nothing_else_balances_else_takes_the_fastest():
    def auto(live_NS, **settings):
        plan = make_plan(
            live_NS,
            "auto",
            microbatches_per_node=settings.pop("per_node", 4),
            degraded_costs=[settings.pop("cost", 0.6)],
            slack=0.0,
            auto=AutoConfig(**settings),
        )
        assert plan.choice is not None and plan.choice.policy == plan.policy
        return plan

    one_of_eight = nodes_alive(8, 3)
    exact = auto(one_of_eight, max_slowdown=0.25)
    assert exact.policy == "reroute" and "within 0.25" in exact.choice.reason
    assert exact.choice.prospects["reroute"].slowdown == pytest.approx(0.25)
    assert exact.choice.prospects["reroute"].error == 0
    assert exact.choice.prospects["drop"].slowdown == 0

    balanced = auto(one_of_eight, max_slowdown=0.05, degraded_error=0.5)
    assert balanced.policy == "balanced"
    assert balanced.choice.prospects["balanced"].error == pytest.approx(0.5 * 8 / 32)
    same = plan_of(one_of_eight, "balanced", slack=0.05)
    np.testing.assert_array_equal(balanced.level_MS, same.level_MS)

    half = auto(nodes_alive(8, 0, 2, 4, 6), max_slowdown=0.05, degraded_error=0.5)
    assert half.policy == "balanced" and "progress" in half.choice.reason  # 8 degraded ones on each: 1.2, as neighbor
    wrong = auto(nodes_alive(8, 0, 2, 4, 6), max_slowdown=0.05, degraded_error=0.9)
    assert wrong.policy == "reroute"  # 1.2 (1 + 0.9^2) is more than 2
    lost = auto(nodes_alive(8, 0, 2, 4, 6), max_slowdown=0.05, degraded_error=0.9, sampling_error=0.1, may_drop=True)
    assert lost.policy == "drop" and lost.choice.prospects["drop"].error == pytest.approx(0.1 * np.sqrt(1 / 32))
    quick = auto(one_of_eight, max_slowdown=0.15, per_node=1, cost=1.0, sampling_error=0.1, may_drop=True)
    assert quick.policy == "drop" and len(quick.dropped) == 1  # whole microbatches make rerouting take 2
    costly = auto(nodes_alive(8, 0, 2, 4, 6), max_slowdown=0.05, cost=1.5)
    assert costly.policy == "reroute" and "balanced" not in costly.choice.prospects

    everywhere = np.ones((2, 3), dtype=bool)
    everywhere[:, 1] = False
    covered = auto(everywhere, max_slowdown=0.05)
    assert covered.policy == "neighbor" and set(covered.choice.prospects) == {"neighbor"}


def test_auto_weighs_levels_by_what_they_save():
    def error(costs):
        plan = make_plan(
            nodes_alive(8, 3), "auto", microbatches_per_node=8, degraded_costs=costs, slack=0.0, auto=AutoConfig()
        )
        return plan.choice.prospects["balanced"].error

    one = error([0.5])
    assert one == pytest.approx(1.2 * 16 / 64), "six nodes degrade 2 of 9, one 4 of 10"
    assert error([0.75, 0.5]) == pytest.approx(2 * one), "twice as many, at the first level"
    assert error([0.95, 0.5]) == pytest.approx(10 * one), "as many at the second level, which saves ten times the first"
    assert error([1.2, 0.5]) == pytest.approx(one), "a first level that saves nothing is no measure"


SAMPLED = {"skip_attention": False, "remat_ffn": False, "low_rank": False}


def test_what_auto_expects_of_a_degraded_pass():
    def errors(configured=None, **switches):
        return expected_errors(AutoConfig(degraded_error=configured), DegradedConfig(**switches))

    assert errors() == errors(skip_attention=False) == Errors(degraded=1.2, level_variances=(), sampling=7.0)
    sampled = errors(**SAMPLED, sampled_fractions=(1.0, 1 / 2, 1 / 5))
    assert sampled.degraded == 0 and sampled.level_variances == pytest.approx((0, 0.2, 1.6))
    of_both = errors(**SAMPLED, sampled_fractions=(1 / 2, 1 / 5), sample_ffn=True)
    assert of_both.level_variances == pytest.approx((1.3 * 0.2, 1.3 * 1.6))
    assert errors(**SAMPLED) == Errors(degraded=0.0, level_variances=(), sampling=7.0), "recomputing changes nothing"
    told = errors(0.3, **SAMPLED, sampled_fractions=(0.5,))
    assert told == Errors(degraded=0.3, level_variances=(), sampling=7.0)


@pytest.mark.parametrize(
    ("policy", "dead", "measured"), [("neighbor", (3,), 0.09), ("balanced", (3,), 0.18), ("balanced", (3, 9), 0.24)]
)
def test_the_error_that_auto_expects_of_samples_is_near_what_was_measured(policy, dead, measured):
    """Half of the tokens, 128 microbatches on 16 nodes: docs/results/gradient_error.md."""
    errors = expected_errors(AutoConfig(), DegradedConfig(**SAMPLED, sampled_fractions=(0.5,)))
    settings = {"microbatches_per_node": 8, "degraded_costs": [0.85], "slack": 0.0}
    auto = AutoConfig(max_slowdown=0.0)
    plan = make_plan(nodes_alive(16, *dead), "auto", **settings, auto=auto, errors=errors)
    assert plan.choice.prospects[policy].error == pytest.approx(measured, rel=0.15)


def test_further_levels_of_samples_are_noisier():
    """Six nodes of nine microbatches and one of ten: each drops below 8 with its own levels."""
    errors = Errors(degraded=0.0, level_variances=(1.0, 10.0), sampling=8.0)
    plan = make_plan(
        nodes_alive(8, 3), "auto", microbatches_per_node=8, degraded_costs=[0.9, 0.8], slack=0.0, errors=errors
    )
    balanced = plan_of(nodes_alive(8, 3), "balanced", microbatches_per_node=8, degraded_costs=[0.9, 0.8], slack=0.01)
    ones, twos = (int((balanced.level_MS == level).sum()) for level in (1, 2))
    assert ones > 0 and twos > 0
    assert plan.choice.prospects["balanced"].error == pytest.approx(8 * np.sqrt((ones + 10 * twos) / 64 / 64))


def test_auto_has_nothing_to_choose_while_all_are_healthy():
    plan = plan_of(np.ones((4, 1)), "auto")
    assert plan.choice is None and plan.degraded.size == plan.taken_over.size == 0


def test_the_error_that_auto_expects_of_dropping_is_that_of_a_smaller_sample():
    rng, total, dropped = np.random.default_rng(0), 32, 8
    noise = rng.standard_normal((20_000, total))  # of one microbatch, relative to a mean gradient of norm 1
    errors = noise[:, dropped:].mean(axis=1) - noise.mean(axis=1)
    expected = estimate(
        critical_load=1.0,
        degradation=0.0,
        level_variance=0.0,
        num_dropped=dropped,
        num_microbatches=total,
        errors=Errors(degraded=0.0, level_variances=(), sampling=1.0),
    )
    assert expected.error == pytest.approx(np.sqrt((errors**2).mean()), rel=0.02)
    assert expected.slowdown == 0


def test_of_equals_auto_takes_the_first_and_nothing_within_the_limit_needs_no_error():
    same = Prospect(slowdown=0.2, error=0.1)
    for limit in (0.2, 0.1):
        assert choose({"a": same, "b": same}, ["b", "a"], limit).policy == "b"
    faster = Prospect(slowdown=0.1, error=0.1)
    assert choose({"a": same, "b": faster}, ["a", "b"], 0.3).policy == "b", "of equal errors the faster one"
    unknown = {"slow": Prospect(slowdown=0.5, error=0.0), "fast": Prospect(slowdown=0.3, error=0.0)}
    assert choose(unknown, list(unknown), 0.1).policy == "fast"
