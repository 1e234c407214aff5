"""Arithmetic cost of a microbatch, exact and degraded, from the config alone.

Counted are the floating-point operations of the matrix products, 2 for each multiply-add; norms, activations,
softmax and the embedding's look-up are left out (below 1% of the total at the paper's sizes). Attention scores
count in full, without a saving for the causal mask, as XLA computes them. The backward pass of a product costs two
such products, one for each operand's gradient.

Legend: b tokens of a microbatch, D hidden, F feed-forward, T sequence, V vocabulary, r rank.
"""

from collections.abc import Sequence

from mecefo_jax.config import DegradedConfig, ModelConfig


def exact_flops(model: ModelConfig, *, microbatch_tokens: int, seq_len: int, vocab_size: int) -> float:
    """Operations of an exact microbatch, forward and backward, with the model's rematerialisation.

    Three times the forward pass, and per layer what is recomputed: the feed-forward's gate and up products
    (``remat`` ffn or block; nothing needs the down product again) and the attention branch (block).

    Args:
      model: shape of the model and its remat; its vocab_size is not looked at.
      microbatch_tokens: predicted tokens of a microbatch (b).
      seq_len: tokens of a sequence (T).
      vocab_size: entries of the vocabulary (V).

    Returns:
      Floating-point operations.
    """
    attention = _attention_forward(model, microbatch_tokens, seq_len)
    layer = 3 * (attention + _ffn_forward(model, microbatch_tokens))
    if model.remat in ("ffn", "block"):
        layer += _ffn_recompute(model, microbatch_tokens)
    if model.remat == "block":
        layer += attention
    return model.num_layers * layer + _head(model, microbatch_tokens, vocab_size)


def degraded_flops(
    model: ModelConfig,
    degraded: DegradedConfig,
    *,
    rank: int,
    microbatch_tokens: int,
    seq_len: int,
    vocab_size: int,
    level: int = 1,
) -> float:
    """Operations of a microbatch that is degraded in all layers, forward and backward.

    The forward pass and the head are those of an exact microbatch. Skipped attention costs nothing in the backward
    pass, and is not recomputed. The feed-forward is recomputed for ``remat_ffn`` or if an exact microbatch does so.
    With ``low_rank`` a weight gradient ``[in, out]`` costs ``2b (in r + r out)`` in place of ``2b in out``; the product
    with the bases, done once by a node in a step that degrades, is not counted: ``r / b`` of a full weight gradient.
    Sampled weight gradients, and with ``sample_ffn`` the feed-forward's input gradients, cost the fraction of the
    tokens that is drawn, which is less at each level.

    Args:
      model: shape of the model and its remat; its vocab_size is not looked at.
      degraded: which approximations are on.
      rank: columns of a basis (r); clipped to a weight's input size.
      microbatch_tokens: predicted tokens of a microbatch (b).
      seq_len: tokens of a sequence (T).
      vocab_size: entries of the vocabulary (V).
      level: how far it is degraded, from 1 on.

    Returns:
      Floating-point operations.
    """
    attention = _attention_forward(model, microbatch_tokens, seq_len)
    ffn = _ffn_forward(model, microbatch_tokens)
    sampled = degraded.drawn_tokens(seq_len)[level - 1] / seq_len
    layer = attention + ffn + degraded.drawn_ffn_tokens(seq_len)[level - 1] / seq_len * ffn
    layer += _low_rank(_ffn_shapes(model), rank, microbatch_tokens) if degraded.low_rank else sampled * ffn
    if degraded.remat_ffn or model.remat in ("ffn", "block"):
        layer += _ffn_recompute(model, microbatch_tokens)
    if not degraded.skip_attention:
        layer += 2 * attention
        layer -= (1 - sampled) * _products(_attention_shapes(model), microbatch_tokens)
        if model.remat == "block":
            layer += attention
    return model.num_layers * layer + _head(model, microbatch_tokens, vocab_size)


def scaled_costs(costs: Sequence[float], first: float) -> tuple[float, ...]:
    """Costs by level, of which the first is known better: the others are as far below it as they were."""
    return tuple(first * (cost / costs[0]) for cost in costs)


def degraded_costs(
    model: ModelConfig,
    degraded: DegradedConfig,
    *,
    rank: int,
    microbatch_tokens: int,
    seq_len: int,
    vocab_size: int,
) -> tuple[float, ...]:
    """Cost of a degraded microbatch relative to an exact one: the ratio of their operations.

    Args:
      model: shape of the model and its remat; its vocab_size is not looked at.
      degraded: which approximations are on.
      rank: columns of a basis (r); clipped to a weight's input size.
      microbatch_tokens: predicted tokens of a microbatch (b).
      seq_len: tokens of a sequence (T).
      vocab_size: entries of the vocabulary (V).

    Returns:
      The ratio at each level; 1.0 with all approximations off, above 1 where they cost more than they save.
    """
    sizes = {"microbatch_tokens": microbatch_tokens, "seq_len": seq_len, "vocab_size": vocab_size}
    exact = exact_flops(model, **sizes)
    levels = range(1, len(degraded.drawn_tokens(seq_len)) + 1)
    return tuple(degraded_flops(model, degraded, rank=rank, level=level, **sizes) / exact for level in levels)


def _attention_forward(model: ModelConfig, microbatch_tokens: int, seq_len: int) -> float:
    """Projections to queries, keys, values and output; scores, and their product with the values."""
    scores = 4 * microbatch_tokens * seq_len * model.hidden_size
    return _products(_attention_shapes(model), microbatch_tokens) + scores


def _ffn_forward(model: ModelConfig, microbatch_tokens: int) -> float:
    """Gate, up and down products. All their input gradients, or weight gradients, cost as much again."""
    return _products(_ffn_shapes(model), microbatch_tokens)


def _ffn_recompute(model: ModelConfig, microbatch_tokens: int) -> float:
    """Gate and up products: the down product's own output is not needed again."""
    return _products(_ffn_shapes(model)[:2], microbatch_tokens)


def _attention_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """Query, key, value and output kernels ``[in, out]``."""
    kv_size = model.hidden_size // model.num_heads * model.kv_heads
    return [(model.hidden_size, size) for size in (model.hidden_size, kv_size, kv_size, model.hidden_size)]


def _ffn_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """Gate and up kernels [D, F], and the down kernel [F, D]."""
    return [(model.hidden_size, model.ffn_size)] * 2 + [(model.ffn_size, model.hidden_size)]


def _products(shapes: Sequence[tuple[int, int]], microbatch_tokens: int) -> float:
    """A product with each kernel; all input gradients, or weight gradients, cost as much."""
    return float(sum(2 * microbatch_tokens * size_in * size_out for size_in, size_out in shapes))


def _low_rank(shapes: Sequence[tuple[int, int]], rank: int, microbatch_tokens: int) -> float:
    """Projected weight gradients of the kernels."""
    total = 0
    for size_in, size_out in shapes:
        r = min(rank, size_in)
        total += 2 * microbatch_tokens * (size_in * r + r * size_out)
    return float(total)


def _head(model: ModelConfig, microbatch_tokens: int, vocab_size: int) -> float:
    """Logits, and the gradients of their two operands."""
    return float(3 * 2 * microbatch_tokens * model.hidden_size * vocab_size)
