"""One training step in three pure functions: node-local gradients, their sum over the live nodes, and the update.

``node_gradients`` and ``update`` are local to a node and are compiled once, whatever fails. The reduction alone spans
nodes; it is one all-reduce, and all that has to be compiled for a new set of live nodes.

Legend: S slots, M microbatches of the step, L layers, B microbatch size, T sequence length.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from mecefo_jax.config import Config, DegradedConfig
from mecefo_jax.degraded.block import degraded_block, masked_block
from mecefo_jax.degraded.low_rank import expand, zero_coordinates
from mecefo_jax.degraded.sampled import sample_of
from mecefo_jax.model import Model, attention_mask, compute_dtype, ffn_kernel_mask, loss_sum
from mecefo_jax.optimizer import (
    basis_state,
    first_moment,
    hold_moments,
    learning_rate_schedule,
    make_optimizer,
    touched_mask,
)
from mecefo_jax.state import TrainState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NodeBatch:
    """What a node computes in a step: exact microbatches first, then degraded ones, then unused slots."""

    tokens_SBT: Int[Array, "S B T+1"]
    ids_S: Int[Array, "S"]
    level_SL: Int[Array, "S L"]
    """How far the backward pass of each layer is degraded; 0: not."""
    num_exact: Int[Array, ""]
    num_degraded: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over microbatches; sums of nodes add up to those of the step."""

    grads: Model
    """Gradients of the summed (not averaged) loss."""
    losses_M: Float[Array, "M"]
    """Loss by microbatch id, so that its total does not depend on who computed what."""
    tokens_M: Int[Array, "M"]
    """Tokens predicted, by microbatch id."""
    computed_M: Int[Array, "M"]
    """How often each microbatch was computed."""
    exact_tokens_L: Int[Array, "L"]
    """Tokens of the microbatches that are exact in layer l (N_l)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What one update reports, equal on all nodes."""

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    tokens_M: Int[Array, "M"]
    computed_M: Int[Array, "M"]
    skipped: Int[Array, ""]
    skipped_in_a_row: Int[Array, ""]
    bases_refreshed: Int[Array, ""]
    """Refreshes of the bases so far."""
    bases_kept: Int[Array, ""]
    """Bases that a refresh left as they were, since the new ones were not finite, so far."""


Objective = Callable[..., tuple[Float[Array, ""], Int[Array, ""]]]
"""What is minimized, called as ``model.loss_sum``: (model, rows ``[B, T+1]`` of a microbatch, compute dtype,
apply_block, per_layer) -> (sum, number of items that it is the sum of). Where items are no tokens, they are what
``tokens`` counts here."""

LayerMasks = Literal["all", "by_layer"]
"""Degraded microbatches are degraded in all layers, known when compiling; or in those that ``level_SL`` says."""


def node_gradients(
    params: Model,
    bases: PyTree,
    batch: NodeBatch,
    config: Config,
    layer_masks: LayerMasks,
    objective: Objective = loss_sum,
) -> Sums:
    """Sums over this node's microbatches: a loop over the exact ones, then one over the degraded ones.

    Trip counts are data, so every plan runs the same executable, and a loop that runs no microbatch costs nothing.

    Args:
        params: parameters.
        bases: ``[L, in, R]`` in the places of the kernels that are projected (``BasisState.bases``).
        batch: the microbatches.
        config: static.
        layer_masks: static; whether degraded microbatches may be exact in some layers.
        objective: static; whose gradients.
    """
    dtype = compute_dtype(config.model)
    sums = zero_sums(params, config)

    def exact(slot: Int[Array, ""], sums: Sums) -> Sums:
        (loss, tokens), grads = jax.value_and_grad(objective, has_aux=True)(params, batch.tokens_SBT[slot], dtype)
        return _add(sums, batch.ids_S[slot], loss, tokens, grads, jnp.broadcast_to(tokens, (config.model.num_layers,)))

    sums = jax.lax.fori_loop(0, batch.num_exact, exact, sums)
    return _add_degraded(sums, params, bases, batch, config, layer_masks, objective)


def _add_degraded(
    sums: Sums,
    params: Model,
    bases: PyTree,
    batch: NodeBatch,
    config: Config,
    layer_masks: LayerMasks,
    objective: Objective,
) -> Sums:
    """Add the degraded microbatches: differentiated only in what they give a gradient to."""
    switches, dtype = config.degraded, compute_dtype(config.model)
    everywhere = layer_masks == "all"
    trained, fixed = _partition(params, _gets_gradient(params, config, everywhere))
    origin = zero_coordinates(params, bases) if switches.low_rank else None

    def apply_block(block, x_BTD, positions, layer):
        bases_l, coordinates_l, sample, level = layer
        arguments = (block, x_BTD, positions, bases_l, coordinates_l, sample)
        if everywhere:
            return degraded_block(*arguments, switches, config.model.remat)
        return masked_block(*arguments, level > 0, switches, config.model.remat)

    def loss(trained, coordinates, slot):
        tokens_BT = batch.tokens_SBT[slot]
        level_L = batch.level_SL[slot]
        sample = sample_of(tokens_BT, level_L) if switches.samples else None
        per_layer = (_blocks(bases), _blocks(coordinates), sample, level_L)
        return objective(_combine(trained, fixed), tokens_BT, dtype, apply_block, per_layer)

    def degraded(index, carry):
        sums, coordinate_sums = carry
        slot = batch.num_exact + index
        gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (loss_value, tokens), (grads, coordinate_grads) = gradient(trained, origin, slot)
        exact_tokens_L = jnp.where(batch.level_SL[slot] > 0, 0, tokens)
        sums = _add(sums, batch.ids_S[slot], loss_value, tokens, grads, exact_tokens_L)
        return sums, jax.tree.map(jnp.add, coordinate_sums, coordinate_grads)

    def run(sums: Sums) -> Sums:
        sums, coordinate_sums = jax.lax.fori_loop(0, batch.num_degraded, degraded, (sums, origin))
        if not switches.low_rank:
            return sums
        return dataclasses.replace(sums, grads=_add_trees(sums.grads, expand(bases, coordinate_sums)))

    return jax.lax.cond(batch.num_degraded > 0, run, lambda sums: sums, sums)


def make_reduction(specs: PyTree[P], mesh: Mesh) -> Callable[[PyTree], PyTree]:
    """The sum over the live nodes: one all-reduce along ``data``, compiled when it is first called.

    Args:
        specs: how the nodes' sums, leaves ``[1, ...]``, are sharded inside a node.
        mesh: the live mesh.

    Returns:
        A jitted function of what ``mesh.stack`` makes of the nodes' sums; it returns leaves ``[1, ...]``, replicated
        over ``data`` and sharded inside a node as before, in the buffers of its argument.
    """
    per_node = jax.tree.map(lambda spec: P("data", *spec[1:]), specs, is_leaf=_is_spec)
    summed = jax.tree.map(lambda spec: P(None, *spec[1:]), specs, is_leaf=_is_spec)
    psum = jax.shard_map(lambda parts: jax.lax.psum(parts, "data"), mesh=mesh, in_specs=(per_node,), out_specs=summed)
    out_shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), summed, is_leaf=_is_spec)
    return jax.jit(psum, out_shardings=out_shardings, donate_argnums=0)


def update(state: TrainState, sums: Sums, config: Config) -> tuple[TrainState, StepMetrics]:
    """Average the step's sums and apply the optimizer; a non-finite step changes no parameter and is counted.

    Each node runs this on its own copy of the state; equal inputs and the same executable keep the copies equal.
    """
    total_tokens = jnp.sum(sums.tokens_M)
    loss = jnp.sum(sums.losses_M) / _at_least_one(total_tokens)
    switches = config.degraded
    touched = touched_mask(state.params, (sums.exact_tokens_L > 0) | (not switches.skip_attention))
    grads = average_gradients(sums, switches)
    grad_norm = optax.tree.norm(grads)
    learning_rate = jnp.float32(learning_rate_schedule(config)(state.step.astype(jnp.float32)))

    moment = first_moment(state.opt_state)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer step counts
        updates, opt_state = make_optimizer(config).update(grads, state.opt_state, state.params, moment=moment)
    moved = jax.tree.map(
        lambda touched, param, change: jnp.where(touched, param - learning_rate * change, param),
        touched,
        state.params,
        updates,
    )
    opt_state = hold_moments(touched, opt_state, state.opt_state)

    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), (moved, opt_state), (state.params, state.opt_state)
    )
    skipped = state.skipped + jnp.where(finite, 0, 1).astype(jnp.int32)
    in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1).astype(jnp.int32)
    new_state = TrainState(
        step=state.step + 1, params=params, opt_state=opt_state, skipped=skipped, skipped_in_a_row=in_a_row
    )
    return new_state, StepMetrics(
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        tokens_M=sums.tokens_M,
        computed_M=sums.computed_M,
        skipped=skipped,
        skipped_in_a_row=in_a_row,
        bases_refreshed=basis_state(opt_state).refreshes,
        bases_kept=basis_state(opt_state).kept,
    )


def average_gradients(sums: Sums, switches: DegradedConfig) -> Model:
    """The gradient of a step from its sums.

    Args:
        sums: of the step.
        switches: skipped attention and norm1 are averaged over ``N_l``, everything else over all tokens.
    """
    total = _at_least_one(jnp.sum(sums.tokens_M))
    exact_L = _at_least_one(sums.exact_tokens_L)

    def average(grad, is_attention):
        over_exact = is_attention and switches.skip_attention
        return grad / (exact_L.reshape(-1, *[1] * (grad.ndim - 1)) if over_exact else total)

    return jax.tree.map(average, sums.grads, attention_mask(sums.grads))


def evaluate(
    params: Model, tokens_BT: Int[Array, "B T+1"], config: Config, objective: Objective = loss_sum
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Summed loss of one microbatch (in nats, if it is a likelihood), and its number of tokens."""
    return objective(params, tokens_BT, compute_dtype(config.model))


def state_for_gradients(state: TrainState) -> tuple[Model, PyTree]:
    """What ``node_gradients`` reads of the state: parameters and bases."""
    return state.params, basis_state(state.opt_state).bases


def zero_sums(params: Model, config: Config) -> Sums:
    """Sums over no microbatch."""
    M = config.num_microbatches
    return Sums(
        grads=jax.tree.map(jnp.zeros_like, params),
        losses_M=jnp.zeros((M,), jnp.float32),
        tokens_M=jnp.zeros((M,), jnp.int32),
        computed_M=jnp.zeros((M,), jnp.int32),
        exact_tokens_L=jnp.zeros((config.model.num_layers,), jnp.int32),
    )


def _add(
    sums: Sums,
    microbatch: Int[Array, ""],
    loss: Float[Array, ""],
    tokens: Int[Array, ""],
    grads: PyTree,
    exact_tokens_L: Int[Array, "L"],
) -> Sums:
    """Add one microbatch; ``grads`` may have None for parameters that it gives no gradient to."""
    return Sums(
        grads=_add_trees(sums.grads, grads),
        losses_M=sums.losses_M.at[microbatch].add(loss),
        tokens_M=sums.tokens_M.at[microbatch].add(tokens),
        computed_M=sums.computed_M.at[microbatch].add(1),
        exact_tokens_L=sums.exact_tokens_L + exact_tokens_L,
    )


def _gets_gradient(params: Model, config: Config, everywhere: bool) -> PyTree[bool]:
    """False at what a microbatch degraded in all layers gives no gradient (directly) to."""

    def trained(is_attention, is_ffn_kernel):
        skipped = is_attention and config.degraded.skip_attention
        projected = is_ffn_kernel and config.degraded.low_rank
        return not (everywhere and (skipped or projected))

    return jax.tree.map(trained, attention_mask(params), ffn_kernel_mask(params))


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, P)


def _blocks(tree: PyTree) -> PyTree:
    return None if tree is None else tree.blocks


def _partition(tree: PyTree, mask: PyTree[bool]) -> tuple[PyTree, PyTree]:
    """The leaves where the mask is True, and the others; None in the places of those left out."""
    return (
        jax.tree.map(lambda leaf, keep: leaf if keep else None, tree, mask),
        jax.tree.map(lambda leaf, keep: None if keep else leaf, tree, mask),
    )


def _combine(first: PyTree, second: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: b if a is None else a, first, second, is_leaf=lambda leaf: leaf is None)


def _add_trees(total: PyTree, part: PyTree) -> PyTree:
    """``total + part`` where ``part`` has a leaf that is not None."""
    add = lambda part, total: total if part is None else total + part  # noqa: E731
    return jax.tree.map(add, part, total, is_leaf=lambda leaf: leaf is None)


def _at_least_one(count: Int[Array, "..."]) -> Float[Array, "..."]:
    return jnp.maximum(count, 1).astype(jnp.float32)
