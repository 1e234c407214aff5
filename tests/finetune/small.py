"""A small model that knows nothing, and tasks that it can learn in seconds."""

import numpy as np

from mecefo_jax.config import BasisConfig, Config, DataConfig, DegradedConfig, FaultsConfig, ModelConfig
from mecefo_jax.data.tokenizer import ByteTokenizer
from mecefo_jax.finetune.loop import fine_tune
from mecefo_jax.finetune.settings import Settings
from mecefo_jax.finetune.tasks import Example, Task, make_task
from mecefo_jax.model import init_model
from mecefo_jax.trained import TrainedModel

MAX_LENGTH = 16


def small_model() -> TrainedModel:
    tokenizer = ByteTokenizer()
    config = Config(
        model=ModelConfig(
            hidden_size=32, ffn_size=48, num_layers=2, num_heads=2, vocab_size=tokenizer.vocab_size, tie_embeddings=True
        ),
        data=DataConfig(seq_len=MAX_LENGTH),
    )
    params = init_model(config.model, tokenizer.vocab_size, seed=1)
    return TrainedModel(config=config, params=params, tokenizer=tokenizer, step=0)


def counting_task(num_train: int = 512, num_dev: int = 100) -> Task:
    """Which of two letters is more frequent; half of the texts are near the longest that fit."""
    rng = np.random.default_rng(0)

    def example(number: int) -> Example:
        text = "".join(rng.choice(list("ab"), rng.choice([5, 7, 13])))
        return Example((text,), "a" if text.count("a") > text.count("b") else "b", f"made:{number}")

    examples = [example(number) for number in range(num_train + num_dev)]
    return make_task("counting", examples[:num_train], examples[num_train:])


def equality_task(num_train: int = 512, num_dev: int = 100) -> Task:
    """Whether two texts of one letter are equal; as often as not."""
    rng = np.random.default_rng(0)

    def example(number: int) -> Example:
        first, other = rng.choice(list("abc"), 2, replace=False)
        label = number % 2
        return Example((first, first if label else other), label, f"made:{number}")

    examples = [example(number) for number in range(num_train + num_dev)]
    return make_task("equality", examples[:num_train], examples[num_train:])


def tune(out, task: Task, *, faults: FaultsConfig | None = None, model: TrainedModel | None = None, **settings) -> dict:
    return fine_tune(
        small_model() if model is None else model,
        task,
        Settings(**({"learning_rate": 3e-3, "devices": 1} | settings)),
        out,
        faults=FaultsConfig() if faults is None else faults,
        degraded=DegradedConfig(),
        basis=BasisConfig(rank=8),
    )
