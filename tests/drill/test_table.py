"""A drill's tables, as they are seen."""

import io

from rich.console import Console

from mecefo_jax.drill.account import TIMES
from mecefo_jax.drill.table import tables

FIGURES = {
    "steps": 60,
    "tokens": 1234,
    "eval_loss": 2.5,
    "final_loss": 2.4,
    "goodput": 0.5,
    "steps_per_s": 3.0,
    "wall_time_s": 20.0,
}


def entry(**changes):
    times = {"detect_s": 0.25, "recover_s": 1.5, "rejoin_s": 8.0, "stall_s": 0.4, "rejoined_by": 2}
    flags = {"passed_over": False, "was_running": True, "was_member": True}
    return (
        {"planned": "kill 2 @ step 30", "target": 2, "step": 31}
        | times
        | flags
        | {
            "steps_lost": 0,
            "samples_lost": 0,
            **changes,
        }
    )


def test_table_says_what_happened_in_80_columns():
    spread = {"median": 0.25, "max": None}
    final = FIGURES | {name: spread for name in TIMES}
    final |= dict.fromkeys(("samples_lost", "samples_doubled", "wrong_records", "steps_repeated"), 0)
    final |= dict.fromkeys(("deaths", "restarts", "restarts_in_place", "model_compilations_after_first_step"), 1)
    final |= {"states_equal": False, "states_compared": 3, "loss_difference": -0.125, "passed": False}
    final |= {"undisturbed": FIGURES | {"noise": 0.5}, "failed_because": ["the final states differ"]}
    final["baselines"] = {"drop": FIGURES, "restart_from_checkpoint": FIGURES | {"eval_loss": None}}
    run = {"name": "quickstart", "nodes": 4, "spares": 1, "commit": "abc", "date": "d", "machine": "m", "jax": "1"}
    events = [
        entry(),
        entry(rejoined_by=5, planned="kill coordinator @ step 30", samples_lost=8),
        entry(passed_over=True, detect_s=None),
        entry(was_running=False, detect_s=None),
        entry(rejoin_s=None, rejoined_by=None, stall_s=None),
    ]
    console = Console(width=80, file=io.StringIO())
    for table in tables({"run": run, "events": events, "final": final}):
        console.print(table)
    lines = [line.split() for line in console.file.getvalue().splitlines() if line.strip()]
    assert "kill 2 @ step 30 31 0.25 1.50 8.00 0.40 -".split() in lines
    assert "kill coordinator @ step 30 31 0.25 1.50 8.00 as 5 0.40 8".split() in lines, "it wraps in its last column"
    assert "kill 2 @ step 30 31 spared 1.50 8.00 0.40 -".split() in lines
    assert "kill 2 @ step 30 31 not up 1.50 8.00 0.40 -".split() in lines
    assert "kill 2 @ step 30 31 0.25 1.50 - - -".split() in lines
    assert "restart 60 1,234 - 2.4000 0.50 3.00 20".split() in lines
    assert "verdict NOT PASSED: the final states differ".split() in lines
    assert "loss difference -0.1250 (noise of seeds: 0.5000)".split() in lines
