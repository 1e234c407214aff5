"""The audit finds what it is for, in books written by hand: lost, doubled, repeated, wrong, torn."""

import contextlib
import json

import numpy as np
import pytest

from mecefo_jax.processes.audit import Audit, check

STEPS, MICROBATCHES = 2, 4


class Records:
    """Stands in for a sampler: microbatch m of step s has the records 100 s + 10 m + {0, 1}."""

    def record_ids(self, step, number):
        return 100 * step + 10 * number + np.arange(2)


def keep(folder, process, *notes, ended="aa", ended_at=STEPS):
    """A process's book: (step, what it computed, what was committed)."""
    with contextlib.closing(Audit(folder, process, Records())) as audit:
        for step, computed, committed in notes:
            audit.computed(step, computed)
            audit.committed(step, committed)
        if ended:
            audit.ended(ended_at, ended)


def found(folder):
    return check(folder, Records(), STEPS, MICROBATCHES)


def whole(folder, **ended):
    shares = {1: [0, 1], 2: [2, 3]}
    for process, computed in shares.items():
        keep(folder, process, *((step, computed, shares) for step in range(STEPS)), **ended)


def test_whole_run(tmp_path):
    whole(tmp_path)
    assert found(tmp_path) == {
        "steps_committed": 2,
        "samples_lost": 0,
        "lost_at": {},
        "samples_doubled": 0,
        "steps_repeated": 0,
        "wrong_records": 0,
        "states": 1,
        "states_told": 2,
    }


def test_no_books_means_that_everything_is_lost(tmp_path):
    assert found(tmp_path)["samples_lost"] == 16
    assert found(tmp_path)["states"] == found(tmp_path)["states_told"] == 0


def test_lost_microbatch(tmp_path):
    shares = {1: [0, 1], 2: [3]}
    keep(tmp_path, 1, (0, [0, 1, 2, 3], {1: [0, 1, 2, 3]}), (1, [0, 1], shares))
    keep(tmp_path, 2, (1, [3], shares))
    assert (found(tmp_path)["samples_lost"], found(tmp_path)["lost_at"]) == (2, {1: 2})


def test_microbatch_of_two_processes_is_doubled(tmp_path):
    shares = {1: [0, 1, 2], 2: [2, 3]}
    keep(tmp_path, 1, (0, [0, 1, 2], shares), (1, [0, 1, 2, 3], {1: [0, 1, 2, 3]}))
    keep(tmp_path, 2, (0, [2, 3], shares))
    assert (found(tmp_path)["samples_doubled"], found(tmp_path)["samples_lost"]) == (2, 0)


@pytest.mark.parametrize("second", [{1: [0, 1, 2, 3]}, {1: [0, 1], 2: [2, 3]}])
def test_step_committed_again_is_repeated_in_the_same_way_or_in_another(second, tmp_path):
    whole(tmp_path, ended=None)
    keep(tmp_path, 1, (1, [0, 1, 2, 3], second))
    if len(second) == 2:
        keep(tmp_path, 2, (1, [2, 3], second))
    assert (found(tmp_path)["steps_repeated"], found(tmp_path)["steps_committed"]) == (1, 2)
    assert found(tmp_path)["samples_doubled"] == 0


def test_records_that_are_not_the_samplers_are_wrong(tmp_path):
    whole(tmp_path)
    book = tmp_path / "2.jsonl"
    book.write_text(book.read_text().replace("120", "999"))
    assert found(tmp_path)["wrong_records"] == 1


def test_records_never_computed_are_wrong(tmp_path):
    keep(tmp_path, 1, (0, [0, 1], {1: [0, 1, 2]}))
    assert found(tmp_path)["wrong_records"] == 1


def test_states_that_differ(tmp_path):
    whole(tmp_path, ended=None)
    for process, digest in ((1, "aa"), (2, "aa"), (3, "bb")):
        keep(tmp_path, process, ended=digest)
    keep(tmp_path, 4, ended="cc", ended_at=STEPS - 1)  # it never received the last state
    assert (found(tmp_path)["states"], found(tmp_path)["states_told"]) == (2, 3)


def test_torn_line_is_nothing_and_spoils_no_later_one(tmp_path):
    whole(tmp_path, ended=None)
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write('{"step": 1, "comp')
    before = found(tmp_path)
    keep(tmp_path, 1)
    assert found(tmp_path) == before | {"states": 1, "states_told": 1}
    assert before["samples_lost"] == before["wrong_records"] == 0


def test_no_folder_no_book(tmp_path):
    audit = Audit(None, 1, Records())
    audit.computed(0, [0])
    audit.committed(0, {1: [0]})
    audit.ended(1, "aa")
    assert list(tmp_path.iterdir()) == []


def test_book_says_what_was_computed_by_whom(tmp_path):
    keep(tmp_path, 7, (1, [2], {7: [2]}))
    lines = [json.loads(line) for line in (tmp_path / "7.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "computed": {"2": [120, 121]}},
        {"step": 1, "committed": {"7": [2]}},
        {"step": 2, "state": "aa"},
    ]
