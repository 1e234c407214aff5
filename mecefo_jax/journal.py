"""The account that an attempt gives of its steps: counted, checked, and written where they are due."""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any, Protocol

import jax

from mecefo_jax.config import Config
from mecefo_jax.errors import NonFiniteError
from mecefo_jax.performance import Throughput, compilation_counter, peak_flops
from mecefo_jax.progress import Progress
from mecefo_jax.step import StepMetrics
from mecefo_jax.takeover import Plan
from mecefo_jax.takeover.cost import exact_flops


class Log(Protocol):
    """Where rows and events go, such as ``metrics.RunLog``."""

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Log a row of metrics."""

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Log a change."""


class Journal:
    """Keeps ``progress`` and writes to ``log``."""

    def __init__(self, config: Config, vocab_size: int, progress: Progress, log: Log) -> None:
        """Begin with the progress made so far."""
        self._config, self.progress, self._log = config, progress, log
        self._throughput = _new_throughput(config, vocab_size)
        self._compilations, self._compilations_before = compilation_counter(), compilation_counter().count

    def commit(self, step: int, plan: Plan, metrics: StepMetrics, failures: int, ended: float | None = None) -> None:
        """Account for a step, and log it if it is due.

        Args:
            step: number of the step.
            plan: who computed what.
            metrics: what the update reported, on the host.
            failures: failures of the run up to and including this step.
            ended: ``time.perf_counter()`` at its end; None: now.

        Raises:
            NonFiniteError: too many updates in a row were skipped.
        """
        done = step + 1
        assert (metrics.computed_M == (plan.executor_M >= 0)).all(), "a microbatch was lost or computed twice"
        tokens = int(metrics.tokens_M.sum())
        degraded_tokens = float(metrics.tokens_M @ plan.degraded_MS.mean(axis=1))
        self.progress.commit(
            step,
            loss=float(metrics.loss),
            tokens=tokens,
            degraded_tokens=degraded_tokens,
            critical_load=plan.critical_load,
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
                "ft/critical_load": plan.critical_load,
                "ft/failures_total": failures,
            }
            self._log.scalars(done, row | self._throughput.read())
        limit = self._config.train.max_skipped_in_a_row
        if metrics.skipped_in_a_row >= limit:
            raise NonFiniteError(
                f"the loss or a gradient was not finite in {limit} steps in a row (train.max_skipped_in_a_row), the "
                f"last one step {done}; set a lower --optim.learning_rate"
            )

    def evaluated(self, step: int, scores: Mapping[str, float], seconds: float) -> None:
        """Log an evaluation, whose time does not count for the speed."""
        self._log.scalars(step, scores)
        self._throughput.pause(seconds)

    def _report_counters(self, done: int, metrics: StepMetrics) -> None:
        """Events for the counters that an update advanced."""
        progress = self.progress
        if metrics.skipped > progress.skipped_steps:
            self._log.event("skipped", done, in_a_row=int(metrics.skipped_in_a_row))
        if metrics.bases_refreshed > progress.basis_refreshes:
            self._log.event("basis_refresh", done, not_finite=int(metrics.bases_kept) - progress.bases_kept)
        progress.skipped_steps = int(metrics.skipped)
        progress.basis_refreshes, progress.bases_kept = int(metrics.bases_refreshed), int(metrics.bases_kept)


def scores(total: float, tokens: int) -> dict[str, float]:
    """Metrics of an evaluation: the token-weighted mean loss in nats, and its exponential."""
    loss = total / tokens
    return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}


def _new_throughput(config: Config, vocab_size: int) -> Throughput:
    model, data, size = config.model, config.data, config.train.microbatch_size
    flops = exact_flops(
        dataclasses.replace(model, remat="none"),
        microbatch_tokens=size * data.seq_len,
        seq_len=data.seq_len,
        vocab_size=vocab_size,
    )
    return Throughput(flops / (size * data.seq_len), config.mesh.num_devices, peak_flops(jax.devices()[0]))
