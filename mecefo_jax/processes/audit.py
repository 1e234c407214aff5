"""Proof that nothing was lost or seen twice: what each process computed, and what was committed of it.

With ``cluster.audit``, each process appends to ``audit/<process>.jsonl`` in the run directory, before it computes
microbatches, their records ``{"step", "computed": {microbatch: [record ids]}}``, and, once a step is committed, whose
microbatches went into it: ``{"step", "committed": {process: [microbatches]}}``. ``check`` puts the two together.
"""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mecefo_jax.data import Sampler


class Audit:
    """One process's book; with no directory, none is kept."""

    def __init__(self, directory: pathlib.Path | None, process: int, sampler: Sampler) -> None:
        """Append to the book of an earlier life."""
        self._sampler, self._file = sampler, None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = (directory / f"{process}.jsonl").open("ab", buffering=0)

    def computed(self, step: int, microbatches: Sequence[int]) -> None:
        """Note what is about to be computed."""
        if self._file is not None:
            ids = {number: self._sampler.record_ids(step, number).tolist() for number in microbatches}
            self._write({"step": step, "computed": ids})

    def committed(self, step: int, by_process: Mapping[int, Sequence[int]]) -> None:
        """Note whose microbatches went into a committed step."""
        if self._file is not None:
            self._write({"step": step, "committed": {process: list(ids) for process, ids in by_process.items()}})

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line).encode() + b"\n")


def check(directory: pathlib.Path, sampler: Sampler, steps: int, num_microbatches: int) -> dict[str, Any]:
    """Compare the books of all processes with what the run should have read.

    Args:
        directory: of the books.
        sampler: of the run's data.
        steps: steps of the run.
        num_microbatches: of a step.

    Returns:
        ``steps_committed``, ``samples_lost`` and ``samples_doubled`` (sequences), ``steps_repeated`` (committed again
        after everybody who knew had died), and ``wrong_records``.
    """
    computed: dict[tuple[int, int, int], list[int]] = {}
    committed: dict[int, set[str]] = {}
    for path in sorted(directory.glob("*.jsonl")):
        for line in _lines(path):
            if "computed" in line:
                for number, ids in line["computed"].items():
                    computed[int(path.stem), line["step"], int(number)] = ids
            else:
                committed.setdefault(line["step"], set()).add(json.dumps(line["committed"], sort_keys=True))
    lost = doubled = wrong = 0
    for step in range(steps):
        seen: dict[int, int] = {}
        for process, numbers in json.loads(max(committed.get(step, {"{}"}))).items():
            for number in numbers:
                seen[number] = seen.get(number, 0) + 1
                wrong += computed.get((int(process), step, number)) != sampler.record_ids(step, number).tolist()
        size = len(sampler.record_ids(step, 0))
        lost += size * sum(number not in seen for number in range(num_microbatches))
        doubled += size * sum(count - 1 for count in seen.values())
    return {
        "steps_committed": len(committed),
        "samples_lost": lost,
        "samples_doubled": doubled,
        "steps_repeated": sum(len(ways) - 1 for ways in committed.values()),
        "wrong_records": wrong,
    }


def _lines(path: pathlib.Path) -> Iterable[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # the line that was being written
            continue
