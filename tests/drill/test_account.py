"""Which of a run's events belong to which strike, and what adds up; on runs written by hand."""

import pytest

from mecefo_jax.drill.account import (
    account,
    reasons_against,
    steps_per_second,
    totals,
    usual_step_seconds,
    whole_goodput,
)
from mecefo_jax.drill.conductor import Outcome, Struck
from mecefo_jax.drill.schedule import Strike

NODES = 3
WHOLE = {
    "steps_committed": 9,
    "steps_repeated": 0,
    "samples_lost": 0,
    "samples_doubled": 0,
    "wrong_records": 0,
    "states": 1,
    "states_told": 3,
}


def struck(target, at, step, attempt=1, **changes):
    facts = {"strike": Strike(kind="kill", target=target, step=max(step, 1)), "at": at, "step": step}
    return Struck(**facts, attempt=attempt, **({"was_running": True, "was_member": True} | changes))


def failure(process, node, noticed, time):
    fields = {"waited_s": 0.1, "takeover_s": time - noticed, "cost_s": 0.4, "recomputed": 2}
    return {"kind": "failure", "attempt": 1, "step": 0, "process": process, "node": node, "noticed": noticed} | {
        "time": time,
        **fields,
    }


def recovery(process, node, time, **parts):
    return {"kind": "recovery", "attempt": 1, "step": 0, "process": process, "node": node, "time": time, **parts}


def rows(*seen, first=1, attempt=1, live=NODES):
    return [
        {"step": step, "attempt": attempt, "seen": time, "ft/live_nodes": live} for step, time in enumerate(seen, first)
    ]


def test_node_is_detected_recovered_and_back():
    outcome = Outcome(
        began=90.0,
        rows=rows(100.0, 101.0, 101.4, 103.0),
        events=[failure(2, 1, 101.2, 101.9), recovery(2, 1, 109.0, imports_s=3.0, bytes=7)],
        struck=[struck(2, 101.1, 2)],
    )
    (entry,) = account(outcome, NODES, {})
    assert entry["detect_s"] == pytest.approx(0.1)
    # Row 3 was on its way when the process died: the failure's own step is what counts.
    assert entry["recover_s"] == pytest.approx(0.8)
    assert entry["rejoin_s"] == pytest.approx(7.9)
    assert (entry["node"], entry["rejoined_by"]) == (1, 2)
    assert entry["rejoin_parts"] == {"imports_s": 3.0, "bytes": 7}
    assert entry["failure"]["recomputed"] == 2


def test_stall_is_what_three_steps_took_too_long():
    seen = [*(100 + 0.2 * step for step in range(10)), 102.5, 103.0, 103.4, 103.6]
    back = recovery(2, 1, 103.0) | {"step": 11}
    outcome = Outcome(
        began=90.0, rows=rows(*seen), events=[failure(2, 1, 100.5, 100.7), back], struck=[struck(2, 100.5, 3)]
    )
    (entry,) = account(outcome, NODES, {})
    assert entry["stall_s"] == pytest.approx(103.4 - 101.8 - 3 * 0.2)
    outcome.rows = outcome.rows[:-2]
    (entry,) = account(outcome, NODES, {})
    assert entry["stall_s"] is None


@pytest.mark.parametrize(("noticed", "is_its"), [(112.0, True), (171.0, False)])
def test_strike_of_a_waiting_process_is_not_blamed_for_a_death_long_after(noticed, is_its):
    outcome = Outcome(
        began=90.0,
        rows=rows(100.0, 180.0),
        events=[failure(4, 1, noticed, noticed + 0.1)],
        struck=[struck(4, 110.0, 1, was_member=False)],
    )
    (entry,) = account(outcome, NODES, {})
    assert (entry["node"] is not None) == is_its


def test_row_that_appears_after_the_failure_event_is_the_later_one():
    outcome = Outcome(
        began=90.0, rows=rows(100.0, 102.5), events=[failure(2, 1, 101.2, 102.0)], struck=[struck(2, 101.0, 1)]
    )
    (entry,) = account(outcome, NODES, {})
    assert entry["recover_s"] == pytest.approx(1.5)
    assert entry["rejoin_s"] is None and entry["rejoin_parts"] == {}


def test_spare_that_takes_the_node_counts_as_its_return():
    outcome = Outcome(
        began=90.0,
        rows=rows(100.0, 103.0),
        events=[failure(2, 1, 101.2, 102.0), recovery(4, 1, 103.0), recovery(2, 0, 120.0)],
        struck=[struck(2, 101.0, 1)],
    )
    (entry,) = account(outcome, NODES, {})
    assert (entry["rejoined_by"], entry["rejoin_s"]) == (4, pytest.approx(2.0))


def test_process_struck_twice_is_matched_in_order():
    outcome = Outcome(
        began=90.0,
        rows=rows(100.0, 102.0, 130.0, 132.0),
        events=[
            failure(2, 1, 101.2, 102.0),
            recovery(2, 1, 120.0),
            failure(2, 1, 131.5, 132.0),
            recovery(2, 1, 140.0),
        ],
        struck=[struck(2, 101.0, 1), struck(2, 131.0, 3)],
    )
    first, second = account(outcome, NODES, {})
    assert (first["detect_s"], first["rejoin_s"]) == (pytest.approx(0.2), pytest.approx(19.0))
    assert (second["detect_s"], second["rejoin_s"]) == (pytest.approx(0.5), pytest.approx(9.0))


def test_strike_on_a_process_on_its_way_back_claims_no_later_failure():
    outcome = Outcome(
        began=90.0,
        rows=rows(100.0, 102.0, 130.0),
        events=[failure(2, 1, 101.2, 102.0), recovery(2, 1, 120.0), failure(2, 1, 131.5, 132.0)],
        struck=[struck(2, 101.0, 1), struck(2, 110.0, 2, was_member=False), struck(3, 125.0, 2)],
    )
    first, on_its_way, other = account(outcome, NODES, {})
    assert first["detect_s"] == pytest.approx(0.2)
    assert on_its_way["detect_s"] is None and on_its_way["recover_s"] is None
    assert other["detect_s"] is None, "the failure of another process"


def test_death_that_is_noticed_late_belongs_to_the_strike_on_the_member():
    outcome = Outcome(
        began=90.0,
        rows=rows(100.0, 162.0),
        # The second strike hit a process that had been let in before anybody knew that it was dead again.
        events=[failure(2, 1, 160.0, 162.0), recovery(4, 1, 163.0), failure(2, 2, 170.0, 171.0)],
        struck=[struck(2, 101.0, 1), struck(2, 120.0, 1, was_member=False), struck(2, 130.0, 1, was_member=False)],
    )
    first, second, third = account(outcome, NODES, {})
    assert (first["node"], first["detect_s"]) == (1, pytest.approx(59.0))
    assert second["detect_s"] is None
    assert (third["node"], third["detect_s"]) == (2, pytest.approx(40.0))


def test_two_at_once_share_the_step_and_not_the_events():
    outcome = Outcome(
        began=90.0,
        rows=rows(100.0, 103.0),
        events=[
            failure(2, 1, 101.2, 103.0),
            failure(3, 2, 101.2, 103.0),
            recovery(3, 2, 110.0),
            recovery(2, 1, 111.0),
        ],
        struck=[struck(2, 101.0, 1), struck(3, 101.01, 1)],
    )
    one, two = account(outcome, NODES, {})
    assert (one["node"], one["rejoin_s"]) == (1, pytest.approx(10.0))
    assert (two["node"], two["rejoin_s"]) == (2, pytest.approx(8.99))


def test_coordinator_is_back_with_the_restart_and_whole_with_all_nodes():
    outcome = Outcome(
        began=90.0,
        rows=[
            *rows(100.0, 101.0, 101.3),
            *rows(120.0, 121.0, first=3, attempt=2, live=2),
            *rows(123.0, first=5, attempt=2),
        ],
        launcher_events=[{"kind": "restart_in_place", "process": None, "time": 101.5, "detail": ""}],
        struck=[struck(0, 101.2, 2)],
    )
    (entry,) = account(outcome, NODES, {})
    assert entry["target"] == "coordinator"
    assert entry["detect_s"] == pytest.approx(0.3)
    assert entry["recover_s"] == pytest.approx(18.8), "row 3 of the first attempt came from before the restart"
    assert entry["rejoin_s"] == pytest.approx(21.8)
    assert entry["steps_lost"] == 1, "step 3 was committed twice"


def test_losses_belong_to_the_strike_before_them():
    outcome = Outcome(began=90.0, rows=rows(100.0, 110.0, 120.0), struck=[struck(1, 101.0, 1), struck(2, 111.0, 2)])
    first, second = account(outcome, NODES, {0: 5, 1: 7, 2: 11, 8: 13})
    assert first["samples_lost"] == 7 and second["samples_lost"] == 24


def test_passed_over_strike_has_no_times():
    outcome = Outcome(
        began=90.0,
        rows=rows(100.0, 103.0),
        events=[failure(2, 1, 101.2, 102.0)],
        struck=[struck(2, 101.0, 1, passed_over=True)],
    )
    (entry,) = account(outcome, NODES, {})
    assert entry["passed_over"] and entry["detect_s"] is None


def final(**changes):
    outcome = Outcome(began=90.0, ended=131.0, exit_code=0, rows=rows(100.0, 101.0, 104.0))
    return totals(outcome, [], WHOLE) | {"within_noise": True} | changes


def test_totals():
    events = [{"kind": kind} for kind in ("started", "died", "died", "restarted", "restart_in_place", "finished")]
    outcome = Outcome(began=90.0, ended=131.0, exit_code=0, rows=rows(100.0, 101.0, 104.0), launcher_events=events)
    times = [
        {"detect_s": 1.0, "recover_s": None, "rejoin_s": 4.0, "stall_s": None},
        {"detect_s": 3.0, "recover_s": None, "rejoin_s": 4.5, "stall_s": None},
    ]
    sums = totals(outcome, times, WHOLE | {"states": 2})
    assert sums["detect_s"] == {"median": 2.0, "max": 3.0}
    assert sums["recover_s"] == {"median": None, "max": None}
    assert (sums["deaths"], sums["restarts"], sums["restarts_in_place"]) == (2, 1, 1)
    assert sums["steps_per_s"] == pytest.approx(0.5)
    assert sums["wall_time_s"] == 41.0
    assert not sums["states_equal"]


def test_a_clean_drill_passes():
    assert reasons_against(final(), [{}, {}], 2) == []
    assert reasons_against(final(within_noise=None), [], 0) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"exit_code": 76}, "exit code 76"),
        ({"exit_code": 130, "timed_out": True}, "it ran into the limit"),
        ({"samples_lost": 8}, "8 samples lost"),
        ({"samples_doubled": 2}, "2 samples doubled"),
        ({"wrong_records": 1}, "1 wrong records"),
        ({"states_equal": False}, "the final states differ"),
        ({"states_equal": False, "states_compared": 0}, "no process told its final state (cluster.audit)"),
        ({"within_noise": False}, "the loss differs by more than the noise of seeds"),
    ],
)
def test_each_defect_alone_fails_a_drill(changes, reason):
    assert reasons_against(final(**changes), [], 0) == [reason]


def test_strikes_that_did_not_come_fail_a_drill():
    assert reasons_against(final(), [{}], 3) == ["2 of 3 strikes did not come before the end"]


def test_speed_needs_two_rows():
    assert steps_per_second([]) is None and steps_per_second(rows(100.0)) is None


def test_usual_step_is_that_of_the_second_half():
    assert usual_step_seconds(rows(0.0, 50.0, 100.0, 101.0, 102.0, 103.0)) == pytest.approx(1.0)


def test_goodput_counts_the_time_before_a_start_that_lost_everything():
    started = [{"kind": "started", "time": time} for time in (100.0, 160.0)]
    # 20 s of work in the 40 s since the second start, 100 s after the first one.
    assert whole_goodput({"goodput": 0.5}, Outcome(began=90.0, ended=200.0, events=started)) == pytest.approx(0.2)
    assert whole_goodput({"goodput": 0.5}, Outcome(began=90.0, ended=200.0, events=started[1:])) == pytest.approx(0.5)
    assert whole_goodput({}, Outcome(began=90.0)) is None


def test_a_process_that_came_up_again_and_gave_up_by_itself_is_not_the_strikes():
    deaths = [{"kind": "died", "process": 1, "time": time} for time in (100.1, 121.1)]
    outcome = Outcome(
        began=90.0,
        rows=rows(99.0, 100.0, 122.0),
        events=[failure(1, 2, noticed=121.05, time=121.4)],
        launcher_events=deaths,
        struck=[struck(1, 100.0, 2, was_member=False)],
    )
    (entry,) = account(outcome, NODES, {})
    assert entry["detect_s"] is None
    outcome.launcher_events = deaths[:1]  # it was on its way in when it was struck, and is told of late
    (entry,) = account(outcome, NODES, {})
    assert entry["detect_s"] == pytest.approx(21.05)
