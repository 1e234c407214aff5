"""The yardstick of a healthy step: one monolithic jitted data-parallel step, as it is written without fault tolerance.

It trains the same model on the same devices, with the same microbatches, loss and optimizer as ``step.py``, and shares
none of its code: gradients by ``jax.value_and_grad``, the update by ``optax.adamw``, one program over all devices.

Legend: S microbatches of a sub-mesh, N sub-meshes, B microbatch size, T sequence length.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from mecefo_jax.config import Config
from mecefo_jax.errors import ConfigError
from mecefo_jax.executor import MicrobatchSource
from mecefo_jax.mesh import Cluster, live_mesh, partition_specs, shardings
from mecefo_jax.model import Model, compute_dtype, loss_sum
from mecefo_jax.optimizer import first_moment, learning_rate_schedule, make_optimizer
from mecefo_jax.state import TrainState

Carry = tuple[Model, optax.OptState]


def adamw(config: Config) -> optax.GradientTransformation:
    """Clipping by global norm and AdamW with the config's schedule, out of optax alone."""
    optim = config.optim
    clip = optax.identity() if optim.clip_norm is None else optax.clip_by_global_norm(optim.clip_norm)
    return optax.chain(
        clip,
        optax.adamw(
            learning_rate_schedule(config),
            b1=optim.beta1,
            b2=optim.beta2,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            mask=_is_matrix,
        ),
    )


def adamw_with_bases(config: Config) -> optax.GradientTransformationExtraArgs:
    """The same with the bases kept and refreshed: tells what these cost an ordinary step."""
    return optax.chain(make_optimizer(config), optax.scale_by_learning_rate(learning_rate_schedule(config)))


class PlainTrainer:
    """Holds parameters and optimizer state, replicated over ``data`` and sharded inside a node, and steps them."""

    def __init__(self, config: Config, state: TrainState, cluster: Cluster, optimizer: optax.GradientTransformation):
        """Start from a state's parameters, as they are, with fresh optimizer state; compiles at the first step.

        Args:
            config: of the run.
            state: on one sub-mesh.
            cluster: where it runs: on all sub-meshes at once.
            optimizer: gradient transformation that includes the learning rate.

        Raises:
            ConfigError: the step's microbatches do not divide over the sub-meshes.
        """
        num_submeshes = len(cluster.submeshes)
        if config.num_microbatches % num_submeshes:
            raise ConfigError(
                f"mesh.num_submeshes: {config.num_microbatches} microbatches do not divide over {num_submeshes} "
                "sub-meshes, as an ordinary data-parallel step needs; set a divisor"
            )
        mesh = live_mesh(cluster, range(num_submeshes))
        transformation = optax.with_extra_args_support(optimizer)
        # Copied because the step donates it, and device_put passes on the buffers that are in place already.
        carry = jax.tree.map(jnp.copy, (state.params, jax.jit(transformation.init)(state.params)))
        carry_shardings = shardings(mesh, carry)
        self._carry = jax.device_put(carry, carry_shardings)
        self._mesh = mesh
        self._microbatches_per_submesh = config.num_microbatches // num_submeshes
        self._step = jax.jit(
            _step_function(config, transformation, mesh),
            donate_argnums=0,
            out_shardings=(carry_shardings, NamedSharding(mesh, P())),
        )

    @property
    def params(self) -> Model:
        """The parameters. Valid until the next ``train_step``."""
        return self._carry[0]

    def train_step(self, step: int, microbatch: MicrobatchSource) -> Float[Array, ""]:
        """Dispatch one step on microbatches read and placed from the host; returns the mean loss without waiting."""
        slots, submeshes = range(self._microbatches_per_submesh), range(self._mesh.shape["data"])
        tokens_SNBT = np.array(
            [[microbatch(step, submesh * len(slots) + slot) for submesh in submeshes] for slot in slots]
        )
        placed = jax.device_put(tokens_SNBT, NamedSharding(self._mesh, P(None, "data", "fsdp")))
        with jax.set_mesh(self._mesh):
            self._carry, loss = self._step(self._carry, placed)
        return loss


def _step_function(config: Config, optimizer: optax.GradientTransformationExtraArgs, mesh: Mesh) -> Callable[..., Any]:
    """``((params, optimizer state), tokens) -> ((params, optimizer state), mean loss)``."""
    dtype = compute_dtype(config.model)
    gradient = jax.value_and_grad(loss_sum, has_aux=True)
    # A gradient for each sub-mesh, summed at the end: if the loss were one sum over all of them, the partitioner would
    # reduce the gradient of every microbatch.
    gradients = jax.vmap(lambda params, tokens_BT: gradient(params, tokens_BT, dtype), (None, 0), spmd_axis_name="data")

    def sums(params: Model, tokens_SNBT: Int[Array, "S N B T+1"]) -> PyTree:
        """Summed loss and tokens, and the gradients' sums."""

        def zeros(leaf: Array, spec: P) -> Array:
            sharding = NamedSharding(mesh, P("data", *spec))
            return jnp.zeros((mesh.shape["data"], *leaf.shape), leaf.dtype, device=sharding)

        def accumulate(total: PyTree, tokens_NBT: Int[Array, "N B T+1"]) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, total, gradients(params, tokens_NBT)), None

        start = ((jnp.float32(0), jnp.int32(0)), params)
        start = jax.tree.map(zeros, start, partition_specs(start))
        total, _ = jax.lax.scan(accumulate, start, tokens_SNBT)
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), total)

    def step(carry: Carry, tokens_SNBT: Int[Array, "S N B T+1"]) -> tuple[Carry, Float[Array, ""]]:
        params, opt_state = carry
        (loss, tokens), grads = sums(params, tokens_SNBT)
        count = jnp.maximum(tokens, 1).astype(jnp.float32)
        grads = jax.tree.map(lambda grad: grad / count, grads)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer step counts
            updates, opt_state = optimizer.update(grads, opt_state, params, moment=first_moment(opt_state))
        return (optax.apply_updates(params, updates), opt_state), loss / count

    return step


def _is_matrix(params: PyTree) -> PyTree[bool]:
    """True but for the scales of norms, which do not decay."""
    return jax.tree_util.tree_map_with_path(lambda path, _: ".scale" not in jax.tree_util.keystr(path), params)
