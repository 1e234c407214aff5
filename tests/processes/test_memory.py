"""State memory: bit-equal round trips, whole states after a kill at any moment, nobody else's files."""

import json
import os
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from mecefo_jax.processes import memory as memory_module
from mecefo_jax.processes.memory import StateMemory, remove_all

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def key(tmp_path):
    yield str(tmp_path)
    remove_all(str(tmp_path))


def arrays_of(step: int, size: int = 1000) -> list[np.ndarray]:
    return [np.full((size,), step, np.float32), np.asarray(step, np.int64)]


def assert_holds(memory: StateMemory, step: int, size: int = 1000) -> None:
    """The newest state is the whole one of ``step``."""
    state = memory.newest()
    assert state is not None and state[0] == step and state[1] == {"step": step}
    for found, expected in zip(state[2], arrays_of(step, size), strict=True):
        np.testing.assert_array_equal(found, expected, strict=True)


def write(memory: StateMemory, step: int, size: int = 1000) -> None:
    memory.write(step, {"step": step}, arrays_of(step, size))


ROUND_TRIPS = {
    "every bfloat16, NaN payloads included": np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16),
    "float32 NaN payloads": np.array([0x7FC00000, 0x7F800001, 0xFFC12345, 0x80000000], np.uint32).view(np.float32),
    "float8": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2),
    "int4": np.arange(-8, 8).astype(ml_dtypes.int4),
    "0-d": np.asarray(2.5, np.float64),
    "0-d bfloat16": np.asarray(1.5, ml_dtypes.bfloat16),
    "empty": np.zeros((3, 0, 2), np.int32),
    "bool": np.array([[True, False]]),
    "uint64": np.array([2**64 - 1], np.uint64),
    "complex64": np.array([1 - 2j], np.complex64),
    "big-endian": np.arange(3, dtype=">f4"),
    "not contiguous": np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1)[::2],
    "larger than a chunk": np.random.default_rng(0).integers(0, 256, (3, 123_457), np.uint8),
}


def test_round_trip_is_bit_equal(key):
    facts = {"attempt": 3, "rows": [1.5, None], "name": "caf\u00e9"}
    StateMemory(key, 1).write(7, facts, list(ROUND_TRIPS.values()))
    state = StateMemory(key, 1).newest()
    assert state is not None and state[:2] == (7, facts)
    for found, (name, expected) in zip(state[2], ROUND_TRIPS.items(), strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        assert found.tobytes() == expected.tobytes(), name


def test_arrays_are_the_callers_own(key):
    memory = StateMemory(key, 0)
    write(memory, 1)
    _, _, (array, _) = memory.newest()
    array[:] = -1
    assert_holds(memory, 1)
    for step in (2, 3):
        write(memory, step)
    assert (array == -1).all()


@pytest.mark.parametrize("array", [np.array([None]), np.zeros(2, [("a", np.int32)])], ids=["objects", "a structure"])
def test_dtypes_without_a_name_are_refused_before_anything_is_lost(array, key):
    memory = StateMemory(key, 0)
    write(memory, 1)
    with pytest.raises(TypeError, match="^arrays: got dtype .*expected"):
        memory.write(2, {}, [array])
    assert_holds(memory, 1)


def test_the_two_newest_states_are_kept_each_found_by_its_step(key):
    memory = StateMemory(key, 0)
    assert memory.steps() == []
    for step in (3, 4, 8):
        write(memory, step)
    assert memory.steps() == [4, 8]
    assert memory.read(3) is None
    for step in (4, 8):
        assert memory.read(step)[1] == {"step": step}
    assert_holds(memory, 8)


@pytest.mark.parametrize(
    ("back_at", "left"),
    [
        (12, [11, 12]),
        (11, [10, 11]),  # the other processes only had step 10
        (10, [10]),
        (6, [6]),  # all went back to a checkpoint
    ],
)
def test_states_of_a_past_that_was_given_up_are_gone(back_at, left, key):
    memory = StateMemory(key, 0)
    for step in (10, 11):
        write(memory, step)
    memory.write(back_at, {"again": True}, [])
    assert memory.steps() == left
    assert memory.newest() == (back_at, {"again": True}, [])


def test_nothing_is_found_and_no_file_made_where_nothing_was_written(key):
    write(StateMemory(key, 0), 1)
    for other in (StateMemory(key, 1), StateMemory(key + "/", 0)):
        assert other.newest() is None and other.read(1) is None and other.steps() == []
        other.remove()
        assert not other.path.exists()


class _KilledError(Exception):
    pass


def killed_in_write(number: int, share: float, body: Callable[[], None]) -> bool:
    """Whether ``body`` made its system call ``number`` that writes: it ends there, after a share of the bytes."""
    pwrite, calls = os.pwrite, 0

    def interrupted(file, data, offset):
        nonlocal calls
        calls += 1
        if calls == number:
            pwrite(file, data[: round(len(data) * share)], offset)
            raise _KilledError
        return pwrite(file, data, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", interrupted)
        try:
            body()
        except _KilledError:
            return True
    return False


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "sizes", [(1000, 1000), (1000, 100_000), (100_000, 1000)], ids=["same", "growing", "shrinking"]
)
def test_a_kill_at_any_write_leaves_a_whole_state(sizes, share, key):
    before, after = sizes
    memory = StateMemory(key, 0)
    for number in range(1, 100):
        memory.remove()
        for step in (1, 2):
            write(memory, step, before)
        if not killed_in_write(number, share, lambda: write(memory, 3, after)):
            assert number > 5, "mark away, description, two arrays, mark: each was a place to be killed"
            return
        committed = share == 1.0 and memory.steps()[-1] == 3  # killed between the last write and the return from it
        assert_holds(memory, 3 if committed else 2, after if committed else before)
        write(memory, 4, after)
        assert_holds(memory, 4, after)
    raise AssertionError("writes without end")


def test_writers_killed_at_random_moments_leave_whole_states(key):
    seed = time.time_ns()
    print(f"seed of the random moments: {seed}")
    script = pathlib.Path(__file__).with_name("killed_writer.py")
    command = [sys.executable, str(script), key, "30", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0, "no kill came in the midst of a write"
    step, facts, _ = StateMemory(key, 0).newest()
    assert facts == {"step": step} and step >= 90


def test_a_flipped_bit_anywhere_in_the_newest_state_falls_back_to_the_older(key):
    memory = StateMemory(key, 0)
    for step in (1, 2):
        write(memory, step, 50)
    whole = memory.path.read_bytes()
    num_fallen_back = 0
    for position in range(len(whole)):
        memory.path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        step, facts, (array, _) = memory.newest()
        assert facts == {"step": step} and (array == step).all()
        num_fallen_back += step == 1
    protected = sum(array.nbytes for array in arrays_of(2, 50)) + len(json.dumps({"step": 2}))
    assert num_fallen_back > protected, "its mark and its description of the arrays are protected as well"
    memory.path.write_bytes(whole[:-1])
    assert_holds(memory, 1, 50)


def test_states_may_change_their_sizes(key):
    memory = StateMemory(key, 0)
    sizes = [10, 5000, 7, 90_000, 90_000, 100_000, 20, 100_000, *[3] * 3, *[100_000] * 20]
    for step, size in enumerate(sizes, start=1):
        write(memory, step, size)
        assert_holds(memory, step, size)
        if step > 1:
            assert memory.read(step - 1)[1] == {"step": step - 1}
    # What lies before the kept state is smaller than the new one, or the new one would lie there: three are enough.
    assert memory.path.stat().st_size < 3.1 * 100_000 * np.float32().nbytes


def test_full_memory_raises_and_loses_nothing(key):
    memory = StateMemory(key, 0)
    for step in (1, 2):
        write(memory, step)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # stands for a file system that is full there
    try:
        with pytest.raises(OSError):
            write(memory, 3, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert memory.steps() == [1, 2]
    assert_holds(memory, 2)


def test_only_its_owner_can_open_the_file(key):
    previous = os.umask(0)
    try:
        memory = StateMemory(key, 0)
        write(memory, 1)
    finally:
        os.umask(previous)
    assert memory.path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_somebody_else_put_there_is_refused(key, monkeypatch):
    memory = StateMemory(key, 0)
    write(memory, 1)
    memory.path.chmod(0o666)
    for use in (StateMemory(key, 0).newest, StateMemory(key, 0).steps, lambda: write(StateMemory(key, 0), 2)):
        with pytest.raises(PermissionError, match="expected a file of user .* mode 600, got .*rw-rw-rw-; remove it"):
            use()
    memory.path.chmod(0o600)
    assert_holds(StateMemory(key, 0), 1)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(PermissionError, match=f"expected a file of user {other} with mode 600, got user {other - 1}"):
        StateMemory(key, 0).newest()


def test_a_symbolic_link_is_refused(key, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    victim.chmod(0o600)
    memory = StateMemory(key, 0)
    memory.path.symlink_to(victim)
    for use in (memory.newest, lambda: write(memory, 1)):
        with pytest.raises(OSError):
            use()
    memory.remove()
    assert victim.read_bytes() == b"precious"


def test_removal(key):
    memories = [StateMemory(key, process) for process in (0, 1, 12)]
    other = StateMemory(key + "-other", 0)
    for memory in (*memories, other):
        write(memory, 5)
    memories[1].remove()
    assert [memory.path.exists() for memory in memories] == [True, False, True]
    remove_all(key)
    assert not any(memory.path.exists() for memory in memories)
    assert StateMemory(key, 12).newest() is None
    assert_holds(other, 5)
    other.remove()
    memories[1].close()  # closed by its removal: once more does no harm
    write(memories[1], 6)
    assert_holds(StateMemory(key, 1), 6)


def test_without_shared_memory_the_file_lies_among_temporary_ones(key, monkeypatch, tmp_path):
    monkeypatch.setattr(memory_module, "_SHARED_MEMORY", tmp_path / "missing")
    monkeypatch.setattr(memory_module.tempfile, "tempdir", str(tmp_path))
    memory = StateMemory(key, 0)
    write(memory, 1)
    assert memory.path.parent == tmp_path
    assert_holds(StateMemory(key, 0), 1)
    remove_all(key)
    assert not memory.path.exists()


def test_a_reader_beside_a_busy_writer_always_finds_a_state(key):
    program = (
        "import sys, numpy as np; from mecefo_jax.processes.memory import StateMemory\n"
        "memory = StateMemory(sys.argv[1], 0)\n"
        "for step in range(1, 10**9): memory.write(step, {'step': step}, [np.full(50_000, step, np.int64)])\n"
    )
    memory = StateMemory(key, 0)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writer = subprocess.Popen([sys.executable, "-c", program, key], env=environment, stderr=subprocess.PIPE)
    try:
        deadline, found = time.monotonic() + 60, []
        while len(set(found)) < 50:
            assert writer.poll() is None and time.monotonic() < deadline
            state = memory.newest()
            if state is None:
                assert not found
                continue
            assert state[1] == {"step": state[0]} and (state[2][0] == state[0]).all()
            found.append(state[0])
    finally:
        writer.kill()
        writer.communicate()
    assert found == sorted(found)


def test_states_written_over_while_they_are_read_give_way_to_the_new_ones(key, monkeypatch):
    writer, reader, preadv = StateMemory(key, 0), StateMemory(key, 0), os.preadv
    for step in (1, 2):
        write(writer, step)
    new_steps = [3, 4]

    def overtaken(file, buffers, offset):
        while new_steps:
            write(writer, new_steps.pop(0))
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", overtaken)
    assert_holds(reader, 4)
