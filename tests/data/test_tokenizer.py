"""Tokenizers return what they were given, and never make special tokens of text."""

import json
import pathlib

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mecefo_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer, read_tokenizer, train_bpe
from mecefo_jax.errors import ConfigError, DataError

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "na\u00efve \u6570 text"] * 5
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def bpe() -> HuggingFaceTokenizer:
    return train_bpe(iter(TEXTS), 280)


def word_level(folder: pathlib.Path, vocab: dict[str, int], special: tuple[str, ...] = ()) -> pathlib.Path:
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    model.add_special_tokens(list(special))
    model.enable_truncation(3)
    model.enable_padding(length=8)
    path = folder / "tokenizer.json"
    model.save(str(path))
    return path


@given(text=TEXT)
def test_bytes_are_the_text(text: str) -> None:
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.int32
    assert bytes(ids.tolist()) == text.encode()
    assert ByteTokenizer().decode([256, *ids, 257, -1]) == text


def test_byte_ids_of_bos_and_eos_are_no_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert sorted([tokenizer.bos_id, tokenizer.eos_id]) == [256, 257]
    assert tokenizer.vocab_size == 258


@given(texts=st.lists(TEXT, max_size=4))
def test_bpe_returns_any_text(bpe: HuggingFaceTokenizer, texts: list[str]) -> None:
    for text, ids in zip(texts, bpe.encode_batch(texts), strict=True):
        assert bpe.decode([bpe.bos_id, *ids, bpe.eos_id, -1]) == text
        np.testing.assert_array_equal(ids, bpe.encode(text))


def test_bpe_compresses_and_is_reproducible(bpe: HuggingFaceTokenizer) -> None:
    assert bpe.vocab_size == 280
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert train_bpe(iter(TEXTS), 280) == bpe


def test_bpe_of_a_short_text_has_fewer_entries() -> None:
    assert train_bpe(iter(["ab"]), 1000).vocab_size < 300
    with pytest.raises(ConfigError, match="data.bpe_vocab_size is 257; set at least 258"):
        train_bpe(iter(TEXTS), 257)


def test_text_that_spells_a_special_token_is_text(bpe: HuggingFaceTokenizer) -> None:
    ids = bpe.encode("<s>a</s>")
    assert not {bpe.bos_id, bpe.eos_id} & set(ids.tolist())
    assert bpe.decode(ids) == "<s>a</s>"


def test_a_file_is_read_without_its_truncation_and_padding(tmp_path: pathlib.Path) -> None:
    path = word_level(tmp_path, {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 9})
    tokenizer = read_tokenizer(str(path))
    np.testing.assert_array_equal(tokenizer.encode("a b a b a"), [3, 9, 3, 9, 3])
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.vocab_size == 10  # ids may have gaps: not the count of entries, which is 5
    assert read_tokenizer(str(tmp_path)) == read_tokenizer(str(path)) or str(tmp_path) != str(path)


@pytest.mark.parametrize("form", [str, lambda token: {"content": token}], ids=["string", "object"])
def test_declared_special_tokens_win(tmp_path: pathlib.Path, form: object) -> None:
    path = word_level(tmp_path, {"<unk>": 0, "<s>": 1, "start": 2, "stop": 3})
    assert callable(form)
    declared = {"bos_token": form("start"), "eos_token": form("stop")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    tokenizer = read_tokenizer(str(path))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (2, 3)


def test_one_special_token_stands_for_both(tmp_path: pathlib.Path) -> None:
    tokenizer = read_tokenizer(str(word_level(tmp_path, {"<unk>": 0, "</s>": 5})))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (5, 5)


def test_files_without_a_start_token_or_with_a_wrong_one_are_refused(tmp_path: pathlib.Path) -> None:
    path = word_level(tmp_path, {"<unk>": 0, "a": 1})
    with pytest.raises(ConfigError, match="no token to begin documents with"):
        read_tokenizer(str(path))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "nowhere"}')
    with pytest.raises(ConfigError, match="no token 'nowhere'"):
        read_tokenizer(str(path))


def test_what_is_no_tokenizer_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="'byte' is neither bytes nor bpe nor a tokenizer.json"):
        read_tokenizer("byte")
    path = tmp_path / "tokenizer.json"
    for content in (b"", b'{"model": ', b"{}", b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{path}: not a Hugging Face tokenizer"):
            read_tokenizer(str(path))


@pytest.mark.parametrize("path", ["a" * 300, "~no-such-user/tokenizer.json", "tokenizer.json/tokenizer.json", "a\nb"])
def test_a_path_that_cannot_be_opened_is_a_wrong_setting(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("in the way")
    with pytest.raises(ConfigError, match=r"^data.tokenizer: '.* nor a tokenizer.json that can be read \(.*set one of"):
        read_tokenizer(path)


@pytest.mark.parametrize("content", ["[]", "null", "7", '"bos_token"', "[" * 100_000, "{", "\xff"])
def test_a_malformed_tokenizer_config_is_named(tmp_path: pathlib.Path, content: str) -> None:
    path = word_level(tmp_path, {"<unk>": 0, "<s>": 1})
    (tmp_path / "tokenizer_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=f"^{tmp_path}/tokenizer_config.json: (not a JSON object|cannot be read)"):
        read_tokenizer(str(path))


NO_UNKNOWN = {
    "word level": tokenizers.models.WordLevel({"<s>": 0, "a": 1}, unk_token="<unk>"),
    "word piece": tokenizers.models.WordPiece({"<s>": 0, "a": 1}, unk_token="<unk>"),
    "bpe": tokenizers.models.BPE({"<s>": 0, "a": 1}, [], unk_token="<unk>"),
    "unigram": tokenizers.models.Unigram([("<s>", 0.0), ("a", -1.0)], None, False),
}


@pytest.mark.parametrize("kind", NO_UNKNOWN)
def test_a_tokenizer_that_cannot_encode_the_text_is_named(tmp_path: pathlib.Path, kind: str) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(NO_UNKNOWN[kind]).save(str(path))
    tokenizer = read_tokenizer(str(path))
    np.testing.assert_array_equal(tokenizer.encode("a"), [1])
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["a", text])):
        with pytest.raises(DataError, match=f"^data.tokenizer: {path} cannot encode the text .*(?i:unk)") as caught:
            encode("zebra")
        assert "\n" not in str(caught.value)


def test_a_saved_tokenizer_is_loaded_or_refused(tmp_path: pathlib.Path, bpe: HuggingFaceTokenizer) -> None:
    saved = json.loads(json.dumps(bpe.save(tmp_path)))
    assert load_tokenizer(saved, tmp_path) == bpe
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("cat", "cut"))
    with pytest.raises(DataError, match="not the tokenizer that the data was prepared with"):
        load_tokenizer(saved, tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=f"{path}: cannot be read"):
        load_tokenizer(saved, tmp_path)
    assert load_tokenizer(ByteTokenizer().save(tmp_path), tmp_path) == ByteTokenizer()
