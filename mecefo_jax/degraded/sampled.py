"""Weight gradients from a sample of the tokens, unbiased; not in the paper.

``x^T g`` is a sum over tokens. Of each sequence a fixed number of them is drawn, with probabilities in proportion to
the norms of what they contribute, and each is weighted by one over its own: column-row sampling (Drineas, Kannan,
Mahoney 2006). Where attention is not skipped, every input gradient is exact, and so is the expectation of every weight
gradient.

Legend: B batch, T time, D a linear's input size, F its output size, K drawn tokens of a sequence.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mecefo_jax.layers import Rotary, linear, swiglu
from mecefo_jax.model import Block, attend

_ROUNDS = 6  # of capping probabilities at 1; the few that would need more are drawn a bit too seldom, and weigh more
_TINY = 1e-30  # norm of a token that contributes nothing, so that it can be divided by


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def sampled_linear(
    x_BTD: Float[Array, "B T D"], w_DF: Float[Array, "D F"], offset_B: Float[Array, "B"], num_drawn: int
) -> Float[Array, "B T F"]:
    """``y = x W``, whose weight gradient is summed over some of the tokens.

    Args:
        x_BTD: inputs.
        w_DF: the weight.
        offset_B: in [0, 1); decides for each sequence which tokens are drawn, and gets no gradient.
        num_drawn: tokens of a sequence that are drawn (K); static.

    Returns:
        ``x W``. ``dL/dx = g W^T`` is exact; over uniformly random offsets the mean of ``dL/dW`` is ``x^T g``. With
        ``K = T`` it is ``x^T g`` itself.
    """
    del offset_B, num_drawn
    return linear(x_BTD, w_DF)


def _forward(x_BTD, w_DF, offset_B, num_drawn):
    return sampled_linear(x_BTD, w_DF, offset_B, num_drawn), (x_BTD, w_DF, offset_B)


def _backward(num_drawn, residuals, g_BTF):
    x_BTD, w_DF, offset_B = residuals
    x_grad_BTD = g_BTF @ w_DF.astype(g_BTF.dtype).T
    norms_BT = _norms(x_BTD) * _norms(g_BTF)
    index_BK, weight_BK = jax.vmap(functools.partial(draw, num_drawn=num_drawn))(norms_BT, offset_B)
    x_BKD, g_BKF = (jnp.take_along_axis(rows, index_BK[..., None], axis=1) for rows in (x_BTD, g_BTF))
    g_BKF = (g_BKF.astype(jnp.float32) * weight_BK[..., None]).astype(g_BTF.dtype)
    tokens = ((0, 1), (0, 1))
    w_grad_DF = jax.lax.dot_general(x_BKD, g_BKF, (tokens, ((), ())), preferred_element_type=w_DF.dtype)
    return x_grad_BTD, w_grad_DF, None


sampled_linear.defvjp(_forward, _backward)


def _norms(rows_BTD: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    return jnp.linalg.norm(rows_BTD.astype(jnp.float32), axis=-1)


def draw(
    norms_T: Float[Array, "T"], offset: Float[Array, ""], num_drawn: int
) -> tuple[Int[Array, "K"], Float[Array, "K"]]:
    """Systematic sampling: tokens are laid end to end, each as long as its probability, and hit at equal distances.

    Args:
        norms_T: of the tokens' contributions; zeros are drawn only if there is not enough else.
        offset: of the first hit, in [0, 1) of a distance.
        num_drawn: hits (K).

    Returns:
        Indices in order, and weights: summed over the hits, a token's weight is 1 in the mean over offsets.
    """
    if num_drawn == norms_T.size:
        return jnp.arange(num_drawn), jnp.ones_like(norms_T)
    norms_T = jnp.maximum(norms_T, _TINY)
    length_T = jnp.zeros_like(norms_T)
    for _ in range(_ROUNDS):  # tokens at 1 share nothing of what is left to the others
        free_T = length_T < 1
        left = num_drawn - jnp.sum(~free_T, dtype=norms_T.dtype)
        total = jnp.maximum(jnp.sum(jnp.where(free_T, norms_T, 0)), _TINY)
        length_T = jnp.where(free_T, jnp.minimum(norms_T * (left / total), 1), 1)
    ends_T = jnp.cumsum(length_T)
    distance = ends_T[-1] / num_drawn
    hits_K = (jnp.arange(num_drawn, dtype=norms_T.dtype) + offset) * distance
    hits_K = jnp.minimum(hits_K, jnp.nextafter(ends_T[-1], jnp.zeros_like(distance)))  # the last one may round up
    index_K = jnp.searchsorted(ends_T, hits_K, side="right")
    return index_K, distance / length_T[index_K]


def offsets(tokens_BT: Int[Array, "B T"], num_layers: int) -> Float[Array, "L B"]:
    """Of each layer and sequence, from the sequence's own tokens: the same wherever and whenever it is computed.

    A sequence that comes again has the same offset again; what is drawn still changes with the gradients.
    """
    key_B = jax.vmap(lambda tokens_T: jax.random.key(_hash(tokens_T)))(tokens_BT)
    return jax.vmap(lambda key: jax.random.uniform(key, (num_layers,)), out_axes=1)(key_B)


def _hash(tokens_T: Int[Array, "T"]) -> Int[Array, ""]:
    """A polynomial in an odd number, modulo 2^32 (Rabin, Karp)."""
    powers_T = jnp.cumprod(jnp.full(tokens_T.shape, 16777619, jnp.uint32))
    return jnp.sum(tokens_T.astype(jnp.uint32) * powers_T, dtype=jnp.uint32)


def sampled_attention_branch(
    block: Block, x_BTD: Float[Array, "B T D"], positions: Rotary, offset_B: Float[Array, "B"], num_drawn: int
) -> Float[Array, "B T D"]:
    """``attention(norm1(x))`` out of ``sampled_linear``."""
    product = _products(block.attention, offset_B, num_drawn)
    return attend(product, block.norm1(x_BTD), positions, block.attention.head_size)


def sampled_feed_forward_branch(
    block: Block, m_BTD: Float[Array, "B T D"], offset_B: Float[Array, "B"], num_drawn: int
) -> Float[Array, "B T D"]:
    """``feed_forward(norm2(m))`` out of ``sampled_linear``."""
    product = _products(block.feed_forward, offset_B, num_drawn)
    x_BTD = block.norm2(m_BTD)
    return product("down", swiglu(product("gate", x_BTD), product("up", x_BTD)))


def _products(
    weights: nnx.Module, offset_B: Float[Array, "B"], num_drawn: int
) -> Callable[[str, Float[Array, "B T D"]], Float[Array, "B T F"]]:
    """The sampled product of each of a module's kernels, by the kernel's name."""

    def product(name: str, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        return sampled_linear(x, getattr(weights, name).kernel[...], offset_B, num_drawn)

    return product
