"""The timeline on the command line."""

import pytest

from mecefo_jax.faults.__main__ import main


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_rows_show_when_each_node_is_dead(capsys):
    script = "fail 3 at 2, back at 5; fail 1 at 4"
    assert main(["--scenario", "script", "--script", script, "--nodes", "5", "--steps", "8"]) == 0
    output = capsys.readouterr().out
    rows = {line.strip()[:7].strip(): line.split()[-1] for line in output.splitlines() if line}
    assert rows["node 3"] == "\u00b7\u00b7\u2588\u2588\u2588\u00b7\u00b7\u00b7"
    assert rows["node 1"] == "\u00b7\u00b7\u00b7\u00b7\u2588\u2588\u2588\u2588"
    assert rows["other 3"] == "\u00b7" * 8
    assert "failures 2, recoveries 1" in output
    assert "0.88 on average, 2 at most, none in 25% of the steps" in output


@pytest.mark.parametrize("scenario", ["none", "low", "mid", "high", "steps"])
@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_no_line_is_wider_than_the_terminal(capsys, scenario, steps):
    assert main(["--scenario", scenario, "--steps", str(steps), "--stages", "2"]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "--nodes 0: set 1 or more"),
        (["--scenario", "script", "--script", "fail"], "faults.script: 'fail'"),
        (["--scenario", "trace"], "faults.trace_file"),
        (["--scenario", "persistent", "--persistent-nodes", "40"], "0 to 31"),
        (["--frequency", "-1"], "faults.frequency"),
    ],
)
def test_mistakes_print_one_line_and_exit_2(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and message in captured.err
