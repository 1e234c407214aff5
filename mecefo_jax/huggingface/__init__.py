"""Conversion to and from the folders of Hugging Face's LLaMA (``LlamaForCausalLM``), in NumPy alone."""

from mecefo_jax.huggingface.exporting import write_model
from mecefo_jax.huggingface.importing import Pretrained, read_pretrained, write_run
from mecefo_jax.huggingface.verification import (
    can_compare_logits,
    largest_logit_difference,
    require_equal_weights,
)
from mecefo_jax.huggingface.whole_folder import whole_folder

__all__ = [
    "Pretrained",
    "can_compare_logits",
    "largest_logit_difference",
    "read_pretrained",
    "require_equal_weights",
    "whole_folder",
    "write_model",
    "write_run",
]
