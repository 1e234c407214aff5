"""The array functions against float64 NumPy and plain ``jax.grad``, and what they keep for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mecefo_jax import layers
from mecefo_jax.layers import causal_attention, linear, rms_norm, rotary, rotate, swiglu

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
TOLERANCE = 1e-5  # float32 rounding of sums of at most some hundred terms, with a margin of about ten


def normal(seed: int, *shape: int, dtype=F32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def close(actual, expected, tolerance: float = TOLERANCE) -> bool:
    expected = np.asarray(expected, np.float64)
    return bool(np.abs(np.asarray(actual, np.float64) - expected).max() <= tolerance * np.abs(expected).max())


def residual_entries(function, *args) -> int:
    """Entries of all arrays that ``function`` keeps for its backward pass."""
    _, pullback = jax.vjp(function, *args)
    return sum(leaf.size for leaf in jax.tree.leaves(pullback))


def naive_attention(q_BTNH, k_BTKH, v_BTKH):
    groups = q_BTNH.shape[2] // k_BTKH.shape[2]
    k_BTNH, v_BTNH = (jnp.repeat(x, groups, axis=2) for x in (k_BTKH, v_BTKH))
    scores_BNTS = jnp.einsum("btnh,bsnh->bnts", q_BTNH, k_BTNH) * q_BTNH.shape[-1] ** -0.5
    num_positions = q_BTNH.shape[1]
    future_TS = jnp.triu(jnp.ones((num_positions, num_positions), bool), k=1)
    weights_BNTS = jax.nn.softmax(jnp.where(future_TS[None, None], -jnp.inf, scores_BNTS), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights_BNTS, v_BTNH)


@pytest.mark.parametrize("leading", [(7,), (2, 5), (2, 3, 4)])
def test_linear_and_its_gradients_equal_those_of_a_matrix_product(leading):
    x, w, g = normal(0, *leading, 6), normal(1, 6, 9), normal(2, *leading, 9)
    y, pullback = jax.vjp(linear, x, w)
    expected, expected_pullback = jax.vjp(jnp.matmul, x, w)
    assert close(y, expected)
    for grad, expected_grad in zip(pullback(g), expected_pullback(g), strict=True):
        assert close(grad, expected_grad)


def test_linear_in_bfloat16_sums_the_gradient_of_a_float32_weight_in_float32():
    """Rounded to bfloat16, the sum over 4096 rows would be off by 2^-9 of itself; in float32 it is not."""
    x, w, g = normal(0, 4096, 4, dtype=BF16), normal(1, 4, 3), normal(2, 4096, 3, dtype=BF16)
    y, pullback = jax.vjp(linear, x, w)
    x_grad, w_grad = pullback(g)
    assert (y.dtype, x_grad.dtype, w_grad.dtype) == (BF16, BF16, F32)
    assert close(w_grad, np.asarray(x, np.float64).T @ np.asarray(g, np.float64))


def test_linear_returns_unrounded_sums_where_asked_to():
    x, w = normal(0, 8, 64, dtype=BF16), normal(1, 64, 5)
    y = linear(x, w, F32)
    expected = np.asarray(x, np.float64) @ np.asarray(w.astype(BF16), np.float64)
    assert y.dtype == F32 and close(y, expected)
    assert not close(linear(x, w), expected, 1e-4), "bfloat16 outputs would hide what this test is for"
    _, pullback = jax.vjp(lambda x, w: linear(x, w, F32), x, w)
    assert [grad.dtype for grad in pullback(normal(2, 8, 5))] == [BF16, F32]


@pytest.mark.parametrize("num_queries", [1, 9, 64, 65, 130, 257])  # one block, whole blocks, and one cut short
@pytest.mark.parametrize("groups", [1, 3])
def test_attention_and_its_gradients_equal_the_naive_ones_for_every_length(num_queries, groups):
    q, g = (3 * normal(i, 2, num_queries, 2 * groups, 4) for i in range(2))
    k, v = (normal(i, 2, num_queries, 2, 4) for i in (2, 3))

    def output_and_gradients(attention):
        def function(q, k, v, g):
            y, pullback = jax.vjp(attention, q, k, v)
            return y, *pullback(g)

        return jax.jit(function)(q, k, v, g)

    actual, expected = output_and_gradients(causal_attention), output_and_gradients(naive_attention)
    for one, other in zip(actual, expected, strict=True):
        # A single key leaves gradients of zero, so nothing is relative to less than 1.
        assert np.abs(one - other).max() <= TOLERANCE * max(1.0, float(np.abs(other).max()))


def test_attention_reads_no_later_key_or_value():
    q, k, v = (normal(i, 1, 130, 2, 4) for i in range(3))  # three blocks

    @jax.jit
    def gradients_of_output(t):
        return jax.grad(lambda k, v: jnp.sum(causal_attention(q, k, v)[:, t] ** 2), argnums=(0, 1))(k, v)

    for t in (0, 1, 63, 64, 100, 128, 129):
        k_grad, v_grad = map(np.asarray, gradients_of_output(t))
        assert not k_grad[:, t + 1 :].any() and not v_grad[:, t + 1 :].any()
        assert v_grad[:, : t + 1].any(axis=(0, 2, 3)).all()


def test_attention_of_bfloat16_takes_its_softmax_in_float32():
    """Scores near 100, where bfloat16 has steps of 0.5: rounded to it, they would make outputs wrong by a tenth."""
    q = jnp.full((1, 8, 1, 1), 100.0, BF16)
    k = (1.0 + jnp.arange(8) / 128).astype(BF16).reshape(1, 8, 1, 1)
    v = normal(2, 1, 8, 1, 1, dtype=BF16)
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention promotes bfloat16 to float32
        y = causal_attention(q, k, v)
    expected = naive_attention(*(x.astype(F32) for x in (q, k, v)))
    assert y.dtype == BF16 and close(y, expected, 0.01)


@pytest.mark.parametrize(("dtype", "implementation"), [(BF16, "cudnn"), (F32, "xla")])
def test_attention_on_a_gpu_is_one_call_fused_for_16_bit_floats(monkeypatch, dtype, implementation):
    calls = []
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *args, **options: calls.append(options) or args[0])
    q = normal(0, 1, 8, 2, 4, dtype=dtype)
    causal_attention(q, q, q)
    assert calls == [{"is_causal": True, "implementation": implementation}]


def test_attention_keeps_its_arguments_alone_for_the_backward_pass():
    q, k, v = normal(0, 2, 32, 4, 8), normal(1, 2, 32, 2, 8), normal(2, 2, 32, 2, 8)
    assert residual_entries(causal_attention, q, k, v) == q.size + k.size + v.size


def test_element_wise_functions_keep_their_arguments_alone_for_the_backward_pass():
    x, y, scale = normal(0, 2, 8, 16), normal(1, 2, 8, 16), normal(2, 16)
    assert residual_entries(swiglu, x, y) == x.size + y.size
    assert residual_entries(lambda x, scale: rms_norm(x, scale, 1e-5), x, scale) <= x.size + scale.size + 1


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rms_norm_is_computed_in_float32(dtype):
    x, scale = normal(0, 2, 3, 64, dtype=dtype), normal(1, 64)
    x64 = np.asarray(x, np.float64)
    expected = x64 / np.sqrt(np.mean(x64**2, axis=-1, keepdims=True) + 0.1) * np.asarray(scale, np.float64)
    y = rms_norm(x, scale, 0.1)
    # A rounding to the output's dtype, and a few in float32 before it.
    tolerance = float(jnp.finfo(dtype).eps) / 2 + 4 * float(jnp.finfo(F32).eps)
    assert y.dtype == dtype and np.all(np.abs(np.asarray(y, np.float64) - expected) <= tolerance * np.abs(expected))


def test_swiglu_and_its_gradient_equal_the_formula():
    gate, up = normal(0, 2, 3, 8), normal(1, 2, 3, 8)
    g64, u64 = np.asarray(gate, np.float64), np.asarray(up, np.float64)
    sigmoid = 1 / (1 + np.exp(-g64))
    y, pullback = jax.vjp(swiglu, gate, up)
    gate_grad, up_grad = pullback(jnp.ones_like(y))
    assert close(y, g64 * sigmoid * u64)
    assert close(up_grad, g64 * sigmoid)
    assert close(gate_grad, u64 * sigmoid * (1 + g64 * (1 - sigmoid)))


@given(shift=st.integers(0, 40), first=st.integers(0, 23), second=st.integers(0, 23))
@settings(max_examples=20)
def test_rotated_products_depend_on_the_distance_alone(shift, first, second):
    positions = rotary(64, 8, 100.0)
    q, k = (jnp.broadcast_to(normal(i, 1, 1, 1, 8), (1, 64, 1, 8)) for i in range(2))
    products = np.asarray(jnp.einsum("tnh,snh->ts", rotate(q, positions)[0], rotate(k, positions)[0]))
    # Angles up to 64 in float32 are off by 64 * 2^-24; the vectors' norms are near 3.
    assert abs(products[first, second] - products[first + shift, second + shift]) < 2e-4


def test_rotation_keeps_lengths_and_leaves_position_zero_alone():
    x = normal(0, 2, 16, 3, 8)
    rotated = rotate(x, rotary(16, 8, 10_000.0))
    assert np.array_equal(rotated[:, 0], x[:, 0])
    assert close(jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(x, axis=-1))
    assert not close(rotated[:, 1], x[:, 1], 0.01)


def test_rotation_turns_pair_i_by_position_times_base_to_the_minus_2i_over_h():
    x = jnp.zeros((1, 5, 1, 6)).at[..., 1].set(1.0)  # the first half of pair 1
    rotated = np.asarray(rotate(x, rotary(5, 6, 50.0)))[0, :, 0]
    angles = np.arange(5) * 50.0 ** (-2 / 6)
    assert close(rotated[:, 1], np.cos(angles)) and close(rotated[:, 4], np.sin(angles))
    assert not np.any(rotated[:, [0, 2, 3, 5]])


def test_query_blocks_save_work(monkeypatch):
    """Four blocks multiply 10/16 of the scores that one block does."""
    q, k, v = (normal(i, 1, 256, 2, 16) for i in range(3))

    def flops() -> float:
        return jax.jit(lambda q, k, v: causal_attention(q, k, v)).lower(q, k, v).cost_analysis()["flops"]

    in_blocks = flops()
    monkeypatch.setattr(layers, "_MOST_BLOCKS", 1)
    jax.clear_caches()
    assert in_blocks == pytest.approx(10 / 16 * flops(), rel=0.02)
