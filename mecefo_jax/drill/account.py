"""What a drill cost: each strike matched with what the run says of it, then totals and a verdict.

Of a struck process: *detected* when the survivors noticed (``noticed`` of the ``failure`` event; for the coordinator,
when the restart in place began), *recovered* when a step was committed without it, *rejoined* when a process took its
node again (``recovery``; for the coordinator, the first step with all nodes). *Stall* is what the others lost at that:
the time of the three steps in which it came (they make room, hand the state over, connect), beyond three usual ones.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mecefo_jax.drill.conductor import Outcome, Struck
from mecefo_jax.drill.schedule import COORDINATOR

TIMES = ("detect_s", "recover_s", "rejoin_s", "stall_s")
"""What is measured of each strike, in seconds."""

_ROUNDING_S = 0.002
"""Events give times in milliseconds."""
_TOLD_LATE_S = 60.0
"""A process that had just become a member when it was struck is told of as failed by then."""
_LAUNCHER_LOOKS_S = 0.25
"""The launcher tells of a death this much later than the survivors, at most."""
_STALLED_STEPS, _USUAL_STEPS = 3, 20
_NO_PARTS = ("step", "attempt", "kind", "time", "node", "process")


def account(outcome: Outcome, num_nodes: int, lost_at: Mapping[int, int]) -> list[dict[str, Any]]:
    """One entry for each strike, in their order.

    Args:
        outcome: of the run.
        num_nodes: of the run.
        lost_at: sequences lost in each step, of those that lost any (``audit.check``).
    """
    repeated, failures = _repeated_rows(outcome.rows), _failures(outcome)
    entries: list[dict[str, Any]] = []
    for index, struck in enumerate(outcome.struck):
        later = outcome.struck[index + 1 :]
        until = later[0].at if later else float("inf")
        next_step = later[0].step if later else float("inf")
        entry: dict[str, Any] = {
            "kind": struck.strike.kind,
            "target": "coordinator" if struck.strike.target == COORDINATOR else struck.strike.target,
            "planned": str(struck.strike),
            "step": struck.step,
            "killed_at": round(struck.at, 3),
            "was_running": struck.was_running,
            "was_member": struck.was_member,
            "passed_over": struck.passed_over,
        }
        if struck.passed_over:
            entry |= _nothing()
        elif struck.strike.target == COORDINATOR:
            entry |= _of_coordinator(struck, outcome, num_nodes)
        else:
            entry |= _of_node(struck, outcome, failures.get(index))
        entry["steps_lost"] = len({row["step"] for row in repeated if struck.at <= row["seen"] < until})
        entry["samples_lost"] = sum(lost for step, lost in lost_at.items() if struck.step <= step < next_step)
        entries.append(entry)
    return entries


def totals(outcome: Outcome, entries: Sequence[Mapping[str, Any]], audit: Mapping[str, Any]) -> dict[str, Any]:
    """What adds up over a run.

    Args:
        outcome: of the run.
        entries: of ``account``.
        audit: of ``audit.check``.
    """
    kinds = [event["kind"] for event in outcome.launcher_events]
    return {
        "exit_code": outcome.exit_code,
        "timed_out": outcome.timed_out,
        "steps_committed": audit["steps_committed"],
        "steps_repeated": audit["steps_repeated"],
        "samples_lost": audit["samples_lost"],
        "samples_doubled": audit["samples_doubled"],
        "wrong_records": audit["wrong_records"],
        "states_equal": audit["states"] == 1,
        "states_compared": audit["states_told"],
        **{name: _spread(entries, name) for name in TIMES},
        "steps_per_s": steps_per_second(outcome.rows),
        "deaths": kinds.count("died"),
        "restarts": kinds.count("restarted"),
        "restarts_in_place": kinds.count("restart_in_place"),
        "wall_time_s": round(outcome.ended - outcome.began, 1),
    }


def steps_per_second(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Committed steps in the time from the first row to the last, whatever happened in between."""
    if not rows or rows[-1]["seen"] <= rows[0]["seen"]:
        return None
    return (rows[-1]["step"] - rows[0]["step"]) / (rows[-1]["seen"] - rows[0]["seen"])


def usual_step_seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """Median time of a step in the second half of an undisturbed run."""
    later = rows[len(rows) // 2 :]
    gaps = [(right["seen"] - left["seen"]) for left, right in zip(later, later[1:], strict=False)]
    # Rows that were seen at the same look are apart by less than its resolution.
    return max(statistics.mean(gaps), 1e-3)


def whole_goodput(summary: Mapping[str, Any], outcome: Outcome) -> float | None:
    """Share of the time since the first start that went into committed steps.

    A run that loses its state before the first checkpoint begins its account anew: the time before counts as well.
    """
    starts = [event["time"] for event in outcome.events if event["kind"] == "started"]
    goodput = summary.get("goodput")
    if goodput is None or not starts:
        return None
    return goodput * (outcome.ended - starts[-1]) / max(outcome.ended - starts[0], 1e-9)


def reasons_against(final: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], num_planned: int) -> list[str]:
    """Why a drill has not passed; empty: it has.

    Args:
        final: ``totals`` and ``within_noise``; None there: not judged.
        entries: of ``account``.
        num_planned: strikes of the schedule.
    """
    reasons = []
    if final["exit_code"] != 0:
        reasons.append("it ran into the limit" if final["timed_out"] else f"exit code {final['exit_code']}")
    for name in ("samples_lost", "samples_doubled", "wrong_records"):
        if final[name]:
            reasons.append(f"{final[name]} {name.replace('_', ' ')}")
    if not final["states_equal"]:
        reasons.append(
            "the final states differ" if final["states_compared"] else "no process told its final state (cluster.audit)"
        )
    if final["within_noise"] is False:
        reasons.append("the loss differs by more than the noise of seeds")
    if len(entries) < num_planned:
        reasons.append(f"{num_planned - len(entries)} of {num_planned} strikes did not come before the end")
    return reasons


def _failures(outcome: Outcome) -> dict[int, dict[str, Any]]:
    """The failure that each strike of a node caused, by the strike's index.

    One that struck a member is served first: who struck a process on its way back may have been told of nowhere.
    """
    found: dict[int, dict[str, Any]] = {}
    strikes = list(enumerate(outcome.struck))
    for index, struck in sorted(strikes, key=lambda numbered: not numbered[1].was_member):
        process, since = struck.strike.target, struck.at - _ROUNDING_S
        events = [event for event in outcome.events if event.get("process") == process]
        back = [event["time"] for event in events if event["kind"] == "recovery" and event["time"] >= since]
        again = [
            other.at
            for _, other in strikes[index + 1 :]
            if other.strike.target == process and (other.was_member or not struck.was_member)
        ]
        died = [
            event["time"] - _LAUNCHER_LOOKS_S
            for event in outcome.launcher_events
            if event["kind"] == "died" and event["process"] == process and event["time"] >= since
        ]
        # Once it is back, struck again, or dead of something else, a failure is another one; so it is long after one
        # who was no member.
        ends = back + again + died[1:]
        before = min(ends + ([] if struck.was_member else [struck.at + _TOLD_LATE_S]), default=float("inf"))
        candidates = [
            event
            for event in events
            if event["kind"] == "failure" and since <= event["noticed"] < before and event not in found.values()
        ]
        if candidates and not struck.passed_over:
            found[index] = candidates[0]
    return found


def _of_node(struck: Struck, outcome: Outcome, failure: dict[str, Any] | None) -> dict[str, Any]:
    """What followed on the strike of a node or spare."""
    if failure is None:
        return _nothing()
    recoveries = [event for event in outcome.events if event["kind"] == "recovery"]
    row = next((row for row in outcome.rows if row["seen"] >= struck.at and row["step"] > struck.step), None)
    recovered = failure["time"] if row is None else max(failure["time"], row["seen"])
    joined = next(
        (
            event
            for event in recoveries
            if event["node"] == failure["node"] and event["time"] >= failure["time"] - _ROUNDING_S
        ),
        None,
    )
    return {
        "node": failure["node"],
        "detect_s": round(failure["noticed"] - struck.at, 3),
        "recover_s": round(recovered - struck.at, 3),
        "rejoin_s": None if joined is None else round(joined["time"] - struck.at, 3),
        "rejoined_by": None if joined is None else joined["process"],
        "stall_s": None if joined is None else _stall(outcome.rows, joined),
        "failure": {name: failure.get(name) for name in ("waited_s", "takeover_s", "cost_s", "recomputed")},
        "rejoin_parts": {} if joined is None else {n: v for n, v in joined.items() if n not in _NO_PARTS},
    }


def _of_coordinator(struck: Struck, outcome: Outcome, num_nodes: int) -> dict[str, Any]:
    """What followed on the strike of the coordinator: all start again in place."""
    entry = _nothing()
    restart = next(
        (e["time"] for e in outcome.launcher_events if e["kind"] == "restart_in_place" and e["time"] >= struck.at), None
    )
    if restart is None:
        return entry
    rows = [row for row in outcome.rows if row["attempt"] > struck.attempt and row["step"] > struck.step]
    whole = [row for row in rows if row["ft/live_nodes"] == num_nodes]
    return entry | {
        "detect_s": round(restart - struck.at, 3),
        "recover_s": round(rows[0]["seen"] - struck.at, 3) if rows else None,
        "rejoin_s": round(whole[0]["seen"] - struck.at, 3) if whole else None,
    }


def _stall(rows: Sequence[Mapping[str, Any]], recovery: Mapping[str, Any]) -> float | None:
    """Seconds that the others lost when a process came back; None too close to a start or the end to tell."""
    seen = {row["step"]: row["seen"] for row in rows if row["attempt"] == recovery["attempt"]}
    before = recovery["step"] - 1  # steps done when it is let in; it takes part in the next but one
    usual = [
        seen[step + 1] - seen[step] for step in range(before - _USUAL_STEPS, before) if {step, step + 1} <= set(seen)
    ]
    last = before + _STALLED_STEPS
    if not usual or not {before, last} <= set(seen):
        return None
    return round(seen[last] - seen[before] - _STALLED_STEPS * statistics.median(usual), 3)


def _nothing() -> dict[str, Any]:
    """The entry of a strike that the run does not tell of."""
    times = dict.fromkeys(("node", *TIMES, "rejoined_by"))
    return {**times, "failure": {}, "rejoin_parts": {}}


def _repeated_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows of steps that an earlier attempt had committed already."""
    first: dict[int, int] = {}
    return [row for row in rows if row["attempt"] > first.setdefault(row["step"], row["attempt"])]


def _spread(entries: Sequence[Mapping[str, Any]], name: str) -> dict[str, float | None]:
    """Median and maximum, of those that are known."""
    known = [entry[name] for entry in entries if entry[name] is not None]
    return {"median": round(statistics.median(known), 3), "max": max(known)} if known else {"median": None, "max": None}
