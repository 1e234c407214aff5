"""The training loop: data -> faults -> plan -> step -> metrics -> checkpoint. The only place where all of them meet."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import jax

from mecefo_jax.config import Config
from mecefo_jax.config_file import save_config
from mecefo_jax.errors import ConfigError, DataError, TooFewLiveNodesError
from mecefo_jax.executor import Executor
from mecefo_jax.inputs import Inputs, open_inputs
from mecefo_jax.journal import Journal, scores
from mecefo_jax.locking import locked
from mecefo_jax.membership import Membership, run_degraded_costs
from mecefo_jax.mesh import make_cluster
from mecefo_jax.metrics import RunLog
from mecefo_jax.progress import Progress
from mecefo_jax.report import write_report
from mecefo_jax.snapshots import Snapshots, run_identity
from mecefo_jax.state import abstract_state, init_sharded_state
from mecefo_jax.step import StepMetrics
from mecefo_jax.stopping import StopRequest, stop_requests
from mecefo_jax.takeover import Plan
from mecefo_jax.tracker_threads import open_trackers
from mecefo_jax.trackers import check_installed
from mecefo_jax.trained import keep_tokenizer


@dataclasses.dataclass(frozen=True)
class _Dispatched:
    """A step whose metrics have not been read yet."""

    step: int
    plan: Plan
    metrics: StepMetrics
    failures: int
    """Failures of the run up to and including this step."""


def run(config: Config, workdir: pathlib.Path) -> dict[str, Any]:
    """Train to the last step, resuming from the run directory if it holds a checkpoint.

    Args:
        config: complete description of the run.
        workdir: run directory, made if needed.

    Returns:
        The summary, as written to ``summary.json``.

    Raises:
        RunError: with its exit code: another process in the same directory, data, checkpoints, too few live nodes,
            non-finite steps, preemption.
    """
    check_installed(config.track)
    inputs = open_inputs(config)
    with (
        locked(workdir / "run", on_wait=lambda: refuse_to_share(workdir), setting="--workdir"),
        _open_log(config, workdir) as log,
        stop_requests() as stop,
    ):
        trainer = Trainer(config, workdir, inputs, log)
        if not trainer.is_finished:  # a finished run stays what it was
            save_config(config, workdir / "config.json")
            keep_tokenizer(workdir, inputs.prepared.tokenizer)
        with contextlib.closing(trainer):
            return trainer.run(stop)


class Trainer:
    """One attempt at a run."""

    def __init__(self, config: Config, workdir: pathlib.Path, inputs: Inputs, log: RunLog):
        """Set everything up and restore the newest checkpoint, if there is one."""
        self._config, self._workdir, self._inputs, self._log = config, workdir, inputs, log
        if config.eval.every and not len(inputs.held_out):
            log.event("not_evaluated", 0, reason="no held-out text")
        vocab_size, cluster = inputs.vocab_size, make_cluster(config.mesh)
        self._snapshots = Snapshots(config, run_identity(config, vocab_size, inputs.prepared), workdir, log)
        restored = self._snapshots.restore(abstract_state(config, vocab_size, cluster.submeshes[0]))
        if restored is None:
            restored = init_sharded_state(config, vocab_size, cluster.submeshes[0]), Progress()
        state, self.progress = restored
        self._done = int(state.step)
        costs = run_degraded_costs(config, vocab_size)
        self._membership = Membership(config, costs, self.progress, log, self._done)
        self._executor = Executor(config, cluster, state)
        self._journal = Journal(config, vocab_size, self.progress, log)
        self._pending: _Dispatched | None = None
        self._model_compilations_of_first_step: int | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done."""
        return self._done >= self._config.train.steps

    def run(self, stop: StopRequest) -> dict[str, Any]:
        """Train the remaining steps, evaluate, save, and write the summary and the report."""
        config, started = self._config, time.perf_counter()
        already_finished = self.is_finished
        if already_finished:
            self._log.event("already_finished", self._done, steps=config.train.steps)
        earlier_s = self.progress.wall_time_s
        for step in range(self._done, config.train.steps):
            self._train(step)
            self.progress.wall_time_s = earlier_s + time.perf_counter() - started
            if stop.received is not None and not self.is_finished:
                self._save_and_wait()
                raise stop.error(self._done)
        self._flush()
        final_eval = self._evaluate()
        if not already_finished:
            self._log.scalars(self._done, final_eval)
            self._save_and_wait()
        summary = self._summary(final_eval)
        self._log.summary(summary)
        try:
            write_report(self._workdir)
        except DataError as error:  # the run itself is done
            self._log.event("report_failed", self._done, reason=str(error))
        return summary

    def close(self) -> None:
        """Wait for the save under way, if there is one."""
        self._snapshots.close()

    def _train(self, step: int) -> None:
        """Dispatch one step, then see to the one before it while the devices work."""
        plan, started = self._plan(step), time.perf_counter()
        failures = self._membership.failures_through(step)
        metrics = self._executor.train_step(step, plan, self._inputs.sampler.microbatch)
        if self._model_compilations_of_first_step is None:
            self._model_compilations_of_first_step = self._executor.model_compilations
        previous, self._pending = self._pending, _Dispatched(step, plan, metrics, failures)
        if previous is not None:
            self._commit(previous, ended=started)
        self._membership.report(step, plan)
        self._done = done = step + 1
        self._log.progress(done)
        self._snapshots.poll()

        config = self._config
        is_last = done == config.train.steps
        if config.eval.every and done % config.eval.every == 0 and not is_last:
            self._flush()
            started = time.perf_counter()
            self._journal.evaluated(done, self._evaluate(), time.perf_counter() - started)
        if config.checkpoint.every and done % config.checkpoint.every == 0 and not is_last:
            self._save()

    def _plan(self, step: int) -> Plan:
        """The plan of a step; saves and gives up where too few units live."""
        try:
            return self._membership.plan(step)
        except TooFewLiveNodesError as error:
            self._flush()
            self._membership.report(step, None)
            self._save_and_wait()
            raise TooFewLiveNodesError(f"{error}; the state of step {self._done} is saved") from error

    def _commit(self, dispatched: _Dispatched, ended: float | None = None) -> None:
        """Read a step's metrics and account for it; ``ended``: now, once they have been read."""
        metrics = jax.device_get(dispatched.metrics)
        self._journal.commit(dispatched.step, dispatched.plan, metrics, dispatched.failures, ended)

    def _flush(self) -> None:
        """Account for every step dispatched so far."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._commit(pending)

    def _evaluate(self) -> dict[str, float]:
        """Loss on the held-out text: token-weighted mean in nats, and its exponential; empty without such text."""
        held_out = self._inputs.held_out
        return scores(*self._executor.evaluate(held_out)) if len(held_out) else {}

    def _save(self) -> None:
        self._flush()
        self._snapshots.save(self._done, self._executor.state, self.progress)

    def _save_and_wait(self) -> None:
        self._flush()
        self._snapshots.save_and_wait(self._done, self._executor.state, self.progress)

    def _summary(self, final_eval: Mapping[str, float]) -> dict[str, Any]:
        first = self._model_compilations_of_first_step
        return self.progress.summary(self._done) | {
            "eval_loss": final_eval.get("eval/loss"),
            "eval_perplexity": final_eval.get("eval/perplexity"),
            "model_compilations_after_first_step": 0 if first is None else self._executor.model_compilations - first,
        }


def _open_log(config: Config, workdir: pathlib.Path) -> RunLog:
    trackers = open_trackers(config, workdir)
    return RunLog(workdir, total_steps=config.train.steps, num_nodes=config.mesh.num_nodes, trackers=trackers)


def refuse_to_share(workdir: pathlib.Path) -> NoReturn:
    """Another process holds the lock of the run directory."""
    raise ConfigError(f"another process is training in {workdir}; stop it, or set another --workdir")
