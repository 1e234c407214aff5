"""Pictures of plans on the command line."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from mecefo_jax.takeover.__main__ import main
from mecefo_jax.takeover.picture import boxes_of
from mecefo_jax.takeover.plan import POLICIES, make_plan


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def show(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def rows(output):
    return {fields[0]: " ".join(fields[1:]) for line in output.splitlines() if (fields := line.split())}


def test_one_policy_shows_who_does_what_at_which_load(capsys):
    output = show(capsys, "--nodes", "8", "--failed", "3", "--policy", "neighbor", "--microbatches-per-node", "2")
    seen = rows(output)
    assert re.fullmatch("1.00 \u2588+ \\[0\\] \\[1\\]", seen["0"])
    assert seen["3"] == "\u00d7 dead, taken over by 4"
    assert re.fullmatch(r"1.20 \u2588+ \(6<3\) \(7<3\) \(8\) \(9\)", seen["4"])
    assert "16 microbatches: 12 exact, 4 degraded (cost 0.6)" in output
    assert "critical load 1.20" in output


def test_drop_says_what_is_lost(capsys):
    output = show(capsys, "--failed", "3,4", "--policy", "drop")
    assert rows(output)["4"] == "\u00d7 dead, dropped"
    assert "32 microbatches: 24 exact, 0 degraded (cost 0.6), 8 dropped" in output


def test_without_a_policy_all_stand_side_by_side(capsys):
    output = show(capsys, "--failed", "3")
    seen = rows(output)
    assert seen["node"] == "neighbor reroute balanced drop auto"
    assert seen["3"] == "\u00d7 \u00d7 \u00d7 \u00d7 \u00d7"
    assert seen["4"].split() == [
        "\u25c7\u25c7\u25c7\u25c7\u25a1\u25a1\u25a1\u25a1", "1.20",
        "\u25c6\u25a0\u25a0\u25a0\u25a0", "1.25",
        "\u25c7\u25a1\u25a0\u25a0\u25a0", "1.05",
        "\u25a0\u25a0\u25a0\u25a0", "1.00",
        "\u25c7\u25a1\u25a1\u25a0\u25a0", "0.95",
    ]  # fmt: skip
    assert "auto: balanced, least error within 0.01 of extra time" in output
    assert seen["degraded"] == "8 of 32 0 of 32 8 of 32 0 of 32 12 of 32"
    assert seen["dropped"] == "0 of 32 0 of 32 0 of 32 4 of 32 0 of 32"


def test_stages_show_who_covers_whom(capsys):
    output = show(capsys, "--nodes", "3", "--stages", "3", "--failed", "1.2", "--policy", "neighbor")
    covering = "\u25a1\u25c7" * 4
    assert rows(output)["1"] == f"{covering} 1.20 \u25a0\u25a0\u25a0\u25a0 1.00 \u00d7 \u2192 0"


def test_a_comparison_says_why_a_policy_has_no_plan(capsys):
    output = show(capsys, "--nodes", "2", "--stages", "2", "--failed", "0.0,1.1")
    assert "impossible: every node has a dead stage, so --policy=drop" in output.replace("\n", " ")


@pytest.mark.parametrize("policy", [*POLICIES, None])
@pytest.mark.parametrize("nodes", ["1", "8", "16384"])
def test_no_line_is_wider_than_the_terminal_and_large_clusters_are_cut_short(capsys, policy, nodes):
    failed = "" if nodes == "1" else "3,4"
    arguments = ["--nodes", nodes, "--failed", failed, *([] if policy is None else ["--policy", policy])]
    lines = show(capsys, *arguments).splitlines()
    assert max(len(line) for line in lines) <= 80
    assert len(lines) < 60


@pytest.mark.parametrize("policy", POLICIES)
def test_the_boxes_of_all_units_are_the_plan(policy):
    live_NS = np.array([[True, False, True], [True, True, True], [False, True, True], [True, True, True]])
    plan = make_plan(live_NS, policy, microbatches_per_node=3, degraded_costs=[0.6], slack=0.1)
    load_NS = plan.load_NS
    for node, stage in np.argwhere(live_NS):
        boxes = boxes_of(plan, node, stage)
        assert sum(0.6 if item.degraded else 1.0 for item in boxes) == pytest.approx(3 * load_NS[node, stage])


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--policy", "ballanced"], "error: --policy='ballanced': unknown; did you mean balanced", 2),
        (["--failed", "8"], "no node 8; with --nodes 8 write 0 to 7", 2),
        (["--failed", "3;4"], "--failed 3;4: write nodes", 2),
        (["--failed", "3.1"], "set --stages 2 or more", 2),
        (["--nodes", "0"], "--nodes: got 0, expected a number at least 1", 2),
        (["--nodes", "1e12"], "--nodes: got 1000000000000", 2),
        (["--stages", "1e12"], "--stages: got 1000000000000", 2),
        (["--microbatches-per-node", "0"], "--microbatches-per-node: got 0", 2),
        (["--microbatches-per-node", "1e12"], "--microbatches-per-node: got 1000000000000", 2),
        (["--slack", "-1"], "error: --slack=-1", 2),
        (["--degraded-cost", "0"], "error: --degraded-cost=0", 2),
        (["--degraded-cost", "0.9,0"], "error: --degraded-cost=0", 2),
        (["--nodes", "2", "--failed", "0,1", "--policy", "drop"], "no node is live", 5),
    ],
)
def test_mistakes_print_one_line_and_the_exit_code(capsys, arguments, message, code):
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and message in captured.err


def test_characters_that_the_terminal_lacks_are_replaced():
    done = subprocess.run(
        [sys.executable, "-m", "mecefo_jax.takeover", "--failed", "3"],
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
