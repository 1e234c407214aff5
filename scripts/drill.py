"""Kills the processes of a run by a schedule and measures what it costs.

    python scripts/drill.py quickstart --nodes 4 --spares 1 --schedule "kill 2 @ step 30; kill coordinator @ step 90"
    python scripts/drill.py quickstart --nodes 4 --schedule "random mtbf 20s for 300s" -- --faults.policy balanced

The run under fire is compared with undisturbed ones: the same launcher without kills, of the same seed and, to know how
much chance alone changes the loss, of others. Unless ``--no-baselines`` is given, the same schedule then strikes a run
that drops the microbatches of dead nodes, and one that starts again from the last checkpoint at each strike.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import io
import json
import math
import os
import pathlib
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from rich.console import Console

from mecefo_jax import cli, launch
from mecefo_jax.config import MAX_NODES, Config
from mecefo_jax.config_values import check_range
from mecefo_jax.drill.account import (
    account,
    reasons_against,
    steps_per_second,
    totals,
    usual_step_seconds,
    whole_goodput,
)
from mecefo_jax.drill.conductor import POLL_SECONDS, Conductor, Outcome, Struck
from mecefo_jax.drill.schedule import RandomKills, Strike, parse_schedule
from mecefo_jax.drill.table import tables
from mecefo_jax.errors import ConfigError, RunError
from mecefo_jax.inputs import open_inputs
from mecefo_jax.processes.audit import check
from mecefo_jax.processes.keys import run_key
from mecefo_jax.processes.memory import remove_all
from mecefo_jax.terminal import integer, number

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_OWN = {"train.log_every": "1", "cluster.audit": "true"}
"""Settings without which a drill could not measure."""
_PROBE_STEPS = 40
_CHECKPOINT_EVERY = 20
"""Steps between saves of the baseline that starts again from checkpoints."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drill:
    """What is to be drilled."""

    name: str
    nodes: int
    spares: int
    settings: dict[str, str]
    """Of ``train.py``, by dotted name; lists with commas."""
    folder: pathlib.Path
    """Holds a directory for each run."""
    limit_s: float | None = None

    def changed(self, **settings: str) -> "Drill":
        """The same with other settings; ``__`` stands for the dot."""
        new = {key.replace("__", "."): value for key, value in settings.items()}
        return dataclasses.replace(self, settings=self.settings | new)

    def commands(self, run: str) -> Callable[[str], list[list[str]]]:
        """Commands of the processes of one of its runs, as the launcher makes them."""
        words = [self.name, *(f"--{key}={value}" for key, value in self.settings.items())]
        words += ["--workdir", str(self.folder / run)]
        options, words = launch.scan(["--nodes", str(self.nodes), "--spares", str(self.spares), "--", *words])
        return launch.commands_of(options, words)

    def config(self, run: str) -> Config:
        """The config of a node in one of its runs."""
        return cli.parse(self.commands(run)("127.0.0.1:1")[1][2:])[0]

    def conduct(self, run: str, strikes: Sequence[Strike], *, restarts_all: bool = False) -> Outcome:
        """Run, and strike."""
        config = self.config(run)
        limit_s = 600.0 + 60 * len(strikes) + 5 * config.train.steps if self.limit_s is None else self.limit_s
        print(f"{run}: {config.train.steps} steps on {self.nodes} nodes ...", flush=True)
        conductor = Conductor(
            self.commands(run),
            self.folder / run,
            strikes,
            num_nodes=self.nodes,
            limit_s=limit_s,
            restarts_all=restarts_all,
            on_struck=_say,
        )
        try:
            outcome = conductor.run()
        finally:
            if (self.folder / run / "processes" / "run-id").exists():  # killed processes leave their states behind
                remove_all(run_key(self.folder / run))
        print(f"{run}: exit code {outcome.exit_code} after {outcome.ended - outcome.began:.0f} s", flush=True)
        return outcome

    def summary(self, run: str) -> dict[str, Any]:
        """The summary of one of its runs; empty if that did not finish."""
        path = self.folder / run / "summary.json"
        return json.loads(path.read_text()) if path.exists() else {}


def main(argv: Sequence[str]) -> int:
    """Run a drill; returns 0 if it passed, 1 if not, 2 with one line on standard error for a user's mistake."""
    try:
        options, drill = _parse(argv)
        planned = parse_schedule(options.schedule, drill.nodes + drill.spares)
        _check_steps(planned, drill)
        _make_folder(drill.folder)
        if isinstance(planned, RandomKills):
            drill = _long_enough(drill, planned.duration_s)
            strikes = planned.draw(drill.nodes + drill.spares, options.seed)
        else:
            strikes = planned
        results = _run_all(drill, strikes, options)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; all processes are killed", file=sys.stderr)
        return 130
    results["run"] |= {"schedule": str(planned) if isinstance(planned, RandomKills) else options.schedule}
    results["run"] |= {"command": shlex.join(["python", "scripts/drill.py", *argv])}
    for table in tables(results):
        Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0 if results["final"]["passed"] else 1


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Drill]:
    """The drill's own options, and what it drills."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:cut])
    check_range("--nodes", options.nodes, at_least=1, at_most=MAX_NODES)
    check_range("--spares", options.spares, at_least=0, at_most=MAX_NODES)
    check_range("--noise-seeds", options.noise_seeds, at_least=0)
    check_range("--limit", options.limit, above=0)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json}: its folder is not there; make it, or set another file")
    given = cli.scan([options.name, *words[cut + 1 :]])
    if given.workdir is not None or given.print_config or given.show_help:
        raise ConfigError("got --workdir or the like after --; a drill's own --workdir stands before")
    settings = {key: value if isinstance(value, str) else ",".join(value) for key, value in given.settings.items()}
    for key, value in _OWN.items():
        if settings.get(key, value) != value:
            raise ConfigError(f"{key}: got {settings[key]}, but a drill sets it to {value}; leave it out")
    folder = options.workdir or pathlib.Path("runs") / "drills" / f"{options.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    drill = Drill(
        name=options.name,
        nodes=options.nodes,
        spares=options.spares,
        settings=settings | _OWN,
        folder=folder,
        limit_s=options.limit,
    )
    drill.config("drill")  # what is wrong with it is said now
    return options, drill


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="drill.py",
        usage="%(prog)s NAME --nodes N --schedule S [options] [-- train.py settings]",
        description="Kill the processes of a run by a schedule, and measure what it costs.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="run, as for train.py")
    parser.add_argument("--nodes", type=integer, required=True, metavar="N", help="nodes that train")
    parser.add_argument("--spares", type=integer, default=0, metavar="N", help="processes that wait (default: 0)")
    parser.add_argument(
        "--schedule",
        required=True,
        metavar="S",
        help="'kill 2 @ step 30; stop 1 @ 12.5s' or 'random mtbf 20s for 300s'",
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write everything there")
    parser.add_argument("--workdir", type=pathlib.Path, metavar="DIR", help="new folder for the runs (runs/drills/...)")
    parser.add_argument("--no-baselines", action="store_true", help="only this run, not what others would make of it")
    parser.add_argument(
        "--noise-seeds",
        type=integer,
        default=3,
        metavar="N",
        help="undisturbed runs to compare with, of as many seeds; 1: no noise, 0: no comparison (default: 3)",
    )
    parser.add_argument("--seed", type=integer, default=0, metavar="N", help="of random schedules (default: 0)")
    parser.add_argument("--limit", type=number, metavar="S", help="kill a run after so many seconds")
    return parser


def _check_steps(planned: tuple[Strike, ...] | RandomKills, drill: Drill) -> None:
    """Whether the run is long enough for its strikes, or free to become so."""
    if isinstance(planned, RandomKills):
        if "train.steps" in drill.settings:
            raise ConfigError("train.steps: a random schedule sets it, by its duration; leave it out")
        return
    steps = drill.config("drill").train.steps
    for strike in planned:
        if strike.step is not None and strike.step >= steps:
            raise ConfigError(f"--schedule: got '{strike}', expected a step before the last one, {steps} (train.steps)")


def _make_folder(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--workdir {folder}: is not empty, and a drill begins afresh; set another one")
    except OSError as error:
        raise ConfigError(f"--workdir {folder}: cannot be made ({error.strerror}); set another one") from error


def _long_enough(drill: Drill, duration_s: float) -> Drill:
    """With as many steps as an undisturbed run takes in a time, which a short one tells, and data that lasts."""
    warmup = drill.config("probe").optim.warmup_steps or 0
    outcome = drill.changed(train__steps=str(max(_PROBE_STEPS, warmup + 1))).conduct("probe", ())
    if outcome.exit_code != 0:
        raise RunError(f"the short undisturbed run ended with exit code {outcome.exit_code}; see {drill.folder}/probe")
    steps = math.ceil(duration_s / usual_step_seconds(outcome.rows))
    return drill.changed(
        train__steps=str(max(steps, warmup + 1)), data__repeat=drill.settings.get("data.repeat", "true")
    )


def _run_all(drill: Drill, strikes: Sequence[Strike], options: argparse.Namespace) -> dict[str, Any]:
    """The undisturbed runs, the drill, the baselines."""
    first = drill.config("drill").train.seed
    undisturbed = [_undisturbed(drill, seed) for seed in range(first, first + options.noise_seeds)]
    outcome = drill.conduct("drill", strikes)
    audit = _check(drill, "drill")
    entries = account(outcome, drill.nodes, audit["lost_at"])
    final = totals(outcome, entries, audit) | _outcome(drill, "drill", outcome)
    summary = drill.summary("drill")
    final["model_compilations_after_first_step"] = summary.get("model_compilations_after_first_step")
    final |= _compare(final, undisturbed)
    # Those drawn at random fall where they fall: the run may be over a little sooner than was measured.
    demanded = sum(not strike.spares_last for strike in strikes)
    reasons = reasons_against(final, entries, demanded)
    final |= {"strikes_planned": len(strikes), "passed": not reasons, "failed_because": reasons}
    final["baselines"] = {} if options.no_baselines else _baselines(drill, strikes)
    return {"run": _facts(drill, options.seed), "events": entries, "final": final}


def _undisturbed(drill: Drill, seed: int) -> dict[str, Any]:
    """What a run without kills comes to."""
    name = f"undisturbed-{seed}"
    changed = drill.changed(train__seed=str(seed))
    outcome = changed.conduct(name, ())
    if outcome.exit_code != 0:
        raise RunError(f"an undisturbed run ended with exit code {outcome.exit_code}; see {drill.folder / name}")
    return {"seed": seed} | _outcome(changed, name, outcome)


def _baselines(drill: Drill, strikes: Sequence[Strike]) -> dict[str, Any]:
    """The same strikes on runs that deal with them in other ways."""
    dropping = drill.changed(faults__policy="drop")
    dropped = dropping.conduct("drop", strikes)
    audit = _check(dropping, "drop")
    every = drill.settings.get("checkpoint.every", str(_CHECKPOINT_EVERY))
    restarting = drill.changed(cluster__memory_every="0", checkpoint__every=every)
    restarted = restarting.conduct("restart", strikes, restarts_all=True)
    how = f"each strike kills all processes at once; all start again, from the last checkpoint (each {every} steps)"
    return {
        "drop": _outcome(dropping, "drop", dropped) | {"samples_lost": audit["samples_lost"]},
        "restart_from_checkpoint": _outcome(restarting, "restart", restarted)
        | {"steps_repeated": _check(restarting, "restart")["steps_repeated"], "how": how},
    }


def _outcome(drill: Drill, run: str, outcome: Outcome) -> dict[str, Any]:
    """What any of the runs came to."""
    summary = drill.summary(run)
    return {
        "exit_code": outcome.exit_code,
        **{name: summary.get(name) for name in ("steps", "tokens", "final_loss", "eval_loss")},
        "goodput": whole_goodput(summary, outcome),
        "steps_per_s": steps_per_second(outcome.rows),
        "strikes": sum(not struck.passed_over for struck in outcome.struck),
        "wall_time_s": round(outcome.ended - outcome.began, 1),
    }


def _check(drill: Drill, run: str) -> dict[str, Any]:
    """The audit of one of its runs."""
    config = drill.config(run)
    with contextlib.redirect_stdout(io.StringIO()):  # it says what the run has said
        sampler = open_inputs(config).sampler
    return check(drill.folder / run / "audit", sampler, config.train.steps, config.num_microbatches)


def _compare(final: dict[str, Any], undisturbed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The loss next to that of undisturbed runs; None where there is nothing to compare with."""
    if not undisturbed:
        return {"undisturbed": None, "loss_difference": None, "within_noise": None}
    reference, key = undisturbed[0], "final_loss" if undisturbed[0]["eval_loss"] is None else "eval_loss"
    losses = [run[key] for run in undisturbed]
    noise = max(losses) - min(losses) if len(losses) > 1 else None
    difference = None if final[key] is None else final[key] - reference[key]
    how = f"largest less smallest {key} of undisturbed runs under the same launcher, of seeds "
    how += ", ".join(str(run["seed"]) for run in undisturbed)
    return {
        "undisturbed": reference
        | {"noise": noise, "noise_is": how if noise is not None else None, f"all_{key}": losses},
        "loss_difference": difference,
        "within_noise": None if noise is None else difference is not None and abs(difference) <= noise,
    }


def _facts(drill: Drill, seed: int) -> dict[str, Any]:
    """What the numbers hold for."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    model = ""
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "name": drill.name,
        "nodes": drill.nodes,
        "spares": drill.spares,
        "settings": drill.settings,
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
        "commit": (git("rev-parse", "--short", "HEAD") or "no commit") + ("+" if git("status", "--porcelain") else ""),
        "machine": f"{os.cpu_count()} cores, {model or platform.processor()}",
        "jax": importlib.metadata.version("jax"),
        "python": platform.python_version(),
        "folder": str(drill.folder),
        "resolution_of_rows_s": POLL_SECONDS,
    }


def _say(struck: Struck) -> None:
    how = " (passed over: the last one living)" if struck.passed_over else ""
    how = " (it was not running)" if not struck.was_running else how
    print(f"  step {struck.step}: {struck.strike}{how}", flush=True)


def _exit_on_terminate(signum: int, frame: object) -> NoReturn:
    sys.exit(128 + signum)  # by way of what kills the processes


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit_on_terminate)
    sys.exit(main(sys.argv[1:]))
