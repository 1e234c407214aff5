"""Whether a run may go on from a checkpoint: what must not have changed, and what did."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from mecefo_jax.config_file import in_todays_terms
from mecefo_jax.errors import ConfigError

_IDENTITY = ("model.", "data.tokenizer", "data.seq_len", "data.fingerprint", "train.seed", "train.microbatch_size")
_IDENTITY_OF_BASES = ("basis.rank", "basis.source")
_FREE = (
    "name",
    "data.cache_dir",
    "mesh.",
    "train.log_every",
    "train.microbatches_per_node",
    "checkpoint.",
    "eval.",
    "track.",
    "cluster.",
)
_FREE_OF_MODEL = ("model.remat",)  # what is recomputed changes no value
_SCHEDULE = ("train.steps", "optim.")
_MICROBATCHES = "microbatches a step (mesh.num_nodes x train.microbatches_per_node)"


def check_identity(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    learning_rate: Callable[[Mapping[str, Any]], float] | None = None,
) -> list[str]:
    """Compares the config of a checkpoint with that of the run that wants to continue it.

    Refused are changes of the model, the tokenizer, the sequence length, the data's fingerprint, the seed, the
    microbatch size, the microbatches of a step, and the bases' rank and source. The number of nodes may change
    as long as the microbatches of a step stay the same. A tokenizer that was moved is the same tokenizer if both
    fingerprints are known and equal. Where and how often things are saved, evaluated or logged is free.

    Args:
      saved: config at the time of the save, nested or with dotted names; ``data.fingerprint`` if known.
      current: config of this run, in either form.
      learning_rate: learning rate at the step of the checkpoint under a config as given, to be shown if the
        schedule changed.

    Returns:
      One line for each other setting that changed, the schedule first, with the old and the new learning rate.

    Raises:
      ConfigError: what may not change did; names each field with both values.
    """
    old, new = _comparable(saved), _comparable(current)
    changed = {
        name: f"{name}: saved {_show(old, name)}, now {_show(new, name)}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) or (name in old) != (name in new)
    }
    refused = [line for name, line in changed.items() if _is_identity(name, old, new)]
    if refused:
        raise ConfigError(
            f"this run directory holds checkpoints of another run: {'; '.join(refused)}; "
            "set these back, or choose another --workdir"
        )
    schedule = [line for name, line in changed.items() if name.startswith(_SCHEDULE)]
    if schedule and learning_rate is not None:
        schedule.append(f"learning rate from here: {learning_rate(saved):.4g} -> {learning_rate(current):.4g}")
    rest = [line for name, line in changed.items() if not name.startswith((*_SCHEDULE, *_FREE))]
    return schedule + rest


def _is_identity(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if name == _MICROBATCHES:
        return True
    if name not in old or name not in new or name in _FREE_OF_MODEL:
        return False  # a field that one side does not have cannot be compared: it is reported, not refused
    if name == "data.tokenizer":
        fingerprint = "data.fingerprint"
        return fingerprint not in old or old[fingerprint] != new.get(fingerprint)
    return name.startswith(_IDENTITY) or name in _IDENTITY_OF_BASES


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names to JSON values, with what depends on several fields worked out."""
    flat = in_todays_terms(_flat(json.loads(json.dumps(config))))
    if flat.get("model.num_kv_heads", 0) is None:
        flat["model.num_kv_heads"] = flat.get("model.num_heads")
    if "mesh.num_nodes" in flat and "train.microbatches_per_node" in flat:
        flat[_MICROBATCHES] = flat["mesh.num_nodes"] * flat["train.microbatches_per_node"]
    return flat


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _show(flat: Mapping[str, Any], name: str) -> str:
    return json.dumps(flat[name]) if name in flat else "(not there)"
