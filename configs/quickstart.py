"""The first run: a tiny LLaMA on the text of the Python standard library, on eight emulated nodes that fail."""

from mecefo_jax.config import (
    BasisConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    FaultsConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)


def quickstart() -> Config:
    """A model of 0.9M parameters, 240 steps of 4096 bytes of text, through eight failures and seven recoveries.

    Command: ``make train``, or ``python train.py quickstart``.
    Hardware: any CPU; eight devices are emulated. Made for two cores and less than five minutes.
    Expected: the loss falls well below 5.6, that of guessing bytes; no batch is lost, though at times two nodes are
    down at once, and no gradient or update program is compiled after the first step.
    """
    return Config(
        name="quickstart",
        model=ModelConfig(hidden_size=128, ffn_size=344, num_layers=4, num_heads=4, max_seq_len=512),
        data=DataConfig(source="builtin", tokenizer="bytes", seq_len=128),
        mesh=MeshConfig(num_nodes=8),
        train=TrainConfig(steps=240, microbatch_size=2, microbatches_per_node=2, log_every=10),
        optim=OptimConfig(learning_rate=3e-3),
        basis=BasisConfig(rank=32, refresh_every=50),
        faults=FaultsConfig(scenario="steps", policy="neighbor", fail_every_steps=30, back_after_steps=25),
        checkpoint=CheckpointConfig(every=60),
        eval=EvalConfig(every=80, batches=64),
    )
