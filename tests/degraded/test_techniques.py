"""Each technique's ``custom_vjp`` against plain gradients, and what a degraded block costs once compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mecefo_jax.config import DegradedConfig, ModelConfig
from mecefo_jax.degraded.basis import low_rank_ffn
from mecefo_jax.degraded.block import degraded_block, masked_block
from mecefo_jax.degraded.low_rank import expand, low_rank_linear, zero_coordinates
from mecefo_jax.degraded.rematerialize import rematerialize
from mecefo_jax.degraded.skip_attention import skip_attention
from mecefo_jax.model import attention_branch, exact_block, ffn_kernel_mask, init_model, loss_sum, rotary

CONFIG = ModelConfig(hidden_size=32, ffn_size=80, num_layers=4, num_heads=4)
VOCAB, B, T, D, F = 64, 2, 64, 32, 80


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def basis(seed, size, rank):
    return jnp.linalg.qr(normal(seed, size, rank)).Q


@pytest.fixture(scope="module")
def model():
    return init_model(CONFIG, VOCAB, seed=0)


@pytest.fixture(scope="module")
def block(model):
    return jax.tree.map(lambda leaf: leaf[0], model.blocks)


def test_skipped_attention_passes_the_gradient_on_and_gives_none_to_its_weights(block):
    x, positions = normal(0, B, T, D), rotary(T, CONFIG.head_size, CONFIG.rope_base)
    m, pullback = jax.vjp(lambda block, x: skip_attention(block, x, positions), block, x)
    np.testing.assert_allclose(m, x + attention_branch(block, x, positions), rtol=1e-6)
    g = normal(1, B, T, D)
    block_grad, x_grad = pullback(g)
    np.testing.assert_array_equal(x_grad, g)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(block_grad))


def test_rematerialized_gradients_are_the_same():
    f = lambda w, x: jnp.sum(jnp.sin(x @ w) ** 2)  # noqa: E731
    w, x = normal(0, D, F), normal(1, B, D)
    for ours, plain in zip(jax.grad(rematerialize(f), (0, 1))(w, x), jax.grad(f, (0, 1))(w, x), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)


@pytest.mark.parametrize("rank", [1, 4, D])
def test_low_rank_weight_gradient_is_the_projection_of_the_full_one(rank):
    x, w, v, g = normal(0, B, T, D), normal(1, D, F), basis(2, D, rank), normal(3, B, T, F)
    y, pullback = jax.vjp(low_rank_linear, x, w, v, jnp.zeros((rank, F)))
    np.testing.assert_array_equal(y, x @ w)
    x_grad, w_grad, v_grad, c_grad = pullback(g)
    assert (w_grad == 0).all() and (v_grad == 0).all()
    x64, w64, v64, g64 = (np.asarray(a, np.float64) for a in (x, w, v, g))
    full = np.einsum("btd,btf->df", x64, g64)
    np.testing.assert_allclose(x_grad, g64 @ w64.T, rtol=1e-5, atol=1e-4)
    # float32 products of 128 terms of size one.
    np.testing.assert_allclose(v64 @ np.asarray(c_grad, np.float64), v64 @ v64.T @ full, atol=1e-4)
    if rank == D:
        np.testing.assert_allclose(v64 @ np.asarray(c_grad, np.float64), full, atol=1e-4)


def test_low_rank_linear_in_bfloat16_sums_its_gradient_in_float32():
    x, w, v = normal(0, B, T, D).astype(jnp.bfloat16), normal(1, D, F), basis(2, D, 4)
    y, pullback = jax.vjp(low_rank_linear, x, w, v, jnp.zeros((4, F)))
    x_grad, _, _, c_grad = pullback(jnp.ones_like(y))
    assert (y.dtype, x_grad.dtype, c_grad.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)


def test_the_coordinate_gradient_expands_to_what_the_optax_transformation_projects(model):
    """Differentiating in coordinates equals projecting the full gradient with ``low_rank_ffn(project=True)``."""
    projection = low_rank_ffn(6, 100, ffn_mask=ffn_kernel_mask, method="svd", project=True)
    state = projection.init(model)
    tokens = jax.random.randint(jax.random.key(0), (B, T + 1), 0, VOCAB)
    dtype = jnp.dtype("float32")
    low_rank = DegradedConfig(skip_attention=False, remat_ffn=False)

    def apply(block, x, positions, layer):
        return degraded_block(block, x, positions, *layer, None, low_rank, "none")

    def loss(coordinates):
        per_layer = (state.bases.blocks, coordinates.blocks)
        return loss_sum(model, tokens, dtype, apply, per_layer)[0]

    expanded = expand(state.bases, jax.jit(jax.grad(loss))(zero_coordinates(model, state.bases)))
    full = jax.jit(jax.grad(lambda model: loss_sum(model, tokens, dtype)[0]))(model)
    projected, _ = projection.update(full, state, model)
    for name in ("gate", "up", "down"):
        ours, reference = (getattr(tree.blocks.feed_forward, name).kernel[...] for tree in (expanded, projected))
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5 * float(jnp.abs(reference).max()))


def for_kernels(block, make):
    """A tree like the block with something in the places of the feed-forward kernels, None elsewhere."""
    return jax.tree.map(lambda is_kernel, w: make(w) if is_kernel else None, ffn_kernel_mask(block), block)


@pytest.mark.parametrize("is_degraded", [False, True])
def test_a_masked_block_is_one_of_the_two(block, is_degraded):
    x, positions, switches = normal(0, B, T, D), rotary(T, CONFIG.head_size, CONFIG.rope_base), DegradedConfig()
    bases = for_kernels(block, lambda w: basis(0, w.shape[0], 4))
    zeros = for_kernels(block, lambda w: jnp.zeros((4, w.shape[1])))

    def masked(block, x):
        return masked_block(block, x, positions, bases, zeros, None, jnp.bool_(is_degraded), switches, "none")

    def expected(block, x):
        if is_degraded:
            return degraded_block(block, x, positions, bases, zeros, None, switches, "none")
        return exact_block(block, x, positions)

    g = normal(1, B, T, D)
    for ours, reference in zip(
        jax.tree.leaves(jax.vjp(masked, block, x)[1](g)),
        jax.tree.leaves(jax.vjp(expected, block, x)[1](g)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-5)


def compiled(switches: DegradedConfig | None, remat: str):
    """One block's forward and backward pass from abstract arrays; None: the exact one."""
    config = ModelConfig(hidden_size=128, ffn_size=512, num_layers=1, num_heads=4)
    block = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], init_model(config, VOCAB, 0).blocks))
    x = jax.ShapeDtypeStruct((4, 256, 128), jnp.float32)
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)  # noqa: E731
    bases = for_kernels(block, lambda w: shape(w.shape[0], 16))
    coordinates = for_kernels(block, lambda w: shape(16, w.shape[1]))
    positions = rotary(256, 32, 10000.0)

    def loss(trained, block, x, bases):
        if switches is None:
            return jnp.sum(exact_block(trained, x, positions, remat) ** 2)
        return jnp.sum(degraded_block(block, x, positions, bases, trained, None, switches, remat) ** 2)

    trained = block if switches is None else coordinates
    return jax.jit(jax.grad(loss, (0, 2))).lower(trained, block, x, bases).compile()


@pytest.mark.parametrize("remat", ["none", "block"])
def test_the_work_and_the_residuals_of_the_exact_backward_pass_are_gone(remat):
    exact, degraded = compiled(None, remat), compiled(DegradedConfig(remat_ffn=False), remat)
    flops = [program.cost_analysis()["flops"] for program in (exact, degraded)]
    memory = [program.memory_analysis().temp_size_in_bytes for program in (exact, degraded)]
    assert flops[1] < 0.65 * flops[0]
    assert memory[1] < memory[0]


def test_recomputing_stores_less_across_layers():
    """In a scan over layers, where XLA cannot merge the recomputation with the forward pass."""
    config = ModelConfig(hidden_size=64, ffn_size=256, num_layers=8, num_heads=4)
    model = jax.eval_shape(lambda: init_model(config, VOCAB, 0))
    tokens = jax.ShapeDtypeStruct((4, 257), jnp.int32)

    def temporary_bytes(switches):
        def loss(model, tokens):
            def apply(block, x, positions, _):
                return degraded_block(block, x, positions, None, None, None, switches, "none")

            return loss_sum(model, tokens, jnp.dtype("float32"), apply)[0]

        compiled = jax.jit(jax.grad(loss)).lower(model, tokens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    kept = temporary_bytes(DegradedConfig(remat_ffn=False, low_rank=False))
    recomputed = temporary_bytes(DegradedConfig(remat_ffn=True, low_rank=False))
    # Gate and up, each [8, 4, 256, 256] in float32, are no longer kept.
    assert kept - recomputed >= 2 * 8 * 4 * 256 * 256 * 4
