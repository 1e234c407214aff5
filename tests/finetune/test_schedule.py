"""The learning rate of fine-tuning: up and down in straight lines."""

import numpy as np
import pytest

from mecefo_jax.config import Config, OptimConfig, TrainConfig
from mecefo_jax.optimizer import learning_rate_schedule


@pytest.mark.parametrize(("steps", "warmup", "last"), [(20, 4, 0.0), (20, None, 0.25), (3, None, 0.0), (1, 0, 0.0)])
def test_warms_up_and_decays_linearly(steps, warmup, last):
    """From ``peak / (warm-up + 1)`` to the peak, and from there to the given fraction of it."""
    optim = OptimConfig(learning_rate=2e-3, warmup_steps=warmup, decay="linear", final_fraction=last)
    schedule = learning_rate_schedule(Config(optim=optim, train=TrainConfig(steps=steps)))
    rise = steps // 10 if warmup is None else warmup
    points = [(0, 2e-3 / (rise + 1)), (rise, 2e-3), (steps, 2e-3 * last)][rise == 0 :]
    expected = np.interp(np.arange(steps + 1), *zip(*points, strict=True))
    rates = [float(schedule(np.float32(step))) for step in range(steps + 1)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-9)
