"""Cells are measured once, whatever interrupts them, and rows survive the file."""

import dataclasses
import pathlib

import pytest
from matplotlib.figure import Figure

from mecefo_jax.config import Config, TrainConfig
from mecefo_jax.errors import DataError
from mecefo_jax.studies import markdown, rows, runner
from mecefo_jax.studies.study import Cell, Study


def measure(config: Config, workdir: pathlib.Path) -> list[dict]:
    """Two rows; fails for seed 13. Leaves a line for each time that it is called."""
    with (workdir / "calls").open("a") as file:
        file.write("called\n")
    if config.train.seed == 13:
        raise ValueError("thirteen")
    print("seed", config.train.seed)
    return [{"half": half, "value": config.train.seed / 2 if half else None} for half in (0, 1)]


def cell(seed: int) -> Cell:
    return Cell(labels={"seed": seed}, config=Config(train=TrainConfig(seed=seed)), measure=measure)


STUDY = Study(
    title="Halves",
    cells=lambda quick: [cell(1), cell(2)],
    columns=("seed", "half", "value"),
    report=lambda rows: "",
    plot=lambda rows: Figure(),
)


def calls(folder: pathlib.Path, seed: int) -> int:
    return len((folder / cell(seed).key / "calls").read_text().splitlines())


@pytest.mark.slow
def test_what_is_done_is_done_once_and_the_rest_is_done_later(tmp_path):
    csv = tmp_path / "halves.csv"
    with pytest.raises(ValueError, match="thirteen"):
        runner.run(STUDY, [cell(3), cell(13)], csv, tmp_path, 1)
    assert {(row["seed"], row["machine"]) for row in rows.read(csv)} == {(3, markdown.machine())}
    assert runner.measured([cell(4), cell(3)], csv)[1] == 1
    runner.run(STUDY, [cell(4), cell(3)], csv, tmp_path, 2)
    found, done = runner.measured([cell(4), cell(3)], csv)
    assert done == 2
    assert [(row["seed"], row["half"], row["value"]) for row in found] == [
        (4, 0, None),
        (4, 1, 2),
        (3, 0, None),
        (3, 1, 1.5),
    ]
    assert (calls(tmp_path, 3), calls(tmp_path, 4)) == (1, 1)
    assert (tmp_path / cell(4).key / "output.log").read_text() == "seed 4\n"
    assert all(row["commit"] and len(row["date"]) == 10 for row in found)


def test_equal_work_has_one_key():
    assert cell(1).key == cell(1).key != cell(2).key
    other = Cell(labels={"seed": 9}, config=cell(1).config, measure=measure)
    assert other.key == cell(1).key, "labels are no part of the work"
    config = cell(1).config
    for slack, policy, equal in ((0.7, "auto", True), (0.7, "balanced", False)):
        faults = dataclasses.replace(config.faults, slack=slack, policy=policy)
        changed = Cell(labels={}, config=dataclasses.replace(config, faults=faults), measure=measure)
        assert (changed.key == cell(1).key) == equal, "what has no effect does not count"
    assert Cell(labels={}, config=cell(1).config, measure=runner._measure).key != cell(1).key  # type: ignore[arg-type]


def test_rows_come_back_from_the_file(tmp_path):
    written = [
        {
            "a": 1,
            "b": 0.1234567891,
            "c": None,
            "d": 'text, with "quotes"',
            "key": "3742698196128675",
            "commit": "6122513",
            "date": "d",
            "machine": "m, n",
        }
    ]
    rows.write(tmp_path / "t.csv", ("a", "b", "c", "d"), written)
    (row,) = rows.read(tmp_path / "t.csv")
    assert row == written[0] | {"b": 0.123457}
    assert rows.read(tmp_path / "none.csv") == []
    (tmp_path / "other.csv").write_text("x,y\n1,2\n")
    with pytest.raises(DataError, match="no column key"):
        rows.read(tmp_path / "other.csv")


def test_a_table_tells_the_machines_of_its_rows_and_not_its_own():
    told = [
        {"date": "2026-12-01", "commit": commit, "machine": where} for commit, where in (("a", "2 x"), ("b", "8 y"))
    ]
    assert markdown.provenance(told, "make it") == "2026-12-01, commit `a`, `b`, 2 x; 8 y: `make it`"


def test_what_a_cell_tries_beside_its_config_is_work_of_its_own():
    plain = cell(1)
    tried = dataclasses.replace(plain, tries=("drop", 4))
    assert len({plain.key, tried.key, dataclasses.replace(plain, tries=("drop", 5)).key}) == 3
    assert tried.key == dataclasses.replace(plain, tries=("drop", 4)).key
