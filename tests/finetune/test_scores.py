"""Scores against definitions written another way."""

import numpy as np
import pytest

from mecefo_jax.errors import ConfigError
from mecefo_jax.finetune.scores import check_metric, class_scores, number_scores


def test_two_classes():
    labels = np.array([1] * 6 + [0] * 4)
    predicted = np.array([1, 1, 1, 1, 0, 0, 1, 0, 0, 0])
    true_positive, false_negative, false_positive, true_negative = 4, 2, 1, 3
    scores = class_scores(predicted, labels, 2)
    assert scores["accuracy"] == pytest.approx(0.7)
    assert scores["f1"] == pytest.approx(2 * 4 / (2 * 4 + 1 + 2))
    product = true_positive * true_negative - false_positive * false_negative
    assert scores["matthews"] == pytest.approx(product / np.sqrt(5 * 6 * 4 * 5))


def test_more_classes():
    """Matthews' coefficient is the correlation of predictions and labels, each as indicators of all classes."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 200)
    predicted = np.where(rng.random(200) < 0.5, labels, rng.integers(0, 4, 200))
    x, y = (np.eye(4)[which] - np.eye(4)[which].mean(axis=0) for which in (predicted, labels))
    scores = class_scores(predicted, labels, 4)
    assert scores["matthews"] == pytest.approx((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))
    assert scores["accuracy"] == pytest.approx(np.mean(predicted == labels))
    assert "f1" not in scores


def test_always_the_same_class_is_worth_nothing():
    scores = class_scores(np.zeros(10, int), np.arange(10) % 2, 2)
    assert scores == {"accuracy": 0.5, "f1": 0.0, "matthews": 0.0}


def test_numbers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=50)
    y = x + rng.normal(size=50)
    assert number_scores(x, y)["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert number_scores(np.ones(50), y)["pearson"] == 0.0


@pytest.mark.parametrize(("metric", "classes"), [("f1", 3), ("pearson", 2), ("accuracy", 0)])
def test_a_measure_that_the_task_does_not_allow_is_refused(metric, classes):
    with pytest.raises(ConfigError, match=rf"--metric: got {metric} for a task .*, expected "):
        check_metric(metric, classes)


def test_the_usual_measure():
    assert [check_metric(None, classes) for classes in (2, 3, 0)] == ["accuracy", "accuracy", "pearson"]
    assert check_metric("matthews", 3) == "matthews"
