"""The timeline on the command line."""

import os
import subprocess
import sys

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
        (["--nodes", "0"], "--nodes: got 0, expected a number at least 1"),
        (["--nodes", "1e12"], "--nodes: got 1000000000000"),
        (["--stages", "0"], "--stages: got 0"),
        (["--steps", "1e12"], "--steps: got 1000000000000"),
        (["--seed", "-1"], "error: --seed: got -1"),
        (["--seed", "2147483648"], "error: --seed: got 2147483648"),
        (["--script", "fail 1 at 2"], "error: --script: has no effect with --scenario high; set --scenario to script"),
        (["--fail-every-steps", "5"], "--fail-every-steps: has no effect with --scenario high"),
        (["--scenario", "none", "--frequency", "2"], "--frequency: has no effect with --scenario none"),
        (["--scenario", "script", "--script", "fail 1.1 at 2"], "set --stages 2 or more"),
        (["--scenario", "script", "--script", "fail"], "error: --script: 'fail'"),
        (["--scenario", "trace"], "error: --trace-file"),
        (["--scenario", "persistent", "--persistent-nodes", "40"], "error: --persistent-nodes: got 40"),
        (["--frequency", "-1"], "error: --frequency"),
    ],
)
def test_mistakes_print_one_line_and_exit_2(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and message in captured.err


@pytest.mark.parametrize("name", ["~nosuch/x", "x" * 300, "faults.csv"])
def test_trace_that_cannot_be_read_is_named_with_its_flag(capsys, name):
    assert main(["--scenario", "trace", "--trace-file", name]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {name}: cannot read the trace: ")
    assert line.endswith("; set --trace-file")


def test_characters_that_the_terminal_lacks_are_replaced():
    done = subprocess.run(
        [sys.executable, "-m", "mecefo_jax.faults"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout and done.stdout.isascii()


@pytest.mark.parametrize("text", ["1_000", "\uff13"])
def test_only_plain_digits_are_numbers(capsys, text):
    with pytest.raises(SystemExit, match="2"):
        main(["--nodes", text])
    assert "invalid integer value" in capsys.readouterr().err
