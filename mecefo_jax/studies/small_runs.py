"""The small runs that studies are made of: two sizes, two kinds of failing units, the paper's scenarios in steps.

Real text (the source of Python's standard library) as 258 byte tokens. Models are as deep as the paper's pipelines have
stages, so that a stage is a layer. The rank of the bases is an eighth of the hidden size, as 128 is of 1024.

Scenarios keep the paper's proportions. Its longest run (7B, 15.7 billion tokens) takes 44 hours on 32 accelerators of
312 TFLOP/s at 40% utilization (an estimate: the paper's own time is not known here), in which there are 88 failures
under ``high``, 2.75 for each of 32 units. Each run here is declared to last these 44 hours, whatever its steps. Nodes
are 16 in place of 32, so that each has 8 microbatches; together they fail half as often, and each just as often.
"""

import dataclasses
import pathlib
from typing import Any, Literal

import numpy as np

from mecefo_jax.config import (
    BasisConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DegradedConfig,
    EvalConfig,
    FaultsConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from mecefo_jax.errors import TooFewLiveNodesError
from mecefo_jax.faults import make_fault_source
from mecefo_jax.faults import scenario as scenarios
from mecefo_jax.membership import plan_for

Size = Literal["1M", "1M longer", "1M longest", "5M"]
Granularity = Literal["node", "stage"]

HOURS = 44.0
"""Declared length of every run."""
NODES, REPLICAS, STAGES = 16, 4, 8
"""Units that fail: whole nodes, or the stages of 4 nodes."""
UNITS_OF_PAPER = 32
_SEQ_LEN, _MICROBATCH, _MICROBATCHES = 64, 2, 128
_MODELS: dict[str, tuple[int, int, int]] = {"1M": (104, 280, 4), "5M": (224, 608, 7)}  # hidden, FFN, heads
_LEARNING_RATES = {"1M": 4e-3, "5M": 2e-3}
_STEPS: dict[str, int] = {"1M": 300, "1M longer": 700, "1M longest": 1400, "5M": 100}
_STEPS_OF_TEXT = 700
"""About as many as the text has tokens for; longer runs read it again."""
_QUICK_STEPS = 8

SLACK = 0.01
"""Of ``balanced``, as a fraction of a healthy step; none where degraded passes go far enough to do without."""


def _sampled(*fractions: float, ffn: bool = False) -> DegradedConfig:
    return DegradedConfig(
        remat_ffn=False, skip_attention=False, low_rank=False, sampled_fractions=fractions, sample_ffn=ffn
    )


BACKWARDS: dict[str, DegradedConfig] = {
    "paper": DegradedConfig(remat_ffn=False),
    "l": DegradedConfig(remat_ffn=False, skip_attention=False),
    "sampled": _sampled(0.75, 0.5),
    "sampled 1/2": _sampled(0.5),
    "sampled 3/8": _sampled(0.375),
    "sampled to 1/4": _sampled(0.75, 0.5, 0.375, 0.25),
    "sampled to 1/4 with ffn": _sampled(0.75, 0.5, 0.375, 0.25, ffn=True),
    "sampled to 1/8": _sampled(0.75, 0.5, 0.375, 0.25, 0.125),
}
"""Degraded backward passes that are compared, by the names that tables give them. Nothing is recomputed: that saves
memory, which is not short here, and changes no gradient."""

BACKWARDS_IN_WORDS = (
    "Backward passes of degraded microbatches: `paper` skips attention, and projects the feed-forward's weight "
    "gradients (the paper's m and l); `l` does the latter alone; `sampled` skips nothing, and estimates weight "
    "gradients without bias (not in the paper): from 3/4 or 1/2 of the tokens, the most that keeps to the allowed "
    "time; or always from the fraction that is named; or, `to 1/4` and `to 1/8`, from 6/8, 4/8, 3/8, 2/8 and, the "
    "latter, 1/8. `with ffn` the feed-forward's input gradients are sampled too, from 7/8, 6/8, 11/16 and 5/8."
)

STEPS_IN_WORDS = (
    "Runs have "
    + ", ".join(f"{steps} steps ({size})" for size, steps in _STEPS.items())
    + f"; quick ones {_QUICK_STEPS}. Those of more than {_STEPS_OF_TEXT} read the text more than once."
)

Variant = tuple[str | None, str | None, str | None]
"""Policy, backward pass of degraded microbatches, and source of the bases; None: does not matter."""
VARIANT = ("policy", "backward", "source")
"""Columns of a variant."""
FAILURE_FREE: Variant = (None, None, None)


def size_in_words(size: str) -> str:
    """As titles have it."""
    return ", ".join([f"{_parameters(size)} parameters", *size.split()[1:]])


def _parameters(size: str) -> str:
    return size.split()[0]


def small_run(
    size: Size,
    granularity: Granularity,
    *,
    seed: int,
    quick: bool = False,
    scenario: str = "none",
    frequency: float = 1.0,
    fraction: float = 1.0,
    variant: Variant = FAILURE_FREE,
    **faults: Any,
) -> Config:
    """A run of a study.

    Args:
        size: parameters, about, and whether the run is longer than usual.
        granularity: what fails.
        seed: of initialization, data and failures.
        quick: whether it is to be over in seconds.
        scenario: the paper's low, mid or high; or another one of ``FaultsConfig``.
        frequency: divides the scenario's times.
        fraction: of the usual steps.
        variant: what is done about failures.
        faults: of ``FaultsConfig``.
    """
    hidden, ffn, heads = (16, 24, 2) if quick else _MODELS[_parameters(size)]
    steps = round((_QUICK_STEPS if quick else _STEPS[size]) * fraction)
    nodes, units = (NODES, NODES) if granularity == "node" else (REPLICAS, REPLICAS * STAGES)
    settings: dict[str, Any] = {} if granularity == "node" else {"granularity": "stage", "num_stages": STAGES}
    if scenario in scenarios.HOURS:
        hours_between, hours_down = scenarios.HOURS[scenario]
        settings |= {
            "scenario": "steps",
            "fail_every_steps": hours_between * UNITS_OF_PAPER / units * steps / HOURS / frequency,
            "back_after_steps": hours_down * steps / HOURS / frequency,
        }
    else:
        settings["scenario"] = scenario
    policy, backward, source = variant
    settings |= {"policy": policy or "neighbor", "slack": accepted_slack(backward)}
    basis: dict[str, Any] = {"source": source or "weight"}
    config = Config(
        name=f"study_{_parameters(size)}",
        model=ModelConfig(hidden_size=hidden, ffn_size=ffn, num_layers=STAGES, num_heads=heads, max_seq_len=_SEQ_LEN),
        data=DataConfig(source="builtin", tokenizer="bytes", seq_len=_SEQ_LEN, repeat=steps > _STEPS_OF_TEXT),
        mesh=MeshConfig(num_nodes=nodes, num_submeshes=1),
        train=TrainConfig(
            steps=steps, microbatch_size=_MICROBATCH, microbatches_per_node=_MICROBATCHES // nodes, seed=seed
        ),
        optim=OptimConfig(learning_rate=_LEARNING_RATES[_parameters(size)]),
        degraded=BACKWARDS[backward or "paper"],
        basis=BasisConfig(rank=max(hidden // 8, 1), refresh_every=5, **basis),
        faults=FaultsConfig(**(settings | faults)),
        checkpoint=CheckpointConfig(every=max(steps // 4, 1), keep=1),
        eval=EvalConfig(every=0, batches=8 if quick else None),
    )
    return wait_out(config)


def accepted_slack(backward: str | None) -> float:
    """Load above a healthy step that ``balanced`` accepts, as a fraction of a healthy step."""
    fractions = BACKWARDS[backward].sampled_fractions if backward else ()
    return 0.0 if fractions and fractions[-1] <= 0.25 else SLACK


def wait_out(config: Config) -> Config:
    """A run whose failures are those of the config but for the steps that its policy has no plan for.

    Where a stage is dead everywhere, or under ``drop`` every node is cut, a cluster waits until a unit is back. Such
    steps are left out, and the failures written down as a script.
    """
    source, steps = make_fault_source(config.faults, num_nodes=config.mesh.num_nodes, seed=config.train.seed), 0
    lives: list[np.ndarray] = []
    while len(lives) < config.train.steps:
        assert steps < 100 * config.train.steps, "the policy will never have a plan again"
        live_NS = source.live(steps)
        steps += 1
        if _has_plan(config, live_NS):
            lives.append(live_NS)
    if steps == len(lives):
        return config
    faults = dataclasses.replace(config.faults, scenario="script", script=_script(np.stack(lives)))
    return dataclasses.replace(config, faults=faults)


def _script(live_TNS: np.ndarray) -> str:
    """Clauses for when each stage is down."""
    clauses = []
    for node, stage in np.ndindex(live_TNS.shape[1:]):
        down = np.diff(np.r_[0, ~live_TNS[:, node, stage], 0].astype(int))
        for start, end in zip(np.flatnonzero(down == 1), np.flatnonzero(down == -1), strict=True):
            unit = f"{node}.{stage}" if live_TNS.shape[2] > 1 else str(node)
            clauses.append(f"fail {unit} at {start}, back at {end}")
    return "; ".join(clauses)


def _has_plan(config: Config, live_NS: np.ndarray) -> bool:
    """Whether the policy can do a step with these units."""
    try:
        plan_for(config, live_NS, (0.5,))  # at whatever cost
    except TooFewLiveNodesError:
        return False
    return True


TRAINED_COLUMNS = (
    "eval_loss",
    "eval_perplexity",
    "tokens",
    "failures",
    "degraded_token_fraction",
    "mean_critical_load",
)
"""Of the rows of ``train``."""


def train(config: Config, workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Train, going on from where a checkpoint is; one row of what ``summary.json`` tells."""
    from mecefo_jax import trainer

    summary = trainer.run(config, workdir)
    return [{name: summary[name] for name in TRAINED_COLUMNS}]
