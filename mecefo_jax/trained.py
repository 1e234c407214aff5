"""A trained model, as a run directory holds it: what evaluation, export and fine-tuning begin with."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
from jaxtyping import PyTree

from mecefo_jax.checkpoint import read_checkpoint
from mecefo_jax.config import Config
from mecefo_jax.config_file import read_config, replace_file
from mecefo_jax.data import Tokenizer, load_tokenizer, prepare
from mecefo_jax.errors import ConfigError, DataError
from mecefo_jax.model import Model, init_model

TOKENIZER_FOLDER = "tokenizer"
"""Folder of a run directory that its tokenizer is kept in."""
_HOW_SAVED = "saved.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Parameters with what gives them meaning."""

    config: Config
    """Of the run; ``model.vocab_size`` is set."""
    params: Model
    """float32, on the first device."""
    tokenizer: Tokenizer
    step: int
    """Updates done to the parameters."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _OfState:
    """The part of a ``TrainState`` that is read: its leaves have the same paths."""

    params: Model


def keep_tokenizer(workdir: pathlib.Path, tokenizer: Tokenizer) -> None:
    """Put a run's tokenizer into its directory, so that its checkpoints can be used without its data."""
    folder = workdir / TOKENIZER_FOLDER
    folder.mkdir(exist_ok=True)
    saved = json.dumps(tokenizer.save(folder), indent=2) + "\n"
    replace_file(folder / _HOW_SAVED, saved.encode())


def open_trained(workdir: pathlib.Path, step: int | None = None) -> TrainedModel:
    """Read the model of a run, which may be going on.

    Args:
        workdir: the run directory.
        step: of the checkpoint; None: the newest that is intact.

    Raises:
        ConfigError: it is not a run directory.
        DataError: the tokenizer is missing or damaged.
        CheckpointError: there is no such checkpoint, or it cannot be read.
    """
    config = read_run_config(workdir)
    tokenizer = _open_tokenizer(workdir, config)
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))
    abstract = _OfState(abstract_params(config))
    found, tree, _ = read_checkpoint(workdir / "checkpoints", step, abstract)
    return TrainedModel(config=config, params=tree.params, tokenizer=tokenizer, step=found)


def read_run_config(workdir: pathlib.Path) -> Config:
    """The config of a run, as its directory holds it.

    Raises:
        ConfigError: it is not a run directory, or the config is none.
    """
    if not (workdir / "config.json").exists():
        raise ConfigError(
            f"{workdir}: holds no config.json, so it is not a run directory; name one, such as runs/quickstart"
        )
    return read_config(workdir / "config.json")


def abstract_params(config: Config) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the parameters; ``config.model.vocab_size`` must be set."""
    vocab_size = config.model.vocab_size
    assert vocab_size is not None
    return jax.eval_shape(lambda: init_model(config.model, vocab_size, 0))


def _open_tokenizer(workdir: pathlib.Path, config: Config) -> Tokenizer:
    folder = workdir / TOKENIZER_FOLDER
    try:
        saved: dict[str, Any] = json.loads((folder / _HOW_SAVED).read_text(encoding="utf-8"))
    except FileNotFoundError:  # the run is older than this folder
        return prepare(config.data).tokenizer
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / _HOW_SAVED}: cannot be read ({error})") from error
    return load_tokenizer(saved, folder)
