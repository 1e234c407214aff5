"""Prepared data: a folder of packed records, its tokenizer, and ``meta.json``, which says what it was made from."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

from mecefo_jax.data.documents import Rejects
from mecefo_jax.data.records import RecordFile, Records
from mecefo_jax.data.recovery import EXPECTED
from mecefo_jax.data.tokenizer import Tokenizer, load_tokenizer
from mecefo_jax.errors import ConfigError, DataError

META_NAME = "meta.json"
"""File that describes the folder, written last."""

Log = Callable[[str], None]
"""Takes a line worth logging."""


def forgiving(log: Log) -> Log:
    """Return a log that gets ASCII alone, other characters as escapes, and whose failures to write are ignored."""

    def forgiving_log(line: str) -> None:
        # A full disk or a closed pipe behind stdout must not cost the preparation: its result does not depend on it.
        with contextlib.suppress(OSError, ValueError):
            log(line.encode("ascii", "backslashreplace").decode())

    return forgiving_log


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Text ready for training.

    Attributes:
      train: records to train on, each int32[seq_len + 1].
      validation: held-out records; may be empty.
      vocab_size: entries of the tokenizer's vocabulary.
      fingerprint: hash of everything that decides the tokens.
      tokenizer: turns ids into text and back.
      info: JSON-able facts for logs: paths, documents, tokens and sequences of each split, skipped records, how
        documents were held out, the share of the text that the tokenizer gives back, the first tokens of the first
        document.
    """

    train: Records
    validation: Records
    vocab_size: int
    fingerprint: str
    tokenizer: Tokenizer
    info: dict[str, Any]


def check_vocabulary(prepared: PreparedData, vocab_size: int) -> None:
    """Refuse a tokenizer with more entries than the model's vocabulary.

    Args:
      prepared: the data.
      vocab_size: rows of the model's embedding table.

    Raises:
      ConfigError: an id of the tokenizer would lie outside the table.
    """
    if prepared.vocab_size > vocab_size:
        raise ConfigError(
            f"model.vocab_size is {vocab_size} but the tokenizer {prepared.tokenizer.name} has {prepared.vocab_size} "
            f"entries; set --model.vocab_size {prepared.vocab_size} or more"
        )


def open_prepared(folder: pathlib.Path, identity: dict[str, Any], *, skip_invalid: bool, log: Log) -> PreparedData:
    """Open a folder of prepared data.

    Args:
      folder: where it is; its name is the fingerprint.
      identity: what it must have been prepared from.
      skip_invalid: whether data may be used from which invalid records were left out.
      log: called with each line worth logging.

    Raises:
      DataError: the folder is damaged, was prepared from something else, or lacks records that may not be skipped.
    """
    meta = _read_meta(folder, identity)
    info = meta["info"] | {"folder": str(folder), "fingerprint": folder.name}
    if info["skipped"] and not skip_invalid:
        Rejects(skip=False).add(*info["skipped_examples"][0])
    tokenizer = load_tokenizer(meta["tokenizer"], folder)
    splits = {
        split: Records(
            folder,
            [RecordFile(**file) for file in files],
            seq_len=meta["seq_len"],
            vocab_size=meta["vocab_size"],
        )
        for split, files in meta["files"].items()
    }
    prepared = PreparedData(
        train=splits["train"],
        validation=splits["validation"],
        vocab_size=meta["vocab_size"],
        fingerprint=folder.name,
        tokenizer=tokenizer,
        info=info | {"tokenizer": tokenizer.name, "vocab_size": meta["vocab_size"]},
    )
    _log_facts(prepared, log)
    return prepared


def _read_meta(folder: pathlib.Path, identity: dict[str, Any]) -> dict[str, Any]:
    path = folder / META_NAME
    try:
        meta = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); delete {folder} to prepare the data again") from error
    saved = meta.get("identity") if isinstance(meta, dict) else None
    if not isinstance(saved, dict) or saved != identity:
        names = [name for name in identity if not isinstance(saved, dict) or saved.get(name) != identity[name]]
        raise DataError(
            f"{path}: prepared with a different {', '.join(names)}; delete {folder} to prepare the data again"
        )
    return meta


def _log_facts(prepared: PreparedData, log: Log) -> None:
    info = prepared.info
    seq_len = prepared.train[0].shape[0] - 1
    log(
        f"Data {prepared.fingerprint}: {info['source']}, {len(prepared.train)} + {len(prepared.validation)} (held out) "
        f"sequences of {seq_len} tokens, tokenizer {prepared.tokenizer.name} of {prepared.vocab_size} entries"
    )
    if info["hold_out"] == "tail":
        log("Too few documents to hold whole ones out: the last part of each is held out instead")
    if info["skipped"]:
        log(f"Skipped {info['skipped']} invalid records, such as {': '.join(info['skipped_examples'][0])}")
    if info["recovered"] < EXPECTED:
        log(
            f"Warning: the tokenizer {prepared.tokenizer.name} knows only {info['recovered']:.0%} of the text, and "
            "the rest is lost; set --data.tokenizer to one that covers it"
        )
    first = info["first_tokens"]
    log(f"First document begins with tokens {first}: {prepared.tokenizer.decode(first)!r}")
