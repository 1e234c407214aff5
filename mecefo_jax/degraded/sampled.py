"""Weight gradients from a sample of the tokens, unbiased; not in the paper.

``x^T g`` is a sum over tokens. Of each sequence a fixed number of them is drawn, with probabilities in proportion to
the norms of what they contribute, and each is weighted by one over its own: column-row sampling (Drineas, Kannan,
Mahoney 2006). Where attention is not skipped, every input gradient is exact, and so is the expectation of every weight
gradient.

How many are drawn may be chosen among several numbers at run time, and costs the work of those that are drawn.

Legend: B batch, T time, D a linear's input size, F its output size, K drawn tokens of a sequence.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mecefo_jax.layers import Rotary, linear, swiglu
from mecefo_jax.model import Block, attend

_ROUNDS = 6  # of capping probabilities at 1; the few that would need more are drawn a bit too seldom, and weigh more
_TINY = 1e-30  # norm of a token that contributes nothing, so that it can be divided by


class Sample(NamedTuple):
    """Which tokens the weight gradients of a layer are made of."""

    offset_B: Float[Array, "B"]
    """In [0, 1); decides for each sequence which tokens are drawn."""
    level: Int[Array, ""]
    """How many are drawn: from 1 on, a place in the numbers to choose from; 0 is taken for 1."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def sampled_linear(
    x_BTD: Float[Array, "B T D"], w_DF: Float[Array, "D F"], sample: Sample, drawn: tuple[int, ...]
) -> Float[Array, "B T F"]:
    """``y = x W``, whose weight gradient is summed over some of the tokens.

    Args:
        x_BTD: inputs.
        w_DF: the weight.
        sample: which tokens are drawn; gets no gradient.
        drawn: numbers of tokens of a sequence that may be drawn (K), by level; static.

    Returns:
        ``x W``. ``dL/dx = g W^T`` is exact; over uniformly random offsets the mean of ``dL/dW`` is ``x^T g``. With
        ``K = T`` it is ``x^T g`` itself.
    """
    del sample, drawn
    return linear(x_BTD, w_DF)


def _forward(x_BTD, w_DF, sample, drawn):
    return sampled_linear(x_BTD, w_DF, sample, drawn), (x_BTD, w_DF, sample)


def _backward(drawn, residuals, g_BTF):
    x_BTD, w_DF, sample = residuals
    x_grad_BTD = g_BTF @ w_DF.astype(g_BTF.dtype).T
    levels = [
        functools.partial(_weight_gradient, num_drawn=num_drawn, dtype=w_DF.dtype) for num_drawn in drawn
    ]  # each a product of its own size, of which one is computed
    arguments = (x_BTD, g_BTF, sample.offset_B)
    w_grad_DF = levels[0](*arguments) if len(levels) == 1 else jax.lax.switch(sample.level - 1, levels, *arguments)
    return x_grad_BTD, w_grad_DF, None


sampled_linear.defvjp(_forward, _backward)


def _weight_gradient(
    x_BTD: Float[Array, "B T D"],
    g_BTF: Float[Array, "B T F"],
    offset_B: Float[Array, "B"],
    *,
    num_drawn: int,
    dtype: jnp.dtype,
) -> Float[Array, "D F"]:
    """``x^T g`` from some of the tokens."""
    norms_BT = _norms(x_BTD) * _norms(g_BTF)
    index_BK, weight_BK = jax.vmap(functools.partial(draw, num_drawn=num_drawn))(norms_BT, offset_B)
    x_BKD, g_BKF = (jnp.take_along_axis(rows, index_BK[..., None], axis=1) for rows in (x_BTD, g_BTF))
    g_BKF = (g_BKF.astype(jnp.float32) * weight_BK[..., None]).astype(g_BTF.dtype)
    tokens = ((0, 1), (0, 1))
    return jax.lax.dot_general(x_BKD, g_BKF, (tokens, ((), ())), preferred_element_type=dtype)


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
    block: Block, x_BTD: Float[Array, "B T D"], positions: Rotary, sample: Sample, drawn: tuple[int, ...]
) -> Float[Array, "B T D"]:
    """``attention(norm1(x))`` out of ``sampled_linear``."""
    product = _products(block.attention, sample, drawn)
    return attend(product, block.norm1(x_BTD), positions, block.attention.head_size)


def sampled_feed_forward_branch(
    block: Block, m_BTD: Float[Array, "B T D"], sample: Sample, drawn: tuple[int, ...]
) -> Float[Array, "B T D"]:
    """``feed_forward(norm2(m))`` out of ``sampled_linear``."""
    product = _products(block.feed_forward, sample, drawn)
    x_BTD = block.norm2(m_BTD)
    return product("down", swiglu(product("gate", x_BTD), product("up", x_BTD)))


def _products(
    weights: nnx.Module, sample: Sample, drawn: tuple[int, ...]
) -> Callable[[str, Float[Array, "B T D"]], Float[Array, "B T F"]]:
    """The sampled product of each of a module's kernels, by the kernel's name."""

    def product(name: str, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        return sampled_linear(x, getattr(weights, name).kernel[...], sample, drawn)

    return product
