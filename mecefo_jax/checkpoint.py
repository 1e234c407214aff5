"""Checkpoints: durable, verified snapshots of the train state, one directory a step.

The only file that knows Orbax. A step is written to ``<step>.saving`` and gets its final name ``<step>`` by a
rename once every array is on disk together with ``manifest.json``, which holds the caller's metadata, the names,
shapes and dtypes of the arrays, and the size and CRC-32 of every file. So a directory with a plain number is a
complete save, and whatever happened to it since (a file missing, cut short, a bit flipped) is found out before
it is used. One process saves; every array must be addressable from it.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from mecefo_jax.errors import CheckpointError, ConfigError
from mecefo_jax.manifest import UnreadableError, promote, read_manifest, verify_files, write_manifest

_LEFTOVER = re.compile(r"(\d+)\.saving.*")


class _DropOrbaxRecords(logging.Filter):
    """Keeps Orbax's own log lines off the console; its failures arrive as exceptions and are reported as events."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "/orbax/" not in record.pathname.replace(os.sep, "/")


_DROP_ORBAX_RECORDS = _DropOrbaxRecords()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PendingSave:
    step: int
    started: float
    commit: "concurrent.futures.Future[tuple[int, str | None]]"


class Checkpointer:
    """Saves and restores train states in one directory.

    Everything that happens is told through ``on_event(kind, fields)``, always on the caller's thread:
    ``saved`` (step, seconds, bytes), ``save_failed`` (step, reason), ``checkpoint_unreadable`` (step, reason) and
    ``checkpoint_not_deleted`` (step, reason).

    Args:
      directory: where the steps live; made at the first save.
      keep: newest readable checkpoints kept; older ones are deleted after a later save has committed.
      on_event: receives the kind of event and its fields.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int, on_event: Callable[[str, dict], None]) -> None:
        if keep < 1:
            raise ConfigError(f"checkpoint.keep: at least 1 checkpoint must be kept, got {keep}")
        logging.getLogger("absl").addFilter(_DROP_ORBAX_RECORDS)
        self._directory = pathlib.Path(directory).absolute()
        self._keep = keep
        self._on_event = on_event
        self._pending: _PendingSave | None = None
        self._failure: tuple[int, str] | None = None
        self._unreadable: set[int] = set()
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Starts to save ``state`` as ``step``; the arrays may be donated or overwritten once this returns.

        Waits for the save before it, if that is still under way. A failure is never raised here: it is reported as
        ``save_failed``, now or by the first ``poll``, ``save`` or ``wait`` after it happened.

        Args:
          step: optimizer updates done; an existing checkpoint of that step is replaced once the new one is complete.
          state: pytree of arrays.
          metadata: JSON-able facts, given back by ``restore``.
        """
        self._collect(wait=True)
        started = time.monotonic()
        arrays = _flatten(state)
        contents = {"step": step, "metadata": dict(metadata), "arrays": _describe(arrays)}
        json.dumps(contents)  # a value that JSON cannot hold is the caller's mistake: raised here, not as a failed save
        saving = self._directory / f"{step}.saving"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for leftover in self._leftovers(step):
                shutil.rmtree(leftover)
            if jax.process_count() > 1:  # it takes a device's array for one that all processes save a part of
                arrays = jax.device_get(arrays)
            with _context():
                response = ocp.save_async(saving, {name: array for name, array in arrays.items() if array.size})
        except Exception as error:
            self._report_failed(step, error)
            return
        commit = self._executor.submit(self._commit, response, saving, contents)
        self._pending = _PendingSave(step=step, started=started, commit=commit)

    def poll(self) -> None:
        """Reports the save under way if it has ended; never blocks."""
        self._collect(wait=False)

    def wait(self) -> None:
        """Returns once the latest save is durable.

        Raises:
          CheckpointError: the latest save failed.
        """
        self._collect(wait=True)
        if self._failure is not None:
            step, reason = self._failure
            raise CheckpointError(
                f"the state of step {step} could not be saved in {self._directory}: {reason}; "
                "make room or make the directory writable, then start the run again"
            )

    def close(self) -> None:
        """Waits for the save under way, reports how it ended, and frees the background thread."""
        self._collect(wait=True)
        self._executor.shutdown()

    def steps(self) -> list[int]:
        """Returns the steps that have a committed checkpoint, ascending, whether or not it is still intact."""
        return _steps(self._entries())

    def restore(
        self, abstract_state: Any, *, validate: Callable[[dict[str, Any]], None] | None = None
    ) -> tuple[int, Any, dict[str, Any]] | None:
        """Loads the newest checkpoint that is intact, on whatever devices the run now has.

        Args:
          abstract_state: pytree of ``jax.ShapeDtypeStruct``; its shardings are those of the restored arrays, whatever
            those of the saved ones were.
          validate: called with the metadata before arrays are loaded, to refuse them by raising.

        Returns:
          ``(step, state, metadata)``, or None if the directory has never held a complete checkpoint.

        Raises:
          CheckpointError: checkpoints exist and none can be read (nothing is deleted), or the arrays are not those of
            ``abstract_state``.
        """
        self._collect(wait=True)
        self._finish_interrupted()
        steps = self.steps()
        for step in reversed(steps):
            try:
                return step, *_load(self._directory / str(step), abstract_state, validate)
            except UnreadableError as error:
                self._report_unreadable(step, str(error))
        if steps:
            found = ", ".join(str(step) for step in steps)
            raise CheckpointError(
                f"none of the checkpoints in {self._directory} can be read (steps {found}); nothing was deleted: "
                "put the missing files back, or start afresh with another --workdir"
            )
        return None

    def _commit(
        self, response: ocp.AsyncResponse[None], saving: pathlib.Path, contents: dict[str, Any]
    ) -> tuple[int, str | None]:
        """Background part of a save; returns its bytes and why older steps could not be deleted, if they could not."""
        response.result()
        num_bytes = write_manifest(saving, contents)
        promote(saving, self._directory / str(contents["step"]))
        try:
            for path in (*self._expired(contents["step"]), *self._leftovers()):
                shutil.rmtree(path)
        except OSError as error:
            return num_bytes, _one_line(error)
        return num_bytes, None

    def _expired(self, newest: int) -> list[pathlib.Path]:
        """Checkpoints to delete: older than the ``keep`` newest good ones up to the one just saved."""
        # Steps beyond the newest are corrupt ones that this run fell back from: they must not push out good ones.
        good = [step for step in self.steps() if step <= newest and step not in self._unreadable - {newest}]
        return [self._directory / str(step) for step in self.steps() if step < good[-self._keep :][0]]

    def _collect(self, *, wait: bool) -> None:
        """Takes in the outcome of the save under way."""
        pending = self._pending
        if pending is None or not (wait or pending.commit.done()):
            return
        self._pending = None
        try:
            num_bytes, problem = pending.commit.result()
        except Exception as error:
            self._report_failed(pending.step, error)
            return
        self._failure = None
        self._unreadable.discard(pending.step)
        seconds = time.monotonic() - pending.started
        self._on_event("saved", {"step": pending.step, "seconds": round(seconds, 3), "bytes": num_bytes})
        if problem is not None:
            self._on_event("checkpoint_not_deleted", {"step": pending.step, "reason": problem})

    def _finish_interrupted(self) -> None:
        """Commits a complete save that was killed before its rename; reports one that was torn."""
        for leftover in self._leftovers():
            step = int(cast(re.Match[str], _LEFTOVER.fullmatch(leftover.name))[1])
            try:
                read_manifest(leftover)
                promote(leftover, self._directory / str(step))
            except UnreadableError:
                self._report_unreadable(step, "the process ended before this save was complete")
            except OSError as error:
                self._report_unreadable(step, f"its save could not be completed: {_one_line(error)}")

    def _leftovers(self, step: int | None = None) -> list[pathlib.Path]:
        """Directories of saves that did not get their final name, of one step or of all."""
        matches = ((path, _LEFTOVER.fullmatch(path.name)) for path in self._entries())
        return [path for path, match in matches if match and step in (None, int(match[1]))]

    def _entries(self) -> list[pathlib.Path]:
        return _entries(self._directory)

    def _report_failed(self, step: int, error: Exception) -> None:
        with contextlib.suppress(CheckpointError):  # the directory itself may be gone; room is made where it is not
            for leftover in self._leftovers(step):
                shutil.rmtree(leftover, ignore_errors=True)
        self._failure = (step, _one_line(error))
        self._on_event("save_failed", {"step": step, "reason": self._failure[1]})

    def _report_unreadable(self, step: int, reason: str) -> None:
        self._unreadable.add(step)
        self._on_event("checkpoint_unreadable", {"step": step, "reason": reason})


def read_checkpoint(directory: pathlib.Path, step: int | None, abstract: Any) -> tuple[int, Any, dict[str, Any]]:
    """Reads a part of a checkpoint, and changes nothing in the directory, so that a run may be writing there.

    Args:
      directory: of a run's checkpoints.
      step: which one; None: the newest that is intact.
      abstract: pytree of ``jax.ShapeDtypeStruct``, of leaves with the paths of those to read.

    Returns:
      ``(step, tree, metadata)``.

    Raises:
      CheckpointError: there is no such checkpoint, or it cannot be read.
    """
    steps, reasons = _steps(_entries(directory)), []
    if not steps or step not in (None, *steps):
        wanted = "complete checkpoint" if step is None else f"checkpoint of step {step}"
        found = f"; there are steps {', '.join(map(str, steps))}" if steps else ""
        raise CheckpointError(f"no {wanted} in {directory}{found}")
    for candidate in reversed(steps) if step is None else [step]:
        try:
            return candidate, *_load(directory / str(candidate), abstract, None, partial=True)
        except UnreadableError as error:
            reasons.append(f"step {candidate}: {error}")
    raise CheckpointError(f"none of the checkpoints in {directory} can be read: {'; '.join(reasons)}")


def _load(
    path: pathlib.Path,
    abstract_state: Any,
    validate: Callable[[dict[str, Any]], None] | None,
    *,
    partial: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Verifies and loads one checkpoint, or the part of it that is in ``abstract_state``."""
    manifest = read_manifest(path)
    if validate is not None:
        validate(manifest["metadata"])
    abstract = _flatten(abstract_state)
    saved = {name: array for name, array in manifest["arrays"].items() if not partial or name in abstract}
    _check_arrays(path, saved, _describe(abstract))
    verify_files(path, manifest["files"])
    placed = {name: _placed(leaf) for name, leaf in abstract.items()}
    context = _context()
    context.pytree.loading.partial_load = partial
    try:
        with context:
            loaded = ocp.load(path, {name: leaf for name, leaf in placed.items() if leaf.size})
        arrays = cast(dict[str, Any], loaded)
    except Exception as error:
        raise UnreadableError(_one_line(error)) from error
    # Orbax refuses arrays without elements; there is nothing in them to save.
    leaves = [arrays[name] if leaf.size else _empty(leaf) for name, leaf in placed.items()]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(abstract_state), leaves), manifest["metadata"]


def _entries(directory: pathlib.Path) -> list[pathlib.Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot look into {directory}: {_one_line(error)}") from error


def _steps(entries: Iterable[pathlib.Path]) -> list[int]:
    return sorted(int(path.name) for path in entries if path.name.isdecimal())


def _context() -> ocp.Context:
    context = ocp.Context()
    if jax.process_count() > 1:
        _make_orbax_work_alone()
        context.multiprocessing.primary_host = 0
        context.multiprocessing.active_processes = {0}
    # With directories made in the background, a directory that cannot be made leaves Orbax's threads waiting for it.
    context.asynchronous.create_directories_asynchronously = False
    return context


@functools.cache
def _make_orbax_work_alone() -> None:
    """Lets Orbax take this process of many for the only one, since it saves and loads by itself.

    Orbax's own options for that are not enough (0.12.8): it still asks all processes whether they save to the same
    directory, lets process 0 alone write NumPy arrays, and refuses arrays of one process. Its two modules that count
    processes are private; they are touched here alone.
    """
    from orbax.checkpoint._src.multihost import multihost
    from orbax.checkpoint.experimental.v1._src.synchronization import multihost as multihost_v1

    for module in (multihost, multihost_v1):
        module.process_count = lambda: 1
        module.process_index = lambda: 0


def _flatten(tree: Any) -> dict[str, Any]:
    """Leaves by their path in the tree: independent of the container types, which Orbax need not know."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat = {
        jax.tree_util.keystr(path): leaf if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else np.asarray(leaf)
        for path, leaf in leaves
    }
    assert len(flat) == len(leaves), "two leaves of the state have the same path"
    return flat


def _describe(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Shape and dtype of each array, such as ``float32[128,344]``."""
    return {
        name: f"{np.dtype(array.dtype).name}[{','.join(str(size) for size in array.shape)}]"
        for name, array in arrays.items()
    }


def _placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The abstract array with a sharding; without one, Orbax would take the saved one, whose devices may be gone."""
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _empty(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)


def _check_arrays(path: pathlib.Path, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    names = sorted(saved.keys() | current.keys())
    differing = [name for name in names if saved.get(name) != current.get(name)]
    if differing:
        shown = [f"{name}: saved {saved.get(name, '-')}, now {current.get(name, '-')}" for name in differing[:8]]
        more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise CheckpointError(f"the checkpoint {path} holds another train state: {'; '.join(shown)}{more}")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
