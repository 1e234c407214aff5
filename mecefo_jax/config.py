"""The complete description of a run: frozen dataclasses, every field documented with its unit.

A config is data. It is validated when it is made, and derived values are properties. ``cli.py`` turns
command lines and files into configs; ``configs/`` holds the named ones.
"""

import dataclasses
from typing import Literal

from mecefo_jax.errors import ConfigError


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and numerics of the LLaMA model."""

    hidden_size: int = 128
    """Width of the residual stream (D)."""
    ffn_size: int = 344
    """Inner width of the SwiGLU feed-forward network (F)."""
    num_layers: int = 4
    """Number of transformer blocks (L)."""
    num_heads: int = 4
    """Attention query heads."""
    num_kv_heads: int | None = None
    """Key and value heads (grouped-query attention); None: as many as num_heads."""
    vocab_size: int | None = None
    """Rows of the embedding table; None: the size of the tokenizer's vocabulary."""
    max_seq_len: int = 2048
    """Longest sequence the model is meant for, in tokens."""
    rope_base: float = 10000.0
    """Base of the rotary position embedding's geometric frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Whether the output head reuses the embedding table."""
    remat: Literal["none", "ffn", "block"] = "none"
    """What an exact microbatch recomputes in its backward pass instead of storing it."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of matrix products; auto: float32 on CPU, bfloat16 elsewhere. Parameters are always float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What text is trained on, and how it is cut into sequences."""

    source: Literal["builtin", "files", "tfds"] = "builtin"
    """builtin: the Python standard library's source; files: local files; tfds: a TensorFlow Datasets name."""
    files: tuple[str, ...] = ()
    """Paths or globs of *.txt, *.jsonl (a "text" field a line), each optionally .gz; for source=files."""
    validation_files: tuple[str, ...] = ()
    """Files held out for evaluation; empty: a part of the documents is held out (validation_fraction)."""
    tfds_name: str = ""
    """Dataset name with a text feature, such as c4/en; for source=tfds."""
    tokenizer: str = "bytes"
    """bytes, bpe (byte-level BPE trained on this text), or the path of a Hugging Face tokenizer.json."""
    bpe_vocab_size: int = 8192
    """Entries of the vocabulary to train; for tokenizer=bpe."""
    seq_len: int = 256
    """Tokens that a sequence predicts; a record holds one more."""
    validation_fraction: float = 0.05
    """Fraction of documents held out for evaluation where the source has no validation split."""
    skip_invalid: bool = False
    """Whether to skip and count invalid records instead of stopping at the first one."""
    repeat: bool = False
    """Whether to start another epoch where the run needs more sequences than the data holds."""
    cache_dir: str = "~/.cache/mecefo_jax"
    """Where prepared data is kept, one folder a fingerprint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How devices form nodes."""

    num_nodes: int = 8
    """Nodes: the units that fail, along the mesh axis data."""
    fsdp: int = 1
    """Devices in a node over which parameters and microbatches are sharded."""
    tensor: int = 1
    """Devices in a node over which heads and the feed-forward width are sharded."""
    num_submeshes: int | None = None
    """Groups of fsdp x tensor devices that host the nodes, several nodes each where fewer; None: one a node."""

    @property
    def submesh_count(self) -> int:
        """Sub-meshes in use."""
        return self.num_nodes if self.num_submeshes is None else self.num_submeshes


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length and size of the run."""

    steps: int = 200
    """Optimizer steps."""
    microbatch_size: int = 4
    """Sequences in a microbatch."""
    microbatches_per_node: int = 2
    """Microbatches that a node computes in a step while all nodes are healthy."""
    seed: int = 0
    """Seed of initialization, sampling and fault scenarios."""
    log_every: int = 10
    """Steps between rows of metrics."""
    max_skipped_in_a_row: int = 10
    """Non-finite updates in a row after which the run gives up (exit 6)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay."""

    learning_rate: float = 1e-3
    """Peak learning rate."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; None: a tenth of the run."""
    final_fraction: float = 0.1
    """Learning rate at the end of the cosine decay, as a fraction of the peak."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on matrices only."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    clip_norm: float | None = 1.0
    """Largest global norm of the averaged gradient; None: no clipping."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DegradedConfig:
    """Which of the paper's three approximations a degraded microbatch's backward pass uses."""

    skip_attention: bool = True
    """(m) Drop the attention branch from the backward pass."""
    remat_ffn: bool = True
    """(r) Recompute the feed-forward activations instead of storing them."""
    low_rank: bool = True
    """(l) Project the feed-forward weight gradients on a low-rank basis."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BasisConfig:
    """The bases that low-rank weight gradients are projected on."""

    rank: int = 128
    """Columns of a basis (r); clipped to a weight's input size."""
    refresh_every: int = 100
    """Optimizer updates between refreshes (tau)."""
    source: Literal["weight", "momentum"] = "weight"
    """Matrix whose leading left singular vectors span the basis: the weight (paper) or Adam's first moment."""
    method: Literal["svd", "subspace"] = "subspace"
    """svd: exact decomposition; subspace: warm-started subspace iteration (matrix products and a thin QR)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """Which nodes are dead at which step, and what the others do about it."""

    scenario: Literal["none", "low", "mid", "high", "steps", "persistent", "trace", "script"] = "none"
    """none; the paper's low, mid, high (in hours, see step_seconds); steps (fail_every_steps, back_after_steps);
    persistent (persistent_nodes); trace (trace_file); script (script)."""
    policy: Literal["neighbor", "reroute", "balanced", "drop"] = "neighbor"
    """How the microbatches of dead nodes are taken over."""
    granularity: Literal["node", "stage"] = "node"
    """Unit that fails: a node, or a pipeline stage of a node (a contiguous range of layers; emulated)."""
    num_stages: int = 1
    """Pipeline stages a node; for granularity=stage."""
    slack: float = 0.1
    """Extra load over a healthy step that the policy balanced accepts before it degrades microbatches."""
    min_live_nodes: int = 1
    """With fewer live nodes the run saves and stops (exit 5)."""
    degraded_cost: float | None = None
    """Cost of a degraded microbatch relative to an exact one; None: the ratio of their FLOPs."""
    step_seconds: float = 60.0
    """Assumed seconds a step takes, to turn hours and trace times into steps."""
    fail_every_steps: float = 20.0
    """Mean steps between failures in the whole cluster; for scenario=steps."""
    back_after_steps: float = 15.0
    """Steps until a failed unit is back; for scenario=steps."""
    frequency: float = 1.0
    """Divides both times of a scenario: more failures at the same share of time down."""
    timing: Literal["random", "regular"] = "random"
    """Gaps between failures: exponentially distributed with the scenario's mean, or constant."""
    persistent_nodes: tuple[int, ...] = ()
    """Nodes dead for the whole run; for scenario=persistent."""
    trace_file: str = ""
    """CSV of milliseconds, add|remove, name; for scenario=trace."""
    script: str = ""
    """Failures such as 'fail 3 at 20, back at 50; fail 4 at 25, back at 60'; for scenario=script."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved and how long it is kept."""

    every: int = 100
    """Steps between saves; 0: only at the end."""
    keep: int = 3
    """Newest checkpoints kept."""
    required: bool = False
    """Whether a failed save in mid-run stops the run (exit 4) instead of being reported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out text."""

    every: int = 100
    """Steps between evaluations; 0: only at the end."""
    batches: int | None = None
    """Microbatches of validation data evaluated; None: all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A complete run."""

    name: str = "run"
    """Name of the run; its default directory is runs/NAME."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    degraded: DegradedConfig = DegradedConfig()
    basis: BasisConfig = BasisConfig()
    faults: FaultsConfig = FaultsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step (M), whoever computes them."""
        return self.mesh.num_nodes * self.train.microbatches_per_node
