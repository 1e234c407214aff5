"""The conductor, with small programs in place of a run's processes: it strikes when it should, and ends everything."""

import json
import pathlib
import sys

import pytest

from mecefo_jax.drill.conductor import Conductor, Follower
from mecefo_jax.drill.schedule import Strike

PROGRAM = pathlib.Path(__file__).with_name("stand_in_run.py")
LIMIT_S = 60.0


def conductor(folder, strikes, *, steps=40, nodes=1, limit_s=LIMIT_S, **more):
    def commands(address):
        return [[sys.executable, "-S", str(PROGRAM), str(folder), str(p), str(steps)] for p in range(nodes + 1)]

    return Conductor(commands, folder, strikes, num_nodes=nodes, limit_s=limit_s, **more)


def line(**fields):
    return json.dumps(fields) + "\n"


def test_strikes_at_a_step_and_the_run_goes_on(tmp_path):
    heard = []
    strike = Strike(kind="kill", target=1, step=7)
    outcome = conductor(tmp_path, [strike], on_struck=heard.append).run()
    assert outcome.exit_code == 0 and not outcome.timed_out
    (struck,) = outcome.struck
    assert heard == [struck] and struck.strike == strike
    assert struck.was_running and struck.was_member and struck.step >= 7
    kinds = [event["kind"] for event in outcome.launcher_events]
    assert kinds.count("died") == kinds.count("restarted") == 1
    assert outcome.rows[-1]["step"] == 40 and {row["attempt"] for row in outcome.rows} == {1, 2}
    seen = [row["seen"] for row in outcome.rows]
    assert seen == sorted(seen) and outcome.began < seen[0] and seen[-1] < outcome.ended
    assert "finished" in (tmp_path / "output.log").read_text()


def test_strikes_at_a_time_after_the_first_step(tmp_path):
    outcome = conductor(tmp_path, [Strike(kind="kill", target=1, seconds=0.2)]).run()
    (struck,) = outcome.struck
    assert struck.at - outcome.rows[0]["seen"] >= 0.2


def test_strike_may_start_all_again(tmp_path):
    strikes = [Strike(kind="kill", target=2, step=step) for step in (5, 20)]
    outcome = conductor(tmp_path, strikes, nodes=2, restarts_all=True).run()
    assert outcome.exit_code == 0 and len(outcome.struck) == 2
    kinds = [event["kind"] for event in outcome.launcher_events]
    assert kinds.count("started") == 3 * 3 and "restarted" not in kinds
    assert {row["attempt"] for row in outcome.rows} == {1, 2, 3}


def test_last_one_living_is_passed_over_where_chance_chose_it(tmp_path):
    strike = Strike(kind="kill", target=1, step=5, spares_last=True)
    outcome = conductor(tmp_path, [strike]).run()
    (struck,) = outcome.struck
    assert struck.passed_over
    assert "died" not in [event["kind"] for event in outcome.launcher_events]


def test_a_run_over_the_limit_is_killed(tmp_path):
    outcome = conductor(tmp_path, [], steps=10**6, limit_s=1.5).run()
    assert outcome.timed_out and outcome.exit_code == 130


def test_an_error_of_the_conductor_ends_the_run(tmp_path):
    def fail(struck):
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        conductor(tmp_path, [Strike(kind="kill", target=1, step=5)], steps=10**6, on_struck=fail).run()


def test_follower_leaves_lines_that_are_being_written(tmp_path):
    follower = Follower(tmp_path, 2)
    follower.look()
    assert follower.rows == [] and follower.step == 0
    metrics = tmp_path / "metrics.jsonl"
    row = line(step=2, attempt=1, **{"train/loss": 1.0})
    metrics.write_text(line(step=1, attempt=1, **{"train/loss": 1.0}) + line(step=1, **{"eval/loss": 2.0}) + row[:9])
    follower.look()
    assert [row["step"] for row in follower.rows] == [1]
    with metrics.open("a") as file:
        file.write(row[9:])
    follower.look()
    assert follower.step == 2


def test_follower_knows_who_takes_part(tmp_path):
    follower, events = Follower(tmp_path, 2), tmp_path / "events.jsonl"
    follower.forget(2)
    assert follower.members == {1}
    written = ""
    for kind, process, members in (
        ("failure", 2, {1}),
        ("recovery", 3, {1, 3}),
        ("failure", 1, {3}),
        ("resumed", None, {1, 2}),
    ):
        written += line(kind=kind, step=1, process=process)
        events.write_text(written)
        follower.look()
        assert follower.members == members
