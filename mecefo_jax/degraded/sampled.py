"""Gradients from a sample of the tokens, unbiased; not in the paper.

``x^T g`` is a sum over tokens. Of each sequence a fixed number of them is drawn, with probabilities in proportion to
the norms of what they contribute, and each is weighted by one over its own: column-row sampling (Drineas, Kannan,
Mahoney 2006). Where attention is not skipped and only weight gradients are sampled, every input gradient is exact, and
so is the expectation of every weight gradient.

The feed-forward network treats each token by itself, so that its input gradients may be made of a sample too, as in
VCAS (Wang, Chen, Zhu 2024): the rest of the network gets an unbiased gradient from it, and so, the backward pass being
linear, does everything below.

How many are drawn may be chosen among several numbers at run time, and costs the work of those that are drawn.

Legend: B batch, T time, D a linear's input size, F its output size, K drawn tokens of a sequence.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mecefo_jax.layers import Rotary, linear, swiglu
from mecefo_jax.model import Block, attend

_ROUNDS = 6  # of capping probabilities at 1; the few that would need more are drawn a bit too seldom, and weigh more
_TINY = 1e-30  # norm of a token that contributes nothing, so that it can be divided by


class Sample(NamedTuple):
    """Which tokens the gradients of a layer are made of; with a leading axis L, of all layers."""

    offset_B: Float[Array, "B"]
    """In [0, 1); decides for each sequence which tokens are drawn for weight gradients."""
    ffn_offset_B: Float[Array, "B"]
    """In [0, 1), independent of the other; decides which tokens the feed-forward's backward pass is made of."""
    level: Int[Array, ""]
    """How many are drawn: from 1 on, a place in the numbers to choose from; 0 is taken for 1."""


class Drawn(NamedTuple):
    """How many tokens of a sequence are drawn, at one level."""

    for_weights: int
    """For a weight's gradient."""
    for_ffn: int
    """For the feed-forward's backward pass, from which those for its weights are drawn in turn; at least as many."""


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
    levels = [functools.partial(_weight_gradient, num_drawn=num_drawn, dtype=w_DF.dtype) for num_drawn in drawn]
    return x_grad_BTD, _at_level(sample.level, levels, x_BTD, g_BTF, sample.offset_B), None


sampled_linear.defvjp(_forward, _backward)


def _at_level(level: Int[Array, ""], levels: Sequence[Callable[..., Any]], *arguments: Any) -> Any:
    """What one of the levels makes of the arguments: each has products of its own size, of which one's are computed."""
    return levels[0](*arguments) if len(levels) == 1 else jax.lax.switch(level - 1, levels, *arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def sampled_feed_forward(
    x_BTD: Float[Array, "B T D"],
    gate_DF: Float[Array, "D F"],
    up_DF: Float[Array, "D F"],
    down_FD: Float[Array, "F D"],
    sample: Sample,
    drawn: tuple[Drawn, ...],
) -> Float[Array, "B T D"]:
    """``swiglu(x W_gate, x W_up) W_down``, whose backward pass is made of some of the tokens.

    Args:
        x_BTD: inputs.
        gate_DF, up_DF, down_FD: the weights.
        sample: which tokens are drawn; gets no gradient.
        drawn: how many, by level; static.

    Returns:
        The feed-forward network's output. First ``for_ffn`` tokens of a sequence are drawn by the norms of their output
        gradients, then of these ``for_weights`` for each weight as in ``sampled_linear``. Over uniformly random offsets
        that are independent of each other the mean of every gradient is the exact one. With all tokens ``for_ffn`` the
        input gradient is exact.
    """
    del sample, drawn
    return linear(swiglu(linear(x_BTD, gate_DF), linear(x_BTD, up_DF)), down_FD)


def _feed_forward_forward(x_BTD, gate_DF, up_DF, down_FD, sample, drawn):
    del drawn
    gate_BTF, up_BTF = linear(x_BTD, gate_DF), linear(x_BTD, up_DF)
    y_BTD = linear(swiglu(gate_BTF, up_BTF), down_FD)
    return y_BTD, (x_BTD, gate_BTF, up_BTF, (gate_DF, up_DF, down_FD), sample)


def _feed_forward_backward(drawn, residuals, g_BTD):
    levels = [functools.partial(_feed_forward_gradients, drawn=each) for each in drawn]
    return *_at_level(residuals[-1].level, levels, *residuals, g_BTD), None


sampled_feed_forward.defvjp(_feed_forward_forward, _feed_forward_backward)


def _feed_forward_gradients(
    x_BTD: Float[Array, "B T D"],
    gate_BTF: Float[Array, "B T F"],
    up_BTF: Float[Array, "B T F"],
    kernels: tuple[Float[Array, "D F"], Float[Array, "D F"], Float[Array, "F D"]],
    sample: Sample,
    g_BTD: Float[Array, "B T D"],
    *,
    drawn: Drawn,
) -> tuple[Float[Array, "B T D"], Float[Array, "D F"], Float[Array, "D F"], Float[Array, "F D"]]:
    """Gradients of the input and the three weights, from some of the tokens."""
    (x_BKD, gate_BKF, up_BKF), g_BKD, index_BK = _drawn_rows(
        _norms(g_BTD), sample.ffn_offset_B, drawn.for_ffn, (x_BTD, gate_BTF, up_BTF), g_BTD
    )
    gate_DF, up_DF, down_FD = (kernel.astype(g_BKD.dtype) for kernel in kernels)
    hidden_BKF, pullback = jax.vjp(swiglu, gate_BKF, up_BKF)
    gate_grad_BKF, up_grad_BKF = pullback(g_BKD @ down_FD.T)
    x_grad = gate_grad_BKF @ gate_DF.T + up_grad_BKF @ up_DF.T
    if drawn.for_ffn < x_BTD.shape[1]:
        x_grad = _put_back(x_grad, index_BK, like=x_BTD)

    def weight_gradient(rows: Float[Array, "B K D"], grads: Float[Array, "B K F"]) -> Float[Array, "D F"]:
        return _weight_gradient(rows, grads, sample.offset_B, num_drawn=drawn.for_weights, dtype=kernels[0].dtype)

    return (
        x_grad,
        weight_gradient(x_BKD, gate_grad_BKF),
        weight_gradient(x_BKD, up_grad_BKF),
        weight_gradient(hidden_BKF, g_BKD),
    )


def _weight_gradient(
    x_BTD: Float[Array, "B T D"],
    g_BTF: Float[Array, "B T F"],
    offset_B: Float[Array, "B"],
    *,
    num_drawn: int,
    dtype: jnp.dtype,
) -> Float[Array, "D F"]:
    """``x^T g`` from some of the tokens."""
    (x_BKD,), g_BKF, _ = _drawn_rows(_norms(x_BTD) * _norms(g_BTF), offset_B, num_drawn, (x_BTD,), g_BTF)
    tokens = ((0, 1), (0, 1))
    return jax.lax.dot_general(x_BKD, g_BKF, (tokens, ((), ())), preferred_element_type=dtype)


def _drawn_rows(
    norms_BT: Float[Array, "B T"],
    offset_B: Float[Array, "B"],
    num_drawn: int,
    inputs: tuple[Float[Array, "B T D"], ...],
    g_BTF: Float[Array, "B T F"],
) -> tuple[tuple[Float[Array, "B K D"], ...], Float[Array, "B K F"], Int[Array, "B K"]]:
    """Of some of the tokens the inputs, the gradients, times the tokens' weights, and the indices."""
    index_BK, weight_BK = jax.vmap(functools.partial(draw, num_drawn=num_drawn))(norms_BT, offset_B)
    if num_drawn == norms_BT.shape[1]:
        return inputs, g_BTF, index_BK
    *drawn, g_BKF = (jnp.take_along_axis(rows, index_BK[..., None], axis=1) for rows in (*inputs, g_BTF))
    return tuple(drawn), (g_BKF.astype(jnp.float32) * weight_BK[..., None]).astype(g_BTF.dtype), index_BK


def _put_back(
    rows_BKD: Float[Array, "B K D"], index_BK: Int[Array, "B K"], like: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """Rows at their tokens' places, those of a token that was drawn twice together, and zeros elsewhere."""
    add = jax.vmap(lambda zeros_TD, index_K, rows_KD: zeros_TD.at[index_K].add(rows_KD))
    return add(jnp.zeros_like(like), index_BK, rows_BKD)


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


def sample_of(tokens_BT: Int[Array, "B T"], level_L: Int[Array, "L"]) -> Sample:
    """What is drawn in each layer, as the sequences' own tokens say: the same wherever and whenever it is computed.

    A sequence that comes again has the same offsets again; what is drawn still changes with the gradients.

    Args:
        tokens_BT: the sequences.
        level_L: of each layer.

    Returns:
        A sample whose leaves have a leading axis L.
    """
    key_B = jax.vmap(lambda tokens_T: jax.random.key(_hash(tokens_T)))(tokens_BT)
    offset_2LB = jax.vmap(lambda key: jax.random.uniform(key, (2, level_L.size)), out_axes=2)(key_B)
    return Sample(offset_2LB[0], offset_2LB[1], level_L)


def _hash(tokens_T: Int[Array, "T"]) -> Int[Array, ""]:
    """A polynomial in an odd number, modulo 2^32 (Rabin, Karp)."""
    powers_T = jnp.cumprod(jnp.full(tokens_T.shape, 16777619, jnp.uint32))
    return jnp.sum(tokens_T.astype(jnp.uint32) * powers_T, dtype=jnp.uint32)


def sampled_attention_branch(
    block: Block, x_BTD: Float[Array, "B T D"], positions: Rotary, sample: Sample, drawn: tuple[Drawn, ...]
) -> Float[Array, "B T D"]:
    """``attention(norm1(x))`` out of ``sampled_linear``."""
    weights, numbers = block.attention, tuple(each.for_weights for each in drawn)

    def product(name: str, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        return sampled_linear(x, getattr(weights, name).kernel[...], sample, numbers)

    return attend(product, block.norm1(x_BTD), positions, weights.head_size)


def sampled_feed_forward_branch(
    block: Block, m_BTD: Float[Array, "B T D"], sample: Sample, drawn: tuple[Drawn, ...]
) -> Float[Array, "B T D"]:
    """``feed_forward(norm2(m))`` as ``sampled_feed_forward``."""
    weights = (getattr(block.feed_forward, name).kernel[...] for name in ("gate", "up", "down"))
    return sampled_feed_forward(block.norm2(m_BTD), *weights, sample, drawn)
