"""The numerics of the degraded backward pass on the devices at hand: each claim as an error and a bound for it.

The tests of this project make the same claims on CPU; this says whether an accelerator's kernels keep them, in float32
(products in full precision) and in bfloat16. It needs no data and no test packages.

Bounds: gradients that are the same number by another route differ by rounding, which for sums of some thousand terms
stays within 1e-4 of their norm in float32. bfloat16 rounds each activation to 2^-9; through a few layers that comes to
some percent of a gradient's norm.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mecefo_jax.config import BasisConfig, Config, DataConfig, DegradedConfig, MeshConfig, ModelConfig, TrainConfig
from mecefo_jax.degraded.basis import project, subspace_iteration, top_left_singular_vectors
from mecefo_jax.model import Model, attention_mask, compute_dtype, ffn_kernel_mask, loss_sum
from mecefo_jax.optimizer import basis_state
from mecefo_jax.state import TrainState, init_state
from mecefo_jax.step import NodeBatch, Sums, node_gradients

_VOCAB = 512
_BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}
_OFF = DegradedConfig(skip_attention=False, remat_ffn=False, low_rank=False)


def check(dtype: str, hidden_size: int = 256) -> list[dict[str, Any]]:
    """Check every claim.

    Args:
        dtype: of activations and products, float32 or bfloat16.
        hidden_size: of the model that is used.

    Returns:
        For each claim ``name``, ``error`` (relative, by norm), ``bound`` and ``holds``.
    """
    config = _config(dtype, hidden_size)
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        state = init_state(config, _VOCAB)
        errors = _gradient_errors(config, state) | _basis_errors(state.params)
    bound = _BOUNDS[dtype]
    bounds = dict.fromkeys(errors, bound) | {"skipped attention has no gradient": 0.0} | dict.fromkeys(_EXACT, 1e-4)
    return [
        {"name": name, "error": error, "bound": bounds[name], "holds": bool(error <= bounds[name])}
        for name, error in errors.items()
    ]


_EXACT = ("bases are orthonormal", "bases by iteration hold what those by SVD do")
"""Computed in float32 whatever the model's dtype."""


def _gradient_errors(config: Config, state: TrainState) -> dict[str, float]:
    params, tokens_SBT = state.params, _tokens(config)
    dtype = compute_dtype(config.model)

    def total(params: Model) -> jax.Array:
        return sum((loss_sum(params, tokens_BT, dtype)[0] for tokens_BT in tokens_SBT), jnp.float32(0.0))

    reference = jax.jit(jax.grad(total))(params)
    exact = _sums(config, state, tokens_SBT, degraded=False).grads
    off = _sums(_with(config, _OFF), state, tokens_SBT, degraded=True).grads
    recomputed = _sums(_with(config, dataclasses.replace(_OFF, remat_ffn=True)), state, tokens_SBT, degraded=True).grads
    skipped = _sums(_with(config, DegradedConfig()), state, tokens_SBT, degraded=True).grads
    only_low_rank = _with(config, dataclasses.replace(_OFF, low_rank=True))
    low = _sums(only_low_rank, state, tokens_SBT, degraded=True).grads
    bases = basis_state(state.opt_state).bases
    projected = jax.tree.map(lambda v, g: g if v is None else project(g, v), bases, exact, is_leaf=lambda v: v is None)
    full = dataclasses.replace(only_low_rank, basis=BasisConfig(rank=10 * config.model.hidden_size))
    whole = _sums(full, init_state(full, _VOCAB), tokens_SBT, degraded=True).grads
    kernels, attention = ffn_kernel_mask(params), attention_mask(params)
    everything = jax.tree.map(lambda _: True, kernels)
    return {
        "exact microbatches give the plain gradient": _error(exact, reference, everything),
        "all techniques off give the exact gradient": _error(off, exact, everything),
        "recomputing changes nothing": _error(recomputed, exact, everything),
        "low-rank gradients are the projected ones": _error(low, projected, kernels),
        "full rank gives the exact gradient": _error(whole, exact, kernels),
        "skipped attention has no gradient": _norm(skipped, attention),
    }


def _basis_errors(params: Model) -> dict[str, float]:
    w_LDF = params.blocks.feed_forward.gate.kernel[...]
    rank = w_LDF.shape[-2] // 8
    svd = top_left_singular_vectors(w_LDF, rank)
    # From a start near it, as in training, where a refresh begins with the basis in force.
    noise = 0.01 * jax.random.normal(jax.random.key(1), svd.shape) / np.sqrt(w_LDF.shape[-2])
    start = jnp.linalg.qr(svd + noise).Q
    found = jax.lax.map(lambda pair: subspace_iteration(pair[0], pair[1], 8), (w_LDF, start))
    gram = jnp.einsum("ldr,lds->lrs", found, found, precision="highest")
    kept = [jnp.linalg.norm(project(w_LDF, v)) for v in (found, svd)]
    return {
        "bases are orthonormal": float(jnp.linalg.norm(gram - jnp.eye(rank)[None]) / np.sqrt(rank)),
        "bases by iteration hold what those by SVD do": float(jnp.abs(kept[0] / kept[1] - 1)),
    }


def _sums(config: Config, state: TrainState, tokens_SBT: jax.Array, *, degraded: bool) -> Sums:
    slots = len(tokens_SBT)
    batch = NodeBatch(
        tokens_SBT=tokens_SBT,
        ids_S=jnp.arange(slots, dtype=jnp.int32),
        level_SL=jnp.full((slots, config.model.num_layers), degraded, jnp.int8),
        num_exact=jnp.int32(0 if degraded else slots),
        num_degraded=jnp.int32(slots if degraded else 0),
    )
    gradients = jax.jit(lambda params, bases, batch: node_gradients(params, bases, batch, config, "all"))
    return gradients(state.params, basis_state(state.opt_state).bases, batch)


def _config(dtype: str, hidden_size: int) -> Config:
    return Config(
        model=ModelConfig(
            hidden_size=hidden_size,
            ffn_size=hidden_size * 8 // 3 // 2 * 2,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            vocab_size=_VOCAB,
            compute_dtype=dtype,  # type: ignore[arg-type]
        ),
        data=DataConfig(seq_len=64),
        mesh=MeshConfig(num_nodes=1),
        train=TrainConfig(microbatch_size=2, microbatches_per_node=4),
        basis=BasisConfig(rank=hidden_size // 8),
    )


def _with(config: Config, switches: DegradedConfig) -> Config:
    return dataclasses.replace(config, degraded=switches)


def _tokens(config: Config) -> jax.Array:
    shape = (config.num_microbatches, config.train.microbatch_size, config.data.seq_len + 1)
    return jax.random.randint(jax.random.key(0), shape, 0, _VOCAB, jnp.int32)


def _error(found: PyTree, expected: PyTree, mask: PyTree) -> float:
    difference = jax.tree.map(jnp.subtract, found, expected)
    return _norm(difference, mask) / _norm(expected, mask)


def _norm(tree: PyTree, mask: PyTree) -> float:
    chosen = [leaf for leaf, is_in in zip(jax.tree.leaves(tree), jax.tree.leaves(mask), strict=True) if is_in]
    return float(np.sqrt(sum(float(np.sum(np.square(np.asarray(leaf, np.float64)))) for leaf in chosen)))
