"""Settings that only mean something under another setting's value."""

import dataclasses
import functools

from mecefo_jax.config import ClusterConfig, Config

CONDITIONS: dict[str, tuple[str, tuple[object, ...]]] = {
    "data.files": ("data.source", ("files",)),
    "data.validation_files": ("data.source", ("files",)),
    "data.tfds_name": ("data.source", ("tfds",)),
    "data.bpe_vocab_size": ("data.tokenizer", ("bpe",)),
    "degraded.sampled_fractions": ("degraded.low_rank", (False,)),
    "degraded.sample_ffn": ("degraded.low_rank", (False,)),
    "basis.rank": ("degraded.low_rank", (True,)),
    "basis.refresh_every": ("degraded.low_rank", (True,)),
    "basis.source": ("degraded.low_rank", (True,)),
    "basis.method": ("degraded.low_rank", (True,)),
    "faults.num_stages": ("faults.granularity", ("stage",)),
    "faults.slack": ("faults.policy", ("balanced",)),
    "faults.auto.max_slowdown": ("faults.policy", ("auto",)),
    "faults.auto.may_drop": ("faults.policy", ("auto",)),
    "faults.auto.degraded_error": ("faults.policy", ("auto",)),
    "faults.auto.sampling_error": ("faults.policy", ("auto",)),
    "faults.step_seconds": ("faults.scenario", ("low", "mid", "high", "trace")),
    "faults.fail_every_steps": ("faults.scenario", ("steps",)),
    "faults.back_after_steps": ("faults.scenario", ("steps",)),
    "faults.frequency": ("faults.scenario", ("low", "mid", "high", "steps", "trace")),
    "faults.timing": ("faults.scenario", ("low", "mid", "high", "steps")),
    "faults.persistent_nodes": ("faults.scenario", ("persistent",)),
    "faults.trace_file": ("faults.scenario", ("trace",)),
    "faults.script": ("faults.scenario", ("script",)),
    **{
        f"cluster.{field.name}": ("faults.scenario", ("live",))
        for field in dataclasses.fields(ClusterConfig)
        if field.name != "coordinator"
    },
}
"""For each of them the other setting, and the values under which it has an effect."""


def without_effect(config: Config, key: str) -> str | None:
    """Says why a setting is ignored, and what to set so that it is not.

    Args:
      config: where it was set.
      key: dotted name of any setting.

    Returns:
      One line, or None where the setting has an effect.
    """
    if key not in CONDITIONS:
        return None
    other, values = CONDITIONS[key]
    found = value_of(config, other)
    if found in values:
        return None
    shown = ", ".join(str(value).lower() for value in values)
    return f"{key}: has no effect with {other} {str(found).lower()}; set --{other} to {shown}"


def must_take_effect(config: Config, key: str) -> bool:
    """Whether a setting is empty by default and set here: what someone spells out is not to be ignored."""
    return value_of(Config(), key) in ("", ()) and bool(value_of(config, key))


def changed(config: Config) -> set[str]:
    """The conditional settings whose value is not the default."""
    return {key for key in CONDITIONS if value_of(config, key) != value_of(Config(), key)}


def value_of(config: Config, key: str) -> object:
    """The value of a setting in a section, by its dotted name."""
    return functools.reduce(getattr, key.split("."), config)
