"""Stands in for a coordinator or a node: ``stand_in.py FOLDER PROCESS [ADDRESS]`` does what the test wrote for it.

The coordinator notes when it starts and each line that it is told, in FOLDER/told, until its input ends. A node runs
the Python in FOLDER/node_PROCESS.py, else FOLDER/node.py, with what this file defines, FOLDER and PROCESS.
"""

import os
import pathlib
import sys
import time

FOLDER, PROCESS = pathlib.Path(sys.argv[1]), int(sys.argv[2])


def beat():
    pathlib.Path(os.environ["MECEFO_BEAT_FILE"]).touch()


def beat_for_ever():
    while True:
        beat()
        time.sleep(0.05)


def note(name, line):
    with (FOLDER / name).open("a") as file:
        file.write(f"{line}\n")


def await_note(name):
    while not (FOLDER / name).exists() or not (FOLDER / name).read_text().endswith("\n"):
        time.sleep(0.01)
    return (FOLDER / name).read_text()


def await_end(pid):
    """Waits until a process has ended and its end was noticed by the one that started it."""
    try:
        while True:
            os.kill(pid, 0)
            time.sleep(0.01)
    except ProcessLookupError:
        pass


def coordinate():
    note("told", f"{time.time()} at {sys.argv[3]}")
    for line in sys.stdin:
        note("told", f"{time.time()} {line.strip()}")


if __name__ == "__main__":
    if PROCESS == 0:
        coordinate()
    else:
        own = FOLDER / f"node_{PROCESS}.py"
        exec((own if own.exists() else FOLDER / "node.py").read_text())
