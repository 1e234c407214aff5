"""The script that prepares data ahead of time."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "prepare_data.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_it_prepares_or_says_in_one_line_why_not(tmp_path: pathlib.Path, corpus: pathlib.Path) -> None:
    settings = ["quickstart", "--data.source", "files", "--data.cache_dir", str(tmp_path / "cache")]
    done = run(*settings, "--data.files", f"{corpus}/*.txt")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "cache").glob("*/meta.json"))) == 1
    failed = run(*settings, "--data.files", f"{corpus}/*.md")
    assert failed.returncode == 3
    assert failed.stderr.startswith("error: data.files: no file matches") and failed.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_costs_nothing(
    tmp_path: pathlib.Path, corpus: pathlib.Path, unbuffered: str
) -> None:
    settings = [
        "--data.source",
        "files",
        "--data.files",
        f"{corpus}/*.txt",
        "--data.cache_dir",
        str(tmp_path / "cache"),
    ]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, str(SCRIPT), "quickstart", *settings]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((tmp_path / "cache").glob("*/meta.json"))) == 1
