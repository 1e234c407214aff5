"""The complete description of a run: frozen dataclasses, every field documented with its unit.

A config is data. It is validated when it is made, and derived values are properties. ``cli.py`` turns
command lines and files into configs; ``configs/`` holds the named ones.
"""

import dataclasses
import itertools
import math
import re
from typing import Literal

from mecefo_jax.config_values import check_fits, check_named, check_range, check_types
from mecefo_jax.errors import ConfigError

BYTE_ENTRIES = 258
"""Entries of the vocabulary of bytes: 256, BOS and EOS; no other tokenizer that is trained here has fewer."""
MAX_NODES = 2**20
"""Most nodes, and most devices along an axis: far above any cluster, and few enough for plans to fit in memory."""
MAX_FRACTIONS = 16
"""Most sizes of a sample to choose from: each is compiled into every product, or every feed-forward network."""
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"


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

    def __post_init__(self) -> None:
        """Raises ConfigError where a value is out of range or the heads do not fit the width."""
        check_types(self, "model.")
        for field in (
            "hidden_size",
            "ffn_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "vocab_size",
            "max_seq_len",
        ):
            check_range(f"model.{field}", getattr(self, field), at_least=1)
        check_range("model.rope_base", self.rope_base, above=1)
        check_range("model.norm_eps", self.norm_eps, above=0)
        check_fits(
            "model.num_heads",
            self.num_heads,
            self.fits_heads,
            f"a divisor of model.hidden_size ({self.hidden_size}) that leaves an even head size",
        )
        check_fits(
            "model.num_kv_heads",
            self.kv_heads,
            lambda heads: self.num_heads % heads == 0,
            f"a divisor of model.num_heads ({self.num_heads})",
        )

    def fits_heads(self, num_heads: int) -> bool:
        """Whether so many heads divide the width into even sizes, as rotary position embeddings rotate pairs."""
        return self.hidden_size % (2 * num_heads) == 0

    @property
    def head_size(self) -> int:
        """Width of a head (H)."""
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads (K)."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What text is trained on, and how it is cut into sequences."""

    source: Literal["builtin", "files", "tfds"] = "builtin"
    """builtin: the Python standard library's source; files: local files; tfds: a TensorFlow Datasets name."""
    files: tuple[str, ...] = ()
    """Paths or globs of *.txt, *.jsonl or *.json (a "text" field a line), each optionally .gz; for source=files."""
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
    """Fraction of documents (or of the tail of a single one) held out where the source has no validation split."""
    skip_invalid: bool = False
    """Whether to skip and count invalid records instead of stopping at the first one."""
    repeat: bool = False
    """Whether to start another epoch where the run needs more sequences than the data holds."""
    cache_dir: str = "~/.cache/mecefo_jax"
    """Where prepared data is kept, one folder a fingerprint."""

    def __post_init__(self) -> None:
        """Raises ConfigError where a value is out of range or the chosen source is not named."""
        check_types(self, "data.")
        check_range("data.bpe_vocab_size", self.bpe_vocab_size, at_least=BYTE_ENTRIES)
        check_range("data.seq_len", self.seq_len, at_least=1)
        check_range("data.validation_fraction", self.validation_fraction, above=0, below=1)
        check_named(self, "data", "source", {"files": "files", "tfds": "tfds_name"})
        for field in ("tokenizer", "cache_dir"):
            if not getattr(self, field):
                raise ConfigError(f"data.{field}: got '', expected text; leave it out for the default")


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

    def __post_init__(self) -> None:
        """Raises ConfigError where a count is out of range."""
        check_types(self, "mesh.")
        for field in ("num_nodes", "fsdp", "tensor", "num_submeshes"):
            check_range(f"mesh.{field}", getattr(self, field), at_least=1, at_most=MAX_NODES)
        at_most = f"at most mesh.num_nodes ({self.num_nodes})"
        check_fits("mesh.num_submeshes", self.submesh_count, lambda count: count <= self.num_nodes, at_most)

    @property
    def submesh_count(self) -> int:
        """Sub-meshes in use."""
        return self.num_nodes if self.num_submeshes is None else self.num_submeshes

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return self.submesh_count * self.fsdp * self.tensor


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

    def __post_init__(self) -> None:
        """Raises ConfigError where a value is out of range."""
        check_types(self, "train.")
        for field in ("steps", "microbatch_size", "microbatches_per_node", "log_every", "max_skipped_in_a_row"):
            check_range(f"train.{field}", getattr(self, field), at_least=1)
        check_range("train.seed", self.seed, at_least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with linear warm-up and a decay."""

    learning_rate: float = 1e-3
    """Peak learning rate."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; None: a tenth of the run."""
    decay: Literal["cosine", "linear"] = "cosine"
    """Form of the decay from the peak: half a cosine, or a straight line."""
    final_fraction: float = 0.1
    """Learning rate at the end of the decay, as a fraction of the peak."""
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

    def __post_init__(self) -> None:
        """Raises ConfigError where a value is out of range."""
        check_types(self, "optim.")
        for field in ("learning_rate", "eps", "clip_norm"):
            check_range(f"optim.{field}", getattr(self, field), above=0)
        for field in ("warmup_steps", "weight_decay"):
            check_range(f"optim.{field}", getattr(self, field), at_least=0)
        check_range("optim.final_fraction", self.final_fraction, at_least=0, at_most=1)
        for field in ("beta1", "beta2"):
            check_range(f"optim.{field}", getattr(self, field), at_least=0, below=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DegradedConfig:
    """Which approximations a degraded microbatch's backward pass uses; (m), (r) and (l) are the paper's."""

    skip_attention: bool = True
    """(m) Drop the attention branch from the backward pass."""
    remat_ffn: bool = True
    """(r) Recompute the feed-forward activations instead of storing them."""
    low_rank: bool = True
    """(l) Project the feed-forward weight gradients on a low-rank basis."""
    sampled_fractions: tuple[float, ...] = ()
    """Not in the paper: with low_rank off, estimate weight gradients, without bias, from a fraction of a sequence's
    tokens; those of attention too if it is not skipped. In decreasing order: balanced, and auto if it takes that,
    draws no less than the load needs; other policies take the first. Empty: off."""
    sample_ffn: bool = False
    """Not in the paper: for a fraction f of sampled_fractions make the feed-forward's input gradients of a sample too,
    (1 + f) / 2 of the tokens, which saves more. Those of everything below are no longer exact, but without bias."""

    def __post_init__(self) -> None:
        """Raises ConfigError where a value is of another type or out of range."""
        check_types(self, "degraded.")
        if self.sample_ffn and not self.sampled_fractions:
            raise ConfigError(
                "degraded.sample_ffn: got true without degraded.sampled_fractions, which say how much is sampled; set "
                "--degraded.sampled_fractions"
            )
        for fraction in self.sampled_fractions:
            check_range("degraded.sampled_fractions", fraction, above=0, at_most=1)
        if any(after >= before for before, after in itertools.pairwise(self.sampled_fractions)):
            raise ConfigError(f"degraded.sampled_fractions: got {self.sampled_fractions}, expected a decreasing order")
        if len(self.sampled_fractions) > MAX_FRACTIONS:
            raise ConfigError(
                f"degraded.sampled_fractions: got {len(self.sampled_fractions)}, expected at most {MAX_FRACTIONS}, for "
                "each is compiled"
            )

    @property
    def samples(self) -> bool:
        """Whether weight gradients are estimated from some of the tokens."""
        return bool(self.sampled_fractions) and not self.low_rank

    def drawn_tokens(self, seq_len: int) -> tuple[int, ...]:
        """Tokens of a sequence that its weight gradients are made of, where neither skipped nor of low rank.

        Args:
            seq_len: tokens of a sequence.

        Returns:
            A number for each level that a microbatch may be degraded to, all of the tokens where nothing is sampled.
        """
        if not self.samples:
            return (seq_len,)
        return tuple(max(round(fraction * seq_len), 1) for fraction in self.sampled_fractions)

    def drawn_ffn_tokens(self, seq_len: int) -> tuple[int, ...]:
        """Tokens of a sequence that the feed-forward's input gradients are made of.

        Args:
            seq_len: tokens of a sequence.

        Returns:
            A number for each level, no less than its ``drawn_tokens``; all of the tokens without ``sample_ffn``.
        """
        drawn = self.drawn_tokens(seq_len)
        return tuple(math.ceil((seq_len + each) / 2) if self.sample_ffn else seq_len for each in drawn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BasisConfig:
    """The bases that low-rank weight gradients are projected on."""

    rank: int = 128
    """Columns of a basis (r); clipped to a weight's input size."""
    refresh_every: int = 100
    """Optimizer updates between refreshes (tau)."""
    source: Literal["weight", "momentum"] = "momentum"
    """Matrix whose leading left singular vectors span the basis: the weight (paper) or Adam's first moment."""
    method: Literal["svd", "subspace"] = "subspace"
    """svd: exact decomposition; subspace: warm-started subspace iteration (matrix products and a thin QR)."""

    def __post_init__(self) -> None:
        """Raises ConfigError where a value is out of range."""
        check_types(self, "basis.")
        check_range("basis.rank", self.rank, at_least=1)
        check_range("basis.refresh_every", self.refresh_every, at_least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoConfig:
    """What the policy auto weighs at each failure: extra time and the error of the gradient."""

    max_slowdown: float = 0.01
    """Extra time of a step, as a fraction of a healthy one's, within which auto takes the least error; where nothing
    is, it takes what makes the most progress a second."""
    may_drop: bool = False
    """Whether auto may leave microbatches out (drop), which loses data."""
    degraded_error: float | None = None
    """Relative error of the gradient if all microbatches are degraded, with several sampled_fractions by the first.
    None: 1.2 where attention is skipped or gradients are of low rank, measured for both together at 1M parameters
    (docs/results/gradient_error.md); with samples alone their noise (takeover/auto.py)."""
    sampling_error: float = 7.0
    """Relative standard deviation of one microbatch's gradient. Measured there, with 128 tokens a microbatch; of one
    model it falls as one over the root of their number, but gradients of larger models are noisier."""

    def __post_init__(self) -> None:
        """Raises ConfigError where a value is out of range."""
        check_types(self, "faults.auto.")
        for field in ("max_slowdown", "degraded_error", "sampling_error"):
            check_range(f"faults.auto.{field}", getattr(self, field), at_least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultsConfig:
    """Which nodes are dead at which step, and what the others do about it."""

    scenario: Literal["none", "low", "mid", "high", "steps", "persistent", "trace", "script", "live"] = "none"
    """live: nodes are processes (section cluster), dead when they are found to be. Emulated are none; the paper's low,
    mid, high (in hours, see step_seconds); steps (fail_every_steps, back_after_steps); persistent (persistent_nodes);
    trace (trace_file); script (script)."""
    policy: Literal["neighbor", "reroute", "balanced", "drop", "auto"] = "auto"
    """How the microbatches of dead nodes are taken over; auto chooses among the others at each failure."""
    granularity: Literal["node", "stage"] = "node"
    """Unit that fails: a node, or a pipeline stage of a node (a contiguous range of layers; emulated)."""
    num_stages: int = 1
    """Pipeline stages a node; for granularity=stage."""
    slack: float = 0.1
    """Extra load over a healthy step that the policy balanced accepts before it degrades microbatches."""
    min_live_nodes: int = 1
    """With fewer live nodes the run saves and stops (exit 5)."""
    degraded_cost: float | None = None
    """Cost of a degraded microbatch relative to an exact one; None: the ratio of their FLOPs. With several
    sampled_fractions that of the first; the others are scaled with it."""
    step_seconds: float = 60.0
    """Assumed seconds a step takes, to turn hours and trace times into steps."""
    fail_every_steps: float = 20.0
    """Mean steps between failures in the whole cluster; for scenario=steps."""
    back_after_steps: float = 15.0
    """Steps until a failed unit is back; for scenario=steps."""
    frequency: float = 1.0
    """Divides the times of a scenario or trace: more failures at the same share of time down; 1 for other scenarios."""
    timing: Literal["random", "regular"] = "random"
    """Gaps between failures: exponentially distributed with the scenario's mean, or constant."""
    persistent_nodes: tuple[int, ...] = ()
    """Nodes dead for the whole run; for scenario=persistent."""
    trace_file: str = ""
    """CSV of milliseconds, add|remove, name; for scenario=trace."""
    script: str = ""
    """Failures such as 'fail 3 at 20, back at 50; fail 4 at 25, back at 60'; for scenario=script."""
    auto: AutoConfig = AutoConfig()
    """For policy=auto."""

    def __post_init__(self) -> None:
        """Raises ConfigError where a value is out of range or the chosen scenario lacks what it is made of."""
        check_types(self, "faults.")
        check_range("faults.num_stages", self.num_stages, at_least=1)
        check_range("faults.slack", self.slack, at_least=0)
        check_range("faults.min_live_nodes", self.min_live_nodes, at_least=1)
        check_range("faults.degraded_cost", self.degraded_cost, above=0, at_most=1)
        for field in ("step_seconds", "fail_every_steps", "back_after_steps", "frequency"):
            check_range(f"faults.{field}", getattr(self, field), above=0)
        check_named(
            self,
            "faults",
            "scenario",
            {"persistent": "persistent_nodes", "trace": "trace_file", "script": "script"},
        )
        if self.granularity == "node" and self.num_stages != 1:
            raise ConfigError(
                f"faults.num_stages: got {self.num_stages} with faults.granularity node, expected 1; "
                "set --faults.granularity stage to let stages fail"
            )
        if self.granularity == "stage" and self.num_stages == 1:
            raise ConfigError("faults.num_stages: got 1 with faults.granularity stage, expected at least 2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved and how long it is kept."""

    every: int = 100
    """Steps between saves; 0: only at the end."""
    keep: int = 3
    """Newest checkpoints kept."""
    required: bool = False
    """Whether a failed save in mid-run stops the run (exit 4) instead of being reported."""

    def __post_init__(self) -> None:
        """Raises ConfigError where a count is out of range."""
        check_types(self, "checkpoint.")
        check_range("checkpoint.every", self.every, at_least=0)
        check_range("checkpoint.keep", self.keep, at_least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out text."""

    every: int = 100
    """Steps between evaluations; 0: only at the end."""
    batches: int | None = None
    """Microbatches of validation data evaluated; None: all."""

    def __post_init__(self) -> None:
        """Raises ConfigError where a count is out of range."""
        check_types(self, "eval.")
        check_range("eval.every", self.every, at_least=0)
        check_range("eval.batches", self.batches, at_least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackConfig:
    """Experiment trackers that get the metrics, too; TensorBoard's files are always written."""

    trackers: tuple[Literal["wandb", "trackio"], ...] = ()
    """Each of them wants the extra of its name installed, and its own settings from the environment."""
    project: str = ""
    """Project that the run belongs to there; empty: the run's name."""

    def __post_init__(self) -> None:
        """Raises ConfigError where a tracker is named twice, or a project that none can have."""
        check_types(self, "track.")
        if len(set(self.trackers)) < len(self.trackers):
            raise ConfigError(f"track.trackers: got {', '.join(self.trackers)}, expected each once")
        if self.project and not self.trackers:
            raise ConfigError(
                f"track.project: got {self.project!r} without a tracker; set --track.trackers, or leave it out"
            )
        if self.project and not re.fullmatch(_NAME, self.project):
            raise ConfigError(f"track.project: got {self.project!r}, expected letters, digits and . _ -")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Nodes as processes of their own, which really die; without a coordinator they are emulated in one process."""

    coordinator: str = ""
    """host:port of process 0, which coordinates and trains nothing; auto: found by JAX (SLURM, Kubernetes); empty:
    nodes are emulated in one process."""
    process_id: int | None = None
    """Number of this process: 0 is the coordinator, all others are nodes or spares; None: found by JAX."""
    num_processes: int | None = None
    """Processes in all: the coordinator, the nodes and the spares; None: found by JAX."""
    listen_on: str = ""
    """Address that the coordinator listens on; empty: that of coordinator, so the loopback if that is one."""
    startup_seconds: int = 300
    """Longest wait for all processes to come up; whoever is missing is named meanwhile."""
    heartbeat_seconds: int = 10
    """Silence after which the coordinator takes a process for dead; checked each second."""
    collective_seconds: int = 2
    """Longest wait inside one reduction or transfer, once all have reached it; what a death in it costs at most."""
    progress_seconds: int = 60
    """Time without progress after which a process dumps its stacks and ends itself (exit 124)."""
    first_step_seconds: int = 600
    """The same while programs are compiled, states are read or evaluations run."""
    memory_every: int = 1
    """Steps between copies of the state to shared memory, from which a restart in place goes on; 0: no copies."""
    compile_cache: str = "~/.cache/mecefo_jax/compiled"
    """Where compiled programs are kept, so that a process that comes back need not compile; empty: nowhere."""
    audit: bool = False
    """Whether each process records what it computed (audit/ in the run directory), to prove that nothing was lost."""

    def __post_init__(self) -> None:
        """Raises ConfigError where a value is out of range, or time-outs are not ordered as they must be."""
        check_types(self, "cluster.")
        check_range("cluster.process_id", self.process_id, at_least=0)
        check_range("cluster.num_processes", self.num_processes, at_least=2)
        for field in ("startup_seconds", "heartbeat_seconds", "collective_seconds", "progress_seconds"):
            check_range(f"cluster.{field}", getattr(self, field), at_least=1)
        check_range("cluster.memory_every", self.memory_every, at_least=0)
        if self.coordinator not in ("", "auto"):
            host, colon, port = self.coordinator.rpartition(":")
            if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
                raise ConfigError(f"cluster.coordinator: got {self.coordinator!r}, expected host:port, auto or nothing")
            for field in ("process_id", "num_processes"):
                if getattr(self, field) is None:
                    raise ConfigError(f"cluster.{field}: got none with cluster.coordinator {self.coordinator}; set it")
        if self.listen_on and self.coordinator in ("", "auto"):
            raise ConfigError(
                f"cluster.listen_on: got {self.listen_on} with cluster.coordinator {self.coordinator!r}, which says no "
                "port; set --cluster.coordinator host:port"
            )
        if self.process_id is not None and self.num_processes is not None:
            below = f"less than cluster.num_processes ({self.num_processes})"
            check_fits("cluster.process_id", self.process_id, lambda number: number < (self.num_processes or 0), below)
        self._check_ladder()

    def _check_ladder(self) -> None:
        """Each time-out must be able to act before the next one up does."""
        for field in ("collective_seconds", "heartbeat_seconds"):
            seconds = getattr(self, field)
            if seconds >= self.progress_seconds:
                raise ConfigError(
                    f"cluster.{field}: got {seconds}, expected less than cluster.progress_seconds "
                    f"({self.progress_seconds}): who waits for a dead process must learn of its death before being "
                    "taken for stuck"
                )
        if self.first_step_seconds < self.progress_seconds:
            raise ConfigError(
                f"cluster.first_step_seconds: got {self.first_step_seconds}, expected at least "
                f"cluster.progress_seconds ({self.progress_seconds})"
            )

    @property
    def is_real(self) -> bool:
        """Whether nodes are processes."""
        return bool(self.coordinator)


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
    track: TrackConfig = TrackConfig()
    cluster: ClusterConfig = ClusterConfig()

    def __post_init__(self) -> None:
        """Raises ConfigError where sections do not fit each other."""
        check_types(self, "")
        if not re.fullmatch(_NAME, self.name):
            raise ConfigError(f"name: got {self.name!r}, expected letters, digits and . _ - (it names a directory)")
        self._check_sharding()
        self._check_lengths()
        nodes = self.mesh.num_nodes
        at_most = f"at most mesh.num_nodes ({nodes})"
        check_fits("faults.min_live_nodes", self.faults.min_live_nodes, lambda count: count <= nodes, at_most)
        for node in self.faults.persistent_nodes:
            check_range("faults.persistent_nodes", node, at_least=0, below=nodes)
        self._check_processes()

    def _check_sharding(self) -> None:
        """Whether every sharded dimension divides over the devices of a node."""
        model, fsdp, tensor = self.model, self.mesh.fsdp, self.mesh.tensor
        over_tensor = f"a multiple of mesh.tensor ({tensor})"
        over_fsdp = f"a multiple of mesh.fsdp ({fsdp})"
        check_fits("model.num_heads", model.num_heads, lambda n: n % tensor == 0 and model.fits_heads(n), over_tensor)
        check_fits(
            "model.num_kv_heads", model.kv_heads, lambda n: n % tensor == 0 and model.num_heads % n == 0, over_tensor
        )
        check_fits("model.ffn_size", model.ffn_size, lambda n: n % tensor == 0, over_tensor)
        even_heads = 2 * model.num_heads
        check_fits("model.hidden_size", model.hidden_size, lambda n: n % fsdp == 0 and n % even_heads == 0, over_fsdp)
        check_fits("train.microbatch_size", self.train.microbatch_size, lambda n: n % fsdp == 0, over_fsdp)
        if model.vocab_size is not None:
            check_vocab_size(model.vocab_size, self.mesh)

    def _check_processes(self) -> None:
        """Whether real processes are asked for as a whole: who they are, and that they are what fails."""
        cluster, mesh = self.cluster, self.mesh
        if cluster.is_real != (self.faults.scenario == "live"):
            raise ConfigError(
                f"faults.scenario: got {self.faults.scenario} with cluster.coordinator {cluster.coordinator!r}; set "
                "--faults.scenario live where nodes are processes, and nowhere else (mecefo_jax.launch does)"
            )
        if not cluster.is_real:
            return
        if self.faults.granularity != "node":
            raise ConfigError("faults.granularity: got stage, expected node: the processes that fail are whole nodes")
        if mesh.submesh_count != mesh.num_nodes:
            raise ConfigError(f"mesh.num_submeshes: got {mesh.num_submeshes}, expected none: each node is a process")
        if cluster.num_processes is not None and cluster.num_processes <= mesh.num_nodes:
            raise ConfigError(
                f"cluster.num_processes: got {cluster.num_processes}, expected at least {mesh.num_nodes + 1}: the "
                f"coordinator and mesh.num_nodes ({mesh.num_nodes}) nodes; more are spares"
            )

    def _check_lengths(self) -> None:
        """Whether lengths and periods fit each other."""
        if self.data.seq_len > self.model.max_seq_len:
            raise ConfigError(
                f"data.seq_len: got {self.data.seq_len}, expected at most model.max_seq_len ({self.model.max_seq_len})"
            )
        warmup = self.optim.warmup_steps
        if warmup is not None and warmup >= self.train.steps:
            raise ConfigError(f"optim.warmup_steps: got {warmup}, expected less than train.steps ({self.train.steps})")
        layers = self.model.num_layers
        check_fits(
            "faults.num_stages",
            self.faults.num_stages,
            lambda stages: layers % stages == 0,
            f"a divisor of model.num_layers ({layers})",
        )

    @property
    def compiled_part(self) -> "Config":
        """This config without what compiled programs do not depend on: runs that differ in that alone share them."""
        return dataclasses.replace(
            self,
            name="compiled",
            data=DataConfig(seq_len=self.data.seq_len),
            faults=FaultsConfig(granularity=self.faults.granularity, num_stages=self.faults.num_stages),
            checkpoint=CheckpointConfig(),
            eval=EvalConfig(),
            track=TrackConfig(),
            cluster=ClusterConfig(),
        )

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step (M), whoever computes them."""
        return self.mesh.num_nodes * self.train.microbatches_per_node

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step, over all nodes."""
        return self.num_microbatches * self.train.microbatch_size


def check_devices(mesh: MeshConfig, num_devices: int) -> None:
    """Refuses a mesh that needs more devices than there are.

    Args:
      mesh: how devices form nodes.
      num_devices: devices of this machine, or of all processes together.

    Raises:
      ConfigError: names both counts and the settings that fit.
    """
    if mesh.num_devices <= num_devices:
        return
    per_submesh = mesh.fsdp * mesh.tensor
    fitting = num_devices // per_submesh
    way_out = (
        f"set --mesh.num_submeshes {min(fitting, mesh.num_nodes)}, so that nodes share devices"
        if fitting
        else f"set --mesh.fsdp and --mesh.tensor to a product of at most {num_devices}, with --mesh.num_submeshes 1"
    )
    raise ConfigError(
        f"mesh: {mesh.submesh_count} sub-meshes of fsdp {mesh.fsdp} x tensor {mesh.tensor} need {mesh.num_devices} "
        f"devices, got {num_devices}; {way_out}"
    )


def check_vocab_size(vocab_size: int, mesh: MeshConfig, *, smallest: int = 1) -> None:
    """Refuses a vocabulary that does not divide over the tensor axis.

    Args:
      vocab_size: rows of the embedding table, given or taken from the tokenizer.
      mesh: how devices form nodes.
      smallest: smallest size to name, such as the entries of the tokenizer.

    Raises:
      ConfigError: names the nearest sizes that divide.
    """
    reason = f"a multiple of mesh.tensor ({mesh.tensor})"
    check_fits("model.vocab_size", vocab_size, lambda size: size % mesh.tensor == 0, reason, smallest=smallest)
