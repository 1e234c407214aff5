"""Hugging Face's ``config.json`` of a LLaMA, and the settings of ours that it stands for.

transformers 4 reads ``rope_theta`` and ``torch_dtype``, transformers 5 ``rope_parameters`` and ``dtype``: both are
written, and either is read.
"""

from collections.abc import Mapping
from typing import Any

from mecefo_jax.config import ModelConfig
from mecefo_jax.errors import ConfigError

_ARCHITECTURE = "LlamaForCausalLM"
_SIZES = {
    "hidden_size": "hidden_size",
    "ffn_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
}
"""Our names and theirs of what every ``config.json`` must say."""
# What their LlamaConfig takes where a config.json is silent.
_DEFAULT_EPS, _DEFAULT_BASE, _DEFAULT_MAX_LENGTH = 1e-6, 10000.0, 2048
_ROPE = {"rope_type", "type", "rope_theta"}
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "partial_rotary_factor": (1,),
    "quantization_config": (None,),
}
"""What may be said in one way alone; the first value stands for silence."""


def to_llama_config(model: ModelConfig, *, bos_id: int, eos_id: int, dtype: str) -> dict[str, Any]:
    """Their ``config.json`` of our model.

    Args:
        model: ours; ``vocab_size`` is set.
        bos_id, eos_id: the tokenizer's.
        dtype: of the weights in the files, such as ``float32``.
    """
    sizes = {theirs: getattr(model, ours) for ours, theirs in _SIZES.items()}
    return {"architectures": [_ARCHITECTURE], "model_type": "llama", **sizes} | {
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_base,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "max_position_embeddings": model.max_seq_len,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def from_llama_config(settings: Mapping[str, Any], source: str) -> ModelConfig:
    """Our model of their ``config.json``.

    Args:
        settings: the file's content.
        source: the file, for messages.

    Raises:
        ConfigError: names the setting that our model cannot follow.
    """
    _check_representable(settings, source)
    for theirs in _SIZES.values():
        if settings.get(theirs) is None:
            raise ConfigError(f"{source}: says no {theirs}; add it")
    try:
        model = _model(settings)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    if (head_size := settings.get("head_dim")) not in (None, model.head_size):
        raise ConfigError(
            f"{source}: head_dim is {head_size}, but heads are hidden_size / num_attention_heads = {model.head_size} "
            "wide here; such a model cannot be converted"
        )
    return model


def _model(settings: Mapping[str, Any]) -> ModelConfig:
    sizes = {ours: settings[theirs] for ours, theirs in _SIZES.items()}
    kv_heads = settings.get("num_key_value_heads")
    return ModelConfig(
        **sizes,
        num_kv_heads=sizes["num_heads"] if kv_heads is None else kv_heads,
        max_seq_len=settings.get("max_position_embeddings", _DEFAULT_MAX_LENGTH),
        rope_base=_rope_base(settings),
        norm_eps=settings.get("rms_norm_eps", _DEFAULT_EPS),
        tie_embeddings=settings.get("tie_word_embeddings", False),
    )


def _check_representable(settings: Mapping[str, Any], source: str) -> None:
    architectures = settings.get("architectures") or [_ARCHITECTURE]
    if architectures != [_ARCHITECTURE]:
        raise ConfigError(f"{source}: architectures is {architectures}; only {_ARCHITECTURE} can be converted")
    for name, allowed in _ONLY.items():
        if (value := settings.get(name, allowed[0])) not in allowed:
            raise ConfigError(f"{source}: {name} is {value!r}; only {allowed[0]!r} can be converted")


def _rope_base(settings: Mapping[str, Any]) -> float:
    bases = [settings.get("rope_theta")]
    for name in ("rope_scaling", "rope_parameters"):
        rope = settings.get(name)
        if rope is None:
            continue
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else None
        if kind != "default" or rope.keys() - _ROPE:
            raise ConfigError(f"{name} is {rope!r}; only rotary positions of type 'default' can be converted")
        bases.append(rope.get("rope_theta"))
    named = [base for base in bases if base is not None]
    if any(base != named[0] for base in named):
        raise ConfigError(f"rope_theta and rope_parameters name different bases, {named}; set one of them")
    base = named[0] if named else _DEFAULT_BASE
    return float(base) if isinstance(base, int) else base
