"""Proof that nothing was lost or seen twice: what each process computed, and what was committed of it.

With ``cluster.audit``, each process appends to ``audit/<process>.jsonl`` in the run directory, before it computes
microbatches, their records ``{"step", "computed": {microbatch: [record ids]}}``, and, once a step is committed, whose
microbatches went into it: ``{"step", "committed": {process: [microbatches]}}``. At the end of the run it adds a digest
of the state that it holds: ``{"step", "state": hex}``. ``check`` puts them together.
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
            path = directory / f"{process}.jsonl"
            torn = path.exists() and not path.read_bytes().endswith(b"\n")
            self._file = path.open("ab", buffering=0)
            if torn:  # what an earlier life was writing when it died
                self._file.write(b"\n")

    def computed(self, step: int, microbatches: Sequence[int]) -> None:
        """Note what is about to be computed."""
        if self._file is not None:
            ids = {number: self._sampler.record_ids(step, number).tolist() for number in microbatches}
            self._write({"step": step, "computed": ids})

    def committed(self, step: int, by_process: Mapping[int, Sequence[int]]) -> None:
        """Note whose microbatches went into a committed step."""
        if self._file is not None:
            self._write({"step": step, "committed": {process: list(ids) for process, ids in by_process.items()}})

    def ended(self, step: int, digest: str) -> None:
        """Note the state that this process holds at the end of the run."""
        if self._file is not None:
            self._write({"step": step, "state": digest})

    def close(self) -> None:
        """Close the book, in which all has been written already."""
        if self._file is not None:
            self._file.close()

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
        ``steps_committed``; ``samples_lost`` and ``samples_doubled`` (sequences); ``lost_at`` (sequences lost, by step,
        of the steps that lost any); ``steps_repeated`` (committed again after everybody who knew had died);
        ``wrong_records`` (microbatches whose records were not those of the sampler); ``states`` (different final states
        among ``states_told``, the number of processes that told theirs).
    """
    books = {int(path.stem): list(_lines(path)) for path in sorted(directory.glob("*.jsonl"))}
    computed = {
        (process, line["step"], int(number)): ids
        for process, lines in books.items()
        for line in lines
        if "computed" in line
        for number, ids in line["computed"].items()
    }
    committed = _commits(books)
    lost_at: dict[int, int] = {}
    doubled = wrong = 0
    for step in range(steps):
        size = len(sampler.record_ids(step, 0))
        for commit in committed.get(step, [{}]):
            done = [(int(process), number) for process, numbers in commit.items() for number in numbers]
            numbers = [number for _, number in done]
            wrong += sum(
                computed.get((process, step, number)) != sampler.record_ids(step, number).tolist()
                for process, number in done
            )
            doubled += size * (len(numbers) - len(set(numbers)))
            lost = size * len(set(range(num_microbatches)) - set(numbers))
            if lost:
                lost_at[step] = max(lost_at.get(step, 0), lost)
    states = [line["state"] for lines in books.values() for line in lines[-1:] if line.get("step") == steps]
    return {
        "steps_committed": len(committed),
        "samples_lost": sum(lost_at.values()),
        "lost_at": lost_at,
        "samples_doubled": doubled,
        "steps_repeated": sum(len(commits) - 1 for commits in committed.values()),
        "wrong_records": wrong,
        "states": len(set(states)),
        "states_told": len(states),
    }


def _commits(books: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, list[dict[str, list[int]]]]:
    """For each step, how it was committed; more than once, if it had to be repeated.

    All that take part in a commit note the same. So different notes are different commits, and so are equal notes in
    one process's book.
    """
    counts: dict[int, dict[str, int]] = {}
    for lines in books.values():
        own: dict[tuple[int, str], int] = {}
        for line in lines:
            if "committed" in line:
                key = line["step"], json.dumps(line["committed"], sort_keys=True)
                own[key] = own.get(key, 0) + 1
        for (step, note), count in own.items():
            notes = counts.setdefault(step, {})
            notes[note] = max(notes.get(note, 0), count)
    return {step: [json.loads(n) for n, count in notes.items() for _ in range(count)] for step, notes in counts.items()}


def _lines(path: pathlib.Path) -> Iterable[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # the line that was being written
            continue
