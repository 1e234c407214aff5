"""A trained model that answers questions about text: what a harness asks, in its order, in batches."""

from collections.abc import Mapping, Sequence
from typing import Any

from mecefo_jax.errors import ConfigError
from mecefo_jax.evaluation.conventions import (
    GenerationRequest,
    cut,
    encode_pair,
    generation_request,
    prompt_ids,
    rolling_spans,
    scored_span,
)
from mecefo_jax.evaluation.generation import Generator
from mecefo_jax.evaluation.scoring import Scorer
from mecefo_jax.trained import TrainedModel


class TextModel:
    """Scores and continues texts."""

    def __init__(
        self, model: TrainedModel, *, batch_size: int, max_length: int | None = None, begin_with_bos: bool = False
    ):
        """Set up; compiles nothing.

        Args:
            model: which one.
            batch_size: rows computed together.
            max_length: tokens that the model may see at once; None: as many as it was trained on.
            begin_with_bos: whether contexts and prompts begin with BOS, as documents did in training.

        Raises:
            ConfigError: the length is beyond what the model is meant for.
        """
        longest = model.config.model.max_seq_len
        self.max_length = model.config.data.seq_len if max_length is None else max_length
        """Tokens that the model may see at once."""
        if not 1 <= self.max_length <= longest:
            raise ConfigError(f"--max-length: got {max_length}, expected 1 to model.max_seq_len ({longest})")
        if batch_size < 1:
            raise ConfigError(f"--batch-size: got {batch_size}, expected at least 1")
        self._tokenizer, self._begin_with_bos = model.tokenizer, begin_with_bos
        self._score = Scorer(model, batch_size=batch_size, max_length=self.max_length)
        self._generate = Generator(model, batch_size=batch_size, max_length=self.max_length)

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return self._score.compilations + self._generate.compilations

    def loglikelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of continuations given their contexts: in nats, and whether greedy generation would give them.

        Args:
            pairs: context and continuation; an empty context stands for BOS.

        Raises:
            ConfigError: a continuation has no token of its own, or too many.
        """
        spans = []
        for context, continuation in pairs:
            context_ids, continuation_ids = self._encode_pair(context, continuation)
            if not continuation_ids:
                raise ConfigError(
                    f"a task has the continuation {continuation!r} after {context[-40:]!r}, in which there is no token "
                    "to score; leave the task out"
                )
            spans.append(scored_span(context_ids, continuation_ids, self.max_length))
        return [(score.logprob, score.is_greedy) for score in self._score(spans)]

    def rolling_loglikelihoods(self, texts: Sequence[str]) -> list[float]:
        """Of whole texts, of any length, in nats; the first token is given BOS."""
        spans_of_texts = [rolling_spans(self._encode(text), self._tokenizer.bos_id, self.max_length) for text in texts]
        scores = iter(self._score([span for spans in spans_of_texts for span in spans]))
        return [sum((next(scores).logprob for _ in spans), 0.0) for spans in spans_of_texts]

    def generations(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Greedy continuations.

        Args:
            requests: prompt (an empty one stands for BOS) and the task's ``generation_kwargs``.

        Raises:
            ConfigError: a request cannot be met; it names the setting.
        """
        groups: dict[GenerationRequest, list[int]] = {}
        for number, (_, settings) in enumerate(requests):
            groups.setdefault(generation_request(settings), []).append(number)
        texts: dict[int, str] = {}
        for request, numbers in groups.items():
            texts.update(zip(numbers, self._generations([requests[n][0] for n in numbers], request), strict=True))
        return [texts[number] for number in range(len(requests))]

    def _generations(self, prompts: Sequence[str], request: GenerationRequest) -> list[str]:
        decode = self._tokenizer.decode

        def is_done(ids: Sequence[int]) -> bool:
            text = decode(ids)
            return cut(text, request.until) != text

        bos = [self._tokenizer.bos_id]
        encoded = [(bos if self._begin_with_bos else []) + self._encode(prompt) or bos for prompt in prompts]
        rows = self._generate(
            [prompt_ids(ids, request.max_new_tokens, self.max_length) for ids in encoded],
            max_new_tokens=request.max_new_tokens,
            is_done=is_done,
        )
        return [cut(decode(row), request.until) for row in rows]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        bos = [self._tokenizer.bos_id]
        if not context:
            return bos, self._encode(continuation)
        context_ids, continuation_ids = encode_pair(self._encode, context, continuation)
        # A context of spaces alone has gone to the continuation.
        return (bos if self._begin_with_bos else []) + context_ids or bos, continuation_ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).tolist()
