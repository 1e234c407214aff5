"""Answers about texts, against single forward passes; nothing here needs the harness."""

import numpy as np
import pytest

from mecefo_jax.errors import ConfigError
from mecefo_jax.evaluation.text_model import TextModel
from tests.evaluation.toy import LONGEST, TOKENIZER, TOLERANCE, continue_slowly, logprobs_of, toy_model

BOS = TOKENIZER.bos_id
LONG = "It was a long text about very little, and it went on for as long as anybody cared to listen to it. " * 3


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def texts(model):
    return TextModel(model, batch_size=3)


def ids(text):
    return list(text.encode())


def test_continuations_are_scored_given_their_contexts(model, texts):
    pairs = [("Hello, ", "world"), ("", "world"), (LONG, " the end"), ("   ", "x"), ("Hello,", " world"), ("a", "b")]
    rows = [
        (ids("Hello, world"), 6),
        ([BOS, *ids("world")], 5),
        (ids(LONG.rstrip() + "  the end")[-(LONGEST + 1) :], 9),
        ([BOS, *ids("   x")], 4),
        (ids("Hello, world"), 6),
        (ids("ab"), 1),
    ]
    expected = [logprobs_of(model, row)[-count:].sum() for row, count in rows]
    found = texts.loglikelihoods(pairs)
    np.testing.assert_allclose([logprob for logprob, _ in found], expected, atol=TOLERANCE, rtol=0)
    (context,) = texts.generations([("Hello,", {"max_gen_toks": 3})])
    if "\ufffd" not in context:
        assert texts.loglikelihoods([("Hello,", context)])[0][1]


def test_contexts_and_prompts_may_begin_with_bos(model):
    texts = TextModel(model, batch_size=3, begin_with_bos=True)
    expected = logprobs_of(model, [BOS, *ids("Hello, world")])[-6:].sum()
    assert texts.loglikelihoods([("Hello, ", "world")])[0][0] == pytest.approx(expected, abs=TOLERANCE)
    plain = TextModel(model, batch_size=3)
    assert texts.loglikelihoods([("", "ab")]) == plain.loglikelihoods([("", "ab")])  # and not with two of them
    assert texts.rolling_loglikelihoods(["ab"]) == plain.rolling_loglikelihoods(["ab"])
    (found,) = texts.generations([("Hello", {"max_gen_toks": 8})])
    assert found == TOKENIZER.decode(continue_slowly(model, [BOS, *ids("Hello")], 8))


def test_whole_texts_are_scored_in_windows(model, texts):
    short = "A short one."
    stream = [BOS, *ids(LONG)]
    total = 0.0
    for start in range(0, len(stream) - 1, LONGEST):
        stop = min(start + LONGEST, len(stream) - 1)
        total += logprobs_of(model, stream[max(stop - LONGEST, 0) : stop + 1])[-(stop - start) :].sum()
    expected = [total, 0.0, logprobs_of(model, [BOS, *ids(short)]).sum()]
    np.testing.assert_allclose(texts.rolling_loglikelihoods([LONG, "", short]), expected, atol=4 * TOLERANCE, rtol=0)


def test_generated_text_ends_where_the_task_says(model, texts):
    prompts = ["Hello", "Once upon a time", ""]
    whole = [TOKENIZER.decode(continue_slowly(model, ids(prompt) or [BOS], 16)) for prompt in prompts]
    assert all(len(text) > 8 for text in whole)
    end = whole[1][5:7]
    requests = [(prompts[0], {"max_gen_toks": 16}), (prompts[1], {"until": [end], "max_gen_toks": 16})]
    requests += [(prompts[2], {"max_gen_toks": 16}), (prompts[0], {"until": whole[0][0], "max_gen_toks": 16})]
    assert texts.generations(requests) == [whole[0], whole[1].split(end)[0], whole[2], ""]


def test_long_prompt_loses_its_first_tokens(model, texts):
    (found,) = texts.generations([(LONG, {"max_gen_toks": 16})])
    assert found == TOKENIZER.decode(continue_slowly(model, ids(LONG)[-(LONGEST - 16) :], 16))


def test_what_cannot_be_answered_is_refused_by_name(model, texts):
    with pytest.raises(ConfigError, match="continuation '' after 'Hello'"):
        texts.loglikelihoods([("Hello", "")])
    with pytest.raises(ConfigError, match=r"--max-length: got 96, but a task generates 256 tokens"):
        texts.generations([("Hello", {})])
    with pytest.raises(ConfigError, match=r"--max-length: got 513, expected 1 to model.max_seq_len \(512\)"):
        TextModel(model, batch_size=1, max_length=513)
    with pytest.raises(ConfigError, match="--batch-size: got 0"):
        TextModel(model, batch_size=0)


def test_length_is_that_of_training_unless_given(model, texts):
    assert texts.max_length == LONGEST
    longer = TextModel(model, batch_size=1, max_length=400)
    expected = logprobs_of(model, [BOS, *ids(LONG)]).sum()
    assert longer.rolling_loglikelihoods([LONG])[0] == pytest.approx(expected, abs=4 * TOLERANCE)
    assert longer.compilations == 1
