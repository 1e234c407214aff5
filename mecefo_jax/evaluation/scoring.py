"""How likely a model finds given tokens, after others.

Legend: B rows of a batch, T tokens that are predicted, V vocabulary.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from mecefo_jax.evaluation.buckets import batches, padded_rows
from mecefo_jax.model import Model, compute_dtype
from mecefo_jax.padding import PAD
from mecefo_jax.trained import TrainedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens whose last ones are scored, each given all that are before it."""

    tokens: Sequence[int]
    """At least one more than are scored."""
    num_scored: int

    def __post_init__(self) -> None:
        """Asserts that there is something to score, and something before it."""
        assert 0 < self.num_scored < len(self.tokens), (self.num_scored, len(self.tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Of the scored tokens of a span."""

    logprob: float
    """Of all of them, in nats: the sum of theirs."""
    is_greedy: bool
    """Whether each of them is the likeliest one in its place."""


class Scorer:
    """A model's scores, computed in batches: one program for each padded length."""

    def __init__(self, model: TrainedModel, *, batch_size: int, max_length: int):
        """Set up; compiles nothing.

        Args:
            model: whose scores.
            batch_size: rows computed together.
            max_length: most tokens that a span may have before its last one.
        """
        self._model, self._batch_size, self._max_length = model, batch_size, max_length
        self.compilations = 0
        """Programs compiled so far."""
        dtype = compute_dtype(model.config.model)

        def program(params: Model, tokens_BT1: Array) -> tuple[Array, Array]:
            self.compilations += 1  # runs when it is traced
            return token_scores(params, tokens_BT1, dtype)

        self._program = jax.jit(program)

    def __call__(self, spans: Sequence[Span]) -> list[Score]:
        """Scores, in the order of the spans."""
        scores: dict[int, Score] = {}
        lengths = [len(span.tokens) - 1 for span in spans]
        for batch in batches(lengths, batch_size=self._batch_size, longest=self._max_length):
            tokens_BT1 = padded_rows([spans[row].tokens for row in batch.rows], self._batch_size, batch.length + 1, PAD)
            logprobs_BT, greedy_BT = jax.device_get(self._program(self._model.params, tokens_BT1))
            for number, row in enumerate(batch.rows):
                scored = slice(lengths[row] - spans[row].num_scored, lengths[row])
                logprob = float(np.sum(logprobs_BT[number, scored], dtype=np.float64))
                scores[row] = Score(logprob=logprob, is_greedy=bool(np.all(greedy_BT[number, scored])))
        return [scores[row] for row in range(len(spans))]


def token_scores(
    params: Model, tokens_BT1: Int[Array, "B T+1"], dtype: jnp.dtype
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Log-probability of each token but the first given those before it, and whether it is the likeliest.

    Args:
        params: the model.
        tokens_BT1: token ids; what is returned at ``PAD`` means nothing.
        dtype: of activations and matrix products.

    Returns:
        ``(nats, is_greedy)``.
    """
    logits_BTV = params(tokens_BT1[:, :-1], dtype)
    targets_BT = tokens_BT1[:, 1:]
    target_logits_BT1 = jnp.take_along_axis(logits_BTV, jnp.maximum(targets_BT, 0)[..., None], axis=-1)
    logprobs_BT = target_logits_BT1[..., 0] - jax.nn.logsumexp(logits_BTV, axis=-1)
    return logprobs_BT, jnp.argmax(logits_BTV, axis=-1).astype(targets_BT.dtype) == targets_BT
