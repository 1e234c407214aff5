"""A run as its directory tells of it: finished, going on, or crashed."""

import dataclasses
import json
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import configs
from mecefo_jax.config_file import to_dict
from mecefo_jax.errors import ConfigError, DataError
from mecefo_jax.metrics import EVENTS_FILE, METRICS_FILE, read_events, read_rows
from mecefo_jax.report import plan_series, read_json

_OF_LAUNCHER = {
    "cluster.coordinator",
    "cluster.process_id",
    "cluster.num_processes",
    "cluster.listen_on",
    "faults.scenario",
    "mesh.num_nodes",
    "train.microbatches_per_node",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a run directory says."""

    name: str
    """Of the directory; the whole path where several runs would have the same name."""
    directory: pathlib.Path
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    config: dict[str, Any]
    summary: dict[str, Any]
    """Of the finished run; else empty."""

    @property
    def last_step(self) -> int:
        """Updates done when the last row was written."""
        return self.rows[-1]["step"]

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, if they are known."""
        return self.config.get("train", {}).get("steps")

    def events_of(self, kind: str) -> np.ndarray:
        """Steps of the events of a kind."""
        return np.array([event["step"] for event in self.events if event["kind"] == kind], float)

    def plan(self, metric: str, field: str, healthy: float) -> tuple[np.ndarray, np.ndarray]:
        """A property of the plans over steps, each value holding until the next one (``report.plan_series``)."""
        return plan_series(self.rows, self.events, metric, field, healthy)

    def tokens_at(self, steps: np.ndarray) -> np.ndarray:
        """Tokens trained on after some steps; between rows, each row's rate holds since the row before it."""
        points = [(0, 0.0)]
        for row in self.rows:
            rate, seconds = row.get("perf/tokens_per_s"), row.get("perf/step_time_s")
            if rate is not None and seconds is not None:
                before, tokens = points[-1]
                points.append((row["step"], tokens + rate * seconds * (row["step"] - before)))
        known_steps, known_tokens = np.array(points, float).T
        return np.where(steps <= known_steps[-1], np.interp(steps, known_steps, known_tokens), np.nan)


def open_runs(directories: Sequence[pathlib.Path]) -> list[Run]:
    """Read runs.

    Args:
      directories: of the runs, finished or not.

    Raises:
      ConfigError: one is not a run directory.
      DataError: one has no metrics yet, or they cannot be read.
    """
    names = [directory.resolve().name for directory in directories]
    return [
        _open_run(directory, name if names.count(name) == 1 else str(directory))
        for directory, name in zip(directories, names, strict=True)
    ]


def _open_run(directory: pathlib.Path, name: str) -> Run:
    if not (directory / METRICS_FILE).exists():
        raise ConfigError(
            f"{directory}: holds no {METRICS_FILE}, so it is not a run directory; name one, such as runs/quickstart"
        )
    rows = read_rows(directory / METRICS_FILE)
    if not rows:
        raise DataError(f"{directory / METRICS_FILE}: no row yet, so there is nothing to report")
    events = read_events(directory / EVENTS_FILE) if (directory / EVENTS_FILE).exists() else []
    summary = read_json(directory / "summary.json")
    if summary.get("steps", -1) < rows[-1]["step"]:  # of an earlier end; the run has been given more steps since
        summary = {}
    config = read_json(directory / "config.json")
    return Run(name=name, directory=directory, rows=rows, events=events, config=config, summary=summary)


def flat_settings(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The settings of a config, of any version, by their dotted names."""
    pairs: list[tuple[str, Any]] = []
    for name, value in config.items():
        pairs += flat_settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return pairs


def command(run: Run) -> str:
    """The command that starts another run with the same settings, in terms of today's named configs."""
    config, name = dict(flat_settings(run.config)), str(run.config.get("name"))
    if name not in configs.names():
        return f"python train.py {shlex.quote(str(run.directory / 'config.json'))} --workdir NEW"
    named = dict(flat_settings(to_dict(configs.get(name))))
    program, given = "python train.py", set[str]()
    if config.get("cluster.coordinator"):
        nodes, processes = config.get("mesh.num_nodes"), config.get("cluster.num_processes")
        spares = "" if processes is None else f" --spares {processes - 1 - nodes}"
        program = f"python -m mecefo_jax.launch --nodes {nodes}{spares} --"
        given = _OF_LAUNCHER
    options = "".join(
        f" --{key} {shlex.quote(_as_option(value))}"
        for key, value in config.items()
        if key in named and value != named[key] and key not in given
    )
    return f"{program} {name} --workdir NEW{options}"


def _as_option(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(str(item) for item in value)
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
