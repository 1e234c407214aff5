"""A folder of Hugging Face's LLaMA as a run directory: opened like any other, and trained on from step 0.

The run begins with the folder's weights and a fresh optimizer: moments of zero, and bases made of the weights.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from mecefo_jax.config import Config, DataConfig, ModelConfig
from mecefo_jax.config_file import save_config, to_dict
from mecefo_jax.data import Tokenizer
from mecefo_jax.data.tokenizer import HuggingFaceTokenizer
from mecefo_jax.errors import ConfigError, DataError
from mecefo_jax.huggingface.configuration import from_llama_config
from mecefo_jax.huggingface.shards import Stored, stored_tensors
from mecefo_jax.huggingface.tokenizer_files import FILE_NAME, read_pretrained_tokenizer, write_tokenizer
from mecefo_jax.huggingface.weights import check_stored, read_params
from mecefo_jax.progress import Progress
from mecefo_jax.snapshots import Snapshots
from mecefo_jax.state import fresh_state
from mecefo_jax.trained import TOKENIZER_FOLDER, keep_tokenizer

_NAME = "config.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A folder that can be converted; the weights are not read yet."""

    model: ModelConfig
    tokenizer: Tokenizer
    stored: Mapping[str, Stored]
    notes: tuple[str, ...]
    """What the user should know."""


def read_pretrained(folder: pathlib.Path) -> Pretrained:
    """Look into a folder, and refuse what cannot be converted as a whole.

    Raises:
        ConfigError: a setting of the model is not one that ours has.
        DataError: a file is missing or damaged, or the tensors are not those that the settings describe.
    """
    path = folder / _NAME
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path}: not a JSON object")
    model = from_llama_config(settings, str(path))
    assert model.vocab_size is not None
    stored = stored_tensors(folder)
    check_stored(Config(model=model, data=DataConfig(seq_len=1)), stored, str(folder))
    tokenizer = read_pretrained_tokenizer(folder)
    if tokenizer.vocab_size > model.vocab_size:
        raise DataError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} entries, but the embedding {model.vocab_size} rows"
        )
    return Pretrained(model=model, tokenizer=tokenizer, stored=stored, notes=_notes(settings, tokenizer))


def write_run(folder: pathlib.Path, final: pathlib.Path, pretrained: Pretrained, base: Config) -> Config:
    """Write a run directory: ``config.json``, ``tokenizer/``, and a checkpoint of step 0 to train on from.

    Args:
        folder: where; it exists and is empty (``whole_folder``).
        final: the run directory that it becomes: the tokenizer's place in the config, and the run's name.
        pretrained: what to convert.
        base: everything but the shape of the model and the tokenizer.

    Returns:
        The run's config.

    Raises:
        ConfigError: the base does not fit the model.
        CheckpointError: the state cannot be saved.
    """
    config = run_config(final, pretrained, base)
    (folder / TOKENIZER_FOLDER).mkdir()
    # The run is named by this path too: BOS and EOS must be found there by whoever reads the tokenizer as a file.
    write_tokenizer(folder / TOKENIZER_FOLDER, pretrained.tokenizer, config.model.max_seq_len)
    tokenizer = pretrained.tokenizer
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer = dataclasses.replace(tokenizer, name=config.data.tokenizer)
    keep_tokenizer(folder, tokenizer)
    save_config(config, folder / _NAME)
    snapshots = Snapshots(config, to_dict(config), folder, _Silent())
    state = jax.jit(functools.partial(fresh_state, config))(read_params(config, pretrained.stored))
    snapshots.save_and_wait(0, state, Progress())
    snapshots.close()
    return config


def run_config(final: pathlib.Path, pretrained: Pretrained, base: Config) -> Config:
    """The config of the run: the model's shape and the tokenizer of ``pretrained``, the rest of ``base``.

    Raises:
        ConfigError: they do not fit each other.
    """
    final = final.absolute()
    is_file = isinstance(pretrained.tokenizer, HuggingFaceTokenizer)
    model = dataclasses.replace(pretrained.model, remat=base.model.remat, compute_dtype=base.model.compute_dtype)
    data = dataclasses.replace(
        base.data,
        tokenizer=str(final / TOKENIZER_FOLDER / FILE_NAME) if is_file else "bytes",
        bpe_vocab_size=DataConfig().bpe_vocab_size,  # of no effect now, and settings without effect are warned of
    )
    try:
        return dataclasses.replace(base, name=final.name, model=model, data=data)
    except ConfigError as error:
        raise ConfigError(f"the settings of run {base.name} do not fit {final}: {error}") from error


class _Silent:
    """Takes what a run would log: here there is no run yet, and failures are raised."""

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Nothing is measured."""

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Nothing is told."""


def _notes(settings: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[str, ...]:
    notes = []
    for name, ours in (("bos_token_id", tokenizer.bos_id), ("eos_token_id", tokenizer.eos_id)):
        theirs = settings.get(name)
        if theirs not in (None, ours, [ours]):
            notes.append(f"{name} is {theirs} in config.json, but {ours} by the tokenizer, which is followed")
    return tuple(notes)
