"""An independent, naive reference: LLaMA as plain functions over one layer at a time, and MeCeFO's averages by hand.

Reads parameters from the model's tree and nothing else of it. Gradients come from ``jax.grad`` on one device;
projections and averages are float64 NumPy.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mecefo_jax.config import ModelConfig

FFN = ("gate", "up", "down")
ATTENTION = ("query", "key", "value", "out")


def to_dict(params) -> dict:
    """The model's parameters (or a tree like them) as plain nested dicts of arrays."""
    blocks = params.blocks
    tree = {
        "embedding": params.embedding[...],
        "final_norm": params.final_norm.scale[...],
        "norm1": blocks.norm1.scale[...],
        "norm2": blocks.norm2.scale[...],
        "attention": {name: getattr(blocks.attention, name).kernel[...] for name in ATTENTION},
        "feed_forward": {name: getattr(blocks.feed_forward, name).kernel[...] for name in FFN},
    }
    if params.head is not None:
        tree["head"] = params.head.kernel[...]
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), tree)


def _norm(x, scale, eps):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * jnp.broadcast_to(scale, x.shape)


def _rotated(x, base):
    _, T, _, H = x.shape
    angles = np.outer(np.arange(T), base ** (-np.arange(0, H, 2) / H))
    cos, sin = (jnp.asarray(f(angles), jnp.float32)[None, :, None, :] for f in (np.cos, np.sin))
    a, b = x[..., : H // 2], x[..., H // 2 :]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _attention(x, weights, layer, config: ModelConfig):
    B, T, _ = x.shape
    q, k, v = ((x @ weights[name][layer]).reshape(B, T, -1, config.head_size) for name in ("query", "key", "value"))
    q, k = _rotated(q, config.rope_base), _rotated(k, config.rope_base)
    groups = config.num_heads // config.kv_heads
    k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.float32(np.sqrt(config.head_size))
    causal = jnp.tril(jnp.ones((T, T), bool))[None, None]
    probabilities = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", probabilities, v).reshape(B, T, -1) @ weights["out"][layer]


def hidden(weights: dict, tokens, skipped_layers, config: ModelConfig):
    """States after the final norm; the attention branch of skipped layers is a constant to the gradient."""
    x = weights["embedding"][jnp.maximum(tokens, 0)]
    for layer in range(config.num_layers):
        branch = _attention(_norm(x, weights["norm1"][layer], config.norm_eps), weights["attention"], layer, config)
        m = x + (jax.lax.stop_gradient(branch) if skipped_layers[layer] else branch)
        ffn, h = weights["feed_forward"], _norm(m, weights["norm2"][layer], config.norm_eps)
        x = m + (jax.nn.silu(h @ ffn["gate"][layer]) * (h @ ffn["up"][layer])) @ ffn["down"][layer]
    return _norm(x, weights["final_norm"], config.norm_eps)


def loss_sum(weights: dict, tokens, skipped_layers, config: ModelConfig):
    """Summed loss of predicting each token of one microbatch."""
    x = hidden(weights, tokens[:, :-1], skipped_layers, config)
    logits = x @ weights.get("head", weights["embedding"].T)
    targets = tokens[:, 1:]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), jnp.maximum(targets, 0)[..., None], axis=-1)
    return -jnp.sum(jnp.where(targets >= 0, picked[..., 0], 0.0))


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _gradient(objective, weights, rows, skipped_layers, config):
    return jax.value_and_grad(objective)(weights, rows, skipped_layers, config)


def tokens_predicted(rows) -> int:
    return int((rows[:, 1:] >= 0).sum())


def step_gradients(
    params,
    bases,
    microbatches,
    degraded_ML,
    computed_M,
    config: ModelConfig,
    *,
    skip=True,
    low_rank=True,
    objective=loss_sum,
    count=tokens_predicted,
):
    """Loss and averaged gradients of a step, microbatch by microbatch.

    Args:
        params: the model's parameters.
        bases: a tree like them with ``[L, in, R]`` for projected kernels (not read without ``low_rank``).
        microbatches: ``[M, B, T+1]``.
        degraded_ML, computed_M: which layers are degraded, and which microbatches are computed at all.
        skip, low_rank: the switches (recomputing does not change a gradient).
        objective, count: the summed loss of a microbatch, and how many items it is the sum of.
    """
    weights = to_dict(params)
    zeros = lambda: jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float64), weights)  # noqa: E731
    total, attention_like = zeros(), ("attention", "norm1")
    projected = [("feed_forward", name) for name in FFN] if low_rank else []
    basis = lambda of, name: np.asarray(getattr(getattr(bases.blocks, of), name).kernel[...], np.float64)  # noqa: E731
    loss, tokens, exact_tokens_L = 0.0, 0, np.zeros(config.num_layers)
    for m in np.flatnonzero(computed_M):
        degraded_L = degraded_ML[m]
        skipped = tuple(bool(d) and skip for d in degraded_L)
        value, grads = _gradient(objective, weights, jnp.asarray(microbatches[m]), skipped, config)
        grads = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), grads)
        for of, name in projected:
            for layer in np.flatnonzero(degraded_L):
                v, g = basis(of, name)[layer], grads[of][name][layer]
                grads[of][name][layer] = v @ (v.T @ g)
        total = jax.tree.map(np.add, total, grads)
        items = count(microbatches[m])
        loss, tokens = loss + float(value), tokens + items
        exact_tokens_L += np.where(degraded_L, 0, items)
    divisor_L = np.maximum(exact_tokens_L, 1)
    average = {
        name: jax.tree.map(
            lambda leaf, own=skip and name in attention_like: (
                leaf / (divisor_L.reshape(-1, *[1] * (leaf.ndim - 1)) if own else tokens)
            ),
            subtree,
        )
        for name, subtree in total.items()
    }
    return loss / tokens, average
