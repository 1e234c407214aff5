"""Prepares text for training once: tokenize, pack, store under a fingerprint; later runs only open the result.

The fingerprint is a hash of everything that decides the tokens: the content of the text, the tokenizer's bytes (or
how it is trained), the policy of BOS, the sequence length, how documents are held out, and the versions that matter.
Any change gives another folder of the cache, so stale data is never used. A folder appears whole or not at all: it
is written under a temporary name, under a lock, and renamed.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import rich.console
import rich.progress
import tokenizers

from mecefo_jax.config import DataConfig
from mecefo_jax.data import documents as docs
from mecefo_jax.data.files import files_source
from mecefo_jax.data.packing import join_documents
from mecefo_jax.data.prepared import META_NAME, Log, PreparedData, forgiving, open_prepared
from mecefo_jax.data.records import SET_CACHE_DIR, RecordWriter
from mecefo_jax.data.recovery import recovered_share
from mecefo_jax.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    read_tokenizer,
    train_bpe,
)
from mecefo_jax.errors import DataError
from mecefo_jax.locking import locked

_FORMAT = 2
"""Version of what the folder holds; a change of the code that alters it must raise this."""
_DOCUMENT_POLICY = "bos before each document, no eos"
_BATCH_CHARACTERS = 2**22
_BPE_CHARACTERS = 2**30
"""Leading training text that a bpe tokenizer is trained on."""
_FIRST_TOKENS = 16

Advance = Callable[[int], None]


def prepare(config: DataConfig, *, progress: bool = True, log: Log = print) -> PreparedData:
    """Return the data that a config describes, preparing it first if that was not done before.

    Args:
      config: the data section.
      progress: whether to show a progress bar (on stderr, where that is a terminal).
      log: called with each line worth logging, in ASCII; OSError and ValueError that it raises are ignored.

    Raises:
      ConfigError: the section contradicts itself or names no such tokenizer.
      DataError: text cannot be read, holds an invalid record, or is too short; the cache cannot be written; the
        prepared data is damaged.
    """
    log = forgiving(log)
    cache_dir = pathlib.Path(os.path.expanduser(config.cache_dir))
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        source = _open_source(config, cache_dir, progress)
        fixed = _fixed_tokenizer(config)
        identity = _identity(config, source, fixed)
        fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        folder = cache_dir / fingerprint
        if not folder.exists():
            with locked(folder, lambda: log(f"Waiting for another process that prepares {folder}")):
                if not folder.exists():
                    _prepare_folder(folder, config, source, fixed, identity, progress, log)
    except OSError as error:
        raise DataError(f"data cannot be prepared in {cache_dir}: {error}; {SET_CACHE_DIR}") from error
    return open_prepared(folder, identity, skip_invalid=config.skip_invalid, log=log)


def _open_source(config: DataConfig, cache_dir: pathlib.Path, progress: bool) -> docs.Source:
    # tfds is imported only where it is needed: it is slow to import.
    if config.source == "builtin":
        from mecefo_jax.data.stdlib import stdlib_source

        return stdlib_source(cache_dir, config.validation_fraction)
    if config.source == "tfds":
        from mecefo_jax.data.tfds_text import tfds_source

        return tfds_source(config, progress=progress)
    return files_source(config, cache_dir / "file_hashes.json")


def _fixed_tokenizer(config: DataConfig) -> Tokenizer | None:
    """Return the tokenizer that the config names, or None if it is to be trained."""
    if config.tokenizer == "bpe":
        return None
    return ByteTokenizer() if config.tokenizer == "bytes" else read_tokenizer(config.tokenizer)


def _identity(config: DataConfig, source: docs.Source, fixed: Tokenizer | None) -> dict[str, Any]:
    tokenizer: dict[str, Any] = {"kind": "bytes"}
    if fixed is None:
        tokenizer = {"kind": "bpe", "vocab_size": config.bpe_vocab_size, "characters": _BPE_CHARACTERS}
    elif isinstance(fixed, HuggingFaceTokenizer):
        sha256 = hashlib.sha256(fixed.content.encode()).hexdigest()
        tokenizer = {"kind": "huggingface", "sha256": sha256, "bos_id": fixed.bos_id, "eos_id": fixed.eos_id}
    if tokenizer["kind"] != "bytes":
        tokenizer["tokenizers"] = tokenizers.__version__
    identity = {
        "format": _FORMAT,
        "text": source.identity,
        "validation_fraction": None if source.has_splits else config.validation_fraction,
        "tokenizer": tokenizer,
        "documents": _DOCUMENT_POLICY,
        "seq_len": config.seq_len,
    }
    return json.loads(json.dumps(identity))  # as it will be read back


def _prepare_folder(
    folder: pathlib.Path,
    config: DataConfig,
    source: docs.Source,
    fixed: Tokenizer | None,
    identity: dict[str, Any],
    progress: bool,
    log: Log,
) -> None:
    started = time.perf_counter()
    log(f"Preparing {source.name} in {folder}")
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # what a killed preparation left; the lock is ours
    temporary.mkdir()
    try:
        hold_out = docs.choose_hold_out(source, config.validation_fraction, skip_invalid=config.skip_invalid)
        with _progress_bar(progress, source.size) as stage:
            tokenizer = fixed or _train_tokenizer(config, source, hold_out, stage("Training the tokenizer"))
            meta = _write_records(temporary, config, source, hold_out, tokenizer, stage("Tokenizing"))
        meta["identity"] = identity
        (temporary / META_NAME).write_text(json.dumps(meta, indent=1))
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    log(f"Prepared {sum(meta['info']['tokens'].values())} tokens in {time.perf_counter() - started:.1f} s")


@contextlib.contextmanager
def _progress_bar(enabled: bool, size: int) -> Iterator[Callable[[str], Advance]]:
    """Show progress; yields a function that opens a stage and returns how to report the position reached in it."""
    console = rich.console.Console(stderr=True)
    bar = rich.progress.Progress(
        *rich.progress.Progress.get_default_columns(),
        console=console,
        disable=not (enabled and console.is_terminal),
        transient=True,
    )

    def stage(description: str) -> Advance:
        task = bar.add_task(description, total=size)
        return lambda position: bar.update(task, completed=position)

    with bar:
        yield stage


def _train_tokenizer(config: DataConfig, source: docs.Source, hold_out: docs.HoldOut, advance: Advance) -> Tokenizer:
    def texts() -> Iterator[str]:
        rejects = docs.Rejects(config.skip_invalid)
        for document in docs.split_documents(source, hold_out, config.validation_fraction, rejects):
            advance(document.position)
            if document.split == "train":
                yield document.text

    return train_bpe(docs.take_characters(texts(), _BPE_CHARACTERS), config.bpe_vocab_size)


def _write_records(
    folder: pathlib.Path,
    config: DataConfig,
    source: docs.Source,
    hold_out: docs.HoldOut,
    tokenizer: Tokenizer,
    advance: Advance,
) -> dict[str, Any]:
    """Tokenize, pack and write all documents; return what meta.json says about them."""
    writers = {
        split: RecordWriter(folder, split, seq_len=config.seq_len, vocab_size=tokenizer.vocab_size)
        for split in ("train", "validation")
    }
    counts = dict.fromkeys(writers, 0)
    rejects = docs.Rejects(config.skip_invalid)
    empty = 0
    first: np.ndarray | None = None
    recovered = 1.0
    documents = docs.split_documents(source, hold_out, config.validation_fraction, rejects)
    for batch in docs.batches(documents, _BATCH_CHARACTERS):
        kept = [document for document in batch if document.text]
        empty += len(batch) - len(kept)
        texts = [document.text for document in kept]
        if first is None:
            recovered = recovered_share(tokenizer, texts)
        encoded = tokenizer.encode_batch(texts)
        if first is None and encoded:
            first = join_documents([encoded[0][:_FIRST_TOKENS]], tokenizer.bos_id)[:_FIRST_TOKENS]
        for split, writer in writers.items():
            ids = [tokens for document, tokens in zip(kept, encoded, strict=True) if document.split == split]
            counts[split] += len(ids)
            writer.write(join_documents(ids, tokenizer.bos_id))
        advance(batch[-1].position)
    files = {split: writer.close() for split, writer in writers.items()}
    if not files["train"]:
        raise DataError(
            f"{source.name}: no text to train on ({rejects.count} records skipped as invalid, {empty} empty) "
            f"in {', '.join(source.paths[:3])}"
        )
    if source.held_out_paths and not files["validation"]:
        raise DataError(
            f"data.validation_files: no text in {', '.join(source.held_out_paths[:3])}; name files that hold some, or "
            "none to have a part of data.files held out"
        )
    assert first is not None
    return {
        "seq_len": config.seq_len,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.save(folder),
        "files": {split: [dataclasses.asdict(file) for file in files[split]] for split in files},
        "info": {
            "source": source.name,
            "paths": list(source.paths),
            "hold_out": hold_out,
            "documents": counts,
            "tokens": {split: writer.num_tokens for split, writer in writers.items()},
            "sequences": {split: sum(file.num_records for file in files[split]) for split in files},
            "skipped": rejects.count,
            "skipped_examples": rejects.examples,
            "empty_documents": empty,
            "recovered": recovered,
            "first_tokens": first.tolist(),
        },
    }
