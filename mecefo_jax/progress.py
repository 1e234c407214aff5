"""The account of a run since its first step, over all its restarts."""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass
class Progress:
    """Totals, saved with the state and restored with it, so that no step counts twice."""

    tokens: int = 0
    degraded_tokens: float = 0.0
    critical_load_sum: float = 0.0
    failures: int = 0
    recoveries: int = 0
    skipped_steps: int = 0
    basis_refreshes: int = 0
    bases_kept: int = 0
    initial_loss: float = math.nan
    last_loss: float = math.nan
    wall_time_s: float = 0.0
    productive_s: float = 0.0
    """Time of the work that went into committed steps, where nodes are processes."""
    first_start: float | None = None
    """Unix time at which the run began, where nodes are processes."""

    def commit(self, step: int, *, loss: float, tokens: int, degraded_tokens: float, critical_load: float) -> None:
        """Count a committed step.

        Args:
            step: number of the step, from 0.
            loss: token-weighted mean, in nats.
            tokens: tokens predicted.
            degraded_tokens: those of degraded microbatches, each weighted by its share of degraded layers.
            critical_load: of the step's plan.
        """
        self.tokens += tokens
        self.degraded_tokens += degraded_tokens
        self.critical_load_sum += critical_load
        self.last_loss = loss
        if step == 0:
            self.initial_loss = loss

    def summary(self, steps: int) -> dict[str, Any]:
        """The run's figures after ``steps`` steps."""
        return {
            "steps": steps,
            "initial_loss": self.initial_loss,
            "final_loss": self.last_loss,
            "failures": self.failures,
            "recoveries": self.recoveries,
            "tokens": self.tokens,
            "degraded_token_fraction": self.degraded_tokens / max(self.tokens, 1),
            "mean_critical_load": self.critical_load_sum / max(steps, 1),
            "skipped_steps": self.skipped_steps,
            "basis_refreshes": self.basis_refreshes,
            "bases_kept_not_finite": self.bases_kept,
            "wall_time_s": self.wall_time_s,
        }

    def goodput(self, now: float) -> float | None:
        """Share of the time since the run began, restarts included, that went into committed steps."""
        return None if self.first_start is None else self.productive_s / max(now - self.first_start, 1e-9)
