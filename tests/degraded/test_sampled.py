"""Sampled gradients: without bias, better than a uniform sample, and nothing else is touched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mecefo_jax.config import DegradedConfig, ModelConfig
from mecefo_jax.degraded.block import degraded_block
from mecefo_jax.degraded.sampled import Drawn, Sample, draw, sample_of, sampled_feed_forward, sampled_linear
from mecefo_jax.layers import rotary, swiglu
from mecefo_jax.model import Block, exact_block

B, T, D, F = 3, 12, 6, 5
# A token is hit or not at so many places of a distance between hits: the mean over them is off by no more than T / N.
EVERYWHERE = (np.arange(1024, dtype=np.float32) + 0.5) / 1024


def random(shape, seed, dtype=jnp.float32):
    """Rows of very different lengths, as gradients of tokens are."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1))), dtype)


def weight_gradient(x_BTD, g_BTF, offset_B, num_drawn):
    w_DF = jnp.zeros((x_BTD.shape[-1], g_BTF.shape[-1]))
    return jax.vjp(lambda w: sampled_linear(x_BTD, w, sample(offset_B), (num_drawn,)), w_DF)[1](g_BTF)[0]


def sample(offset_B, level=1, ffn_offset_B=None):
    return Sample(offset_B, offset_B if ffn_offset_B is None else ffn_offset_B, jnp.int8(level))


def in_the_mean(function, num_sequences):
    """Over offsets: the same for all sequences, since each one's part is a sum of its own."""
    return jnp.mean(jax.vmap(lambda offset: function(jnp.full(num_sequences, offset)))(jnp.asarray(EVERYWHERE)), axis=0)


def in_the_mean_of_both(function):
    """Over 8192 pairs of offsets that fill the square evenly (Roberts's R2 sequence)."""
    pairs = np.outer(np.arange(8192), [0.7548776662466927, 0.5698402909980532]) % 1
    return jax.tree.map(
        lambda leaf: jnp.mean(leaf, axis=0),
        jax.vmap(lambda pair: function(jnp.full(B, pair[0]), jnp.full(B, pair[1])))(jnp.asarray(pairs, jnp.float32)),
    )


@pytest.mark.parametrize("num_drawn", [1, 2, 5, 11])
def test_the_mean_over_offsets_is_the_exact_weight_gradient(num_drawn):
    x, g = random((B, T, D), 0), random((B, T, F), 1)
    found = in_the_mean(lambda offset_B: weight_gradient(x, g, offset_B, num_drawn), B)
    exact = np.einsum("btd,btf->df", np.asarray(x, np.float64), np.asarray(g, np.float64))
    assert np.linalg.norm(found - exact) <= 1e-2 * np.linalg.norm(exact)


def test_the_level_says_how_many_tokens_are_drawn():
    x, g, offset_B = random((B, T, D), 13), random((B, T, F), 14), jnp.array([0.1, 0.5, 0.9])

    @jax.jit
    def gradient(level):
        w_DF = jnp.zeros((D, F))
        return jax.vjp(lambda w: sampled_linear(x, w, sample(offset_B, level), (9, 6, 2)), w_DF)[1](g)[0]

    for level, num_drawn in ((0, 9), (1, 9), (2, 6), (3, 2)):
        expected = weight_gradient(x, g, offset_B, num_drawn)
        np.testing.assert_allclose(gradient(level), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 0.3, 0.999])
def test_a_sample_of_all_tokens_is_exact_at_any_offset(offset):
    x, g = random((B, T, D), 2), random((B, T, F), 3)
    found = weight_gradient(x, g, jnp.full(B, offset, jnp.float32), T)
    np.testing.assert_allclose(found, jnp.einsum("btd,btf->df", x, g), rtol=1e-4, atol=1e-4)


def test_the_output_and_the_input_gradient_are_exact_bit_for_bit():
    x, w, g = random((B, T, D), 4), random((D, F), 5), random((B, T, F), 6)
    y, pullback = jax.vjp(lambda x: sampled_linear(x, w, sample(jnp.zeros(B)), (2,)), x)
    np.testing.assert_array_equal(y, x @ w)
    np.testing.assert_array_equal(pullback(g)[0], g @ w.T)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_padding_and_a_sequence_of_nothing_but_padding(dtype):
    """Tokens without a gradient are not drawn, and where there are no others nothing comes of it."""
    x, g = random((B, T, D), 7, dtype), random((B, T, F), 8, dtype)
    g = g.at[0, 4:].set(0).at[1].set(0)
    found = in_the_mean(lambda offset_B: weight_gradient(x, g, offset_B, 6), B)
    assert found.dtype == jnp.float32
    exact = np.einsum("btd,btf->df", np.asarray(x, np.float64), np.asarray(g, np.float64))
    tolerance = 1e-2 if dtype == jnp.float32 else 2e-2
    assert np.linalg.norm(found - exact) <= tolerance * np.linalg.norm(exact)


@settings(deadline=None, max_examples=50)
@example(norms=[1.0, 1.0, 0.0], offset=1 - 2**-24, num_drawn=2)  # the last hit rounds up to the end
@example(norms=[1.0] * 3 + [0.0], offset=1 - 2**-23, num_drawn=3)
@given(
    norms=st.lists(st.one_of(st.just(0.0), st.floats(2**-20, 2**20, width=32)), min_size=2, max_size=24),
    offset=st.floats(0, 1, exclude_max=True, width=32),
    num_drawn=st.integers(1, 24),
)
def test_draws_are_in_range_and_every_hit_has_a_finite_weight(norms, offset, num_drawn):
    num_drawn = min(num_drawn, len(norms) - 1)
    index_K, weight_K = draw(jnp.asarray(norms, jnp.float32), jnp.float32(offset), num_drawn)
    assert index_K.shape == weight_K.shape == (num_drawn,)
    assert np.all((index_K >= 0) & (index_K < len(norms))) and np.all(np.diff(index_K) >= 0)
    assert np.all(np.isfinite(weight_K)) and np.all(weight_K > 0)
    if np.count_nonzero(norms) >= num_drawn and offset > 0:
        assert all(norms[index] > 0 for index in np.asarray(index_K))


def test_by_hand():
    """One token of 10 and four of 1, three drawn: the large one for certain, each of the others half of the time."""
    index_K, weight_K = draw(jnp.array([1.0, 1.0, 10.0, 1.0, 1.0]), jnp.float32(0.25), 3)
    np.testing.assert_array_equal(index_K, [0, 2, 3])  # hits at 0.25, 1.25, 2.25 of lengths 0.5, 0.5, 1, 0.5, 0.5
    np.testing.assert_allclose(weight_K, [2, 1, 2], rtol=1e-6)


def test_less_noise_than_a_uniform_sample():
    x, g = random((1, 64, D), 9), random((1, 64, F), 10)
    exact = jnp.einsum("btd,btf->df", x, g)

    def error(function):
        return float(jnp.mean(jnp.square(jax.vmap(lambda offset: function(offset) - exact)(jnp.asarray(EVERYWHERE)))))

    def uniform(offset):
        chosen = jnp.argsort(jax.random.uniform(jax.random.key((offset * 1024).astype(jnp.uint32)), (64,)))[:16]
        return 4 * jnp.einsum("btd,btf->df", x[:, chosen], g[:, chosen])

    assert error(lambda offset: weight_gradient(x, g, jnp.full(1, offset), 16)) < 0.5 * error(uniform)


@pytest.mark.parametrize("sample_ffn", [False, True])
def test_a_block_has_unbiased_gradients_and_without_sample_ffn_exact_ones_but_for_kernels(sample_ffn):
    switches = DegradedConfig(skip_attention=False, low_rank=False, sampled_fractions=(0.25,), sample_ffn=sample_ffn)
    config = ModelConfig(hidden_size=8, ffn_size=12, num_layers=1, num_heads=2, max_seq_len=T)
    block = Block(config, rngs=nnx.Rngs(0))
    x, g, positions = random((B, T, 8), 11), random((B, T, 8), 12), rotary(T, 4, config.rope_base)
    exact = jax.vjp(lambda block, x: exact_block(block, x, positions), block, x)[1](g)

    def degraded(offset_B, ffn_offset_B):
        drawn = sample(offset_B, ffn_offset_B=ffn_offset_B)
        apply = lambda block, x: degraded_block(block, x, positions, None, None, drawn, switches, "none")  # noqa: E731
        return jax.vjp(apply, block, x)[1](g)

    once, means = degraded(jnp.zeros(B), jnp.zeros(B)), in_the_mean_of_both(degraded)
    is_exact = {}
    for path, mean in jax.tree_util.tree_leaves_with_path(means):
        name = jax.tree_util.keystr(path)
        reference, found = (dict(jax.tree_util.tree_leaves_with_path(grads))[path] for grads in (exact, once))
        assert np.linalg.norm(mean - reference) <= 2e-2 * np.linalg.norm(reference), name
        is_exact[name] = bool(np.linalg.norm(found - reference) <= 1e-6 * np.linalg.norm(reference))
    assert len(is_exact) == 10
    assert [name for name, exact in is_exact.items() if exact] == (
        [] if sample_ffn else [name for name in is_exact if "kernel" not in name]
    )


FFN = (random((D, F), 20), random((D, F), 21), random((F, D), 22))


def feed_forward_gradients(x, g, drawn, offset_B, ffn_offset_B, level=1):
    """Of the input and the three weights."""
    function = lambda x, *weights: sampled_feed_forward(x, *weights, sample(offset_B, level, ffn_offset_B), drawn)  # noqa: E731
    return jax.vjp(function, x, *FFN)[1](g)


def exact_feed_forward_gradients(x, g):
    return jax.vjp(lambda x, gate, up, down: swiglu(x @ gate, x @ up) @ down, x, *FFN)[1](g)


@pytest.mark.parametrize(
    "drawn", [Drawn(for_weights=2, for_ffn=5), Drawn(for_weights=7, for_ffn=7), Drawn(for_weights=9, for_ffn=11)]
)
def test_the_mean_over_both_offsets_is_the_exact_feed_forward_gradient(drawn):
    x, g = random((B, T, D), 23), random((B, T, D), 24)
    found = in_the_mean_of_both(lambda *pair: feed_forward_gradients(x, g, (drawn,), *pair))
    for left, right in zip(found, exact_feed_forward_gradients(x, g), strict=True):
        assert np.linalg.norm(left - right) <= 1e-2 * np.linalg.norm(right)


def test_a_feed_forward_from_all_tokens_is_exact():
    x, g = random((B, T, D), 25), random((B, T, D), 26)
    found = feed_forward_gradients(x, g, (Drawn(for_weights=T, for_ffn=T),), jnp.full(B, 0.3), jnp.full(B, 0.7))
    for left, right in zip(found, exact_feed_forward_gradients(x, g), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)


def test_a_token_that_is_drawn_twice_counts_twice():
    """Norms so different that the probabilities of the largest have not all come down to 1."""
    x, g = (
        random((B, T, D), 33),
        random((B, T, D), 34) * jnp.float32(4) ** -jnp.arange(T, dtype=jnp.float32).reshape(1, T, 1),
    )
    index_BK, _ = jax.vmap(lambda rows: draw(jnp.linalg.norm(rows, axis=-1), jnp.float32(0.5), 10))(g)
    assert np.any(np.diff(index_BK) == 0)
    drawn = Drawn(for_weights=10, for_ffn=10)
    found = in_the_mean_of_both(lambda *pair: feed_forward_gradients(x, g, (drawn,), *pair)[0])
    exact = exact_feed_forward_gradients(x, g)[0]
    for token in range(T):
        left, right = found[:, token], exact[:, token]
        assert np.linalg.norm(left - right) <= 2e-2 * np.linalg.norm(right), token


def test_tokens_that_are_not_drawn_give_the_feed_forward_no_gradient():
    """Those that are give theirs, times their weight: of both ways to draw the same."""
    x, g, offset_B = random((B, T, D), 27), random((B, T, D), 28), jnp.array([0.2, 0.5, 0.8])
    input_grad, *kernels = feed_forward_gradients(x, g, (Drawn(for_weights=4, for_ffn=4),), jnp.zeros(B), offset_B)
    index_BK, weight_BK = jax.vmap(lambda norms, offset: draw(norms, offset, 4))(jnp.linalg.norm(g, axis=-1), offset_B)
    weight_BT = np.zeros((B, T), np.float32)
    np.add.at(weight_BT, (np.arange(B)[:, None], np.asarray(index_BK)), np.asarray(weight_BK))
    expected = exact_feed_forward_gradients(x, g * weight_BT[..., None])
    assert 0 < np.count_nonzero(weight_BT) <= 4 * B
    for left, right in zip((input_grad, *kernels), expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)


def test_the_level_says_how_many_tokens_the_feed_forward_is_made_of():
    x, g, offset_B = random((B, T, D), 29), random((B, T, D), 30), jnp.array([0.1, 0.5, 0.9])
    levels = (Drawn(for_weights=9, for_ffn=11), Drawn(for_weights=2, for_ffn=7))
    gradients = jax.jit(lambda level: feed_forward_gradients(x, g, levels, offset_B, offset_B, level))
    for level, drawn in ((0, levels[0]), (1, levels[0]), (2, levels[1])):
        expected = feed_forward_gradients(x, g, (drawn,), offset_B, offset_B)
        for left, right in zip(gradients(level), expected, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)


def test_a_feed_forward_in_bfloat16_has_gradients_in_the_dtypes_of_their_arguments():
    x, g = random((B, T, D), 31, jnp.bfloat16), random((B, T, D), 32, jnp.bfloat16)
    g = g.at[0].set(0)
    drawn, offset_B = Drawn(for_weights=5, for_ffn=8), jnp.full(B, 0.5)
    found = feed_forward_gradients(x, g, (drawn,), offset_B, offset_B)
    assert [grad.dtype for grad in found] == [jnp.bfloat16, *[jnp.float32] * 3]
    assert all(bool(jnp.all(jnp.isfinite(grad))) for grad in found) and not np.any(found[0][0])
    expected = feed_forward_gradients(x.astype(jnp.float32), g.astype(jnp.float32), (drawn,), offset_B, offset_B)
    for left, right in zip(found, expected, strict=True):
        assert np.linalg.norm(left.astype(jnp.float32) - right) <= 3e-2 * np.linalg.norm(right)


def test_offsets_depend_on_the_sequence_alone_and_are_spread_out():
    def offsets(tokens):
        return np.stack(sample_of(jnp.asarray(tokens), jnp.arange(3, dtype=jnp.int8))[:2])

    tokens = np.random.default_rng(0).integers(0, 50, (4000, 17)).astype(np.int32)
    found = offsets(tokens)
    assert found.shape == (2, 3, 4000) and np.all((found >= 0) & (found < 1))
    assert abs(np.corrcoef(found[0].ravel(), found[1].ravel())[0, 1]) < 0.03, "one says nothing of the other"
    np.testing.assert_array_equal(found[..., 5:7], offsets(tokens[5:7]))
    changed = tokens.copy()
    changed[:, -1] = (changed[:, -1] + 1) % 50
    assert not np.any(found == offsets(changed))
    for layer in found.reshape(6, 4000):  # Kolmogorov, Smirnov: uniform samples are nowhere off by more, with 99.9%
        assert np.max(np.abs(np.sort(layer) - (np.arange(4000) + 0.5) / 4000)) < 0.031
