"""The loop of fine-tuning: examples -> plan -> step, an evaluation each epoch, the best epoch kept.

Steps are those of pre-training (``executor.py``) with another objective. Each step's batch is padded to the bucket of
its longest sequence; there is an executor a bucket, whose programs are compiled once, and which hands the state on.
"""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from mecefo_jax.config import BasisConfig, Config, DegradedConfig, FaultsConfig
from mecefo_jax.errors import ConfigError, NonFiniteError
from mecefo_jax.executor import Executor
from mecefo_jax.faults import make_fault_source
from mecefo_jax.finetune.classifier import classification_loss, make_classifier, outputs, regression_loss
from mecefo_jax.finetune.kept import BestEpoch
from mecefo_jax.finetune.rows import Rows, bucket, encode, epoch_order
from mecefo_jax.finetune.scores import check_metric, class_scores, number_scores
from mecefo_jax.finetune.settings import Settings, fine_tuning_config
from mecefo_jax.finetune.tasks import Task
from mecefo_jax.membership import Membership, plan_for, run_degraded_costs
from mecefo_jax.mesh import make_cluster, shardings
from mecefo_jax.metrics import RunLog
from mecefo_jax.model import Model, compute_dtype
from mecefo_jax.progress import Progress
from mecefo_jax.state import TrainState, fresh_state
from mecefo_jax.step import StepMetrics
from mecefo_jax.takeover import Plan
from mecefo_jax.trained import TrainedModel

_outputs = jax.jit(outputs, static_argnums=2)
_fresh_state = jax.jit(fresh_state, static_argnums=0)


def fine_tune(
    model: TrainedModel,
    task: Task,
    settings: Settings,
    out: pathlib.Path,
    *,
    faults: FaultsConfig,
    degraded: DegradedConfig,
    basis: BasisConfig,
) -> dict[str, Any]:
    """Fine-tune a trained model on a task.

    Args:
        model: where the trunk is from.
        task: examples to train on, and to judge by after each epoch.
        settings: how.
        out: directory for metrics, summary and the best epoch; made, or empty.
        faults: what fails, and what is done about it.
        degraded, basis: how degraded microbatches are approximated.

    Returns:
        The summary, as written to ``summary.json``.

    Raises:
        RunError: with its exit code: settings, data, too few live nodes, non-finite steps, a full disk.
    """
    metric = check_metric(settings.metric, len(task.labels))
    steps = settings.epochs * -(-len(task.train) // settings.batch_size)
    config = fine_tuning_config(
        model.config,
        settings,
        steps=steps,
        num_devices=jax.local_device_count(),
        faults=faults,
        degraded=degraded,
        basis=basis,
    )
    _check_failures(config, task)
    train, dev = (encode(part, task, model.tokenizer, config.data.seq_len) for part in (task.train, task.dev))
    _make_empty(out)
    with RunLog(out, total_steps=steps, num_nodes=settings.nodes) as log:
        best = BestEpoch(out, config, task, model.tokenizer, log)
        with contextlib.closing(best):
            tuning = FineTuning(config, task, make_classifier(model.params, task.num_outputs, settings.seed), log)
            return tuning.run(train, dev, settings, metric, best, {"task": task.name, "model_step": model.step})


class FineTuning:
    """The cluster of one fine-tuning, and the account of its steps."""

    def __init__(self, config: Config, task: Task, classifier: Model, log: RunLog) -> None:
        """Begin with a classifier, whose buffers are used up."""
        self._config, self._task, self._log = config, task, log
        self._cluster = make_cluster(config.mesh)
        self._objective = regression_loss if task.is_regression else classification_loss
        self.progress = Progress()
        self._membership = Membership(config, run_degraded_costs(config, task.num_outputs), self.progress, log, 0)
        state = _fresh_state(config.compiled_part, classifier)
        self._executor = self._make_executor(config.data.seq_len, state)
        self._length = config.data.seq_len
        self._pending: tuple[int, Plan, StepMetrics] | None = None
        self._epoch_loss = 0.0

    @property
    def params(self) -> Model:
        """The parameters, on the first sub-mesh."""
        params = self._executor.state.params
        return jax.device_put(params, shardings(self._cluster.submeshes[0], params))

    def run(
        self, train: Rows, dev: Rows, settings: Settings, metric: str, best: BestEpoch, facts: dict[str, Any]
    ) -> dict[str, Any]:
        """Train all epochs; writes and returns the summary."""
        started, step = time.perf_counter(), 0
        rows: list[dict[str, Any]] = []
        for epoch in range(1, settings.epochs + 1):
            order, self._epoch_loss = epoch_order(len(train), settings.seed, epoch - 1), 0.0
            for start in range(0, len(train), settings.batch_size):
                self._step(step, train, order[start : start + settings.batch_size])
                step += 1
            self._flush()
            scores = self.evaluate(dev)
            is_best = not rows or scores[metric] > max(row[metric] for row in rows)
            rows.append({"epoch": epoch, "step": step, "train_loss": self._epoch_loss / len(train)} | scores)
            self._log.scalars(step, {"epoch": epoch} | {f"eval/{name}": value for name, value in scores.items()})
            self._log.event("epoch", step, number=epoch, **{metric: scores[metric]}, best=is_best)
            if is_best:
                best.save(step, self.params, {"epoch": epoch} | scores)
        best.wait()
        summary = facts | self._summary(train, dev, settings, step) | _best(rows, metric)
        summary["wall_time_s"] = time.perf_counter() - started
        self._log.summary(summary)
        return summary

    def evaluate(self, rows: Rows) -> dict[str, float]:
        """Mean loss and scores of the parameters on examples."""
        params, dtype = self.params, compute_dtype(self._config.model)
        outputs_EC = np.zeros((len(rows), self._task.num_outputs))
        for indices, length in _batches_by_length(rows, self._config):
            tokens_BT = rows.batch(indices, self._config.global_batch_size, length)[:, :-1]
            outputs_EC[indices] = np.asarray(_outputs(params, tokens_BT, dtype))[: len(indices)]
        if self._task.is_regression:
            squares = np.square(outputs_EC[:, 0] - rows.labels_E)
            return {"loss": float(squares.mean())} | number_scores(outputs_EC[:, 0], rows.labels_E)
        largest_E1 = outputs_EC.max(axis=1, keepdims=True)
        normalizer_E = np.log(np.exp(outputs_EC - largest_E1).sum(axis=1)) + largest_E1[:, 0]
        losses = normalizer_E - outputs_EC[np.arange(len(rows)), rows.labels_E]
        return {"loss": float(losses.mean())} | class_scores(
            outputs_EC.argmax(axis=1), rows.labels_E, self._task.num_outputs
        )

    def _step(self, step: int, train: Rows, indices: np.ndarray) -> None:
        """Dispatch one step, then account for the one before it while the devices work."""
        plan = self._membership.plan(step)
        length = bucket(train.longest(indices), self._config.data.seq_len)
        if length != self._length:
            self._executor, self._length = self._make_executor(length, self._executor.state), length
        batch = train.batch(indices, self._config.global_batch_size, length)
        microbatches = batch.reshape(self._config.num_microbatches, self._config.train.microbatch_size, length + 1)
        metrics = self._executor.train_step(step, plan, lambda _, number: microbatches[number])
        self._flush()
        self._pending = step, plan, metrics
        self._membership.report(step, plan)
        self._log.progress(step + 1)

    def _make_executor(self, length: int, state: TrainState) -> Executor:
        """Runs batches of this length, from this state on. Programs are kept, and a state stays where it lies."""
        data = dataclasses.replace(self._config.data, seq_len=length)
        config = dataclasses.replace(self._config, data=data)
        return Executor(config, self._cluster, state, self._objective)

    def _flush(self) -> None:
        """Account for the step dispatched last."""
        if self._pending is None:
            return
        (step, plan, dispatched), self._pending = self._pending, None
        metrics, done = jax.device_get(dispatched), step + 1
        assert (metrics.computed_M == (plan.executor_M >= 0)).all(), "a microbatch was lost or computed twice"
        examples, loss = int(metrics.tokens_M.sum()), float(metrics.loss)
        degraded, load = float(metrics.tokens_M @ plan.degraded_MS.mean(axis=1)), plan.critical_load
        self.progress.commit(step, loss=loss, tokens=examples, degraded_tokens=degraded, critical_load=load)
        self.progress.skipped_steps = int(metrics.skipped)
        self._epoch_loss += loss * examples
        train = self._config.train
        if done == 1 or done % train.log_every == 0 or done == train.steps:
            row = {
                "train/loss": metrics.loss,
                "train/grad_norm": metrics.grad_norm,
                "train/learning_rate": metrics.learning_rate,
                "train/skipped_steps": metrics.skipped,
                "ft/live_nodes": int(plan.live_NS.any(axis=1).sum()),
                "ft/degraded_token_fraction": degraded / max(examples, 1),
                "ft/critical_load": load,
            }
            self._log.scalars(done, row)
        if metrics.skipped_in_a_row >= train.max_skipped_in_a_row:
            raise NonFiniteError(
                f"the loss or a gradient was not finite in {train.max_skipped_in_a_row} steps in a row, the last one "
                f"step {done}; set a lower --learning-rate"
            )

    def _summary(self, train: Rows, dev: Rows, settings: Settings, steps: int) -> dict[str, Any]:
        totals = self.progress.summary(steps)
        names = ("steps", "initial_loss", "final_loss", "failures", "recoveries", "mean_critical_load", "skipped_steps")
        return {name: totals[name] for name in names} | {
            "degraded_example_fraction": totals["degraded_token_fraction"],
            "examples_trained_on": totals["tokens"],
            "policy": self._config.faults.policy,
            "scenario": self._config.faults.scenario,
            "epochs": settings.epochs,
            "train_examples": len(train),
            "dev_examples": len(dev),
            "truncated_examples": train.truncated + dev.truncated,
            "labels": list(self._task.labels),
        }


def _best(rows: list[dict[str, Any]], metric: str) -> dict[str, Any]:
    """The first epoch with the best score, and all of them."""
    best = max(rows, key=lambda row: row[metric])
    return {"metric": metric, "best_epoch": best["epoch"], "best": best[metric], "each_epoch": rows}


def _batches_by_length(rows: Rows, config: Config) -> Iterator[tuple[np.ndarray, int]]:
    """Numbers of examples of similar length, and what they are padded to."""
    lengths = np.array([bucket(len(tokens), config.data.seq_len) for tokens in rows.tokens])
    for length in np.unique(lengths):
        of_length = np.flatnonzero(lengths == length)
        for start in range(0, len(of_length), config.global_batch_size):
            yield of_length[start : start + config.global_batch_size], int(length)


def _check_failures(config: Config, task: Task) -> None:
    """Refuse failures or a policy that no plan can be made of, before there is a directory to clear away."""
    source = make_fault_source(config.faults, num_nodes=config.mesh.num_nodes, seed=config.train.seed)
    everything = np.ones((source.num_nodes, source.num_stages), bool)
    plan_for(config, everything, run_degraded_costs(config, task.num_outputs))


def _make_empty(out: pathlib.Path) -> None:
    """Make the directory; refuse one that holds something."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        is_empty = not any(out.iterdir())
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be made ({error.strerror}); set another directory") from error
    if not is_empty:
        raise ConfigError(f"--out {out}: is not empty; set another directory, or delete it")
