"""What EleutherAI's harness asks of a model, in the terms of tokens: as its Hugging Face backend understands it.

The conventions are those of lm_eval 0.4 (``lm_eval/models/huggingface.py``), so that numbers can be compared with those
of other models. Nothing here needs lm_eval.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mecefo_jax.errors import ConfigError
from mecefo_jax.evaluation.scoring import Span

Encode = Callable[[str], list[int]]
"""Text to token ids, without special tokens."""

_MAX_NEW_TOKENS = 256
_MAX_NEW_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_WITHOUT_EFFECT_WHEN_GREEDY = ("top_p", "top_k", "min_p")


def encode_pair(encode: Encode, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Token ids of a context, and of what follows.

    Spaces at the end of the context go with the continuation, since tokens begin with them. The two are encoded as one
    text, and the continuation is what lies beyond as many tokens as the context has alone.

    Args:
        encode: the tokenizer's.
        context: not empty.
        continuation: may be empty in tokens where it melts into the context's last one.
    """
    assert context
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    context_ids = encode(stripped)
    return context_ids, encode(stripped + continuation)[len(context_ids) :]


def scored_span(context_ids: Sequence[int], continuation_ids: Sequence[int], max_length: int) -> Span:
    """The continuation after its context, which loses its first tokens where both are too long.

    Args:
        context_ids: at least one token.
        continuation_ids: what is scored.
        max_length: tokens that the model may see at once.

    Raises:
        ConfigError: the continuation alone is longer.
    """
    num_scored = len(continuation_ids)
    if num_scored > max_length:
        raise ConfigError(
            f"--max-length: got {max_length}, but a task has a continuation of {num_scored} tokens; set it to that at "
            "least, or leave the task out"
        )
    return Span(tokens=[*context_ids, *continuation_ids][-(max_length + 1) :], num_scored=num_scored)


def rolling_spans(ids: Sequence[int], first_id: int, max_length: int) -> list[Span]:
    """A text cut into spans that score each token once.

    The first span begins with ``first_id``. Every other one is as long as can be, so that its scored tokens are all
    given one token at least, and those of the last span as many as fit.

    Args:
        ids: token ids of the text; may be empty.
        first_id: what the first token is given.
        max_length: tokens that the model may see at once.
    """
    stream, spans = [first_id, *ids], []
    for start in range(0, len(ids), max_length):
        stop = min(start + max_length, len(ids))
        spans.append(Span(tokens=stream[max(stop - max_length, 0) : stop + 1], num_scored=stop - start))
    return spans


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """How a task wants text to be generated, greedily."""

    until: tuple[str, ...]
    """Text ends before the first of these, taken in this order."""
    max_new_tokens: int


def generation_request(settings: Mapping[str, Any]) -> GenerationRequest:
    """A task's ``generation_kwargs``.

    Raises:
        ConfigError: it wants something else than greedy generation, or a setting that is not known.
    """
    rest = dict(settings)
    until = rest.pop("until", None) or ()
    lengths = [rest.pop(name) for name in _MAX_NEW_TOKENS_NAMES if rest.get(name) is not None]
    do_sample, temperature = rest.pop("do_sample", None), float(rest.pop("temperature", None) or 0.0)
    if do_sample or (do_sample is None and temperature > 0):
        raise ConfigError(
            f"a task wants to sample (do_sample {do_sample}, temperature {temperature:g}); only greedy generation is "
            "there: set do_sample: false in its generation_kwargs, or leave it out"
        )
    if rest.pop("num_beams", 1) != 1:
        raise ConfigError("a task wants a beam search (num_beams); only greedy generation is there: leave it out")
    unknown = [name for name in rest if name not in (*_MAX_NEW_TOKENS_NAMES, *_WITHOUT_EFFECT_WHEN_GREEDY)]
    if unknown:
        raise ConfigError(f"a task sets {', '.join(unknown)} in its generation_kwargs, which is not known here")
    return GenerationRequest(
        until=(until,) if isinstance(until, str) else tuple(until),
        max_new_tokens=int(lengths[0]) if lengths else _MAX_NEW_TOKENS,
    )


def prompt_ids(ids: Sequence[int], max_new_tokens: int, max_length: int) -> list[int]:
    """The last tokens of a prompt, as many as leave room for those to come.

    Raises:
        ConfigError: no room is left for a prompt.
    """
    room = max_length - max_new_tokens
    if room < 1:
        raise ConfigError(
            f"--max-length: got {max_length}, but a task generates {max_new_tokens} tokens; set it to "
            f"{max_new_tokens + 1} at least, or max_gen_toks in the task's generation_kwargs to less"
        )
    return list(ids[-room:])


def cut(text: str, until: Sequence[str]) -> str:
    """The text before the first of the strings that end it; an empty one ends nothing."""
    for end in until:
        if end:
            text = text.split(end)[0]
    return text
