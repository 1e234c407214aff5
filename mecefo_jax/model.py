"""LLaMA: RMSNorm, rotary positions, grouped-query attention, SwiGLU, and the token-weighted loss.

Modules are Flax NNX modules used as immutable pytrees: parameters are float32, ``__call__`` mutates nothing, and plain
JAX transforms apply. The blocks of all layers are one ``Block`` whose leaves carry a leading layer axis, and are
scanned. The arithmetic is in ``layers.py``.

How a block is applied is an argument of the model, so that the degraded backward pass (``degraded/``) replaces the
block and leaves everything else alone.

Legend: B batch, T time, D hidden size, F feed-forward size, L layers, N query heads, K key/value heads, H head size,
V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from mecefo_jax.config import ModelConfig
from mecefo_jax.layers import Rotary, causal_attention, linear, rms_norm, rotary, rotate, swiglu
from mecefo_jax.padding import PAD

_INIT_SCALE = 0.02  # standard deviation of all matrices, as in GPT-2 and LLaMA reimplementations


class Linear(nnx.Module):
    """A matrix product without bias; its kernel is ``[in, out]``."""

    def __init__(self, in_size: int, out_size: int, *, scale: float = _INIT_SCALE, rngs: nnx.Rngs):
        self.kernel = nnx.Param(scale * jax.random.normal(rngs.params(), (in_size, out_size)))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... F"]:
        return linear(x, self.kernel[...])


class RMSNorm(nnx.Module):
    """``rms_norm`` with a learned scale (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return rms_norm(x, self.scale[...], self.eps)


class Attention(nnx.Module):
    """Causal attention whose ``N`` query heads share ``K`` key and value heads."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.head_size = config.head_size
        inner, kv_inner = config.num_heads * config.head_size, config.kv_heads * config.head_size
        self.query = Linear(config.hidden_size, inner, rngs=rngs)
        self.key = Linear(config.hidden_size, kv_inner, rngs=rngs)
        self.value = Linear(config.hidden_size, kv_inner, rngs=rngs)
        self.out = Linear(inner, config.hidden_size, scale=_residual_scale(config), rngs=rngs)

    def __call__(self, x_BTD: Float[Array, "B T D"], positions: Rotary) -> Float[Array, "B T D"]:
        return attend(lambda name, x: getattr(self, name)(x), x_BTD, positions, self.head_size)


class FeedForward(nnx.Module):
    """``down(swiglu(gate(x), up(x)))`` (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.gate = Linear(config.hidden_size, config.ffn_size, rngs=rngs)
        self.up = Linear(config.hidden_size, config.ffn_size, rngs=rngs)
        self.down = Linear(config.ffn_size, config.hidden_size, scale=_residual_scale(config), rngs=rngs)

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(swiglu(self.gate(x_BTD), self.up(x_BTD)))


class Block(nnx.Module):
    """``m = x + attention(norm1(x))``, then ``y = m + feed_forward(norm2(m))``."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.norm1 = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config, rngs=rngs)


def attend(
    product: Callable[[str, Float[Array, "B T D"]], Float[Array, "B T F"]],
    x_BTD: Float[Array, "B T D"],
    positions: Rotary,
    head_size: int,
) -> Float[Array, "B T D"]:
    """Attention whose four products (query, key, value, out) are those of the function given."""
    B, T, _ = x_BTD.shape
    q_BTNH, k_BTKH, v_BTKH = (product(name, x_BTD).reshape(B, T, -1, head_size) for name in ("query", "key", "value"))
    y_BTNH = causal_attention(rotate(q_BTNH, positions), rotate(k_BTKH, positions), v_BTKH)
    return product("out", y_BTNH.reshape(B, T, -1))


def attention_branch(block: Block, x_BTD: Float[Array, "B T D"], positions: Rotary) -> Float[Array, "B T D"]:
    """``attention(norm1(x))``."""
    return block.attention(block.norm1(x_BTD), positions)


def feed_forward_branch(block: Block, m_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """``feed_forward(norm2(m))``."""
    return block.feed_forward(block.norm2(m_BTD))


def exact_block(
    block: Block, x_BTD: Float[Array, "B T D"], positions: Rotary, remat: str = "none"
) -> Float[Array, "B T D"]:
    """Apply a block; ``remat`` says what its backward pass recomputes (``none``, ``ffn``, ``block``)."""
    feed_forward = jax.checkpoint(feed_forward_branch) if remat == "ffn" else feed_forward_branch

    def apply(block: Block, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        m_BTD = x_BTD + attention_branch(block, x_BTD, positions)
        return m_BTD + feed_forward(block, m_BTD)

    return jax.checkpoint(apply)(block, x_BTD) if remat == "block" else apply(block, x_BTD)


ApplyBlock = Callable[[Block, Float[Array, "B T D"], Rotary, Any], Float[Array, "B T D"]]
"""``(block, x, positions, per_layer) -> y``; ``per_layer`` is this layer's slice of the model's argument."""


class Model(nnx.Module):
    """Token ids to logits."""

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        """Initialize with ``vocab_size`` entries; matrices are normal, those into the residual stream scaled down."""
        self.config = config
        self.embedding = nnx.Param(_INIT_SCALE * jax.random.normal(rngs.params(), (vocab_size, config.hidden_size)))
        layer_keys = jax.random.split(rngs.params(), config.num_layers)
        self.blocks = jax.vmap(lambda key: Block(config, rngs=nnx.Rngs(key)))(layer_keys)
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = None if config.tie_embeddings else Linear(config.hidden_size, vocab_size, rngs=rngs)

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        compute_dtype: jnp.dtype,
        apply_block: ApplyBlock | None = None,
        per_layer: PyTree = None,
    ) -> Float[Array, "B T V"]:
        """Logits in float32.

        Args:
            tokens_BT: token ids; ``PAD`` is read as id 0.
            compute_dtype: dtype of activations and matrix products.
            apply_block: how a block is applied; None: exactly, with the config's remat policy.
            per_layer: arrays ``[L, ...]`` handed to ``apply_block`` layer by layer.
        """
        if apply_block is None:
            apply_block = lambda block, x, positions, _: exact_block(block, x, positions, self.config.remat)  # noqa: E731
        table_VD = self.embedding[...]
        x_BTD = shard_batch(table_VD[jnp.maximum(tokens_BT, 0)].astype(compute_dtype))
        positions = rotary(tokens_BT.shape[1], self.config.head_size, self.config.rope_base)

        def layer(x_BTD, block_and_extra):
            block, extra = block_and_extra
            return shard_batch(apply_block(block, x_BTD, positions, extra)), None

        x_BTD, _ = jax.lax.scan(layer, x_BTD, (self.blocks, per_layer))
        return self.logits(x_BTD)

    def logits(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Logits in float32, of what the last block returned."""
        x_BTD = self.final_norm(x_BTD)
        # A tied head is cast first: XLA on CPU has no product for the transposed float32 gradient of bfloat16.
        head_DV = self.embedding[...].astype(x_BTD.dtype).T if self.head is None else self.head.kernel[...]
        return linear(x_BTD, head_DV, jnp.dtype(jnp.float32))


def cross_entropy_sum(
    logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"]
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Summed negative log likelihood in nats, and the number of targets that are not ``PAD``."""
    # A comparison with iota, where indexing would do: its transpose is element-wise and fuses, a scatter does not.
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1], dtype=targets_BT.dtype)[None, None]
    target_logits_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1)
    losses_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_logits_BT
    counted_BT = targets_BT != PAD
    return jnp.sum(jnp.where(counted_BT, losses_BT, 0.0)), jnp.sum(counted_BT, dtype=jnp.int32)


def loss_sum(
    model: Model,
    tokens_BT1: Int[Array, "B T+1"],
    compute_dtype: jnp.dtype,
    apply_block: ApplyBlock | None = None,
    per_layer: PyTree = None,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Loss of predicting each token from those before it: (sum in nats, number of tokens predicted)."""
    logits_BTV = model(tokens_BT1[:, :-1], compute_dtype, apply_block, per_layer)
    return cross_entropy_sum(logits_BTV, tokens_BT1[:, 1:])


def ffn_kernel_mask(params: PyTree) -> PyTree[Bool]:
    """True at the feed-forward kernels: the weights whose gradients a degraded microbatch projects."""
    return _mask(params, lambda path: ".feed_forward." in path)


def attention_mask(params: PyTree) -> PyTree[Bool]:
    """True at norm1 and attention: the parameters that a skipped attention branch gives no gradient."""
    return _mask(params, lambda path: ".attention." in path or ".norm1." in path)


def init_model(config: ModelConfig, vocab_size: int, seed: int) -> Model:
    """A model with random parameters, the same for the same arguments on any number of devices."""
    return Model(config, vocab_size, rngs=nnx.Rngs(params=jax.random.key(seed)))


def compute_dtype(config: ModelConfig) -> jnp.dtype:
    """The dtype that ``config.compute_dtype`` stands for on this machine."""
    if config.compute_dtype != "auto":
        return jnp.dtype(config.compute_dtype)
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def shard_batch(x: Float[Array, "B ..."]) -> Float[Array, "B ..."]:
    """Inside a mesh: rows over the axis ``fsdp``, the rest whole, so that weights are gathered and not activations."""
    if "fsdp" not in jax.sharding.get_abstract_mesh().axis_names:
        return x
    return jax.lax.with_sharding_constraint(x, P("fsdp"))


def _mask(params: PyTree, predicate: Callable[[str], bool]) -> PyTree[Bool]:
    return jax.tree_util.tree_map_with_path(lambda path, _: predicate(jax.tree_util.keystr(path)), params)


def _residual_scale(config: ModelConfig) -> float:
    """Keeps the variance of the residual stream from growing with depth (GPT-2)."""
    return _INIT_SCALE / math.sqrt(2 * config.num_layers)
