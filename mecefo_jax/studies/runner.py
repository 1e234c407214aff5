"""Does the cells of a study that have not been done, several at a time, each on its own core.

Models of studies are so small that one run keeps no more than a core busy; two runs on two cores take little longer
than one on both.
"""

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mecefo_jax.processes.watchdog import die_with_parent
from mecefo_jax.studies import rows
from mecefo_jax.studies.markdown import machine
from mecefo_jax.studies.study import Cell, Study


def run(study: Study, cells: Sequence[Cell], csv: pathlib.Path, workdir: pathlib.Path, jobs: int) -> None:
    """Measure what is missing.

    Rows are in the file as soon as their cell is done, so whatever interrupts this costs the cells under way at most,
    and these go on from where their own checkpoints are.

    Args:
        study: whose cells they are.
        cells: what is wanted.
        csv: rows measured so far; completed.
        workdir: for the runs.
        jobs: cells at a time.
    """
    found = rows.read(csv)
    known = {row[rows.KEY] for row in found}
    missing = [cell for cell in cells if cell.key not in known]
    with _progress() as progress, _pool(jobs, len(missing)) as pool:
        task = progress.add_task(csv.stem, total=len(missing))
        stamp = {rows.COMMIT: _commit(), rows.DATE: time.strftime("%Y-%m-%d"), rows.MACHINE: machine()}
        futures = {pool.submit(_measure, cell, workdir / cell.key): cell for cell in missing}
        try:
            for future in concurrent.futures.as_completed(futures):
                cell = futures[future]
                found += [{**cell.labels, **row, rows.KEY: cell.key, **stamp} for row in future.result()]
                rows.write(csv, study.columns, found)
                progress.advance(task)
                progress.print(_line(cell), highlight=False)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def measured(cells: Sequence[Cell], csv: pathlib.Path) -> tuple[list[dict[str, Any]], int]:
    """The rows that there are already, in the order of the cells, and the number of cells that they are of."""
    order = {cell.key: place for place, cell in enumerate(cells)}
    found = [row for row in rows.read(csv) if row[rows.KEY] in order]
    return sorted(found, key=lambda row: order[row[rows.KEY]]), len({row[rows.KEY] for row in found})


def _measure(cell: Cell, workdir: pathlib.Path) -> list[dict[str, Any]]:
    """In a process of the pool: what the cell prints goes to a file beside its run."""
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / "output.log").open("a", encoding="utf-8") as log:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            return cell.measure(cell.config, workdir)


@contextlib.contextmanager
def _pool(jobs: int, num_cells: int) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Processes that begin afresh, for JAX does not survive a fork."""
    context = multiprocessing.get_context("spawn")
    jobs = max(1, min(jobs, num_cells))
    cores = context.Queue()
    for core in itertools.islice(itertools.cycle(sorted(os.sched_getaffinity(0))), jobs):
        cores.put(core)
    with concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_begin, initargs=(cores if jobs > 1 else None,)
    ) as pool:
        yield pool


def _begin(cores: Any) -> None:
    """End with the one who asked; take a core, before XLA counts how many there are."""
    die_with_parent()
    if cores is not None:
        os.sched_setaffinity(0, {cores.get()})
    from mecefo_jax import devices
    from mecefo_jax.config import MeshConfig

    devices.prepare(MeshConfig(num_nodes=1))


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    return Progress(*columns, console=Console(file=sys.stderr))


def _line(cell: Cell) -> str:
    return "  ".join(f"{name} {value}" for name, value in cell.labels.items())


def _commit() -> str:
    """The commit of the code, with a + where it has been changed since."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=pathlib.Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    return (git("rev-parse", "--short", "HEAD") or "none") + ("+" if git("status", "--porcelain", "-uno") else "")
