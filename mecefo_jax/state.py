"""The train state: everything that a run is, between two steps."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int, PyTree

from mecefo_jax import mesh as meshes
from mecefo_jax.config import Config
from mecefo_jax.model import Model, init_model
from mecefo_jax.optimizer import make_optimizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """A pytree; each node holds one, sharded over its own devices, equal on all of them."""

    step: Int[Array, ""]
    """Steps done; the next step's microbatches are a function of it."""
    params: Model
    """float32 parameters."""
    opt_state: optax.OptState
    """Moments, and the bases of the low-rank technique."""
    skipped: Int[Array, ""]
    """Updates skipped because the loss or a gradient was not finite."""
    skipped_in_a_row: Int[Array, ""]
    """The last of them, without an applied update in between."""


def init_state(config: Config, vocab_size: int) -> TrainState:
    """The state before the first step: a function of the config and its seed alone."""
    return fresh_state(config, init_model(config.model, vocab_size, config.train.seed))


def fresh_state(config: Config, params: Model) -> TrainState:
    """The state before the first step that begins with these parameters."""
    zero = jnp.int32(0)
    return TrainState(
        step=zero, params=params, opt_state=make_optimizer(config).init(params), skipped=zero, skipped_in_a_row=zero
    )


def abstract_state(config: Config, vocab_size: int, mesh: Mesh) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of the state on a sub-mesh, without memory for it."""
    shapes = jax.eval_shape(lambda: init_state(config, vocab_size))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        meshes.shardings(mesh, shapes),
    )


def init_sharded_state(config: Config, vocab_size: int, mesh: Mesh) -> TrainState:
    """``init_state`` made in place on a sub-mesh: no device ever holds a whole copy of a sharded leaf."""
    return _initializer(config.compiled_part, vocab_size, mesh)()


@functools.lru_cache(maxsize=8)
def _initializer(config: Config, vocab_size: int, mesh: Mesh) -> Callable[[], TrainState]:
    out = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, vocab_size, mesh))
    return jax.jit(lambda: init_state(config, vocab_size), out_shardings=out)
