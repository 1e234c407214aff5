"""Generation with a cache against whole forward passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mecefo_jax.evaluation.generation import Generator, decode, prefill
from tests.evaluation.toy import LONGEST, continue_slowly, toy_model

SHAPES = {"grouped": {}, "full and tied": {"num_kv_heads": 4, "tie_embeddings": True}}


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def generate(model):
    return Generator(model, batch_size=2, max_length=LONGEST)


def never(ids):
    return False


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, length).tolist() for length in lengths]


@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_makes_the_cache_that_a_longer_prompt_has(shape):
    model, dtype = toy_model(**SHAPES[shape]), jnp.dtype("float32")
    start_at = jax.jit(lambda tokens_BP, length_B: prefill(model.params, tokens_BP, length_B, 24, dtype))
    lengths, more = np.asarray([3, 9, 16], np.int32), 5
    tokens = np.random.default_rng(0).integers(0, 258, (3, 24)).astype(np.int32)  # rubbish beyond the lengths
    end, passed = jax.jit(lambda start: decode(model.params, start, more, dtype))(start_at(tokens, lengths))
    np.testing.assert_array_equal(end.position_B, lengths + more)
    longer = np.zeros((3, 24), np.int32)
    for row, length in enumerate(lengths):
        longer[row, : length + more] = [*tokens[row, :length], *np.asarray(passed[row])]
    expected = start_at(longer, lengths + more)
    np.testing.assert_array_equal(end.token_B, expected.token_B)
    for row, length in enumerate(lengths):
        for found, whole in zip(jax.tree.leaves(end.cache), jax.tree.leaves(expected.cache), strict=True):
            used = found[:, row, : length + more]
            assert np.abs(used).max() > 0.1
            np.testing.assert_allclose(used, whole[:, row, : length + more], atol=2e-5)


def test_tokens_are_those_of_whole_forward_passes_in_the_order_of_the_prompts(model, generate):
    prompts = prompts_of([5, 12, 1, 17, 31])
    rows = generate(prompts, max_new_tokens=20, is_done=never)
    assert rows == [continue_slowly(model, prompt, 20) for prompt in prompts]
    assert len(set(map(tuple, rows))) == 5


def test_row_ends_at_eos(model):
    prompts = prompts_of([7, 12])
    first, second = (continue_slowly(model, prompt, 20) for prompt in prompts)
    eos = next(token for token in first[2:] if token not in second and token not in first[:2])
    ending = dataclasses.replace(model, tokenizer=dataclasses.replace(model.tokenizer, eos_id=eos))
    rows = Generator(ending, batch_size=2, max_length=LONGEST)(prompts, max_new_tokens=20, is_done=never)
    assert rows == [first[: first.index(eos)], second]


def test_row_ends_where_it_is_done(model, generate):
    (prompt,), asked = prompts_of([7]), []

    def done_at_ten(ids):
        asked.append(len(ids))
        return len(ids) >= 10

    (row,) = generate([prompt], max_new_tokens=20, is_done=done_at_ten)
    assert row == continue_slowly(model, prompt, len(row)) and 10 <= len(row) < 20
    assert asked == [len(row)]  # done at the first look, and not asked again


def test_two_programs_a_padded_length_and_number_of_chunks(model):
    generate = Generator(model, batch_size=2, max_length=LONGEST)
    for lengths, count in (([3, 5, 30], 4), ([31], 15), ([8], 16), ([33, 64], 4)):
        generate(prompts_of(lengths), max_new_tokens=count, is_done=lambda ids: True)
    assert generate.compilations == 4
    assert generate([], max_new_tokens=4, is_done=never) == []


def test_dtype_is_that_of_the_config():
    generate = Generator(toy_model(compute_dtype="bfloat16"), batch_size=1, max_length=LONGEST)
    with jax.numpy_dtype_promotion("standard"):  # inside JAX's attention
        (row,) = generate(prompts_of([5]), max_new_tokens=3, is_done=never)
        progress = jax.eval_shape(lambda: generate._start(generate._model.params, *_ONE_ROW, num_slots=8))
    assert len(row) == 3
    assert {leaf.dtype for leaf in jax.tree.leaves(progress.cache)} == {jnp.dtype("bfloat16")}


_ONE_ROW = np.zeros((1, 4), np.int32), np.ones(1, np.int32)
