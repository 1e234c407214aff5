"""What XLA makes of one microbatch's gradient: floating-point operations and temporary memory, without running it.

The program is ``step.node_gradients`` itself, specialized to one microbatch, compiled from shapes alone: the 7B model
needs no memory here. Operations of a layer are those of a model of two layers, in which the loops over layers are still
loops: without them XLA would merge what is recomputed with its first computation. Temporary memory is that of the whole
depth.

Legend: S slots, L layers, B microbatch size, T sequence length.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from mecefo_jax.config import Config, DegradedConfig
from mecefo_jax.degraded.low_rank import expand
from mecefo_jax.mesh import shardings
from mecefo_jax.model import compute_dtype, loss_sum
from mecefo_jax.state import TrainState, abstract_state
from mecefo_jax.step import NodeBatch, node_gradients, state_for_gradients

Remat = Literal["none", "ffn", "block"]

TECHNIQUES: dict[str, DegradedConfig] = {
    "mrl": DegradedConfig(skip_attention=True, remat_ffn=True, low_rank=True),
    "ml": DegradedConfig(skip_attention=True, remat_ffn=False, low_rank=True),
    "m": DegradedConfig(skip_attention=True, remat_ffn=False, low_rank=False),
}
"""The paper's ablation, by its letters: skipped attention, recomputed and low-rank feed-forward."""

REMATS: tuple[Remat, ...] = ("none", "block")
"""Remat policies under which degraded microbatches are compared with exact ones."""


_SHALLOW = 2  # layers; a loop that runs once would be unrolled


def with_variant(config: Config, switches: DegradedConfig, remat: Remat) -> Config:
    """The config with other techniques and another remat policy."""
    return dataclasses.replace(config, degraded=switches, model=dataclasses.replace(config.model, remat=remat))


def microbatch_flops(config: Config, vocab_size: int, mesh: Mesh, *, degraded: bool) -> float:
    """Operations of one more microbatch in a step, forward and backward, as XLA counts its optimized program.

    ``outside + L * layer``, where ``outside`` is the model without blocks and ``layer`` what one block adds to it. The
    product with the basis ``V1`` that a node does once a step, whatever the number of its degraded microbatches, is
    left out.

    Args:
        config: of the run; its remat and techniques count.
        vocab_size: rows of the embedding table.
        mesh: a sub-mesh; operations are those of one of its devices.
        degraded: whether the microbatch is degraded, in all layers, or exact.
    """
    shallow = _with_layers(config, _SHALLOW)
    outside, expansion = _fixed_flops(with_variant(shallow, DegradedConfig(), "none"), vocab_size, mesh)
    in_layers = _flops(_one_microbatch(shallow, degraded), shallow, vocab_size, mesh) - outside
    if degraded and config.degraded.low_rank:
        in_layers -= expansion
    return outside + config.model.num_layers * in_layers / _times_counted(_SHALLOW)


def microbatch_temp_memory(config: Config, vocab_size: int, mesh: Mesh, *, degraded: bool) -> int:
    """Bytes that one microbatch's gradient needs on a device beyond parameters, bases, tokens and the gradient itself.

    Args:
        config: of the run; its remat and techniques count.
        vocab_size: rows of the embedding table.
        mesh: a sub-mesh.
        degraded: whether the microbatch is degraded, in all layers, or exact.
    """
    analysis: Any = _compile(_one_microbatch(config, degraded), config, vocab_size, mesh).memory_analysis()
    return int(analysis.temp_size_in_bytes)


def _one_microbatch(config: Config, degraded: bool) -> Callable[..., PyTree]:
    """``node_gradients`` of a single microbatch; with constant trip counts nothing is left of the other loop."""

    def gradient(state: TrainState, tokens_BT: jax.Array) -> PyTree:
        batch = NodeBatch(
            tokens_SBT=tokens_BT[None],
            ids_S=jnp.zeros((1,), jnp.int32),
            level_SL=jnp.full((1, config.model.num_layers), degraded, jnp.int8),
            num_exact=jnp.int32(not degraded),
            num_degraded=jnp.int32(degraded),
        )
        return node_gradients(*state_for_gradients(state), batch, config=config, layer_masks="all")

    return gradient


def _without_blocks(config: Config) -> Callable[..., PyTree]:
    """The gradient of embedding, final norm, head and loss alone."""
    dtype = compute_dtype(config.model)

    def gradient(state: TrainState, tokens_BT: jax.Array) -> PyTree:
        identity = lambda block, x_BTD, positions, layer: x_BTD  # noqa: E731
        return jax.value_and_grad(loss_sum, has_aux=True)(state.params, tokens_BT, dtype, identity)

    return gradient


def _expand(state: TrainState, tokens_BT: jax.Array) -> PyTree:
    """The product of bases and coordinates, of which a node does one a step."""
    del tokens_BT
    params, bases = state_for_gradients(state)
    in_place_of_coordinates = jax.tree.map(
        lambda v_DR, w_DF: None if v_DR is None else w_DF[..., : v_DR.shape[-1], :],
        bases,
        params,
        is_leaf=lambda leaf: leaf is None,
    )
    return expand(bases, in_place_of_coordinates)


@functools.lru_cache(maxsize=8)
def _fixed_flops(config: Config, vocab_size: int, mesh: Mesh) -> tuple[float, float]:
    """Operations of what no variant changes: the model without blocks, and the product with the bases."""
    without_blocks = _flops(_without_blocks(config), config, vocab_size, mesh)
    return without_blocks, _flops(_expand, config, vocab_size, mesh)


@functools.cache
def _times_counted(trip_count: int) -> int:
    """How often XLA counts the body of a loop that runs ``trip_count`` times: once, or on some backends each time."""
    matrix = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def loop(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=trip_count)[0]

    once, looped = (_cost(jax.jit(function).lower(matrix, matrix).compile()) for function in (jnp.matmul, loop))
    return round(looped / once)


def _flops(function: Callable[..., PyTree], config: Config, vocab_size: int, mesh: Mesh) -> float:
    return _cost(_compile(function, config, vocab_size, mesh))


def _cost(compiled: jax.stages.Compiled) -> float:
    """Floating-point operations that XLA counts in an executable, on one device."""
    analysis: Any = compiled.cost_analysis()
    return float(analysis["flops"])


def _compile(function: Callable[..., PyTree], config: Config, vocab_size: int, mesh: Mesh) -> jax.stages.Compiled:
    """Compile ``function(state, tokens)`` on a sub-mesh from shapes."""
    shape = (config.train.microbatch_size, config.data.seq_len + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, P("fsdp")))
    state = abstract_state(config, vocab_size, mesh)
    with jax.set_mesh(mesh):
        out = shardings(mesh, jax.eval_shape(function, state, tokens))
        return jax.jit(function, out_shardings=out).lower(state, tokens).compile()


def _with_layers(config: Config, num_layers: int) -> Config:
    """The config at another depth, whatever depends on it."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=num_layers),
        faults=dataclasses.replace(config.faults, num_stages=1),
    )
