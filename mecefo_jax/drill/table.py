"""A drill's results as tables for the terminal."""

from typing import Any

from rich import box
from rich.table import Table

from mecefo_jax.drill.account import TIMES


def tables(results: dict[str, Any]) -> list[Table]:
    """A line for each strike; then the totals, next to the other runs. They fit in 80 columns."""
    run, final = results["run"], results["final"]
    spares = f" and {run['spares']} spares" if run["spares"] else ""
    title = f"{run['name']} on {run['nodes']} nodes{spares}, {run['commit']}, {run['date']}\n"
    title += f"{run['machine']}, jax {run['jax']}; times in seconds"
    strikes = Table(title=title, title_justify="left", pad_edge=False, collapse_padding=True, box=box.SIMPLE_HEAD)
    strikes.add_column("strike", no_wrap=True)
    for column in ("step", "detected", "recovered", "rejoined", "stall"):
        strikes.add_column(column, justify="right", no_wrap=True)
    strikes.add_column("lost")
    for entry in results["events"]:
        shown = [_seconds(entry[name]) for name in TIMES]
        if entry["passed_over"] or not entry["was_running"] or not entry["was_member"]:
            reason = "spared" if entry["passed_over"] else "no member"
            shown[0] = reason if entry["was_running"] else "not up"
        if entry["rejoined_by"] not in (None, entry["target"]):
            shown[2] += f" as {entry['rejoined_by']}"
        lost = [f"{entry[f'{what}_lost']} {what}" for what in ("steps", "samples") if entry[f"{what}_lost"]]
        strikes.add_row(entry["planned"], str(entry["step"]), *shown, ", ".join(lost) or "-")
    strikes.add_section()
    for which in ("median", "max"):
        strikes.add_row(which, "", *(_seconds(final[name][which]) for name in TIMES))
    return [strikes, _comparison(final), _totals(final)]


def _comparison(final: dict[str, Any]) -> Table:
    """The drill next to the other runs."""
    shown = Table(pad_edge=False, collapse_padding=True, box=box.SIMPLE_HEAD)
    shown.add_column("run", no_wrap=True)
    renamed = {"restart_from_checkpoint": "restart", "steps_per_s": "steps /s", "wall_time_s": "seconds"}
    columns = {
        "steps": "{:d}",
        "tokens": "{:,d}",
        "eval_loss": "{:.4f}",
        "final_loss": "{:.4f}",
        "goodput": "{:.2f}",
        "steps_per_s": "{:.2f}",
        "wall_time_s": "{:.0f}",
    }
    for name in columns:
        shown.add_column(renamed.get(name, name.replace("_", " ")), justify="right", min_width=4)
    runs = {"drill": final, "undisturbed": final["undisturbed"], **final["baselines"]}
    for name, figures in runs.items():
        if figures is not None:
            values = [(figures[key], form) for key, form in columns.items()]
            shown.add_row(renamed.get(name, name), *("-" if v is None else form.format(v) for v, form in values))
    return shown


def _totals(final: dict[str, Any]) -> Table:
    """What was lost, and the verdict."""
    shown = Table(pad_edge=False, show_header=False, box=None)
    for _ in range(2):
        shown.add_column()
    for name in ("samples_lost", "samples_doubled", "wrong_records", "steps_repeated"):
        shown.add_row(name.replace("_", " "), str(final[name]))
    equal = "equal" if final["states_equal"] else "DIFFERENT" if final["states_compared"] else "not told"
    shown.add_row("final states", f"{equal} ({final['states_compared']} processes)")
    if final["loss_difference"] is not None:
        noise = final["undisturbed"]["noise"]
        shown.add_row(
            "loss difference",
            f"{final['loss_difference']:+.4f}" + ("" if noise is None else f" (noise of seeds: {noise:.4f})"),
        )
    for name in ("deaths", "restarts", "restarts_in_place", "model_compilations_after_first_step"):
        shown.add_row(name.replace("_", " "), str(final[name]))
    verdict = "passed" if final["passed"] else f"NOT PASSED: {'; '.join(final['failed_because'])}"
    shown.add_row("verdict", verdict, style="green" if final["passed"] else "red")
    return shown


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
