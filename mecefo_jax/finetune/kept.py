"""The best epoch of a fine-tuning, as its directory keeps it."""

import dataclasses
import json
import pathlib
from typing import Any

import jax

from mecefo_jax.checkpoint import Checkpointer, read_checkpoint
from mecefo_jax.config import Config
from mecefo_jax.config_file import read_config, replace_file, save_config
from mecefo_jax.data import Tokenizer, load_tokenizer
from mecefo_jax.errors import DataError
from mecefo_jax.finetune.classifier import make_classifier
from mecefo_jax.finetune.tasks import Task
from mecefo_jax.journal import Log
from mecefo_jax.model import Model
from mecefo_jax.trained import abstract_params

_TASK_FILE, _TOKENIZER = "task.json", "tokenizer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTuned:
    """A classifier with what gives it meaning."""

    config: Config
    """Of the fine-tuning; ``data.seq_len`` is the most tokens of an example."""
    params: Model
    """float32, on the first device."""
    tokenizer: Tokenizer
    labels: tuple[int | str, ...]
    """What each output stands for; empty where the one output is the number."""
    step: int
    """Updates done to the parameters."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Saved:
    """What a checkpoint of a fine-tuning holds."""

    params: Model


class BestEpoch:
    """Keeps the parameters of the best epoch so far."""

    def __init__(self, out: pathlib.Path, config: Config, task: Task, tokenizer: Tokenizer, log: Log) -> None:
        """Write what belongs to every epoch.

        Raises:
            ConfigError: the directory cannot be written.
        """
        save_config(config, out / "config.json")
        (out / _TOKENIZER).mkdir(exist_ok=True)
        facts = {"name": task.name, "labels": list(task.labels), "tokenizer": tokenizer.save(out / _TOKENIZER)}
        replace_file(out / _TASK_FILE, (json.dumps(facts, indent=2) + "\n").encode())
        self._checkpoints = Checkpointer(
            out / "checkpoints", keep=1, on_event=lambda kind, fields: log.event(kind, fields.pop("step"), **fields)
        )

    def save(self, step: int, params: Model, facts: dict[str, Any]) -> None:
        """Keep these, in place of those before; they may be donated once this returns."""
        self._checkpoints.save(step, _Saved(params), facts)

    def wait(self) -> None:
        """Return once they are on disk.

        Raises:
            CheckpointError: they could not be saved.
        """
        self._checkpoints.wait()

    def close(self) -> None:
        """Wait for the save under way."""
        self._checkpoints.close()


def open_fine_tuned(out: pathlib.Path) -> FineTuned:
    """Read the best epoch of a fine-tuning.

    Raises:
        ConfigError, DataError, CheckpointError: it is not such a directory, or is damaged.
    """
    config = read_config(out / "config.json")
    try:
        facts = json.loads((out / _TASK_FILE).read_text(encoding="utf-8"))
        labels, tokenizer = tuple(facts["labels"]), load_tokenizer(facts["tokenizer"], out / _TOKENIZER)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{out / _TASK_FILE}: cannot be read ({error}); name the --out of a fine-tuning") from error
    abstract = jax.eval_shape(lambda trunk: make_classifier(trunk, len(labels) or 1, 0), abstract_params(config))
    step, saved, _ = read_checkpoint(out / "checkpoints", None, _Saved(abstract))
    return FineTuned(config=config, params=saved.params, tokenizer=tokenizer, labels=labels, step=step)
