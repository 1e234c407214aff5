"""The training loop: data -> faults -> plan -> step -> metrics -> checkpoint. The only place where all of them meet."""

import contextlib
import dataclasses
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from mecefo_jax.checkpoint import Checkpointer
from mecefo_jax.config import Config, check_vocab_size
from mecefo_jax.config_file import from_dict, save_config, to_dict
from mecefo_jax.data import PreparedData, Sampler, check_vocabulary, evaluation_microbatches, prepare
from mecefo_jax.errors import (
    ConfigError,
    DataError,
    NonFiniteError,
    TooFewLiveNodesError,
)
from mecefo_jax.executor import Executor
from mecefo_jax.identity import check_identity
from mecefo_jax.locking import locked
from mecefo_jax.membership import Membership
from mecefo_jax.mesh import make_cluster
from mecefo_jax.metrics import RunLog
from mecefo_jax.optimizer import learning_rate_schedule
from mecefo_jax.performance import Throughput, compilation_counter, peak_flops
from mecefo_jax.progress import Progress
from mecefo_jax.report import write_report
from mecefo_jax.state import TrainState, abstract_state, init_sharded_state
from mecefo_jax.step import StepMetrics
from mecefo_jax.stopping import StopRequest, stop_requests
from mecefo_jax.takeover import Plan, degraded_cost
from mecefo_jax.takeover.cost import exact_flops


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
    prepared = prepare(config.data)
    vocab_size = config.model.vocab_size or prepared.vocab_size
    check_vocabulary(prepared, vocab_size)
    check_vocab_size(vocab_size, config.mesh, smallest=prepared.vocab_size)
    with (
        locked(workdir / "run", on_wait=lambda: _refuse_to_share(workdir), setting="--workdir"),
        RunLog(workdir, total_steps=config.train.steps, num_nodes=config.mesh.num_nodes) as log,
        stop_requests() as stop,
    ):
        trainer = Trainer(config, workdir, prepared, vocab_size, log)
        if not trainer.is_finished:  # a finished run stays what it was
            save_config(config, workdir / "config.json")
        with contextlib.closing(trainer):
            return trainer.run(stop)


class Trainer:
    """One attempt at a run."""

    def __init__(self, config: Config, workdir: pathlib.Path, prepared: PreparedData, vocab_size: int, log: RunLog):
        """Set everything up and restore the newest checkpoint, if there is one."""
        self._config, self._workdir, self._log = config, workdir, log
        self._compilations, self._compilations_before = compilation_counter(), compilation_counter().count
        self._identity = to_dict(config)
        self._identity["model"] |= {"vocab_size": vocab_size}
        self._identity["data"] |= {"fingerprint": prepared.fingerprint}

        train = config.train
        self._sampler = Sampler(
            prepared.train,
            seed=train.seed,
            num_microbatches=config.num_microbatches,
            microbatch_size=train.microbatch_size,
            repeat=config.data.repeat,
        )
        self._sampler.require_enough(train.steps)
        self._held_out = evaluation_microbatches(prepared.validation, train.microbatch_size, config.eval.batches)
        if config.eval.every and not len(self._held_out):
            log.event("not_evaluated", 0, reason="no held-out text")

        self._checkpoints = Checkpointer(
            workdir / "checkpoints",
            keep=config.checkpoint.keep,
            on_event=lambda kind, fields: self._log.event(kind, fields.pop("step"), **fields),
        )
        cluster = make_cluster(config.mesh)
        self.progress = Progress()
        state = self._restored(vocab_size, cluster.submeshes[0])
        if state is None:
            state = init_sharded_state(config, vocab_size, cluster.submeshes[0])
        self._done = int(state.step)
        self._membership = Membership(config, _degraded_cost(config, vocab_size), self.progress, log, self._done)
        self._executor = Executor(config, cluster, state)
        self._throughput = self._new_throughput(vocab_size)
        self._pending: _Dispatched | None = None
        self._saved_step: int | None = None
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
        self._checkpoints.close()

    def _train(self, step: int) -> None:
        """Dispatch one step, then see to the one before it while the devices work."""
        plan, started = self._plan(step), time.perf_counter()
        failures = self._membership.failures_through(step)
        metrics = self._executor.train_step(step, plan, self._sampler.microbatch)
        if self._model_compilations_of_first_step is None:
            self._model_compilations_of_first_step = self._executor.model_compilations
        previous, self._pending = self._pending, _Dispatched(step, plan, metrics, failures)
        if previous is not None:
            self._commit(previous, ended=started)
        self._membership.report(step, plan)
        self._done = done = step + 1
        self._log.progress(done)
        self._checkpoints.poll()

        config = self._config
        is_last = done == config.train.steps
        if config.eval.every and done % config.eval.every == 0 and not is_last:
            self._flush()
            started = time.perf_counter()
            self._log.scalars(done, self._evaluate())
            self._throughput.pause(time.perf_counter() - started)
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
        """Read a step's metrics, account for it, and log it if it is due; ``ended``: now, once it has been read."""
        metrics, plan, done = jax.device_get(dispatched.metrics), dispatched.plan, dispatched.step + 1
        assert (metrics.computed_M == (plan.executor_M >= 0)).all(), "a microbatch was lost or computed twice"
        tokens = int(metrics.tokens_M.sum())
        degraded_tokens = float(metrics.tokens_M @ plan.degraded_MS.mean(axis=1))
        critical_load = plan.critical_load(self._membership.degraded_cost)
        self.progress.commit(
            dispatched.step,
            loss=float(metrics.loss),
            tokens=tokens,
            degraded_tokens=degraded_tokens,
            critical_load=critical_load,
        )
        self._throughput.committed(tokens, time.perf_counter() if ended is None else ended)
        self._report_counters(done, metrics)

        if done == 1 or done % self._config.train.log_every == 0 or done == self._config.train.steps:
            row = {
                "train/loss": metrics.loss,
                "train/grad_norm": metrics.grad_norm,
                "train/learning_rate": metrics.learning_rate,
                "train/skipped_steps": metrics.skipped,
                "perf/compilations": self._compilations.count - self._compilations_before,
                "ft/live_nodes": int(plan.live_NS.any(axis=1).sum()),
                "ft/degraded_token_fraction": degraded_tokens / max(tokens, 1),
                "ft/critical_load": critical_load,
                "ft/failures_total": dispatched.failures,
            }
            self._log.scalars(done, row | self._throughput.read())
        limit = self._config.train.max_skipped_in_a_row
        if metrics.skipped_in_a_row >= limit:
            raise NonFiniteError(
                f"the loss or a gradient was not finite in {limit} steps in a row (train.max_skipped_in_a_row), the "
                f"last one step {done}; set a lower --optim.learning_rate"
            )

    def _report_counters(self, done: int, metrics: StepMetrics) -> None:
        """Events for the counters that an update advanced."""
        progress = self.progress
        if metrics.skipped > progress.skipped_steps:
            self._log.event("skipped", done, in_a_row=int(metrics.skipped_in_a_row))
        if metrics.bases_refreshed > progress.basis_refreshes:
            self._log.event("basis_refresh", done, not_finite=int(metrics.bases_kept) - progress.bases_kept)
        progress.skipped_steps = int(metrics.skipped)
        progress.basis_refreshes, progress.bases_kept = int(metrics.bases_refreshed), int(metrics.bases_kept)

    def _flush(self) -> None:
        """Account for every step dispatched so far."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._commit(pending)

    def _evaluate(self) -> dict[str, float]:
        """Loss on the held-out text: token-weighted mean in nats, and its exponential; empty without such text."""
        if not len(self._held_out):
            return {}
        total, tokens = self._executor.evaluate(self._held_out)
        loss = total / tokens
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}

    def _save(self) -> None:
        if self._saved_step == self._done:
            return
        self._flush()
        metadata = {"step": self._done, "config": self._identity, "progress": dataclasses.asdict(self.progress)}
        self._checkpoints.save(self._done, self._executor.state, metadata)
        self._saved_step = self._done
        if self._config.checkpoint.required:
            self._checkpoints.wait()

    def _save_and_wait(self) -> None:
        self._save()
        self._checkpoints.wait()

    def _restored(self, vocab_size: int, mesh: jax.sharding.Mesh) -> TrainState | None:
        """The newest checkpoint on ``mesh``; None if there is none."""
        changes: list[str] = []

        def validate(metadata: dict[str, Any]) -> None:
            step = jnp.float32(metadata["step"])
            rate = lambda identity: float(learning_rate_schedule(_run_config(identity))(step))  # noqa: E731
            changes.extend(check_identity(metadata["config"], self._identity, learning_rate=rate))

        restored = self._checkpoints.restore(abstract_state(self._config, vocab_size, mesh), validate=validate)
        if restored is None:
            self._log.event("started", 0)
            return None
        step, state, metadata = restored
        self.progress = Progress(**metadata["progress"])
        self._log.event("resumed", step)
        for change in changes:
            self._log.event("config_changed", step, change=change)
        return state

    def _new_throughput(self, vocab_size: int) -> Throughput:
        model, data, size = self._config.model, self._config.data, self._config.train.microbatch_size
        flops = exact_flops(
            dataclasses.replace(model, remat="none"),
            microbatch_tokens=size * data.seq_len,
            seq_len=data.seq_len,
            vocab_size=vocab_size,
        )
        return Throughput(flops / (size * data.seq_len), self._config.mesh.num_devices, peak_flops(jax.devices()[0]))

    def _summary(self, final_eval: Mapping[str, float]) -> dict[str, Any]:
        first = self._model_compilations_of_first_step
        return self.progress.summary(self._done) | {
            "eval_loss": final_eval.get("eval/loss"),
            "eval_perplexity": final_eval.get("eval/perplexity"),
            "model_compilations_after_first_step": 0 if first is None else self._executor.model_compilations - first,
        }


def _refuse_to_share(workdir: pathlib.Path) -> NoReturn:
    raise ConfigError(f"another process is training in {workdir}; stop it, or set another --workdir")


def _degraded_cost(config: Config, vocab_size: int) -> float:
    """Cost of a degraded microbatch in exact ones: as configured, or the ratio of their FLOPs."""
    if config.faults.degraded_cost is not None:
        return config.faults.degraded_cost
    return degraded_cost(
        config.model,
        config.degraded,
        rank=config.basis.rank,
        microbatch_tokens=config.train.microbatch_size * config.data.seq_len,
        seq_len=config.data.seq_len,
        vocab_size=vocab_size,
    )


def _run_config(identity: Mapping[str, Any]) -> Config:
    """The config in a checkpoint's identity, without what the run added to it."""
    data = {name: value for name, value in identity["data"].items() if name != "fingerprint"}
    return from_dict({**identity, "data": data})
