"""Hugging Face's LLaMA in float64 NumPy, from its public definition alone: a ``config.json`` and tensors by name."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def logits(settings: Mapping[str, Any], weights: Mapping[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """``[T, V]`` of token ids ``[T]``."""
    return forward(settings, weights, tokens)[0]


def forward(
    settings: Mapping[str, Any], weights: Mapping[str, np.ndarray], tokens: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and the attention probabilities ``[layer, head, query, key]``."""
    weight = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    base, eps = settings["rope_parameters"]["rope_theta"], settings["rms_norm_eps"]
    x = weight["model.embed_tokens.weight"][tokens]
    probabilities = []
    for layer in range(settings["num_hidden_layers"]):
        of = {name: weight[f"model.layers.{layer}.{name}.weight"] for name in LAYER}
        attended, p = _attention(settings, of, _norm(x, of["input_layernorm"], eps), base)
        probabilities.append(p)
        x = x + attended
        h = _norm(x, of["post_attention_layernorm"], eps)
        gate = h @ of["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ of["mlp.up_proj"].T)) @ of["mlp.down_proj"].T
    head = weight["model.embed_tokens.weight" if settings["tie_word_embeddings"] else "lm_head.weight"]
    return _norm(x, weight["model.norm.weight"], eps) @ head.T, np.stack(probabilities)


LAYER = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def _norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def _attention(
    settings: Mapping[str, Any], of: Mapping[str, np.ndarray], x: np.ndarray, base: float
) -> tuple[np.ndarray, np.ndarray]:
    heads, groups = settings["num_attention_heads"], settings["num_key_value_heads"]
    size = settings["hidden_size"] // heads
    q, k, v = (
        (x @ of[f"self_attn.{name}_proj"].T).reshape(len(x), -1, size).transpose(1, 0, 2) for name in ("q", "k", "v")
    )
    q, k = _rotated(q, base), _rotated(k, base)
    k, v = np.repeat(k, heads // groups, axis=0), np.repeat(v, heads // groups, axis=0)
    scores = q @ k.transpose(0, 2, 1) / math.sqrt(size)
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return (p @ v).transpose(1, 0, 2).reshape(len(x), -1) @ of["self_attn.o_proj"].T, p


def _rotated(x: np.ndarray, base: float) -> np.ndarray:
    """``x cos + rotate_half(x) sin``; the two halves of a head turn by the same angles."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    cos, sin = (np.concatenate([f(angles)] * 2, axis=-1) for f in (np.cos, np.sin))
    return x * cos + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin
