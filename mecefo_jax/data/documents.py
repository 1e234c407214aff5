"""Documents, where they come from, and which of them are held out for evaluation.

A source says what it holds (its identity, for the fingerprint) and yields its documents in a fixed order, as often
as asked. Sources without a validation split of their own get one here: by a hash of each document's text, so that
equal documents never lie on both sides; or, where there are too few documents for that, by the tail of each.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Literal

from mecefo_jax.errors import DataError

Split = Literal["train", "validation"]

HoldOut = Literal["source", "hash", "tail"]
"""How documents are held out: as the source says; whole ones by hash; the tail of each."""

_KEPT_EXAMPLES = 5


@dataclasses.dataclass(frozen=True)
class Document:
    """One text; ``position`` is how far into its source it ends, in the source's units of progress."""

    text: str
    position: int
    split: Split | None = None


class Rejects:
    """Counts invalid records where these are to be skipped, else stops at the first one."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.count = 0
        self.examples: list[tuple[str, str]] = []

    def add(self, where: str, reason: str) -> None:
        """Take note of an invalid record.

        Args:
          where: file and line, or dataset and index, of the record.
          reason: what is wrong with it.

        Raises:
          DataError: invalid records are not to be skipped.
        """
        if not self.skip:
            raise DataError(f"{where}: {reason}; correct it, or set --data.skip_invalid true to skip such records")
        self.count += 1
        if len(self.examples) < _KEPT_EXAMPLES:
            self.examples.append((where, reason))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where documents come from.

    Attributes:
      name: shown in messages.
      identity: JSON-able description of the content; equal identities mean equal documents in equal order.
      paths: files or dataset that the documents are read from, for the record.
      size: position of the last document.
      has_splits: whether each document says which split it belongs to.
      documents: yields the documents; invalid records go to the given ``Rejects``.
      held_out_paths: files that were named to be held out.
    """

    name: str
    identity: dict[str, Any]
    paths: tuple[str, ...]
    size: int
    has_splits: bool
    documents: Callable[[Rejects], Iterator[Document]]
    held_out_paths: tuple[str, ...] = ()


def is_held_out(key: bytes, fraction: float) -> bool:
    """Return whether the document with this key is for evaluation: its hash is below ``fraction`` of 2^64."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") < fraction * 2**64


def choose_hold_out(source: Source, fraction: float, *, skip_invalid: bool) -> HoldOut:
    """Choose how documents are held out, reading no more of them than it takes to see both splits.

    Args:
      source: the documents.
      fraction: share of the documents to hold out, in (0, 1).
      skip_invalid: whether invalid records are skipped.

    Returns:
      "source" where the source has splits, "hash" where that leaves no split empty, else "tail".
    """
    if source.has_splits:
        return "source"
    seen = set()
    for document in source.documents(Rejects(skip_invalid)):
        if document.text:
            seen.add(is_held_out(document.text.encode(), fraction))
        if len(seen) == 2:
            return "hash"
    return "tail"


def split_documents(source: Source, hold_out: HoldOut, fraction: float, rejects: Rejects) -> Iterator[Document]:
    """Yield the documents of a source, each with its split.

    Args:
      source: the documents.
      hold_out: the choice of ``choose_hold_out``.
      fraction: share of the text to hold out.
      rejects: where invalid records go.

    Yields:
      Documents whose split is set; under "tail", two for a document of at least two characters.
    """
    for document in source.documents(rejects):
        if hold_out == "source":
            assert document.split is not None, f"{source.name} yields a document without a split"
            yield document
        elif hold_out == "hash":
            held_out = is_held_out(document.text.encode(), fraction)
            yield dataclasses.replace(document, split="validation" if held_out else "train")
        else:
            yield from _cut_tail(document, fraction)


def _cut_tail(document: Document, fraction: float) -> Iterator[Document]:
    length = len(document.text)
    cut = max(1, min(length - 1, round(length * (1 - fraction))))
    yield dataclasses.replace(document, text=document.text[:cut], split="train")
    if cut < length:
        yield dataclasses.replace(document, text=document.text[cut:], split="validation")


def batches(documents: Iterator[Document], num_characters: int) -> Iterator[list[Document]]:
    """Group documents into lists of at least ``num_characters`` characters (the last may be shorter)."""
    batch: list[Document] = []
    total = 0
    for document in documents:
        batch.append(document)
        total += len(document.text)
        if total >= num_characters:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def take_characters(texts: Iterator[str], num_characters: int) -> Iterator[str]:
    """Yield leading texts until ``num_characters`` characters have been passed on."""
    left = num_characters
    for text in texts:
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)
