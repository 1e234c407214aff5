"""Kills a writer of state memory at random moments: ``killed_writer.py KEY ROUNDS SEED``.

After each kill the newest state must be whole, not older than what had been committed, and made of its own step. Prints
how many kills tore a slot, so that a reader can tell whether the moments were any good.
"""

import os
import pathlib
import random
import signal
import sys
import time

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # only a process without threads may fork

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np

from mecefo_jax.processes.memory import StateMemory
from mecefo_jax.processes.watchdog import die_with_parent

NUM_CONTENTS = 5


def content(step: int) -> list[np.ndarray]:
    """Arrays that only this step and its like have, of sizes that change from step to step."""
    like = step % NUM_CONTENTS
    return [np.full((100_000 * (like + 1),), like, np.float32), np.asarray(like, np.int32)]


def write_for_ever(memory: StateMemory, step: int) -> None:
    die_with_parent()
    contents = [content(like) for like in range(NUM_CONTENTS)]
    while True:
        step += 1
        memory.write(step, {"step": step}, contents[step % NUM_CONTENTS])


def kill_a_writer(memory: StateMemory, last: int, delay: float) -> int:
    """The step that a writer, which goes on from ``last``, had surely committed when it was killed."""
    child = os.fork()
    if child == 0:
        write_for_ever(memory, last)
    try:
        deadline = time.monotonic() + 60
        while max(memory.steps()) < last + 3:
            assert time.monotonic() < deadline, "the writer does not write"
            time.sleep(0.0005)
        time.sleep(delay)
        return max(memory.steps())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def main() -> None:
    key, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    memory = StateMemory(key, 0)
    memory.write(0, {"step": 0}, content(0))
    last, torn = 0, 0
    for _ in range(rounds):
        committed = kill_a_writer(memory, last, rng.uniform(0, 0.005))
        torn += len(memory.steps()) == 1
        state = memory.newest()
        assert state is not None
        last, facts, arrays = state
        assert last >= committed and facts == {"step": last}, (last, committed, facts)
        for found, expected in zip(arrays, content(last), strict=True):
            np.testing.assert_array_equal(found, expected, strict=True)
    print(torn)


if __name__ == "__main__":
    main()
