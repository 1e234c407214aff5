"""The model against LLaMA written naively in float64 NumPy, and what must hold for it whatever the weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mecefo_jax.config import ModelConfig
from mecefo_jax.layers import rotary
from mecefo_jax.model import (
    PAD,
    attention_mask,
    compute_dtype,
    exact_block,
    ffn_kernel_mask,
    init_model,
    loss_sum,
)

VOCAB, SEQ_LEN, BATCH = 23, 11, 3
MHA = ModelConfig(hidden_size=16, ffn_size=24, num_layers=3, num_heads=4, norm_eps=1e-3, rope_base=100.0)
GQA = dataclasses.replace(MHA, num_kv_heads=2)
TIED = dataclasses.replace(GQA, tie_embeddings=True)
SHAPES = {"mha": MHA, "gqa": GQA, "tied": TIED}

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
# float32 rounding through three layers, relative to the largest entry, with a margin of about ten
TOLERANCE = 1e-5


def random_model(config: ModelConfig, seed: int = 0):
    """Weights large enough for attention to be peaked and for norms to matter; norm scales differ from 1."""
    params = init_model(config, VOCAB, seed)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    leaves = [
        1.0 + 0.3 * jax.random.normal(key, leaf.shape)
        if leaf.ndim == 1 or leaf.shape == (config.num_layers, config.hidden_size)
        else 0.3 * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def random_tokens() -> jax.Array:
    return jax.random.randint(jax.random.key(100), (BATCH, SEQ_LEN + 1), 0, VOCAB)


def relative_error(actual, expected) -> float:
    expected = np.asarray(expected, np.float64)
    return float(np.abs(np.asarray(actual, np.float64) - expected).max() / np.abs(expected).max())


def assert_equal_trees(actual, expected, tolerance: float) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < tolerance, jax.tree_util.keystr(path)


@functools.partial(jax.jit, static_argnums=2)
def loss_and_gradient(params, tokens, dtype=F32):
    """``(loss, number of tokens), gradient``."""
    return jax.value_and_grad(loss_sum, has_aux=True)(params, tokens, dtype)


@functools.partial(jax.jit, static_argnums=2)
def logits_of(params, tokens, dtype=F32):
    return params(tokens, dtype)


# The reference: one sequence, one layer, one head and one position after another.


def numpy_norm(x_D, scale_D, eps):
    return x_D / np.sqrt(np.mean(x_D**2) + eps) * scale_D


def numpy_rotate(x_H, position, base):
    half = len(x_H) // 2
    rotated = np.empty_like(x_H)
    for i in range(half):
        angle = position * base ** (-2 * i / len(x_H))
        rotated[i] = x_H[i] * np.cos(angle) - x_H[i + half] * np.sin(angle)
        rotated[i + half] = x_H[i] * np.sin(angle) + x_H[i + half] * np.cos(angle)
    return rotated


def numpy_attention(x_TD, weights, layer, config):
    q_TD, k_TD, v_TD = (x_TD @ weights(f"attention.{name}.kernel")[layer] for name in ("query", "key", "value"))
    size = config.head_size
    y_TD = np.zeros((len(x_TD), config.num_heads * size))
    for head in range(config.num_heads):
        own, shared = (slice(h * size, (h + 1) * size) for h in (head, head * config.kv_heads // config.num_heads))
        for t in range(len(x_TD)):
            query = numpy_rotate(q_TD[t, own], t, config.rope_base)
            keys = [numpy_rotate(k_TD[s, shared], s, config.rope_base) for s in range(t + 1)]
            scores = np.array([query @ key for key in keys]) / np.sqrt(size)
            weights_S = np.exp(scores - scores.max())
            y_TD[t, own] = weights_S / weights_S.sum() @ v_TD[: t + 1, shared]
    return y_TD @ weights("attention.out.kernel")[layer]


def numpy_logits(params, tokens_T, config):
    leaves = {
        jax.tree_util.keystr(path): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }

    def weights(name):
        (found,) = (leaf for path, leaf in leaves.items() if f".{name}" in path)
        return found

    norm = lambda x_TD, scale_D: np.stack([numpy_norm(x_D, scale_D, config.norm_eps) for x_D in x_TD])  # noqa: E731
    x_TD = weights("embedding")[np.maximum(tokens_T, 0)]
    for layer in range(config.num_layers):
        x_TD = x_TD + numpy_attention(norm(x_TD, weights("norm1.scale")[layer]), weights, layer, config)
        h_TD = norm(x_TD, weights("norm2.scale")[layer])
        gate_TF, up_TF = (h_TD @ weights(f"feed_forward.{name}.kernel")[layer] for name in ("gate", "up"))
        x_TD = x_TD + (gate_TF / (1 + np.exp(-gate_TF)) * up_TF) @ weights("feed_forward.down.kernel")[layer]
    head_DV = weights("embedding").T if config.tie_embeddings else weights("head.kernel")
    return norm(x_TD, weights("final_norm.scale")) @ head_DV


def numpy_loss_sum(params, tokens_BT, config):
    total, count = 0.0, 0
    for tokens_T in np.asarray(tokens_BT):
        logits_TV = numpy_logits(params, tokens_T[:-1], config)
        for logits_V, target in zip(logits_TV, tokens_T[1:], strict=True):
            if target != PAD:
                total += np.log(np.exp(logits_V - logits_V[target]).sum())
                count += 1
    return total, count


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_loss_equal_the_float64_reference(shape):
    config = SHAPES[shape]
    params, tokens = random_model(config), random_tokens()
    tokens = tokens.at[1, 7:].set(PAD)
    expected = np.stack([numpy_logits(params, row[:-1], config) for row in np.asarray(tokens)])
    assert relative_error(logits_of(params, tokens[:, :-1]), expected) < TOLERANCE

    (loss, count), _ = loss_and_gradient(params, tokens)
    expected_loss, expected_count = numpy_loss_sum(params, tokens, config)
    assert int(count) == expected_count == BATCH * SEQ_LEN - 5
    assert float(loss) == pytest.approx(expected_loss, rel=TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
def test_directional_derivatives_equal_those_of_the_float64_reference(shape):
    """``<gradient, direction>`` for one random direction a leaf, by central differences in float64.

    The step 1e-4 leaves a truncation error of about 1e-8 and a rounding error of 1e-12.
    """
    config = SHAPES[shape]
    params, tokens = random_model(config), random_tokens()
    _, grads = loss_and_gradient(params, tokens)
    leaves, structure = jax.tree.flatten(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params))
    for index, grad in enumerate(jax.tree.leaves(grads)):
        direction = np.random.default_rng(index).standard_normal(grad.shape)
        direction /= np.linalg.norm(direction)

        def loss_at(offset, index=index, direction=direction):
            moved = [leaf + offset * direction if i == index else leaf for i, leaf in enumerate(leaves)]
            return numpy_loss_sum(jax.tree.unflatten(structure, moved), tokens, config)[0]

        expected = (loss_at(1e-4) - loss_at(-1e-4)) / 2e-4
        actual = np.sum(np.asarray(grad, np.float64) * direction)
        assert abs(actual - expected) < TOLERANCE * np.linalg.norm(grad)


def test_no_gradient_flows_from_a_position_to_a_later_one():
    """Inputs of each layer at positions after t get a gradient of exactly zero from the logits at t."""
    params, tokens = random_model(GQA), random_tokens()[:, :-1]

    def shifted_block(block, x_BTD, positions, shift_BTD):
        return exact_block(block, x_BTD + shift_BTD, positions)

    @jax.jit
    def reached_by(t):
        """Whether the logits at t have a gradient to each layer's input at each position."""

        def outcome(shifts_LBTD):
            return jnp.sum(jnp.square(params(tokens, F32, shifted_block, shifts_LBTD)[:, t]))

        shifts = jnp.zeros((GQA.num_layers, *tokens.shape, GQA.hidden_size))
        return jnp.any(jax.grad(outcome)(shifts) != 0, axis=-1)

    for t in range(SEQ_LEN):
        reached_LBT = np.asarray(reached_by(t))
        assert not reached_LBT[:, :, t + 1 :].any()
        assert reached_LBT[:, :, t].all()
        assert reached_LBT[:-1, :, :t].all(), "attention reaches back to every earlier position"


def test_grouped_queries_equal_repeated_key_and_value_heads():
    grouped = random_model(GQA)
    targets, structure = jax.tree.flatten(init_model(MHA, VOCAB, seed=0))
    leaves = []
    for (path, leaf), target in zip(jax.tree_util.tree_leaves_with_path(grouped), targets, strict=True):
        if jax.tree_util.keystr(path).endswith((".key.kernel.value", ".value.kernel.value")):
            heads = leaf.reshape(*leaf.shape[:-1], GQA.kv_heads, GQA.head_size)
            leaf = jnp.repeat(heads, GQA.num_heads // GQA.kv_heads, axis=-2).reshape(target.shape)
        leaves.append(leaf)
    repeated = jax.tree.unflatten(structure, leaves)
    tokens = random_tokens()[:, :-1]
    assert relative_error(logits_of(repeated, tokens), logits_of(grouped, tokens)) < TOLERANCE


def test_padding_counts_neither_in_the_loss_nor_in_its_gradient():
    """A padded sequence has the loss and the gradient of the same sequence without its end."""
    params, tokens = random_model(GQA), random_tokens()
    short, padded = tokens[:, :8], tokens.at[:, 8:].set(PAD)
    (loss, count), grads = loss_and_gradient(params, padded)
    (expected_loss, expected_count), expected_grads = loss_and_gradient(params, short)
    assert int(count) == int(expected_count) == BATCH * 7
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    assert_equal_trees(grads, expected_grads, TOLERANCE)


def test_a_microbatch_of_padding_alone_has_no_loss_and_a_zero_gradient():
    params = random_model(GQA)
    tokens = jnp.full((BATCH, SEQ_LEN + 1), PAD)
    (loss, count), grads = loss_and_gradient(params, tokens)
    assert float(loss) == 0.0 and int(count) == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads))


def test_sums_of_parts_add_up_to_the_sum_of_the_whole():
    """However uneven the parts: losses, counts and gradients are sums, not means; rows of other parts are padding."""
    params, tokens = random_model(GQA), random_tokens().at[0, 3:].set(PAD)
    (loss, count), grads = loss_and_gradient(params, tokens)
    parts = [loss_and_gradient(params, tokens.at[rows].set(PAD)) for rows in (slice(1, None), slice(0, 1))]
    assert [int(part_count) for (_, part_count), _ in parts] == [2, 2 * SEQ_LEN]
    assert int(count) == 2 + 2 * SEQ_LEN
    assert float(loss) == pytest.approx(sum(float(part_loss) for (part_loss, _), _ in parts), rel=1e-6)
    summed = jax.tree.map(jnp.add, parts[0][1], parts[1][1])
    assert_equal_trees(summed, grads, TOLERANCE)


@pytest.mark.parametrize("remat", ["ffn", "block"])
def test_remat_changes_memory_and_not_gradients(remat):
    tokens = random_tokens()
    stored, recomputed = (random_model(dataclasses.replace(GQA, remat=policy)) for policy in ("none", remat))
    _, grads = loss_and_gradient(recomputed, tokens)
    _, expected = loss_and_gradient(stored, tokens)
    for grad, expected_grad in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert relative_error(grad, expected_grad) < 1e-6

    def residuals(policy: str) -> int:
        block = jax.tree.map(lambda leaf: leaf[0], stored.blocks)
        positions = rotary(SEQ_LEN, GQA.head_size, GQA.rope_base)
        x_BTD = jnp.ones((BATCH, SEQ_LEN, GQA.hidden_size))
        _, pullback = jax.vjp(lambda block, x: exact_block(block, x, positions, policy), block, x_BTD)
        return sum(leaf.size for leaf in jax.tree.leaves(pullback))

    assert residuals(remat) < residuals("none")


@pytest.mark.parametrize("shape", ["gqa", "tied"])
def test_bfloat16_compute_keeps_parameters_loss_and_gradients_in_float32(shape):
    params, tokens = random_model(SHAPES[shape]), random_tokens()
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention promotes bfloat16 to float32
        logits = logits_of(params, tokens[:, :-1], BF16)
        (loss, _), grads = jax.block_until_ready(loss_and_gradient(params, tokens, BF16))
    assert logits.dtype == loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves((params, grads))} == {F32}
    # bfloat16 has 8 bits: relative rounding of 2^-9 an operation, some ten of them one after another.
    _, exact = loss_and_gradient(params, tokens)
    assert relative_error(logits, logits_of(params, tokens[:, :-1])) < 0.05
    for grad, reference in zip(jax.tree.leaves(grads), jax.tree.leaves(exact), strict=True):
        assert np.linalg.norm(grad - reference) < 0.1 * np.linalg.norm(reference)


def test_bfloat16_products_really_are_in_bfloat16():
    params, tokens = random_model(GQA), random_tokens()[:, :-1]
    with jax.numpy_dtype_promotion("standard"):
        lowered = logits_of.lower(params, tokens, BF16).as_text()
    products = [line for line in lowered.splitlines() if "dot_general" in line]
    assert products and all("bf16" in line for line in products)


def test_a_tied_head_adds_its_gradient_to_the_embedding():
    tied = random_model(TIED)
    untied = init_model(GQA, VOCAB, seed=0)
    assert tied.head is None
    untied.blocks, untied.final_norm, untied.embedding = tied.blocks, tied.final_norm, tied.embedding
    untied.head.kernel = type(untied.head.kernel)(tied.embedding[...].T)
    tokens = random_tokens()
    (loss, _), grads = loss_and_gradient(tied, tokens)
    (expected_loss, _), apart = loss_and_gradient(untied, tokens)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    assert relative_error(grads.embedding[...], apart.embedding[...] + apart.head.kernel[...].T) < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
def test_masks_name_exactly_the_attention_and_the_feed_forward_parameters(shape):
    params = init_model(SHAPES[shape], VOCAB, seed=0)

    def marked(mask) -> set[str]:
        return {
            jax.tree_util.keystr(path).removeprefix(".blocks").removesuffix(".value")
            for path, is_marked in jax.tree_util.tree_leaves_with_path(mask)
            if is_marked
        }

    attention = {f".attention.{name}.kernel" for name in ("query", "key", "value", "out")}
    assert marked(attention_mask(params)) == attention | {".norm1.scale"}
    assert marked(ffn_kernel_mask(params)) == {f".feed_forward.{name}.kernel" for name in ("gate", "up", "down")}
    for mask in (attention_mask(params), ffn_kernel_mask(params)):
        assert jax.tree.structure(mask) == jax.tree.structure(params)


def test_initial_weights_follow_the_seed_and_are_scaled_for_depth():
    config = ModelConfig(hidden_size=64, ffn_size=160, num_layers=8, num_heads=4)
    params, same, other = (init_model(config, 256, seed) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True))
    attention, feed_forward = params.blocks.attention, params.blocks.feed_forward
    assert not np.array_equal(attention.query.kernel[...], other.blocks.attention.query.kernel[...])
    # The standard deviation of n normal samples is off by 1/sqrt(2n): at most 0.5% here; six times that is allowed.
    for kernel, scale in (
        (attention.query.kernel, 0.02),
        (feed_forward.up.kernel, 0.02),
        (params.embedding, 0.02),
        (attention.out.kernel, 0.02 / 4),
        (feed_forward.down.kernel, 0.02 / 4),
    ):
        assert float(jnp.std(kernel[...])) == pytest.approx(scale, rel=0.03)
    layers = np.asarray(feed_forward.up.kernel[...])
    assert all(not np.array_equal(layers[0], layer) for layer in layers[1:])
    assert np.all(np.asarray(params.blocks.norm1.scale[...]) == 1.0)


def test_compute_dtype_is_float32_on_cpu_unless_it_is_set():
    assert compute_dtype(MHA) == F32
    for name in ("float32", "bfloat16"):
        assert compute_dtype(dataclasses.replace(MHA, compute_dtype=name)) == jnp.dtype(name)
