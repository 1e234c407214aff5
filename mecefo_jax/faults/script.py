"""Scripted failures, for demonstrations and tests: ``fail 3 at 20, back at 50; fail 4 6 at 25``.

    script = clause {";" clause}
    clause = "fail" unit {unit} "at" STEP ["," "back" "at" STEP]
    unit   = NODE | NODE "." STAGE

Without ``back`` the units stay dead. ``NODE`` alone stands for all stages of the node.
"""

import math
import re

from mecefo_jax.errors import ConfigError
from mecefo_jax.faults.outages import Outage

GRAMMAR = "fail NODE[.STAGE] ... at STEP[, back at STEP]; ..."
"""The form of a script, as error messages quote it."""

# Fifteen digits: exact as a float64.
_NUMBER = r"\d{1,15}"
_UNIT = rf"{_NUMBER}(?:\.{_NUMBER})?"
_CLAUSE = re.compile(
    rf"fail\s+(?P<units>{_UNIT}(?:\s+{_UNIT})*)\s+at\s+(?P<start>{_NUMBER})(?:\s*,\s*back\s+at\s+(?P<end>{_NUMBER}))?",
    re.IGNORECASE | re.ASCII,
)


def script_outages(script: str, num_nodes: int, num_stages: int, *, stages_fail: bool) -> list[Outage]:
    """Parse a script.

    Args:
      script: clauses as in the module's docstring; semicolons or line breaks separate them.
      num_nodes: nodes of the cluster.
      num_stages: pipeline stages of a node.
      stages_fail: whether single stages may fail (faults.granularity=stage).

    Returns:
      The outages, in the order of the script.

    Raises:
      ConfigError: a clause that is not of that form, names a unit that does not exist, ends before it
        starts, or kills a unit that an earlier clause keeps dead at that time; quotes the clause.
    """
    clauses = [clause.strip() for clause in re.split(r"[;\n]", script) if clause.strip()]
    if not clauses:
        raise ConfigError(f"faults.script is empty: set failures of the form '{GRAMMAR}'")
    outages: list[Outage] = []
    for clause in clauses:
        try:
            for outage in _parse_clause(clause, num_nodes, num_stages, stages_fail):
                _check_overlap(outage, outages, num_stages)
                outages.append(outage)
        except ValueError as error:
            raise ConfigError(f"faults.script: '{clause}': {error}") from error
    return outages


def _parse_clause(clause: str, num_nodes: int, num_stages: int, stages_fail: bool) -> list[Outage]:
    """Outages of one clause; ValueError says what is wrong."""
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        raise ValueError(f"not understood; write '{GRAMMAR}'")
    start = int(match["start"])
    end = math.inf if match["end"] is None else int(match["end"])
    if end <= start:
        raise ValueError(f"back at {end} is not after the failure at {start}; write a later step")
    return [
        Outage(unit, start, end)
        for name in match["units"].split()
        for unit in _units_named(name, num_nodes, num_stages, stages_fail)
    ]


def _units_named(name: str, num_nodes: int, num_stages: int, stages_fail: bool) -> list[int]:
    """Units that ``NODE`` or ``NODE.STAGE`` stands for; ValueError says what is wrong."""
    node_text, _, stage_text = name.partition(".")
    node = int(node_text)
    if node >= num_nodes:
        raise ValueError(f"there is no node {node}; mesh.num_nodes={num_nodes}, so write 0 to {num_nodes - 1}")
    if not stage_text:
        return list(range(node * num_stages, (node + 1) * num_stages))
    if not stages_fail:
        raise ValueError(f"{name} names a stage, but whole nodes fail; write {node}, or set faults.granularity=stage")
    stage = int(stage_text)
    if stage >= num_stages:
        raise ValueError(f"there is no stage {stage}; faults.num_stages={num_stages}, so write 0 to {num_stages - 1}")
    return [node * num_stages + stage]


def _check_overlap(outage: Outage, earlier: list[Outage], num_stages: int) -> None:
    """ValueError if the unit is already dead for a part of the time."""
    for other in earlier:
        if other.unit == outage.unit and outage.start < other.end and other.start < outage.end:
            node, stage = divmod(outage.unit, num_stages)
            unit = f"node {node}" if num_stages == 1 else f"stage {node}.{stage}"
            until = "for good" if math.isinf(other.end) else f"until step {other.end:g}"
            raise ValueError(
                f"{unit} is already dead from step {other.start:g} {until}; write times that do not overlap"
            )
