"""The log passes from one process to the next, whole."""

import json

from mecefo_jax.metrics import read_events, read_rows
from mecefo_jax.processes.log import SharedLog


def account(log: SharedLog, steps) -> None:
    """What every holder of the state says of its steps."""
    for step in steps:
        log.scalars(step, {"train/loss": float(step), "train/learning_rate": 0.1})
        if step % 5 == 0:
            log.event("basis_refresh", step, not_finite=0)


def test_the_next_writer_fills_in_what_the_last_one_left_out(tmp_path, capsys):
    first, second = (SharedLog(tmp_path, total_steps=20, num_nodes=4) for _ in range(2))
    first.begin()
    first.event("started", 0)
    account(first, range(1, 8))
    first.close()  # it died; two more steps were committed before anybody noticed
    account(second, range(1, 12))
    assert not second.writes
    second.take_over()
    account(second, range(12, 14))
    second.close()
    rows, events = read_rows(tmp_path / "metrics.jsonl"), read_events(tmp_path / "events.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 14)) and {row["attempt"] for row in rows} == {1}
    assert [(event["kind"], event["step"]) for event in events] == [("started", 0)] + [
        ("basis_refresh", 5),
        ("basis_refresh", 10),
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 13
    assert capsys.readouterr().out.count("loss") == 2  # each printed its header


def test_those_that_do_not_write_are_silent(tmp_path, capsys):
    log = SharedLog(tmp_path, total_steps=20, num_nodes=4)
    account(log, range(1, 2000))
    log.progress(3)
    log.close()
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_a_new_attempt_is_counted(tmp_path):
    for attempt in (1, 2):
        log = SharedLog(tmp_path, total_steps=20, num_nodes=4)
        log.begin()
        log.event("started", 0)
        log.close()
        lines = (tmp_path / "events.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["attempt"] == attempt
