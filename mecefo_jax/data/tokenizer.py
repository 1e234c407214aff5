"""Tokenizers: bytes, a Hugging Face ``tokenizer.json``, and a byte-level BPE trained on the text itself.

Every tokenizer has a BOS id, which is put in front of each document (the only special token in prepared data), and
an EOS id, for whoever generates text. Text never turns into special tokens, even where it spells one out.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tokenizers
from jaxtyping import Int32

from mecefo_jax.config import BYTE_ENTRIES
from mecefo_jax.errors import ConfigError, DataError

_BOS_NAMES = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "<|startoftext|>", "<|im_start|>", "<|endoftext|>", "[CLS]")
_EOS_NAMES = ("</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|endoftext|>", "<|im_end|>", "[SEP]")
_FILE_NAME = "tokenizer.json"


class Tokenizer(Protocol):
    """Turns text into ids and back."""

    @property
    def name(self) -> str:
        """What it is, for messages."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def bos_id(self) -> int:
        """Id in front of each document."""
        ...

    @property
    def eos_id(self) -> int:
        """Id at which generation ends."""
        ...

    @property
    def unknown_id(self) -> int | None:
        """Id of whatever the vocabulary lacks; None if there is none."""
        ...

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Return the ids of a text, without BOS and EOS."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " T"]]:
        """Return the ids of each text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; padding and special tokens vanish."""
        ...

    def save(self, folder: pathlib.Path) -> dict[str, Any]:
        """Write what ``load_tokenizer`` needs into a folder, and return the JSON-able rest of it."""
        ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """The UTF-8 bytes of the text: ids 0-255 are bytes, 256 is BOS, 257 is EOS."""

    name: str = "bytes"
    bos_id: int = 256
    eos_id: int = 257
    vocab_size: int = BYTE_ENTRIES
    unknown_id: int | None = None

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Return the bytes of a text."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " T"]]:
        """Return the bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of bytes; invalid UTF-8 becomes U+FFFD."""
        return bytes(int(i) for i in ids if 0 <= i < 256).decode(errors="replace")

    def save(self, folder: pathlib.Path) -> dict[str, Any]:
        """Write nothing: there is nothing to learn."""
        del folder
        return {"kind": "bytes"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceTokenizer:
    """A tokenizer of the library ``tokenizers``; ``content`` is its ``tokenizer.json``."""

    name: str
    content: str
    bos_id: int
    eos_id: int

    @functools.cached_property
    def _model(self) -> tokenizers.Tokenizer:
        model = tokenizers.Tokenizer.from_str(self.content)
        # A file may ask for either; they would drop or invent tokens without a word.
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = True
        return model

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id: the ids of a vocabulary may have gaps."""
        return max(self._model.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def unknown_id(self) -> int | None:
        """Id of whatever the vocabulary lacks: Unigram models name it by id, the others by token."""
        model = json.loads(self.content)["model"]
        token = model.get("unk_token")
        return model.get("unk_id") if token is None else self._model.token_to_id(token)

    def encode(self, text: str) -> Int32[np.ndarray, " T"]:
        """Return the ids of a text, without the special tokens that the file's post-processor may add.

        Raises:
          DataError: the text holds what the vocabulary lacks, and the vocabulary has no token that stands for it.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Int32[np.ndarray, " T"]]:
        """Return the ids of each text, computed in parallel.

        Raises:
          DataError: as ``encode``.
        """
        try:
            encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception for whatever goes wrong
            raise DataError(
                f"data.tokenizer: {self.name} cannot encode the text ({error}); set a tokenizer that covers it, such "
                "as --data.tokenizer bpe"
            ) from error
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""
        return self._model.decode([int(i) for i in ids if i >= 0], skip_special_tokens=True)

    def save(self, folder: pathlib.Path) -> dict[str, Any]:
        """Write ``tokenizer.json``."""
        (folder / _FILE_NAME).write_text(self.content, encoding="utf-8")
        sha256 = hashlib.sha256(self.content.encode()).hexdigest()
        return {
            "kind": "huggingface",
            "name": self.name,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "sha256": sha256,
        }


def read_tokenizer(path: str) -> HuggingFaceTokenizer:
    """Return the tokenizer of a ``tokenizer.json``, or of the folder that holds one.

    BOS and EOS are what a ``tokenizer_config.json`` beside it says, or else the first usual name in the vocabulary;
    where only one of them exists, it stands for both.

    Args:
      path: value of ``data.tokenizer``.

    Raises:
      ConfigError: there is no such file, it cannot be read, or neither BOS nor EOS can be told.
      DataError: the file, or the one beside it, is not what its name says.
    """
    expanded = os.path.expanduser(path)
    file = pathlib.Path(expanded, _FILE_NAME) if os.path.isdir(expanded) else pathlib.Path(expanded)
    try:
        content = file.read_text(encoding="utf-8")
        model = tokenizers.Tokenizer.from_str(content)
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer: {path!r} is neither bytes nor bpe nor a tokenizer.json that can be read "
            f"({error.strerror or error}); set one of these"
        ) from error
    except Exception as error:  # the library raises plain Exception for a malformed file
        raise DataError(f"{file}: not a Hugging Face tokenizer ({error})") from error
    declared = _declared_tokens(file.with_name("tokenizer_config.json"))
    bos = _token_id(model, file, declared.get("bos_token"), _BOS_NAMES)
    eos = _token_id(model, file, declared.get("eos_token"), _EOS_NAMES)
    separator = eos if bos is None else bos
    if separator is None:
        raise ConfigError(
            f"data.tokenizer: {file} has no token to begin documents with; name one as bos_token in a "
            "tokenizer_config.json beside it"
        )
    return HuggingFaceTokenizer(
        name=str(path), content=content, bos_id=separator, eos_id=separator if eos is None else eos
    )


def train_bpe(texts: Iterator[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Return a byte-level BPE tokenizer trained on texts; ids 0 and 1 are BOS and EOS.

    Args:
      texts: what to train on.
      vocab_size: entries wanted, of which 258 are the bytes and the special tokens; short texts give fewer.

    Raises:
      ConfigError: ``vocab_size`` is too small.
    """
    if vocab_size < BYTE_ENTRIES:
        raise ConfigError(f"data.bpe_vocab_size is {vocab_size}; set at least {BYTE_ENTRIES} (the bytes, BOS and EOS)")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    model.decoder = tokenizers.decoders.ByteLevel()  # type: ignore[assignment]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return HuggingFaceTokenizer(name=f"bpe ({vocab_size})", content=model.to_str(), bos_id=0, eos_id=1)


def load_tokenizer(saved: dict[str, Any], folder: pathlib.Path) -> Tokenizer:
    """Return the tokenizer that ``save`` wrote.

    Args:
      saved: what ``save`` returned.
      folder: where it wrote.

    Raises:
      DataError: the file is missing or not the one that was written.
    """
    if saved["kind"] == "bytes":
        return ByteTokenizer()
    file = folder / _FILE_NAME
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({error}); delete {folder} to prepare the data again") from error
    if hashlib.sha256(content.encode()).hexdigest() != saved["sha256"]:
        raise DataError(f"{file}: not the tokenizer that the data was prepared with; delete {folder} to prepare again")
    return HuggingFaceTokenizer(name=saved["name"], content=content, bos_id=saved["bos_id"], eos_id=saved["eos_id"])


def _declared_tokens(file: pathlib.Path) -> dict[str, str]:
    """Return the special tokens that a tokenizer_config.json names (as a string, or as an object with "content")."""
    if not os.path.isfile(file):
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise DataError(f"{file}: not a JSON object; correct it, or take it away to have BOS and EOS found by name")
    declared = {}
    for role in ("bos_token", "eos_token"):
        token = config.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            declared[role] = str(token)
    return declared


def _token_id(
    model: tokenizers.Tokenizer, file: pathlib.Path, declared: str | None, names: Sequence[str]
) -> int | None:
    if declared is not None:
        found = model.token_to_id(declared)
        if found is None:
            raise ConfigError(
                f"data.tokenizer: {file} has no token {declared!r}, which its tokenizer_config.json names"
            )
        return found
    return next((i for i in map(model.token_to_id, names) if i is not None), None)
