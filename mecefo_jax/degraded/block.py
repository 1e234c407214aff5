"""A transformer block with the degraded backward pass: the techniques joined, each with its own switch."""

import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Bool, Float

from mecefo_jax.config import DegradedConfig
from mecefo_jax.degraded.low_rank import low_rank_feed_forward_branch
from mecefo_jax.degraded.rematerialize import rematerialize
from mecefo_jax.degraded.sampled import Drawn, Sample, sampled_attention_branch, sampled_feed_forward_branch
from mecefo_jax.degraded.skip_attention import skip_attention
from mecefo_jax.model import Block, Rotary, attention_branch, exact_block, feed_forward_branch


def degraded_block(
    block: Block,
    x_BTD: Float[Array, "B T D"],
    positions: Rotary,
    bases: Block,
    coordinates: Block,
    sample: Sample | None,
    switches: DegradedConfig,
    remat: str,
) -> Float[Array, "B T D"]:
    """Apply a block exactly, to be differentiated approximately; with all switches off the gradient is exact.

    Args:
        block: parameters of this layer.
        x_BTD: input.
        positions: rotary angles.
        bases, coordinates: of this layer's kernels whose gradients are of low rank; not read where that is off.
        sample: which tokens gradients are made of; not read where that is off.
        switches: which techniques are used.
        remat: the model's policy; ``ffn`` and ``block`` recompute the feed-forward network here too, and an attention
            branch that is not skipped under ``block``.
    """
    seq_len = x_BTD.shape[1]
    drawn = tuple(map(Drawn, switches.drawn_tokens(seq_len), switches.drawn_ffn_tokens(seq_len)))
    if switches.skip_attention:
        m_BTD = skip_attention(block, x_BTD, positions)
    else:
        recompute = rematerialize if remat == "block" else _as_it_is
        if switches.samples:
            branch = functools.partial(sampled_attention_branch, drawn=drawn)
            m_BTD = x_BTD + recompute(branch)(block, x_BTD, positions, sample)
        else:
            m_BTD = x_BTD + recompute(attention_branch)(block, x_BTD, positions)

    recompute = rematerialize if switches.remat_ffn or remat != "none" else _as_it_is
    if switches.low_rank:
        return m_BTD + recompute(low_rank_feed_forward_branch)(block, m_BTD, bases, coordinates)
    if switches.samples:
        branch = functools.partial(sampled_feed_forward_branch, drawn=drawn)
        return m_BTD + recompute(branch)(block, m_BTD, sample)
    return m_BTD + recompute(feed_forward_branch)(block, m_BTD)


def _as_it_is(function: Callable[..., Array]) -> Callable[..., Array]:
    return function


def masked_block(
    block: Block,
    x_BTD: Float[Array, "B T D"],
    positions: Rotary,
    bases: Block,
    coordinates: Block,
    sample: Sample | None,
    is_degraded: Bool[Array, ""],
    switches: DegradedConfig,
    remat: str,
) -> Float[Array, "B T D"]:
    """``degraded_block`` or ``exact_block``, as the microbatch's level in this layer says."""

    def degraded(block, x_BTD):
        return degraded_block(block, x_BTD, positions, bases, coordinates, sample, switches, remat)

    def exact(block, x_BTD):
        return exact_block(block, x_BTD, positions, remat)

    return jax.lax.cond(is_degraded, degraded, exact, block, x_BTD)
