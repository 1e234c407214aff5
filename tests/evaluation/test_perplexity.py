"""Bytes behind tokens, and whose tokens they are."""

import json

import numpy as np
import pytest
import tokenizers

from mecefo_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, train_bpe
from mecefo_jax.errors import DataError
from mecefo_jax.evaluation.perplexity import bytes_of_tokens, check_same_tokenizer, count_bytes

TEXT = "Wer reitet so sp\u00e4t durch Nacht und Wind? \u03bb\u2192\U0001f600 " * 3


def bpe(size=280):
    return train_bpe(iter([TEXT]), size)


def with_content(tokenizer, change):
    content = json.loads(tokenizer.content)
    change(content)
    return HuggingFaceTokenizer(name="other", content=json.dumps(content), bos_id=0, eos_id=1)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), bpe(), bpe(400)], ids=["bytes", "bpe", "larger bpe"])
def test_tokens_of_a_text_stand_for_its_bytes(tokenizer):
    ids = tokenizer.encode(TEXT)
    bytes_V = bytes_of_tokens(tokenizer)
    assert bytes_V[ids].sum() == len(TEXT.encode()) > len(TEXT)
    assert bytes_V[[tokenizer.bos_id, tokenizer.eos_id]].tolist() == [0, 0]
    # In records: the first token is not predicted, BOS stands for nothing, and padding is left out.
    record = np.asarray([[tokenizer.bos_id, *ids, -1, -1], [*ids, tokenizer.bos_id, -1, -1]], np.int32)
    assert count_bytes(tokenizer, [record, record[:1]]) == 3 * len(TEXT.encode()) - bytes_V[ids[0]]


def test_added_tokens_are_text():
    def add(content):
        token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        content["added_tokens"].append({"id": 280, "content": "\u00e4\u00e4", **token})

    tokenizer = with_content(bpe(), add)
    text = "sp\u00e4\u00e4t"
    assert 280 in tokenizer.encode(text)
    assert bytes_of_tokens(tokenizer)[tokenizer.encode(text)].sum() == len(text.encode())


def test_other_vocabularies_do_not_tell():
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    words = HuggingFaceTokenizer(name="words", content=model.to_str(), bos_id=0, eos_id=1)
    assert bytes_of_tokens(words) is None and count_bytes(words, []) is None


def test_tokens_must_mean_the_same():
    check_same_tokenizer(ByteTokenizer(), ByteTokenizer())
    same = HuggingFaceTokenizer(name="a file", content=bpe().content, bos_id=0, eos_id=0)
    check_same_tokenizer(bpe(), same)
    others = [bpe(281), ByteTokenizer(), HuggingFaceTokenizer(name="bos 1", content=bpe().content, bos_id=1, eos_id=1)]
    for other in others:
        with pytest.raises(DataError, match=r"tokens of bpe \(280\), the data has those of .*--data.tokenizer"):
            check_same_tokenizer(bpe(), other)
