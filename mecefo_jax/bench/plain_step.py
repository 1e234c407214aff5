"""The yardstick of a healthy step: one monolithic jitted data-parallel step, as it is written without fault tolerance.

It trains the same model on the same devices, with the same microbatches, loss and optimizer as ``step.py``, and shares
none of its code: gradients by ``jax.value_and_grad``, the update by ``optax.adamw``, one program over all devices.

Legend: S microbatches of a sub-mesh, B their size over all sub-meshes, T sequence length.
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
from mecefo_jax.mesh import Cluster, live_mesh, shardings
from mecefo_jax.model import Model, compute_dtype, loss_sum
from mecefo_jax.optimizer import first_moment, learning_rate_schedule, make_optimizer
from mecefo_jax.state import TrainState


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
        self._tokens_sharding = NamedSharding(mesh, P(None, ("data", "fsdp")))
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
        count = self._microbatches_per_submesh
        slots = range(count)
        submeshes = range(self._tokens_sharding.mesh.shape["data"])
        tokens_SBT = np.stack(
            [np.concatenate([microbatch(step, submesh * count + slot) for submesh in submeshes]) for slot in slots]
        )
        self._carry, loss = self._step(self._carry, jax.device_put(tokens_SBT, self._tokens_sharding))
        return loss


def _step_function(config: Config, optimizer: optax.GradientTransformationExtraArgs, mesh: Mesh) -> Callable[..., Any]:
    """``((params, optimizer state), tokens) -> ((params, optimizer state), mean loss)``."""
    dtype = compute_dtype(config.model)

    def sums(params: Model, tokens_SBT: Int[Array, "S B T+1"]) -> PyTree:
        """Summed loss, tokens and gradients of one sub-mesh's microbatches, then over all."""

        def accumulate(total, tokens_BT):
            (loss, tokens), grads = jax.value_and_grad(loss_sum, has_aux=True)(params, tokens_BT, dtype)
            return jax.tree.map(jnp.add, total, (loss, tokens, grads)), None

        zero = (jnp.float32(0), jnp.int32(0), jax.tree.map(jnp.zeros_like, params))
        return jax.lax.psum(jax.lax.scan(accumulate, zero, tokens_SBT)[0], "data")

    # One sum after the scan: left to itself, the partitioner would reduce the gradients of every microbatch.
    all_sums = jax.shard_map(
        sums,
        mesh=mesh,
        in_specs=(P(), P(None, "data")),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,  # else gradients of what is equal on all nodes are summed over them at once
    )

    def step(carry: tuple[Model, optax.OptState], tokens_SBT: Int[Array, "S B T+1"]):
        params, opt_state = carry
        loss, tokens, grads = all_sums(params, tokens_SBT)
        count = jnp.maximum(tokens, 1).astype(jnp.float32)
        grads = jax.tree.map(lambda grad: grad / count, grads)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer step counts
            updates, opt_state = optimizer.update(grads, opt_state, params, moment=first_moment(opt_state))
        return (optax.apply_updates(params, updates), opt_state), loss / count

    return step


def _is_matrix(params: PyTree) -> PyTree[bool]:
    """True but for the scales of norms, which do not decay."""
    return jax.tree_util.tree_map_with_path(lambda path, _: ".scale" not in jax.tree_util.keystr(path), params)
