"""Watchdog: who is stuck dies with a reason, who gets on or was merely stopped lives, nobody outlives the parent."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE = 60.0  # for a loaded machine; tests wait for events, not for this

PREAMBLE = """
import os, pathlib, signal, subprocess, sys, time
from mecefo_jax.processes.watchdog import Watchdog, die_with_parent

def stuck_asleep():
    time.sleep(1000)

def stuck_in_a_loop():
    while True:
        pass

def ready():
    print("ready", flush=True)
"""


@pytest.fixture
def start():
    """Starts Python processes with a program and arguments; ends them with the test."""
    started = []

    def run(program: str, *arguments: object, stderr: int = subprocess.PIPE) -> subprocess.Popen:
        command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(program), *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True, start_new_session=True
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):  # of its whole session none may be left
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until_ready(process: subprocess.Popen) -> None:
    assert process.stdout.readline() == "ready\n", process.communicate()[1]


def wait_until(condition) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_a_beat(beat: pathlib.Path, process: subprocess.Popen) -> None:
    last = beat.stat().st_mtime_ns
    wait_until(lambda: beat.stat().st_mtime_ns > last or process.poll() is not None)
    assert process.poll() is None, process.communicate()[1]


def state_of(process_id: int) -> str:
    """The letter that Linux gives the state of a process, such as T for stopped."""
    return pathlib.Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("stuck", ["stuck_asleep", "stuck_in_a_loop"])
def test_a_stuck_process_ends_in_time_and_names_where_it_was(stuck, start, tmp_path):
    stacks = tmp_path / "stacks.txt"
    stacks.write_text("of an earlier attempt\n")
    process = start(
        f"""
        with Watchdog(progress_seconds=1, stacks_to=pathlib.Path(sys.argv[1]), name="node 3"):
            ready()
            {stuck}()
        """,
        stacks,
    )
    wait_until_ready(process)
    since = time.monotonic()
    _, stderr = process.communicate(timeout=DEADLINE)
    assert process.returncode == 124
    assert 0.5 < time.monotonic() - since < 10  # 1 s and a look, and what a loaded machine may add
    for text in (stacks.read_text().removeprefix("of an earlier attempt\n"), stderr):
        assert text.startswith("node 3: stalled: no progress for 1 s\n") and f"in {stuck}\n" in text


def test_steady_progress_survives_many_limits(start):
    process = start(
        """
        with Watchdog(progress_seconds=1, stacks_to=None) as watchdog:
            end = time.monotonic() + 4
            while time.monotonic() < end:
                time.sleep(0.05)
                watchdog.progress()
        """
    )
    assert process.communicate(timeout=DEADLINE)[1] == "" and process.returncode == 0


def test_what_is_allowed_may_take_longer_and_counts_as_progress_at_its_end(start):
    process = start(
        """
        with Watchdog(progress_seconds=1, stacks_to=None) as watchdog:
            with watchdog.allow(100, "compiling"), watchdog.allow(0.1, "tracing"):
                time.sleep(1.5)
            time.sleep(0.4)
        time.sleep(1.5)  # it does not watch any more
        """
    )
    assert process.communicate(timeout=DEADLINE)[1] == "" and process.returncode == 0


def test_what_is_allowed_ends_too(start):
    process = start(
        """
        with Watchdog(progress_seconds=0.2, stacks_to=None) as watchdog:
            with watchdog.allow(0.5, "reading"):
                pass
            with watchdog.allow(1.5, "compiling the step"):
                ready()
                stuck_asleep()
        """
    )
    wait_until_ready(process)
    since = time.monotonic()
    _, stderr = process.communicate(timeout=DEADLINE)
    assert process.returncode == 124 and time.monotonic() - since > 1.2
    assert stderr.startswith("process: stalled: no progress for 1.5 s while compiling the step\n")


def test_a_failure_inside_what_is_allowed_ends_the_allowance(start):
    process = start(
        """
        with Watchdog(progress_seconds=2, stacks_to=None) as watchdog:
            try:
                with watchdog.allow(1000, "compiling"):
                    raise ValueError
            except ValueError:
                stuck_asleep()
        """
    )
    assert "no progress for 2 s\n" in process.communicate(timeout=DEADLINE)[1] and process.returncode == 124


def test_a_process_stopped_for_longer_than_the_limit_goes_on(start, tmp_path):
    beat, finish = tmp_path / "beat", tmp_path / "finish"
    process = start(
        """
        beat, finish = map(pathlib.Path, sys.argv[1:])
        with Watchdog(progress_seconds=2, stacks_to=None, beat_file=beat) as watchdog:
            ready()
            while not finish.exists():
                end = time.thread_time() + 0.2  # work to be done, which does not get less while it is stopped
                while time.thread_time() < end:
                    pass
                watchdog.progress()
        """,
        beat,
        finish,
    )
    wait_until_ready(process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    for _ in range(3):
        wait_for_a_beat(beat, process)
    finish.touch()
    assert process.communicate(timeout=DEADLINE)[1] == "" and process.returncode == 0


def test_a_stuck_process_that_was_stopped_has_one_more_period(start):
    process = start(
        """
        with Watchdog(progress_seconds=1, stacks_to=None):
            ready()
            stuck_asleep()
        """
    )
    wait_until_ready(process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    process.send_signal(signal.SIGCONT)
    since = time.monotonic()
    assert "no progress for 1 s\n" in process.communicate(timeout=DEADLINE)[1] and process.returncode == 124
    assert time.monotonic() - since > 0.9


def test_the_beat_goes_on_while_all_is_well(start, tmp_path):
    beat = tmp_path / "beat"
    process = start(
        """
        with Watchdog(progress_seconds=100, stacks_to=None, beat_file=pathlib.Path(sys.argv[1])):
            ready()
            stuck_in_a_loop()
        """,
        beat,
    )
    wait_until_ready(process)
    for _ in range(3):
        wait_for_a_beat(beat, process)


def test_a_beat_that_cannot_be_is_told_once_and_the_watch_goes_on(start, tmp_path):
    process = start(
        """
        with Watchdog(progress_seconds=1, stacks_to=None, beat_file=pathlib.Path(sys.argv[1]), name="node 1"):
            stuck_asleep()
        """,
        tmp_path / "missing" / "beat",
    )
    _, stderr = process.communicate(timeout=DEADLINE)
    assert process.returncode == 124
    lines = [line for line in stderr.splitlines() if "node 1" in line]
    expected = f"node 1: cannot touch {tmp_path / 'missing' / 'beat'} any more (No such file or directory)"
    assert lines == [expected, "node 1: stalled: no progress for 1 s"]


def test_a_report_that_nobody_reads_does_not_delay_the_end(start, tmp_path):
    """The process fills the pipe itself: whatever it says while it starts must not find it full."""
    reader, writer = os.pipe()
    process = start(
        """
        with Watchdog(progress_seconds=2, stacks_to=pathlib.Path(sys.argv[1])):
            while True:
                sys.stderr.write("stuck in writing this, with the lock of stderr held")
        """,
        tmp_path / "stacks.txt",
        stderr=writer,
    )
    assert process.wait(DEADLINE) == 124
    assert "no progress for 2 s\n" in (tmp_path / "stacks.txt").read_text()
    for descriptor in (reader, writer):
        os.close(descriptor)


def test_stacks_that_cannot_be_kept_are_still_shown(start, tmp_path):
    process = start(
        """
        with Watchdog(progress_seconds=2, stacks_to=pathlib.Path(sys.argv[1])):
            stuck_asleep()
        """,
        tmp_path / "missing" / "stacks.txt",
    )
    _, stderr = process.communicate(timeout=DEADLINE)
    assert process.returncode == 124 and "in stuck_asleep\n" in stderr and "FileNotFoundError" in stderr


LAUNCHER = """
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
print(child.pid, flush=True)
child.wait()
"""


def start_with_launcher(start, program: str) -> tuple[subprocess.Popen, int]:
    """A launcher and the process id of its child, which is ready and keeps the launcher's pipes open while it lives."""
    launcher = start(LAUNCHER, PREAMBLE + textwrap.dedent(program))
    child = int(launcher.stdout.readline())
    wait_until_ready(launcher)
    return launcher, child


def test_a_process_ends_when_its_parent_is_gone(start):
    launcher, _ = start_with_launcher(
        start,
        """
        with Watchdog(progress_seconds=1000, stacks_to=None, parent=int(sys.argv[1]), name="node 2"):
            time.sleep(1)  # lives as long as its parent does
            ready()
            stuck_asleep()
        """,
    )
    launcher.kill()
    _, stderr = launcher.communicate(timeout=DEADLINE)  # the end of the pipes: the child is dead
    assert stderr == f"node 2: parent process {launcher.pid} is gone, ending\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the signal at the parent's death is Linux's")
def test_even_a_stopped_process_dies_with_its_parent(start):
    launcher, child = start_with_launcher(
        start,
        """
        die_with_parent()
        ready()
        os.kill(os.getpid(), signal.SIGSTOP)
        """,
    )
    wait_until(lambda: state_of(child) == "T")
    launcher.kill()
    assert launcher.communicate(timeout=DEADLINE)[1] == ""
