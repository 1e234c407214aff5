"""Technique (l): the feed-forward network's weight gradients of low rank (MeCeFO, arXiv 2510.16415).

Where the paper forms ``V1 ((x V1)^T g)`` for each microbatch, here the gradient is left in the coordinates of the
basis, ``(x V1)^T g``, summed over the microbatches of the step, and multiplied by ``V1`` once: the same number, without
an ``[in, out]`` temporary and its product for each microbatch.

Legend: B batch, T time, D a linear's input size, F its output size, R rank.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from mecefo_jax.layers import linear, swiglu
from mecefo_jax.model import Block


@jax.custom_vjp
def low_rank_linear(
    x_BTD: Float[Array, "B T D"],
    w_DF: Float[Array, "D F"],
    v_DR: Float[Array, "D R"],
    c_RF: Float[Array, "R F"],
) -> Float[Array, "B T F"]:
    """``y = x W``, whose weight gradient is ``V dL/dc`` for the orthonormal basis ``V``.

    Args:
        x_BTD: inputs.
        w_DF: the weight; gets no gradient of its own.
        v_DR: orthonormal columns; gets no gradient.
        c_RF: coordinates, not used by the forward pass; their gradient is ``(x V)^T g``, in float32.

    Returns:
        ``x W``. ``dL/dx = g W^T`` is exact. Only ``x V`` is stored for the backward pass, not ``x``. The error of the
        weight gradient is ``(I - V V^T) x^T g``; it vanishes for ``R = D``. With bfloat16 inputs ``V`` is rounded to
        bfloat16 (2^-9 of each entry) where it multiplies ``x``.
    """
    del v_DR, c_RF
    return linear(x_BTD, w_DF)


def _forward(x_BTD, w_DF, v_DR, c_RF):
    return low_rank_linear(x_BTD, w_DF, v_DR, c_RF), (linear(x_BTD, v_DR), w_DF)


def _backward(residuals, g_BTF):
    xv_BTR, w_DF = residuals
    x_grad_BTD = g_BTF @ w_DF.astype(g_BTF.dtype).T
    tokens = ((0, 1), (0, 1))
    c_grad_RF = jax.lax.dot_general(xv_BTR, g_BTF, (tokens, ((), ())), preferred_element_type=jnp.float32)
    return x_grad_BTD, None, None, c_grad_RF


low_rank_linear.defvjp(_forward, _backward)


def low_rank_feed_forward_branch(
    block: Block, m_BTD: Float[Array, "B T D"], bases: Block, coordinates: Block
) -> Float[Array, "B T D"]:
    """``feed_forward(norm2(m))`` out of ``low_rank_linear``; bases and coordinates stand in the kernels' places."""

    def product(name: str, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        w, v, c = (getattr(tree.feed_forward, name).kernel[...] for tree in (block, bases, coordinates))
        return low_rank_linear(x, w, v, c)

    x_BTD = block.norm2(m_BTD)
    return product("down", swiglu(product("gate", x_BTD), product("up", x_BTD)))


def zero_coordinates(params: PyTree, bases: PyTree) -> PyTree:
    """The point where coordinate gradients are taken: zeros ``[..., R, F]`` where ``bases`` has ``[..., D, R]``."""

    def zeros(v_DR, w_DF):
        return None if v_DR is None else jnp.zeros((*v_DR.shape[:-2], v_DR.shape[-1], w_DF.shape[-1]), jnp.float32)

    return jax.tree.map(zeros, bases, params, is_leaf=lambda leaf: leaf is None)


def expand(bases: PyTree, coordinates: PyTree) -> PyTree:
    """Weight gradients ``V c`` from gradients in coordinates, leaf by leaf."""
    return jax.tree.map(functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST), bases, coordinates)
