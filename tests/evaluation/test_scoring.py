"""Scores against forward passes of single rows, in float64 from the logits on."""

import jax
import numpy as np
import pytest

from mecefo_jax.evaluation.scoring import Scorer, Span
from tests.evaluation.toy import LONGEST, TOLERANCE, logits_of, logprobs_of, toy_model


@pytest.fixture(scope="module")
def model():
    return toy_model()


def random_spans(count, rng):
    lengths = rng.integers(2, LONGEST + 2, count)
    return [
        Span(tokens=rng.integers(0, 258, length).tolist(), num_scored=int(rng.integers(1, length)))
        for length in lengths
    ]


def test_scores_are_those_of_single_rows_in_the_order_of_the_spans(model):
    spans = random_spans(13, np.random.default_rng(0))
    scores = Scorer(model, batch_size=3, max_length=LONGEST)(spans)
    expected = [logprobs_of(model, span.tokens)[-span.num_scored :].sum() for span in spans]
    np.testing.assert_allclose([score.logprob for score in scores], expected, atol=TOLERANCE, rtol=0)
    assert len({round(value) for value in expected}) > 5  # they tell the spans apart


def test_greedy_means_every_scored_token_and_no_other(model):
    context = [72, 101, 108]
    likeliest = [int(np.argmax(logits_of(model, context)[-1]))]
    likeliest.append(int(np.argmax(logits_of(model, context + likeliest)[-1])))
    another = (likeliest[0] + 1) % 258
    rows = {
        (*context, *likeliest): True,
        (*context, likeliest[0], (likeliest[1] + 1) % 258): False,
        (*context, another, int(np.argmax(logits_of(model, [*context, another])[-1]))): False,
    }
    spans = [Span(tokens=row, num_scored=2) for row in rows]
    score = Scorer(model, batch_size=4, max_length=LONGEST)
    assert [found.is_greedy for found in score(spans)] == list(rows.values())
    # The last of them again, but its unlikely token is context now.
    assert score([Span(tokens=spans[2].tokens, num_scored=1)])[0].is_greedy


def test_one_program_a_padded_length(model):
    score = Scorer(model, batch_size=2, max_length=LONGEST)
    rng = np.random.default_rng(1)
    for length in (3, 20, 33, 34, 60, 65, 97, 10, 50):
        score([Span(tokens=rng.integers(0, 258, length).tolist(), num_scored=1)] * 3)
    assert score.compilations == 3  # 32, 64 and 128
    assert score([]) == []


def test_dtype_is_that_of_the_config():
    coarse, fine = toy_model(compute_dtype="bfloat16"), toy_model()
    span = Span(tokens=list(range(40)), num_scored=39)
    with jax.numpy_dtype_promotion("standard"):  # inside JAX's attention
        found = [Scorer(model, batch_size=1, max_length=LONGEST)([span])[0].logprob for model in (coarse, fine)]
    assert 1e-3 < abs(found[0] - found[1]) < 0.05 * abs(found[1])
