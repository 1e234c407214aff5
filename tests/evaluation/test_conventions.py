"""The harness's conventions: examples worked by hand, and what must hold for any text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mecefo_jax.errors import ConfigError
from mecefo_jax.evaluation.conventions import (
    GenerationRequest,
    cut,
    encode_pair,
    generation_request,
    prompt_ids,
    rolling_spans,
    scored_span,
)


def characters(text):
    return [ord(character) for character in text]


def words(text):
    """A tokenizer whose tokens are words with the space before them."""
    return [hash(word) for word in text.replace(" ", "\x00 ").split("\x00") if word]


def test_spaces_at_the_end_of_a_context_go_with_the_continuation():
    assert encode_pair(characters, "ab  ", "c") == (characters("ab"), characters("  c"))
    assert encode_pair(words, "one two ", "three") == (words("one two"), words(" three"))
    assert encode_pair(characters, "ab\n", "c") == (characters("ab"), characters("\nc"))


def test_continuation_is_what_lies_beyond_the_tokens_of_the_context_alone():
    # "ab" is one token in "abc" too, and the first token of the whole: as many tokens as the context has are taken off.
    encode = {"a": [1], "abc": [7, 8]}.__getitem__
    assert encode_pair(encode, "a", "bc") == ([1], [8])
    assert encode_pair({"a": [1], "ab": [9]}.__getitem__, "a", "b") == ([1], [])


def test_too_long_a_context_loses_its_first_tokens():
    span = scored_span([1, 2, 3, 4, 5], [6, 7], max_length=4)
    # The last token is predicted and not read, so that one more than the length fits.
    assert (span.tokens, span.num_scored) == ([3, 4, 5, 6, 7], 2)
    assert scored_span([1], [2, 3], max_length=4).tokens == [1, 2, 3]
    assert scored_span([1, 2], [3, 4], max_length=2).tokens == [2, 3, 4]
    with pytest.raises(ConfigError, match="--max-length: got 2, .* continuation of 3 tokens"):
        scored_span([1], [2, 3, 4], max_length=2)


def test_windows_of_the_example_in_the_harness_documentation():
    spans = rolling_spans(list(range(10)), 99, max_length=4)
    assert [(list(span.tokens), span.num_scored) for span in spans] == [
        ([99, 0, 1, 2, 3], 4),
        ([3, 4, 5, 6, 7], 4),
        ([5, 6, 7, 8, 9], 2),
    ]
    assert rolling_spans([], 99, max_length=4) == []


@given(st.integers(1, 60), st.integers(1, 20))
def test_windows_score_every_token_once_with_as_much_context_as_fits(num_tokens, max_length):
    spans = rolling_spans(list(range(num_tokens)), -1, max_length)
    scored = [token for span in spans for token in span.tokens[-span.num_scored :]]
    assert scored == list(range(num_tokens))
    assert spans[0].tokens[0] == -1
    for span in spans:
        assert list(span.tokens) == list(range(span.tokens[0], span.tokens[0] + len(span.tokens)))
        assert len(span.tokens) == min(max_length, num_tokens) + 1


def test_generation_settings_and_their_other_names():
    assert generation_request({}) == GenerationRequest(until=(), max_new_tokens=256)
    assert generation_request({"until": "\n", "max_gen_toks": 9}) == GenerationRequest(until=("\n",), max_new_tokens=9)
    several = {"until": ["a", "b"], "max_tokens": 3, "max_new_tokens": 2, "do_sample": False, "temperature": 1.0}
    assert generation_request(several) == GenerationRequest(until=("a", "b"), max_new_tokens=2)
    assert generation_request({"temperature": 0.0, "top_p": 0.9, "num_beams": 1}).max_new_tokens == 256


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample": True}, "wants to sample"),
        ({"temperature": 0.7}, "wants to sample"),
        ({"num_beams": 4}, "beam search"),
        ({"repetition_penalty": 1.2, "max_length": 9}, "sets repetition_penalty, max_length in"),
    ],
)
def test_other_than_greedy_generation_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        generation_request({"until": ["\n"], **settings})


def test_prompt_leaves_room_for_what_is_generated():
    assert prompt_ids([1, 2, 3, 4], max_new_tokens=3, max_length=5) == [3, 4]
    assert prompt_ids([1], max_new_tokens=3, max_length=5) == [1]
    with pytest.raises(ConfigError, match="generates 5 tokens; set it to 6 at least"):
        prompt_ids([1], max_new_tokens=5, max_length=5)


def test_text_ends_before_what_ends_it():
    assert cut("one\ntwo. three", [".", "\n"]) == "one"
    assert cut("one two", ["", "x"]) == "one two"
    assert cut("aXYb", ["Y", "XY"]) == "aX"  # one after the other, as the harness does it
