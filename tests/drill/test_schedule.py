"""Schedules: what is written is what is read, mistakes are answered with a form that works, chance is reproducible."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mecefo_jax.drill.schedule import RandomKills, Strike, parse_schedule
from mecefo_jax.errors import ConfigError

PROCESSES = 5


def strikes():
    kinds, targets = st.sampled_from(["kill", "stop"]), st.integers(0, PROCESSES)
    seconds = st.integers(0, 10**6).map(lambda tenths: tenths / 10)
    return st.one_of(
        st.builds(Strike, kind=kinds, target=targets, step=st.integers(1, 10**6)),
        st.builds(Strike, kind=kinds, target=targets, seconds=seconds.filter(lambda s: len(f"{s:g}") < 7)),
    )


@given(st.lists(strikes(), min_size=1, max_size=5))
def test_what_is_written_is_read(planned):
    assert parse_schedule("; ".join(str(strike) for strike in planned), PROCESSES) == tuple(planned)


def test_example_of_the_documentation():
    assert parse_schedule("kill 2 @ step 30;\n stop 1 @ 12.5s; KILL Coordinator@step 90;", PROCESSES) == (
        Strike(kind="kill", target=2, step=30),
        Strike(kind="stop", target=1, seconds=12.5),
        Strike(kind="kill", target=0, step=90),
    )
    assert parse_schedule("random mtbf 20s for 300 s", PROCESSES) == RandomKills(mtbf_s=20, duration_s=300)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("kil 2 @ step 30", "kill 2 @ step 30"),
        ("kill node 2 at step 30", "kill 2 @ step 30"),
        ("stop 3 @ 12.5", "stop 3 @ 12.5s"),
        ("stop 3 @ 12 seconds", "stop 3 @ 12s"),
        ("kill coord @ step 7", "kill coordinator @ step 7"),
        ("term 2 @ step 30", "stop 2 @ step 30"),
        ("kill 2 @ step 1.5", "kill 2 @ 1.5s"),
        ("random mtbf 20 for 300", "random mtbf 20s for 300s"),
        ("random 7s", "random mtbf 7s for 300s"),
        ("random mtbf 0s for 5s", "random mtbf 5s for 300s"),
    ],
)
def test_nearest_form_keeps_what_can_be_understood(wrong, nearest):
    with pytest.raises(ConfigError) as caught:
        parse_schedule(wrong, PROCESSES)
    assert str(caught.value) == f"--schedule: got '{wrong}', expected '{nearest}'"


@given(st.text(st.sampled_from("kilstopcrdnae 0123.@;\N{ARABIC-INDIC DIGIT TWO}"), max_size=30))
def test_any_text_is_read_or_answered_with_a_form_that_is(text):
    try:
        parse_schedule(text, PROCESSES)
    except ConfigError as error:
        assert "\n" not in str(error)
        quoted = re.search(r"expected (?:such as )?'(.*)'$", str(error))
        if quoted:
            parse_schedule(quoted[1], PROCESSES)


@pytest.mark.parametrize("clause", ["kill 6 @ step 3", "kill 0 @ step 3"])
def test_processes_that_there_are_not_are_named_with_those_that_there_are(clause):
    with pytest.raises(ConfigError, match=r"expected 1 to 5 .*, or coordinator"):
        parse_schedule(clause, PROCESSES)


@pytest.mark.parametrize("text", ["", " ;; ", "kill 2 @ step 0"])
def test_nothing_and_step_zero_are_refused(text):
    with pytest.raises(ConfigError, match="--schedule: got"):
        parse_schedule(text, PROCESSES)


def test_random_kills_have_the_mean_gap_and_reach_every_process():
    planned = RandomKills(mtbf_s=2.0, duration_s=4000.0)
    drawn = planned.draw(PROCESSES, seed=1)
    times = [strike.seconds for strike in drawn]
    assert times == sorted(times) and 0 < times[0] and times[-1] < 4000
    # 2000 gaps on average, with a standard deviation of sqrt(2000): five of them.
    assert abs(len(drawn) - 2000) < 5 * 45
    counts = [sum(strike.target == process for strike in drawn) for process in range(1, PROCESSES + 1)]
    assert sum(counts) == len(drawn) and min(counts) > 2000 / PROCESSES - 5 * 18
    assert all(strike.kind == "kill" and strike.spares_last for strike in drawn)


def test_random_kills_are_those_of_their_seed():
    planned = RandomKills(mtbf_s=2.0, duration_s=60.0)
    assert planned.draw(PROCESSES, seed=3) == planned.draw(PROCESSES, seed=3) != planned.draw(PROCESSES, seed=4)
