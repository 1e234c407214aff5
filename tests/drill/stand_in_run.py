"""``stand_in_run.py FOLDER PROCESS STEPS``: process 1 writes rows as a run does and goes on where it left off."""

import json
import os
import pathlib
import sys
import time

FOLDER, PROCESS, STEPS = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
BEAT = pathlib.Path(os.environ["MECEFO_BEAT_FILE"])


def train():
    path = FOLDER / "metrics.jsonl"
    before = [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    attempt = max((row["attempt"] for row in before), default=0) + 1
    with path.open("ab", buffering=0) as file:
        for step in range(len(before) + 1, STEPS + 1):
            BEAT.touch()
            row = {"step": step, "attempt": attempt, "train/loss": 1.0}
            file.write(json.dumps(row).encode() + b"\n")
            time.sleep(0.02)
    (FOLDER / "done").touch()
    print("finished", flush=True)


if PROCESS == 0:
    sys.stdin.read()
elif PROCESS == 1:
    train()
else:
    while not (FOLDER / "done").exists():
        BEAT.touch()
        time.sleep(0.05)
