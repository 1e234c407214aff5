"""Text in, microbatches of tokens out: sources, tokenizers, prepared records, sampler."""

from mecefo_jax.data.preparation import prepare
from mecefo_jax.data.prepared import PreparedData, check_vocabulary
from mecefo_jax.data.records import Records
from mecefo_jax.data.sampler import Sampler, evaluation_microbatches
from mecefo_jax.data.tokenizer import Tokenizer, load_tokenizer
from mecefo_jax.padding import PAD

__all__ = [
    "PAD",
    "PreparedData",
    "Records",
    "Sampler",
    "Tokenizer",
    "check_vocabulary",
    "evaluation_microbatches",
    "load_tokenizer",
    "prepare",
]
