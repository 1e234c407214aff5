"""Tokenizers that lose text are noticed, and those that only normalise it are not."""

import pathlib
import string

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mecefo_jax.data.recovery import recovered_share
from mecefo_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, read_tokenizer, train_bpe
from mecefo_jax.errors import DataError

ACCENTED = "Na\u00efve caf\u00e9 \u00e0 la cr\u00e8me, " * 20


def characters(folder: pathlib.Path, known: str, kind: str) -> HuggingFaceTokenizer:
    """Make a tokenizer that knows some characters, and drops the others or puts one token in their place."""
    vocab = {token: i for i, token in enumerate(["<s>", "<unk>", *dict.fromkeys(known)])}
    models = {
        "dropped": lambda: tokenizers.models.BPE(vocab, []),
        "token": lambda: tokenizers.models.BPE(vocab, [], unk_token="<unk>"),
        "id": lambda: tokenizers.models.Unigram([(token, -1.0) for token in vocab], 1, False),
    }
    model = tokenizers.Tokenizer(models[kind]())
    model.decoder = tokenizers.decoders.Fuse()  # type: ignore[assignment]
    model.save(str(folder / "tokenizer.json"))
    return read_tokenizer(str(folder))


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_bytes_give_everything_back(texts: list[str]) -> None:
    assert recovered_share(ByteTokenizer(), [text.replace("\ufffd", "") for text in texts]) == 1.0


@pytest.mark.parametrize("kind", ["dropped", "token", "id"])
def test_the_share_is_that_of_the_known_characters(tmp_path: pathlib.Path, kind: str) -> None:
    tokenizer = characters(tmp_path, "abc", kind)
    # Spaces, which this vocabulary lacks too, do not count.
    assert recovered_share(tokenizer, ["aab c" * 3, "x  xxx"]) == pytest.approx(12 / 16)
    assert recovered_share(tokenizer, ["abcx"]) == pytest.approx(3 / 4)
    with pytest.raises(DataError, match=f"^data.tokenizer: {tmp_path} knows only 25% of the text; .*bpe$"):
        recovered_share(tokenizer, ["axyz"])


def test_half_bytes_do_not_count_as_text(tmp_path: pathlib.Path) -> None:
    model = tokenizers.Tokenizer.from_str(train_bpe(iter([""]), 258).content)
    vocab = {token: i for token, i in model.get_vocab().items() if i % 2 == 0 or i < 2 + len(string.printable)}
    model.model = tokenizers.models.BPE(vocab, [])
    model.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="knows only"):
        recovered_share(read_tokenizer(str(tmp_path)), ["\u6570\u5b66\u6cd5\u5219" * 50])


@pytest.mark.parametrize("normalizer", ["Lowercase", "NFD", "NFKC", "BertNormalizer"])
def test_normalising_is_no_loss(tmp_path: pathlib.Path, normalizer: str) -> None:
    model = tokenizers.Tokenizer.from_str(train_bpe(iter([ACCENTED]), 300).content)
    model.normalizer = getattr(tokenizers.normalizers, normalizer)()
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode(ACCENTED)) != ACCENTED or normalizer == "NFKC"
    assert recovered_share(tokenizer, [ACCENTED]) > 0.99
    # Decomposed Hangul: three characters a syllable become one.
    assert recovered_share(tokenizer, ["\u1112\u1161\u11ab\u1100\u1173\u11af " * 20]) > 0.99


def test_nothing_to_lose_is_nothing_lost(tmp_path: pathlib.Path) -> None:
    assert recovered_share(characters(tmp_path, "a", "dropped"), ["", " \n"]) == 1.0
