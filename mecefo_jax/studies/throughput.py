"""Throughput under the paper's scenarios, predicted: costs of microbatches, and plans over a long run of failures.

Nothing is run. The time of a step is the load of its busiest unit, 1 being a healthy step; what failures cost
otherwise (to notice, to reduce again, to hand a state over) is measured elsewhere and not in here. Costs of degraded
microbatches are ratios of operations (``takeover/cost.py``).
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from configs import get
from mecefo_jax.config import Config, DegradedConfig
from mecefo_jax.errors import TooFewLiveNodesError
from mecefo_jax.faults import make_fault_source
from mecefo_jax.faults.scenario import HOURS
from mecefo_jax.studies.ablation import switches
from mecefo_jax.studies.markdown import table
from mecefo_jax.studies.small_runs import BACKWARDS, REPLICAS, STAGES, accepted_slack
from mecefo_jax.studies.study import Cell, Row, Study
from mecefo_jax.takeover import degraded_costs, make_plan
from mecefo_jax.takeover.auto import expected_errors

RUNS = ("llama_350m", "llama_1b", "llama_7b")
PAPER: dict[str, float] = {"llama_350m": 1.07, "llama_1b": 2.98, "llama_7b": 4.18}
"""Drops that the paper reports under ``high``, in percent."""
PredictedVariant = tuple[str, float | None, str | None, int]
"""Policy, slack of balanced, a name in ``PASSES`` where it degrades anything, and into how many each of the run's
microbatches is divided."""
VARIANTS: tuple[PredictedVariant, ...] = (
    ("neighbor", None, "mrl", 1),
    ("neighbor", None, "ml", 1),
    ("reroute", None, None, 1),
    ("reroute", None, None, 4),
    ("balanced", 0.01, "mrl", 1),
    ("balanced", 0.01, "mrl", 4),
    ("balanced", 0.01, "ml", 1),
    ("balanced", 0.01, "sampled 1/2", 1),
    ("balanced", 0.01, "sampled", 1),
    ("balanced", 0.01, "sampled", 4),
    ("balanced", accepted_slack("sampled to 1/4"), "sampled to 1/4", 1),
    ("balanced", accepted_slack("sampled to 1/4"), "sampled to 1/4", 4),
    ("balanced", accepted_slack("sampled to 1/4 with ffn"), "sampled to 1/4 with ffn", 1),
    ("balanced", accepted_slack("sampled to 1/4 with ffn"), "sampled to 1/4 with ffn", 4),
    ("balanced", accepted_slack("sampled to 1/8"), "sampled to 1/8", 1),
    ("balanced", accepted_slack("sampled to 1/8"), "sampled to 1/8", 4),
    ("auto", None, "mrl", 1),
    ("auto", None, "ml", 1),
    ("auto", None, "sampled to 1/4", 1),
    ("auto", None, "sampled to 1/4", 4),
    ("balanced", 0.1, "ml", 1),
    ("balanced", 0.1, "sampled", 1),
    ("drop", None, None, 1),
)
PASSES: dict[str, DegradedConfig] = {
    "mrl": switches("mrl"),
    "ml": switches("ml"),
    **{
        name: BACKWARDS[name]
        for name in ("sampled 1/2", "sampled", "sampled to 1/4", "sampled to 1/4 with ffn", "sampled to 1/8")
    },
}
"""Degraded backward passes, by their techniques' letters or their names in ``small_runs``."""
_RUN_HOURS, _LOOKS_PER_HOUR = 2000, 20


def cells(quick: bool) -> list[Cell]:
    """Three sizes, three scenarios, both kinds of units."""
    found = []
    names = RUNS[:1] if quick else RUNS
    for name, fails, scenario in itertools.product(names, ("node", "stage"), HOURS):
        config = get(name)
        model = dataclasses.replace(config.model, remat="none")
        settings: dict[str, Any] = {"scenario": scenario, "step_seconds": 3600 / _LOOKS_PER_HOUR}
        mesh, train = config.mesh, config.train
        if fails == "stage":
            settings |= {"granularity": "stage", "num_stages": STAGES}
            mesh = dataclasses.replace(mesh, num_nodes=REPLICAS)
            per_node = train.microbatches_per_node * config.mesh.num_nodes // REPLICAS
            train = dataclasses.replace(train, microbatches_per_node=per_node)
        steps = (20 if quick else _RUN_HOURS) * _LOOKS_PER_HOUR
        config = dataclasses.replace(
            config,
            model=model,
            mesh=mesh,
            train=dataclasses.replace(train, steps=steps),
            faults=dataclasses.replace(config.faults, **settings),
        )
        labels = {"run": name, "fails": fails, "scenario": scenario}
        found.append(Cell(labels=labels, config=config, measure=predict, tries=(VARIANTS, PASSES)))
    return found


def predict(config: Config, workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Loads and tokens of all variants over the looks at a long run."""
    del workdir
    source = make_fault_source(config.faults, num_nodes=config.mesh.num_nodes, seed=config.train.seed)
    looks: dict[bytes, int] = {}
    for look in range(config.train.steps):
        live = source.live(look).tobytes()
        looks[live] = looks.get(live, 0) + 1
    rows = []
    for policy, slack, techniques, pieces in VARIANTS:
        divided = _divided(config, pieces)
        costs = _costs(divided, techniques or "mrl")
        totals = np.zeros(3)
        for live, count in looks.items():
            totals += count * np.array(_step(divided, live, policy, slack or 0.0, costs, techniques))
        time, tokens, degraded = totals / config.train.steps
        rows.append(
            {
                "policy": policy,
                "slack": slack,
                "techniques": techniques,
                "pieces": pieces,
                "microbatches": divided.train.microbatches_per_node,
                "degraded_cost": None if techniques is None else costs[0],
                "least_cost": None if techniques is None else costs[-1],
                "step_time": time,
                "tokens": tokens,
                "degraded_fraction": degraded / tokens,
                "drop_percent": 100 * (1 - tokens / time),
            }
        )
    return rows


def _divided(config: Config, pieces: int) -> Config:
    """The run with smaller microbatches, so many more that a step has as many sequences."""
    train = config.train
    assert train.microbatch_size % pieces == 0
    smaller = {
        "microbatch_size": train.microbatch_size // pieces,
        "microbatches_per_node": train.microbatches_per_node * pieces,
    }
    noisier = dataclasses.replace(config.faults.auto, sampling_error=config.faults.auto.sampling_error * pieces**0.5)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(train, **smaller),
        faults=dataclasses.replace(config.faults, auto=noisier),
    )


def _step(
    config: Config, live: bytes, policy: str, accepted: float, costs: tuple[float, ...], techniques: str | None
) -> tuple[float, float, float]:
    """Time of a step in healthy ones, share of its tokens that are trained on, and share degraded."""
    shape = (config.mesh.num_nodes, config.faults.num_stages)
    live_NS = np.frombuffer(live, bool).reshape(shape)
    try:
        plan = make_plan(
            live_NS,
            policy,
            microbatches_per_node=config.train.microbatches_per_node,
            degraded_costs=costs,
            slack=accepted,
            auto=config.faults.auto,
            errors=expected_errors(config.faults.auto, PASSES[techniques or "mrl"]),
        )
    except TooFewLiveNodesError:  # a stage is dead everywhere: the run waits
        return 1.0, 0.0, 0.0
    kept = float((plan.executor_M >= 0).mean())
    return max(plan.critical_load, 1.0), kept, float(plan.degraded_MS.mean())


@functools.lru_cache(maxsize=16)
def _costs(config: Config, techniques: str) -> tuple[float, ...]:
    return degraded_costs(
        config.model,
        PASSES[techniques],
        rank=config.basis.rank,
        microbatch_tokens=config.train.microbatch_size * config.data.seq_len,
        seq_len=config.data.seq_len,
        vocab_size=config.model.vocab_size or config.data.bpe_vocab_size,
    )


def report(rows: Sequence[Row]) -> str:
    """A table for each kind of unit."""
    parts = [
        f"**Predicted** from operations and the schedule of failures, not measured: {_RUN_HOURS:,} hours of each "
        f"scenario, looked at {_LOOKS_PER_HOUR} times an hour. A step takes as long as its busiest unit; throughput is "
        "tokens trained on per time, relative to a cluster without failures. What a failure itself costs is not in "
        "it (docs/operations.md). Techniques: `mrl` are the paper's; `ml` the same without recomputing, which saves "
        "nothing but memory; `sampled` skips nothing, and makes weight gradients of a sample of the tokens: of "
        "3/4 or half of them, the most that keeps to the slack; `sampled 1/2` always of half; `to 1/4` and `to 1/8` of "
        "6/8, 4/8, 3/8, 2/8 and, the latter, 1/8; `with ffn` the feed-forward's input gradients too, of 7/8, 6/8, "
        "11/16 and 5/8. Exact microbatches recompute nothing.",
        "Microbatches are whole: where a few come to each of many nodes, some have one more than others, for whom all "
        "wait. With four times as many, each a quarter as large, work is spread more evenly. That smaller ones "
        "are slower on an accelerator is not counted. `auto` takes the plan with the least estimated error of those "
        "within 1% of extra time, and where there is none, the one with the most progress a second, which may take "
        "longer than that of `balanced`.",
        "The paper reports drops of 1.07% (350M), 2.98% (1B) and 4.18% (7B) under `high` for its own system, "
        "measured. Its figures for the systems that it compares with are not at hand here.",
    ]
    for fails in dict.fromkeys(row["fails"] for row in rows):
        what = "32 nodes" if fails == "node" else f"{REPLICAS} x {STAGES} pipeline stages"
        parts += [f"### {what}", _table([row for row in rows if row["fails"] == fails])]
    return "\n\n".join(parts)


def _table(rows: Sequence[Row]) -> str:
    lines = []
    for run, *variant in dict.fromkeys((row["run"], *_variant(row)) for row in rows):
        same = {row["scenario"]: row for row in rows if (row["run"], *_variant(row)) == (run, *variant)}
        policy, slack, techniques, _ = variant
        name = policy if slack is None else f"{policy}, slack {slack:g}"
        first = next(iter(same.values()))
        cost = "-" if techniques is None else _range(first)
        drops = [f"{same[scenario]['drop_percent']:.2f}" if scenario in same else "-" for scenario in HOURS]
        degraded = f"{same['high']['degraded_fraction']:.0%}" if "high" in same else "-"
        lines.append([run, name, techniques or "-", first["microbatches"], cost, *drops, degraded])
    scenarios = [f"{scenario}, % lost" for scenario in HOURS]
    columns = [
        "run",
        "policy",
        "techniques",
        "microbatches a node",
        "cost of a degraded one",
        *scenarios,
        "degraded under high",
    ]
    return table(columns, lines, left=3)


def _variant(row: Row) -> PredictedVariant:
    return row["policy"], row["slack"], row["techniques"], row["pieces"]


def _range(row: Row) -> str:
    most, least = f"{row['degraded_cost']:.2f}", f"{row['least_cost']:.2f}"
    return most if most == least else f"{most} to {least}"


def plot(rows: Sequence[Row]) -> Figure:
    """Drops under ``high``: a line for each variant and for the paper's own system, a point on it for each run."""
    kinds = list(dict.fromkeys(row["fails"] for row in rows))
    lines = [_in_words(variant) for variant in VARIANTS] + ["paper, measured"]
    figure = Figure(figsize=(3.5 * len(kinds) + 3.5, 0.2 * len(lines) + 1.2), layout="constrained")
    for axes, fails in zip(figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0], kinds, strict=True):
        chosen = [row for row in rows if row["fails"] == fails and row["scenario"] == "high"]
        for run, marker in zip(dict.fromkeys(row["run"] for row in chosen), "osD", strict=False):
            drops = {_in_words(_variant(row)): row["drop_percent"] for row in chosen if row["run"] == run}
            drops["paper, measured"] = PAPER[run]
            shown = [line for line in lines if line in drops]
            places = [lines.index(line) for line in shown]
            axes.plot([drops[line] for line in shown], places, marker, label=run, markersize=4, alpha=0.8)
        axes.set_yticks(range(len(lines)), lines, fontsize=8)
        axes.set_title(f"{fails}s fail, high", fontsize=10)
        axes.set_xlabel("throughput lost, % (predicted)")
        axes.grid(alpha=0.3)
    figure.axes[0].invert_yaxis()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper right", fontsize=8, ncols=3)
    return figure


def _in_words(variant: PredictedVariant) -> str:
    policy, slack, techniques, pieces = variant
    divided = "" if pieces == 1 else f"{pieces} x as many microbatches"
    return ", ".join(filter(None, (policy, "" if slack is None else f"slack {slack:g}", techniques, divided)))


STUDY = Study(
    title="Throughput under failures, predicted",
    cells=cells,
    columns=(
        "run",
        "fails",
        "scenario",
        "policy",
        "slack",
        "techniques",
        "pieces",
        "microbatches",
        "degraded_cost",
        "least_cost",
        "step_time",
        "tokens",
        "degraded_fraction",
        "drop_percent",
    ),
    report=report,
    plot=plot,
)
