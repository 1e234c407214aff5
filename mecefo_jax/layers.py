"""The array functions that the model's layers are made of, and what each keeps for its backward pass.

They are written for the memory traffic of training: on CPU, small models spend more time on it than on arithmetic, most
of all on memory that is touched for the first time in a step.

Legend: B batch, T time, D a layer's input size, F its output size, N query heads, K key/value heads, H head size.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Attention on CPU is fastest in blocks of 64 queries, with 128 tokens and with 256. Each further block saves less work
# and costs time to compile.
_SMALLEST_BLOCK, _MOST_BLOCKS = 64, 4

# For element-wise work: its inputs are stored for the backward pass, and the rest is repeated, which costs less than to
# write and read it. In a scan over layers XLA cannot undo this by merging the two passes, so it needs no barrier.
recompute = functools.partial(jax.checkpoint, prevent_cse=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def linear(
    x: Float[Array, "... D"], w_DF: Float[Array, "D F"], out_dtype: jnp.dtype | None = None
) -> Float[Array, "... F"]:
    """``x W``, multiplied in the dtype of ``x`` and returned in ``out_dtype`` (None: that of ``x``).

    The weight's gradient is ``x^T g`` as it stands, in the weight's dtype. JAX's own rule forms ``(g^T x)^T``, for
    which XLA on CPU stores ``g`` column by column: the gradient of a whole model then takes a fifth longer.
    """
    return jnp.matmul(x, w_DF.astype(x.dtype), preferred_element_type=out_dtype)


def _linear_forward(x, w_DF, out_dtype):
    return linear(x, w_DF, out_dtype), (x, w_DF)


def _linear_backward(out_dtype, residuals, g):
    x, w_DF = residuals
    g = g.astype(x.dtype)
    rows = tuple(range(x.ndim - 1))
    w_grad_DF = jax.lax.dot_general(x, g, ((rows, rows), ((), ())), preferred_element_type=w_DF.dtype)
    return g @ w_DF.astype(g.dtype).T, w_grad_DF


linear.defvjp(_linear_forward, _linear_backward)


@recompute
def rms_norm(x_BTD: Float[Array, "B T D"], scale_D: Float[Array, "D"], eps: float) -> Float[Array, "B T D"]:
    """``x / sqrt(mean(x^2) + eps) * scale``, computed in float32, in the dtype of ``x``."""
    x_f32 = x_BTD.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), axis=-1, keepdims=True) + eps)
    return (x_f32 * inverse_rms * scale_D[None, None]).astype(x_BTD.dtype)


@recompute
def swiglu(gate_BTF: Float[Array, "B T F"], up_BTF: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
    """``silu(gate) * up``."""
    return jax.nn.silu(gate_BTF) * up_BTF


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotary:
    """Cosines and sines of the rotary angles, each ``[T, H/2]``, shared by all layers."""

    cos_TH: Float[Array, "T half"]
    sin_TH: Float[Array, "T half"]


def rotary(num_positions: int, head_size: int, base: float) -> Rotary:
    """Angles ``t * base^(-2i/H)`` of positions ``t`` and frequencies ``i`` (RoFormer, arXiv 2104.09864)."""
    frequencies_H = base ** (-jnp.arange(0, head_size, 2, dtype=jnp.float32) / head_size)
    angles_TH = jnp.outer(jnp.arange(num_positions, dtype=jnp.float32), frequencies_H)
    return Rotary(jnp.cos(angles_TH), jnp.sin(angles_TH))


def rotate(x_BTNH: Float[Array, "B T N H"], positions: Rotary) -> Float[Array, "B T N H"]:
    """Rotate the pairs ``(x[i], x[i + H/2])``: the layout of Hugging Face's LLaMA weights."""
    cos, sin = (a[:, None, :].astype(x_BTNH.dtype)[None] for a in (positions.cos_TH, positions.sin_TH))
    first, second = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def causal_attention(
    q_BTNH: Float[Array, "B T N H"], k_BTKH: Float[Array, "B T K H"], v_BTKH: Float[Array, "B T K H"]
) -> Float[Array, "B T N H"]:
    """``softmax(q k^T / sqrt(H)) v`` over the keys up to each query.

    Args:
        q_BTNH: queries; ``N / K`` neighboring heads share a key head.
        k_BTKH, v_BTKH: keys and values.

    Returns:
        Outputs in the dtype of the queries; the softmax is computed in float32.
    """
    if jax.default_backend() == "cpu":
        return _attention_in_blocks(q_BTNH, k_BTKH, v_BTKH)
    # cuDNN's fused kernel exists for 16-bit floats on GPUs alone.
    fused = jax.default_backend() == "gpu" and q_BTNH.dtype.itemsize == 2
    return jax.nn.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, is_causal=True, implementation="cudnn" if fused else "xla"
    )


@recompute
def _attention_in_blocks(q_BTNH, k_BTKH, v_BTKH):
    """Each block of queries with the keys up to its end alone: most of the masked half is never computed."""
    num_queries = q_BTNH.shape[1]
    block_size = max(_SMALLEST_BLOCK, -(-num_queries // _MOST_BLOCKS))

    def attend(start: int) -> Array:
        stop = min(start + block_size, num_queries)
        mask_TS = jnp.tri(stop - start, stop, start, dtype=bool)
        return jax.nn.dot_product_attention(
            q_BTNH[:, start:stop], k_BTKH[:, :stop], v_BTKH[:, :stop], mask=mask_TS[None, None], implementation="xla"
        )

    return jnp.concatenate([attend(start) for start in range(0, num_queries, block_size)], axis=1)
