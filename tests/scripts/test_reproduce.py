"""The tables of docs/results are what the script makes of the rows beside them."""

import pathlib
import shutil

import pytest

from mecefo_jax.studies import STUDIES
from scripts import reproduce

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results"


@pytest.mark.parametrize("table", STUDIES)
def test_committed_tables_are_made_of_the_committed_rows(table, tmp_path):
    shutil.copy(RESULTS / f"{table}.csv", tmp_path)
    assert reproduce.main([table, "--so-far", "--out", str(tmp_path)]) == 0
    made, committed = ((folder / f"{table}.md").read_text() for folder in (tmp_path, RESULTS))
    assert made == committed and "nan" not in made
    assert (tmp_path / f"{table}.png").stat().st_size > 10_000 and (RESULTS / f"{table}.png").exists()


def test_a_table_without_rows_says_what_to_do(tmp_path, capsys):
    assert reproduce.main(["frequency", "--so-far", "--out", str(tmp_path)]) == 2
    assert "start it without --so-far" in capsys.readouterr().err
