"""Generation with a cache against whole forward passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mecefo_jax.evaluation.generation import Generator, decode, prefill
from tests.evaluation.toy import LONGEST, continue_slowly, toy_model

FLOAT32 = jnp.dtype("float32")
SHAPES = {"grouped": {}, "full": {"num_kv_heads": 4}, "tied": {"tie_embeddings": True}, "one": {"num_kv_heads": 1}}


def never(ids):
    return False


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, length).tolist() for length in lengths]


@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_makes_the_cache_that_a_longer_prompt_has(shape):
    model = toy_model(**SHAPES[shape])
    lengths, more = np.asarray([3, 9, 16], np.int32), 5
    tokens = np.random.default_rng(0).integers(0, 258, (3, 16)).astype(np.int32)
    start = prefill(model.params, jnp.asarray(tokens), jnp.asarray(lengths), 24, FLOAT32)
    end, passed = decode(model.params, start, more, FLOAT32)
    np.testing.assert_array_equal(end.position_B, lengths + more)
    longer = np.zeros((3, 24), np.int32)
    for row, length in enumerate(lengths):
        longer[row, : length + more] = [*tokens[row, :length], *np.asarray(passed[row])]
    expected = prefill(model.params, jnp.asarray(longer), jnp.asarray(lengths + more), 24, FLOAT32)
    np.testing.assert_array_equal(end.token_B, expected.token_B)
    for row, length in enumerate(lengths):
        for found, whole in zip(jax.tree.leaves(end.cache), jax.tree.leaves(expected.cache), strict=True):
            used = found[:, row, : length + more]
            assert np.abs(used).max() > 0.1
            np.testing.assert_allclose(used, whole[:, row, : length + more], atol=2e-5)


def test_tokens_are_those_of_whole_forward_passes_in_the_order_of_the_prompts():
    model, prompts = toy_model(), prompts_of([5, 40, 1, 17, 70])
    rows = Generator(model, batch_size=2, max_length=LONGEST)(prompts, max_new_tokens=20, is_done=never)
    assert rows == [continue_slowly(model, prompt, 20) for prompt in prompts]
    assert len(set(map(tuple, rows))) == 5


def test_row_ends_at_eos_and_where_it_is_done():
    model, prompts = toy_model(), prompts_of([7, 12])
    first, second = (continue_slowly(model, prompt, 40) for prompt in prompts)
    eos = next(token for token in first[2:] if token not in second and token not in first[:2])
    ending = toy_model_with_eos(model, eos)
    rows = Generator(ending, batch_size=2, max_length=LONGEST)(prompts, max_new_tokens=40, is_done=never)
    assert rows == [first[: first.index(eos)], second]
    asked = []

    def done_at_ten(ids):
        asked.append(len(ids))
        return len(ids) >= 10

    (row,) = Generator(model, batch_size=2, max_length=LONGEST)(prompts[:1], max_new_tokens=40, is_done=done_at_ten)
    assert row == first[: len(row)] and 10 <= len(row) < 40
    assert asked == [len(row)]  # done at the first look, and not asked again


def toy_model_with_eos(model, eos):
    return dataclasses.replace(model, tokenizer=dataclasses.replace(model.tokenizer, eos_id=eos))


def test_two_programs_a_padded_length_and_number_of_tokens():
    generate = Generator(toy_model(), batch_size=2, max_length=LONGEST)
    for lengths in ([3, 5, 30], [31], [40, 64, 50], [8]):
        generate(prompts_of(lengths), max_new_tokens=4, is_done=never)
    assert generate.compilations == 4
    generate(prompts_of([8]), max_new_tokens=15, is_done=never)  # as many chunks as before
    assert generate.compilations == 4


def test_cache_has_the_dtype_of_the_config():
    model = toy_model()
    progress = jax.eval_shape(
        lambda: prefill(model.params, jnp.zeros((1, 4), jnp.int32), jnp.ones(1, jnp.int32), 8, jnp.dtype("bfloat16"))
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(progress.cache)} == {jnp.dtype("bfloat16")}
    rows = Generator(toy_model(compute_dtype="bfloat16"), batch_size=1, max_length=LONGEST)(
        prompts_of([5]), max_new_tokens=3, is_done=never
    )
    assert [len(row) for row in rows] == [3]
