"""Technique (m): the attention branch is skipped in the backward pass (MeCeFO, arXiv 2510.16415)."""

import jax
from jaxtyping import Array, Float

from mecefo_jax.model import Block, Rotary, attention_branch


@jax.custom_vjp
def skip_attention(block: Block, x_BTD: Float[Array, "B T D"], positions: Rotary) -> Float[Array, "B T D"]:
    """``m = x + attention(norm1(x))`` with the backward pass ``dL/dx = dL/dm``.

    No gradient reaches the attention weights or norm1, and nothing of the branch is stored. The error in ``dL/dx`` is
    the branch's own Jacobian: ``(d attention(norm1(x)) / dx)^T dL/dm``.
    """
    return x_BTD + attention_branch(block, x_BTD, positions)


def _forward(block, x_BTD, positions):
    return skip_attention(block, x_BTD, positions), None


def _backward(_, m_grad_BTD):
    return None, m_grad_BTD, None


skip_attention.defvjp(_forward, _backward)
