"""How predictions are judged: the measures of GLUE, in float64."""

from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from mecefo_jax.errors import ConfigError

Metric = Literal["accuracy", "f1", "matthews", "pearson"]


def metrics_of(num_classes: int) -> tuple[Metric, ...]:
    """Measures that a task allows, the usual one first.

    Args:
      num_classes: 0 where numbers are predicted.
    """
    if not num_classes:
        return ("pearson",)
    return ("accuracy", "f1", "matthews") if num_classes == 2 else ("accuracy", "matthews")


def check_metric(metric: str | None, num_classes: int) -> Metric:
    """The measure that was asked for, or else the usual one.

    Raises:
      ConfigError: the task does not allow it.
    """
    allowed = metrics_of(num_classes)
    if metric is None:
        return allowed[0]
    for name in allowed:
        if name == metric:
            return name
    kind = f"a task of {num_classes} classes" if num_classes else "a task whose labels are numbers with a fraction"
    raise ConfigError(f"--metric: got {metric} for {kind}, expected {' or '.join(allowed)}")


def class_scores(predicted: Int[np.ndarray, " E"], labels: Int[np.ndarray, " E"], num_classes: int) -> dict[str, float]:
    """Accuracy; of two classes the F1 score of the second one; Matthews' correlation coefficient.

    Where a denominator is zero, as if all predictions are the same class, so is the score.
    """
    counts = np.zeros((num_classes, num_classes))
    np.add.at(counts, (labels, predicted), 1.0)
    found = {"accuracy": float(np.trace(counts) / counts.sum())}
    if num_classes == 2:
        found["f1"] = _ratio(2 * counts[1, 1], counts[1].sum() + counts[:, 1].sum())
    # Gorodkin's form for any number of classes, which for two is Matthews' own.
    of_label, of_prediction, total = counts.sum(axis=1), counts.sum(axis=0), counts.sum()
    covariance = np.trace(counts) * total - of_label @ of_prediction
    spread = (total**2 - of_label @ of_label) * (total**2 - of_prediction @ of_prediction)
    return found | {"matthews": _ratio(covariance, np.sqrt(spread))}


def number_scores(predicted: Float[np.ndarray, " E"], labels: Float[np.ndarray, " E"]) -> dict[str, float]:
    """Pearson's correlation; 0 where predictions or labels are all the same."""
    x, y = (np.asarray(values, np.float64) - np.mean(values, dtype=np.float64) for values in (predicted, labels))
    return {"pearson": _ratio(float(x @ y), float(np.sqrt((x @ x) * (y @ y))))}


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator > 0 else 0.0
