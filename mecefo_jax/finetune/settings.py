"""What a fine-tuning is asked for, and the run's config that it makes of this."""

import dataclasses

from mecefo_jax.config import BasisConfig, Config, DegradedConfig, FaultsConfig, MeshConfig, OptimConfig, TrainConfig
from mecefo_jax.config_values import check_range
from mecefo_jax.errors import ConfigError

_SHORTEST = 4
"""Least length to cut to: two texts, each with BOS before it, and a token of each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Of one fine-tuning."""

    epochs: int = 3
    """Times that each example is trained on."""
    batch_size: int = 32
    """Sequences of a step, over all nodes."""
    learning_rate: float = 1e-4
    """Peak learning rate, reached after a tenth of the steps; from there it falls linearly to zero."""
    seed: int = 0
    """Seed of the head, of the order of examples and of fault scenarios."""
    nodes: int = 4
    """Nodes that fail."""
    devices: int | None = None
    """Devices that the nodes share, one a node at most; None: all that there are."""
    microbatches_per_node: int = 2
    """Microbatches that a node computes in a step while all nodes are healthy."""
    max_length: int | None = None
    """Most tokens of an example, of which longer ones lose the end; None: what the model was trained on."""
    metric: str | None = None
    """What the best epoch is chosen by; None: accuracy, or pearson where numbers are predicted."""

    def __post_init__(self) -> None:
        """Raises ConfigError where a value is out of range, or the batch does not divide."""
        for field in ("epochs", "batch_size", "nodes", "devices", "microbatches_per_node"):
            check_range(_flag(field), getattr(self, field), at_least=1)
        check_range("--learning-rate", self.learning_rate, above=0)
        check_range("--seed", self.seed, at_least=0)
        microbatches = self.nodes * self.microbatches_per_node
        if self.batch_size % microbatches:
            below = self.batch_size // microbatches * microbatches
            nearest = f"{below} or {below + microbatches}" if below else f"{microbatches}"
            raise ConfigError(
                f"--batch-size: got {self.batch_size}, expected a multiple of --nodes x --microbatches-per-node "
                f"({microbatches}), such as {nearest}"
            )


def fine_tuning_config(
    pretrained: Config,
    settings: Settings,
    *,
    steps: int,
    num_devices: int,
    faults: FaultsConfig,
    degraded: DegradedConfig,
    basis: BasisConfig,
) -> Config:
    """The config of a fine-tuning; ``data.seq_len`` is the most tokens of an example.

    Args:
        pretrained: of the run that the model is from; ``model.vocab_size`` is set.
        settings: what is asked for.
        steps: optimizer steps in all.
        num_devices: of this process.
        faults: what fails, and what is done about it.
        degraded, basis: how a degraded microbatch is approximated.

    Raises:
        ConfigError: settings do not fit each other or the model.
    """
    max_length = pretrained.data.seq_len if settings.max_length is None else settings.max_length
    check_range("--max-length", max_length, at_least=_SHORTEST, at_most=pretrained.model.max_seq_len)
    check_range("--devices", settings.devices, at_most=num_devices)
    if faults.scenario == "live":
        raise ConfigError("--scenario: got live, expected another one: in fine-tuning, failures are emulated")
    return Config(
        name=pretrained.name,
        model=pretrained.model,
        data=dataclasses.replace(pretrained.data, seq_len=max_length),
        mesh=MeshConfig(num_nodes=settings.nodes, num_submeshes=min(settings.nodes, settings.devices or num_devices)),
        train=TrainConfig(
            steps=steps,
            microbatch_size=settings.batch_size // (settings.nodes * settings.microbatches_per_node),
            microbatches_per_node=settings.microbatches_per_node,
            seed=settings.seed,
        ),
        optim=OptimConfig(
            learning_rate=settings.learning_rate, decay="linear", final_fraction=0.0, weight_decay=0.01, beta2=0.999
        ),
        degraded=degraded,
        basis=basis,
        faults=faults,
    )


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
