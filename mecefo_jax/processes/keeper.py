"""The node's last committed state in shared memory, written beside training, found again by the process after it."""

import concurrent.futures
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mecefo_jax.journal import Log
from mecefo_jax.processes.interconnect import Packed
from mecefo_jax.processes.keys import run_key
from mecefo_jax.processes.memory import StateMemory, processes_of
from mecefo_jax.processes.worker import Worker
from mecefo_jax.progress import Progress


class StateKeeper:
    """Keeps packed states of one run, with the account of the run."""

    def __init__(self, workdir: pathlib.Path, process: int, worker: Worker, identity: Mapping[str, Any], log: Log):
        """For a process of the run in ``workdir``."""
        self._key = run_key(workdir)
        self._memory = StateMemory(self._key, process)
        self._damaged: set[int] = set()
        self._worker, self._identity, self._log = worker, dict(identity), log
        self._writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="memory")
        self._pending: concurrent.futures.Future[None] | None = None
        self._gave_up = False

    def newest_step(self) -> int:
        """Step of the newest state kept by any process of the run on this machine; -1 if there is none."""
        steps: set[int] = set()
        for memory in self._memories():
            steps.update(memory.steps())
            if memory is not self._memory:
                memory.close()
        return max(steps - self._damaged, default=-1)

    def keep(self, step: int, words: Packed, progress: Progress) -> None:
        """Write a state in the background, after the one before it is written.

        Args:
            step: updates done.
            words: the state's bits.
            progress: the account up to that step.
        """
        self.wait()
        if self._gave_up:
            return
        facts = {"progress": dataclasses.asdict(progress), "identity": self._identity}
        self._pending = self._writer.submit(self._write, step, facts, words)

    def read(self, step: int) -> tuple[Packed, Progress, dict[str, Any]] | None:
        """The state kept for a step, its account, and the identity of its run; None if it is not whole."""
        like = self._worker.like_words.vectors
        wanted = [(vector.shape, vector.dtype) for _, vector in sorted(like.items())]
        states = (memory.read(step) for memory in self._memories())
        whole = (s for s in states if s is not None and [(array.shape, array.dtype) for array in s[2]] == wanted)
        found = next(whole, None)
        if found is None:
            self._damaged.add(step)
            return None
        _, facts, arrays = found
        sharding = NamedSharding(self._worker.mesh, P(None, ("fsdp", "tensor")))
        words = Packed(dict(zip(sorted(like), jax.device_put(arrays, sharding), strict=True)))
        return words, Progress(**facts["progress"]), facts["identity"]

    def wait(self) -> None:
        """Return once what was given to keep is kept; a full memory is told of once, and nothing is kept any more."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        except OSError as error:
            self._gave_up = True
            self._log.event("memory_failed", 0, reason=str(error))

    def remove(self) -> None:
        """Free the memory: the state is on the disk."""
        self.wait()
        self._writer.shutdown()
        self._memory.remove()

    def _memories(self) -> list[StateMemory]:
        """Of all processes on this machine, that of this process first."""
        others = (process for process in processes_of(self._key) if process != self._memory.process)
        return [self._memory, *(StateMemory(self._key, process) for process in others)]

    def _write(self, step: int, facts: Mapping[str, Any], words: Packed) -> None:
        arrays = [np.asarray(vector) for _, vector in sorted(words.vectors.items())]
        self._memory.write(step, facts, arrays)
