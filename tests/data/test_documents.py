"""How documents are divided between training and evaluation."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mecefo_jax.data.documents import (
    Document,
    Rejects,
    Source,
    batches,
    choose_hold_out,
    is_held_out,
    split_documents,
    take_characters,
)
from mecefo_jax.errors import DataError


def source_of(texts: Sequence[str], *, invalid_at: int | None = None) -> Source:
    def documents(rejects: Rejects) -> Iterator[Document]:
        for i, text in enumerate(texts):
            if i == invalid_at:
                rejects.add(f"here:{i}", "bad")
            yield Document(text, i + 1)

    return Source(name="test", identity={}, paths=(), size=len(texts), has_splits=False, documents=documents)


def divide(texts: Sequence[str], fraction: float) -> dict[str, list[str]]:
    source = source_of(texts)
    hold_out = choose_hold_out(source, fraction, skip_invalid=False)
    found: dict[str, list[str]] = {"train": [], "validation": []}
    for document in split_documents(source, hold_out, fraction, Rejects(skip=False)):
        assert document.split is not None
        found[document.split].append(document.text)
    return found


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5])
def test_the_share_held_out_is_the_fraction(fraction: float) -> None:
    held_out = sum(is_held_out(f"{i}".encode(), fraction) for i in range(20_000))
    assert abs(held_out / 20_000 - fraction) < 0.015  # 4 standard deviations at 0.5


def test_a_larger_fraction_only_adds_documents() -> None:
    keys = [f"{i}".encode() for i in range(500)]
    assert {k for k in keys if is_held_out(k, 0.1)} < {k for k in keys if is_held_out(k, 0.3)}


def test_many_documents_are_divided_whole_and_equal_ones_alike() -> None:
    texts = [f"text {i % 50}" for i in range(200)]
    found = divide(texts, 0.2)
    assert sorted(found["train"] + found["validation"]) == sorted(texts)
    assert not set(found["train"]) & set(found["validation"])
    assert found["train"] and found["validation"]


@given(text=st.text(min_size=2, max_size=200), fraction=st.floats(0.01, 0.9))
def test_a_single_document_is_cut_in_two(text: str, fraction: float) -> None:
    found = divide([text], fraction)
    (head,), (tail,) = found["train"], found["validation"]
    assert head + tail == text
    assert head and tail
    assert abs(len(tail) - fraction * len(text)) <= 1


def test_a_document_of_one_character_stays_whole() -> None:
    assert divide(["x"], 0.5) == {"train": ["x"], "validation": []}


def test_the_choice_reads_no_further_than_it_must() -> None:
    texts = [f"text {i}" for i in range(500)]
    assert choose_hold_out(source_of(texts, invalid_at=499), 0.2, skip_invalid=False) == "hash"


def test_invalid_records_stop_or_are_counted() -> None:
    with pytest.raises(DataError, match="^file:3: no text; .*--data.skip_invalid true"):
        Rejects(skip=False).add("file:3", "no text")
    rejects = Rejects(skip=True)
    for i in range(100):
        rejects.add(f"file:{i}", "no text")
    assert rejects.count == 100
    assert rejects.examples[0] == ("file:0", "no text")
    assert len(rejects.examples) < 10


@given(lengths=st.lists(st.integers(0, 9), max_size=20), size=st.integers(1, 20))
def test_batches_keep_every_document_in_order(lengths: list[int], size: int) -> None:
    documents = [Document("x" * length, i) for i, length in enumerate(lengths)]
    found = list(batches(iter(documents), size))
    assert [document for batch in found for document in batch] == documents
    assert all(sum(len(d.text) for d in batch) >= size for batch in found[:-1])
    assert all(sum(len(d.text) for d in batch[:-1]) < size for batch in found)


@given(texts=st.lists(st.text(max_size=9), max_size=9), count=st.integers(0, 50))
def test_take_characters_takes_a_prefix(texts: list[str], count: int) -> None:
    assert "".join(take_characters(iter(texts), count)) == "".join(texts)[:count]
