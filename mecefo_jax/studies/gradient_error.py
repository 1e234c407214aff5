"""Relative error of a step's gradient against the exact one, along the exact run: by policy, basis, rank and period.

The run itself is failure-free. At some of its steps, failures are put on trial: the step's gradient under the plan that
a policy makes of them is compared with the exact gradient of the same step. Bases are exact ones (by SVD), of the
weight or of Adam's first moment as they were at the last refresh before the step.

The gradient under a plan is put together from sums over microbatches, which add up: all of them exact, less the exact
ones of those that are degraded, plus the degraded ones.

An error may be noise, of which little is left over many steps, or bias, which adds up. So each trial is repeated with
other batches at the same parameters, and the mean of these errors is told too: of four, noise leaves half of a single
error, and bias all of it.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree
from matplotlib.figure import Figure

from mecefo_jax.batches import BatchPlacer
from mecefo_jax.config import Config, DegradedConfig
from mecefo_jax.degraded.basis import top_left_singular_vectors
from mecefo_jax.executor import Executor
from mecefo_jax.inputs import open_inputs
from mecefo_jax.membership import run_degraded_costs
from mecefo_jax.mesh import Work, make_cluster
from mecefo_jax.model import Model, attention_mask, ffn_kernel_mask
from mecefo_jax.optimizer import first_moment
from mecefo_jax.state import TrainState, init_sharded_state
from mecefo_jax.step import LayerMasks, Sums, average_gradients, node_gradients
from mecefo_jax.studies.markdown import table
from mecefo_jax.studies.small_runs import (
    BACKWARDS,
    BACKWARDS_IN_WORDS,
    NODES,
    REPLICAS,
    SLACK,
    STAGES,
    Granularity,
    accepted_slack,
    small_run,
)
from mecefo_jax.studies.study import Cell, Row, Study
from mecefo_jax.takeover import Plan, make_plan

_EXACT = DegradedConfig(skip_attention=False, remat_ffn=False, low_rank=False)
GROUPS = ("all", "feed-forward", "attention", "rest")
"""Parameter groups: all; kernels of feed-forwards; attention and norm1; embedding, head and the other norms."""
_SOURCES = ("weight", "momentum")
_PASSES = tuple(
    (policy, name, source)
    for policy, names in (
        ("neighbor", ("paper", "l", "sampled 1/2")),
        ("balanced", ("paper", "l", "sampled 1/2", "sampled", "sampled to 1/8")),
    )
    for name in names
    for source in (_SOURCES if BACKWARDS[name].low_rank else (None,))
)
"""Policies, their backward passes of degraded microbatches, and what bases are made of, if there are any."""
_LOOKS, _BATCHES = 3, 4


@dataclasses.dataclass(frozen=True)
class Trial:
    """What is tried at a step."""

    down: int
    """Units that are down, neighbours or not, drawn at random."""
    policy: str
    backward: str | None = None
    """Of degraded microbatches, a name in ``BACKWARDS``; None: the plan degrades nothing, so that there are none."""
    source: str | None = None
    """Of the bases."""
    rank: int | None = None
    period: int | None = None
    """Steps between refreshes."""


def trials(config: Config) -> list[Trial]:
    """One unit down and an eighth of all; ranks and periods around the config's own, on the policy ``neighbor``."""
    units = config.mesh.num_nodes * config.faults.num_stages
    rank, period = config.basis.rank, config.basis.refresh_every
    found = []
    most = max(units // 8, 1)
    for down in sorted({1, most}):
        found.append(Trial(down, "drop"))
        for policy, backward, source in _PASSES:
            basis = (None, None) if source is None else (rank, period)
            found.append(Trial(down, policy, backward, source, *basis))
    others = [(other, period) for other in (rank // 4, rank // 2, 2 * rank, 4 * rank) if other]
    others += [(rank, other) for other in (1, 4 * period, 16 * period)]
    for source, (other_rank, other_period) in itertools.product(_SOURCES, others):
        found.append(Trial(most, "neighbor", "l", source, other_rank, other_period))
    return found


def measure(config: Config, workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Train without failures and try failures at some of the steps; minutes, and not resumed."""
    del workdir
    inputs = open_inputs(config)
    cluster = make_cluster(config.mesh)
    executor = Executor(config, cluster, init_sharded_state(config, inputs.vocab_size, cluster.submeshes[0]))
    everything = np.ones((config.mesh.num_nodes, config.faults.num_stages), bool)
    healthy = _plan(config, inputs.vocab_size, everything, "reroute", None)
    step_error = StepError(config, inputs.vocab_size, functools.partial(_microbatch, inputs.sampler.microbatch))
    tried, rows = trials(config), []
    periods = {trial.period for trial in tried if trial.period is not None}
    every = -(-config.train.steps // (_LOOKS + 1))  # rounded up, so that there are no more looks than that
    for step in range(config.train.steps):
        state = executor.state
        step_error.remember(step, state, [period for period in periods if step % period == 0])
        if step and step % every == 0:
            rows += [{"step": step} | row for row in step_error(step, state, tried)]
        executor.train_step(step, healthy, inputs.sampler.microbatch)
    return rows


def _microbatch(source: Callable[[int, int], np.ndarray], step: int, number: int) -> np.ndarray:
    return source(step, number)


class StepError:
    """Errors of one step's gradient under trials."""

    def __init__(self, config: Config, vocab_size: int, microbatch: Callable[[int, int], np.ndarray]) -> None:
        """For the steps of a run."""
        self._config, self._vocab_size, self._microbatch = config, vocab_size, microbatch
        self._mesh = make_cluster(config.mesh).submeshes[0]
        self._place = BatchPlacer(config, self._mesh, config.num_microbatches)
        self._masks: LayerMasks = "all" if config.faults.granularity == "node" else "by_layer"
        self._gradients = functools.cache(self._compile)
        self._seen: dict[tuple[int | None, str], PyTree] = {}

    def _compile(self, switches: DegradedConfig) -> Callable[..., Sums]:
        config = dataclasses.replace(self._config, degraded=switches)
        return jax.jit(lambda params, bases, batch: node_gradients(params, bases, batch, config, self._masks))

    def remember(self, step: int, state: TrainState, periods: Sequence[int]) -> None:
        """Keep what bases that are refreshed now are made of."""
        moment = first_moment(state.opt_state) if step else state.params  # bases are first made of the weights
        for period in periods:
            for source, tree in (("weight", state.params), ("momentum", moment)):
                self._seen[period, source] = jax.tree.map(np.asarray, tree)

    def __call__(self, step: int, state: TrainState, tried: Sequence[Trial]) -> list[dict[str, Any]]:
        """A row for each trial and parameter group."""
        live_of = {down: _draw(self._config, step, down) for down in {trial.down for trial in tried}}
        batches = range(step, step + _BATCHES)
        everything = np.arange(self._config.num_microbatches)
        exact = [self._sums(batch, state.params, everything) for batch in batches]
        reference = [average_gradients(sums, _EXACT) for sums in exact]
        rows = []
        for trial in tried:
            switches = _switches(trial.backward)
            plan = _plan(self._config, self._vocab_size, live_of[trial.down], trial.policy, trial.backward)
            bases = None if trial.source is None else _bases(self._seen[trial.period, trial.source], trial.rank)
            differences = [
                jax.tree.map(
                    np.subtract,
                    average_gradients(self._under(batch, state.params, sums, plan, trial, bases), switches),
                    right,
                )
                for batch, sums, right in zip(batches, exact, reference, strict=True)
            ]
            mean = jax.tree.map(lambda *parts: np.mean(parts, axis=0), *differences)
            errors, of_mean = relative_norms(differences[0], reference[0]), relative_norms(mean, reference[0])
            for name in GROUPS:
                rows.append(
                    dataclasses.asdict(trial) | {"group": name, "error": errors[name], "of_mean": of_mean[name]}
                )
        return rows

    def _under(self, step: int, params: Model, exact: Sums, plan: Plan, trial: Trial, bases: PyTree) -> Sums:
        """Sums over the microbatches of a step's number under a plan."""
        sums = exact
        for numbers in (plan.dropped, plan.degraded):
            if len(numbers):
                sums = jax.tree.map(np.subtract, sums, self._sums(step, params, numbers))
        if len(plan.degraded):
            assert trial.backward is not None
            degraded = self._sums(step, params, plan.degraded, plan, bases, BACKWARDS[trial.backward])
            sums = jax.tree.map(np.add, sums, degraded)
        return sums

    def _sums(
        self,
        step: int,
        params: Model,
        numbers: np.ndarray,
        plan: Plan | None = None,
        bases: PyTree = None,
        switches: DegradedConfig = _EXACT,
    ) -> Sums:
        """Over some microbatches, as the plan degrades them; None: exactly."""
        layers = self._config.model.num_layers
        nothing = np.zeros((self._config.num_microbatches, layers), np.int8)
        none, ids = np.array([], np.int64), np.asarray(numbers, np.int64)
        work = Work(ids, none) if plan is None else Work(none, ids)
        level_ML = nothing if plan is None else plan.layer_levels(layers)
        batch = self._place(work, level_ML, functools.partial(self._microbatch, step))
        return jax.device_get(self._gradients(switches)(params, bases, batch))


def relative_norms(difference: Model, gradient: Model) -> dict[str, float]:
    """``||difference|| / ||gradient||`` (Frobenius) over all parameters, and over each group."""
    attention, kernels = attention_mask(gradient), ffn_kernel_mask(gradient)
    masks = {
        "all": jax.tree.map(lambda _: True, attention),
        "feed-forward": kernels,
        "attention": attention,
        "rest": jax.tree.map(lambda a, b: not (a or b), attention, kernels),
    }
    return {name: _norm(difference, mask) / _norm(gradient, mask) for name, mask in masks.items()}


def _norm(tree: PyTree, mask: PyTree) -> float:
    chosen = [leaf for leaf, is_in in zip(jax.tree.leaves(tree), jax.tree.leaves(mask), strict=True) if is_in]
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in chosen)))


def _bases(sources: PyTree, rank: int | None) -> PyTree:
    """Exact bases of the kernels that have one, None elsewhere."""
    basis = jax.jit(top_left_singular_vectors, static_argnames="rank")
    return jax.tree.map(
        lambda has_basis, source: basis(source, rank=rank) if has_basis else None,
        ffn_kernel_mask(sources),
        sources,
    )


def _switches(backward: str | None) -> DegradedConfig:
    return _EXACT if backward is None else BACKWARDS[backward]


def _draw(config: Config, step: int, down: int) -> np.ndarray:
    """Random units that are down; at least one node has all of them live."""
    rng = np.random.default_rng([config.train.seed, step, down])
    while True:
        live_NS = np.ones((config.mesh.num_nodes, config.faults.num_stages), bool)
        live_NS.flat[rng.choice(live_NS.size, down, replace=False)] = False
        if live_NS.all(axis=1).any():
            return live_NS


def _plan(config: Config, vocab_size: int, live_NS: np.ndarray, policy: str, backward: str | None) -> Plan:
    return make_plan(
        live_NS,
        policy,
        microbatches_per_node=config.train.microbatches_per_node,
        degraded_costs=run_degraded_costs(dataclasses.replace(config, degraded=_switches(backward)), vocab_size),
        slack=accepted_slack(backward),
    )


def cells(quick: bool) -> list[Cell]:
    """1M, both kinds of units; one seed, for there are several steps and batches already."""
    granularities: tuple[Granularity, ...] = ("node", "stage")
    return [
        Cell(
            labels={"size": "1M", "fails": fails, "seed": 0},
            config=small_run("1M", fails, seed=0, quick=quick),
            measure=measure,
            tries=(trials(small_run("1M", fails, seed=0, quick=quick)), _LOOKS, _BATCHES),
        )
        for fails in granularities
    ]


def report(rows: Sequence[Row]) -> str:
    """Policies, backward passes and bases at the config's own rank and period; then ranks and periods."""
    parts = [
        "Relative error of the step's gradient against the exact one (Frobenius norms): the median over "
        f"{_LOOKS} steps of the run; in brackets, that of the mean over {_BATCHES} batches at the "
        "same parameters: of noise half is left, of bias all. "
        f"Of {NODES} nodes, or of {REPLICAS} x {STAGES} pipeline stages, one unit or an eighth "
        "of all is down, drawn at random. `reroute` is exact. `drop` leaves out what others approximate: its error is "
        f"that of a smaller sample. `balanced` may take {SLACK:.0%} more time than a healthy step, "
        "but none with `sampled to 1/8`.",
        BACKWARDS_IN_WORDS,
    ]
    for size, fails in dict.fromkeys((row["size"], row["fails"]) for row in rows):
        chosen = [row for row in rows if (row["size"], row["fails"]) == (size, fails)]
        rank, period = _own(chosen)
        parts.append(f"### {size} parameters; {fails}s fail; rank {rank}, refreshed each {period} steps")
        parts.append(_policy_table(chosen, rank, period))
        parts.append("Feed-forward kernels at other ranks and periods: `neighbor`, `l`, an eighth of the units down.")
        parts.append(_basis_table(chosen, rank, period))
    return "\n\n".join(parts)


def _own(rows: Sequence[Row]) -> tuple[int, int]:
    """Rank and period at which policies are compared: those of ``balanced``."""
    row = next(row for row in rows if row["policy"] == "balanced" and row["source"])
    return row["rank"], row["period"]


def _policy_table(rows: Sequence[Row], rank: int, period: int) -> str:
    lines = []
    for down in sorted({row["down"] for row in rows}):
        for policy, backward, source in (("drop", None, None), *_PASSES):
            like = {"down": down, "policy": policy, "backward": backward, "source": source}
            if source is not None:
                like |= {"rank": rank, "period": period}
            errors = [_both(rows, like | {"group": group}) for group in GROUPS]
            lines.append([down, policy, backward or "-", source or "-", *errors])
    return table(["down", "policy", "backward", "basis of", *GROUPS], lines, left=4)


def _basis_table(rows: Sequence[Row], rank: int, period: int) -> str:
    down = max(row["down"] for row in rows)
    like = ("neighbor", "l", down)
    neighbor = [row for row in rows if (row["policy"], row["backward"], row["down"]) == like]
    lines = []
    for other_rank, other_period in sorted({(row["rank"], row["period"]) for row in neighbor}):
        if rank != other_rank and period != other_period:
            continue
        basis = {"rank": other_rank, "period": other_period, "group": "feed-forward"}
        errors = [_median(neighbor, basis | {"source": source}) for source in _SOURCES]
        ratio = errors[1] / errors[0]
        lines.append([other_rank, other_period, *(f"{error:.3f}" for error in errors), f"{ratio:.2f}"])
    return table(["rank", "period", *_SOURCES, "momentum / weight"], lines, left=2)


def _both(rows: Sequence[Row], like: Mapping[str, Any]) -> str:
    return f"{_median(rows, like):.2f} ({_median(rows, like, 'of_mean'):.2f})"


def _median(rows: Sequence[Row], like: Mapping[str, Any], what: str = "error") -> float:
    return float(np.median([row[what] for row in rows if all(row[name] == value for name, value in like.items())]))


_LINES: tuple[tuple[str, str | None, str | None, str], ...] = (
    ("drop", None, None, "k-"),
    ("neighbor", "paper", "weight", "C0-"),
    ("balanced", "paper", "weight", "C1-"),
    ("balanced", "paper", "momentum", "C1--"),
    ("balanced", "sampled", None, "C2-"),
)
"""What the plot shows."""


def plot(rows: Sequence[Row]) -> Figure:
    """Errors over training, of all parameters, an eighth of the units down."""
    panels = list(dict.fromkeys((row["size"], row["fails"]) for row in rows))
    figure = Figure(figsize=(3.4 * len(panels) + 2, 3.6), layout="constrained")
    for axes, (size, fails) in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True):
        chosen = [row for row in rows if (row["size"], row["fails"], row["group"]) == (size, fails, "all")]
        rank, period = _own(chosen)
        down = max(row["down"] for row in chosen)
        steps = sorted({row["step"] for row in chosen})
        for policy, backward, source, style in _LINES:
            like: dict[str, Any] = {"down": down, "policy": policy, "backward": backward, "source": source}
            like |= {} if source is None else {"rank": rank, "period": period}
            errors = [_median(chosen, like | {"step": step}) for step in steps]
            label = ", ".join(filter(None, (policy, backward, source)))
            axes.plot(steps, errors, style, marker=".", label=label)
        axes.set_title(f"{size}, {down} {fails}s down", fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylim(bottom=0)
    figure.axes[0].set_ylabel("relative error of the gradient")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    return figure


STUDY = Study(
    title="Error of the gradient",
    cells=cells,
    columns=(
        "size",
        "fails",
        "seed",
        "step",
        "down",
        "policy",
        "backward",
        "source",
        "rank",
        "period",
        "group",
        "error",
        "of_mean",
    ),
    report=report,
    plot=plot,
)
