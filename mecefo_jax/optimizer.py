"""AdamW with warm-up and decay, the bases' refresh, and layers that are held where nothing exact is known.

The chain leaves the learning rate to the caller (``step.update``), which reads it from the step, so that a skipped
update does not shift the schedule.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, PyTree

from mecefo_jax.config import Config
from mecefo_jax.degraded.basis import BasisState, low_rank_ffn
from mecefo_jax.model import attention_mask, ffn_kernel_mask


def make_optimizer(config: Config) -> optax.GradientTransformationExtraArgs:
    """Gradient transformation without the learning rate: clip, refresh bases, Adam, decoupled weight decay.

    ``update`` takes Adam's first moment as the keyword ``moment`` (see ``first_moment``).
    """
    optim, basis = config.optim, config.basis
    clip = optax.identity() if optim.clip_norm is None else optax.clip_by_global_norm(optim.clip_norm)
    return optax.chain(
        clip,
        low_rank_ffn(
            basis.rank,
            basis.refresh_every,
            ffn_mask=ffn_kernel_mask,
            source=basis.source,
            method=basis.method,
        ),
        optax.scale_by_adam(b1=optim.beta1, b2=optim.beta2, eps=optim.eps),
        optax.add_decayed_weights(optim.weight_decay, mask=_matrices),
    )


def learning_rate_schedule(config: Config) -> optax.Schedule:
    """Linear warm-up to the peak, then half a cosine or a line down to ``final_fraction`` of it at the last step."""
    optim, steps = config.optim, config.train.steps
    warmup = steps // 10 if optim.warmup_steps is None else optim.warmup_steps
    first, last = optim.learning_rate / (warmup + 1), optim.learning_rate * optim.final_fraction
    last_step = max(steps, warmup + 1)
    if optim.decay == "linear":
        rise = optax.linear_schedule(first, optim.learning_rate, warmup)
        fall = optax.linear_schedule(optim.learning_rate, last, last_step - warmup)
        return optax.join_schedules([rise, fall], [warmup])
    return optax.warmup_cosine_decay_schedule(
        init_value=first,
        peak_value=optim.learning_rate,
        warmup_steps=warmup,
        decay_steps=last_step,
        end_value=last,
    )


def basis_state(opt_state: optax.OptState) -> BasisState:
    """The bases in force, ``[L, in, r]`` in the feed-forward kernels' places and None elsewhere, and their counters."""
    return _only(opt_state, BasisState)


def first_moment(opt_state: optax.OptState) -> PyTree:
    """Adam's first moment, a tree like the parameters."""
    return _only(opt_state, optax.ScaleByAdamState).mu


def touched_mask(params: PyTree, has_exact_L: Bool[Array, "L"]) -> PyTree[Bool[Array, "..."]]:
    """Which entries have a gradient in this step: attention and norm1 in some layers, all others everywhere.

    Args:
        params: a tree like the parameters.
        has_exact_L: whether there is a gradient for attention in a layer.

    Returns:
        Per leaf a boolean array that broadcasts against it.
    """

    def leaf_mask(leaf, is_attention):
        return has_exact_L.reshape(-1, *[1] * (leaf.ndim - 1)) if is_attention else jnp.ones((1,) * leaf.ndim, bool)

    return jax.tree.map(leaf_mask, params, attention_mask(params))


def hold_moments(touched: PyTree, new: optax.OptState, old: optax.OptState) -> optax.OptState:
    """``new`` with Adam's moments of the untouched entries as they were in ``old``, bit for bit."""

    def hold(new_state, old_state):
        if not isinstance(new_state, optax.ScaleByAdamState):
            return new_state
        mu, nu = (
            jax.tree.map(jnp.where, touched, new_tree, old_tree)
            for new_tree, old_tree in ((new_state.mu, old_state.mu), (new_state.nu, old_state.nu))
        )
        return new_state._replace(mu=mu, nu=nu)

    return jax.tree.map(hold, new, old, is_leaf=_is_state)


def _matrices(params: PyTree) -> PyTree[bool]:
    """Weight decay is for matrices: not for the scales of norms, also where these are stacked over layers."""
    return jax.tree_util.tree_map_with_path(lambda path, _: ".scale" not in jax.tree_util.keystr(path), params)


def _is_state(node: object) -> bool:
    return isinstance(node, BasisState | optax.ScaleByAdamState)


def _only(opt_state: optax.OptState, kind: type) -> Any:
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=_is_state) if isinstance(node, kind)]
    assert len(found) == 1, f"expected one {kind.__name__} in the optimizer state, got {len(found)}"
    return found[0]
