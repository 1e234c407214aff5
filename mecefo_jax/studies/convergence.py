"""Momentum SGD on n nodes with failures: does the gradient's norm fall as 1/sqrt(nT), the rate without failures?

The claim is about the mean over the T steps of the squared gradient norm, at a learning rate proportional to sqrt(n /
T). Each node adds as many sequences to a step, so n nodes have n times the batch. Of these, under ``neighbor``, the
ones of dead nodes and of those that cover for them are degraded. The norm is that of the exact gradient on held-out
text, at some of the steps.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree
from matplotlib.figure import Figure

from mecefo_jax.batches import BatchPlacer
from mecefo_jax.config import Config
from mecefo_jax.degraded.basis import low_rank_ffn
from mecefo_jax.faults import make_fault_source
from mecefo_jax.inputs import open_inputs
from mecefo_jax.membership import run_degraded_costs
from mecefo_jax.mesh import Work, make_cluster
from mecefo_jax.model import Model, compute_dtype, ffn_kernel_mask, init_model, loss_sum
from mecefo_jax.step import NodeBatch, average_gradients, node_gradients
from mecefo_jax.studies.markdown import table
from mecefo_jax.studies.small_runs import small_run
from mecefo_jax.studies.study import Cell, Row, Study
from mecefo_jax.takeover import make_plan

NODES = (1, 2, 4, 8)
STEPS = (50, 100, 200, 400, 800)
_LEARNING_RATE, _MOMENTUM = 0.002, 0.9
"""The rate is that of one node and the fewest steps."""
_PER_NODE, _LOOKS, _HELD_OUT = 4, 25, 64


def cells(quick: bool) -> list[Cell]:
    """Each number of nodes and of steps, with failures and without."""
    found = []
    counts, lengths = ((2,), (8,)) if quick else (NODES, STEPS)
    for nodes, steps, fails in itertools.product(counts, lengths, (False, True)):
        if nodes == 1 and fails:
            continue  # nobody could cover for it
        config = small_run("1M", "node", seed=0, quick=True)
        # A node fails once in 16 hours, and is down for 2: an eighth of the time, as under high.
        gap: dict[str, Any] = {"fail_every_steps": steps / 5 / nodes, "back_after_steps": steps / 40} if fails else {}
        config = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, hidden_size=32, ffn_size=80, num_layers=4),
            mesh=dataclasses.replace(config.mesh, num_nodes=nodes),
            train=dataclasses.replace(config.train, steps=steps, microbatches_per_node=_PER_NODE),
            basis=dataclasses.replace(config.basis, rank=4),
            faults=dataclasses.replace(config.faults, scenario="steps" if fails else "none", **gap),
        )
        labels = {"nodes": nodes, "steps": steps, "failures": "yes" if fails else "no"}
        tries = (_LEARNING_RATE, _MOMENTUM, _LOOKS, _HELD_OUT)
        found.append(Cell(labels=labels, config=config, measure=measure, tries=tries))
    return found


def measure(config: Config, workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Train by momentum SGD; the mean over steps of the squared norm of the exact gradient."""
    del workdir
    inputs, nodes, steps = open_inputs(config), config.mesh.num_nodes, config.train.steps
    params = init_model(config.model, inputs.vocab_size, config.train.seed)
    bases = low_rank_ffn(config.basis.rank, config.basis.refresh_every, ffn_mask=ffn_kernel_mask, project=False)
    rate = _LEARNING_RATE * math.sqrt(nodes / (steps / STEPS[0]))
    optimizer = optax.sgd(rate, momentum=_MOMENTUM)
    step_function, gradient = _step(config, optimizer, bases), _exact_gradient(config, inputs.held_out)
    opt_state, basis_state = optimizer.init(params), bases.init(params)
    batches, squares, degraded = _batches(config, inputs.vocab_size, inputs.sampler.microbatch), [], 0.0
    for step in range(steps):
        if step % max(steps // _LOOKS, 1) == 0:
            squares.append(float(optax.tree.norm(gradient(params), squared=True)))
        batch, share = batches(step)
        degraded += share / steps
        params, opt_state, basis_state = step_function(params, opt_state, basis_state, batch)
    return [{"squared_norm": float(np.mean(squares)), "degraded": degraded, "learning_rate": rate}]


def _step(
    config: Config, optimizer: optax.GradientTransformation, bases: optax.GradientTransformationExtraArgs
) -> Callable[..., Any]:
    @jax.jit
    def step(params: Model, opt_state: PyTree, basis_state: Any, batch: NodeBatch) -> tuple[Model, PyTree, Any]:
        sums = node_gradients(params, basis_state.bases, batch, config, "all")
        grads = average_gradients(sums, config.degraded)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer step counts
            updates, opt_state = optimizer.update(grads, opt_state, params)
            _, basis_state = bases.update(grads, basis_state, params)
        return optax.apply_updates(params, updates), opt_state, basis_state

    return step


def _batches(config: Config, vocab_size: int, microbatch: Callable[[int, int], np.ndarray]) -> Callable[[int], Any]:
    """The whole step's work as one batch, and the share of it that is degraded."""
    source = make_fault_source(config.faults, num_nodes=config.mesh.num_nodes, seed=config.train.seed)
    place = BatchPlacer(config, make_cluster(config.mesh).submeshes[0], config.num_microbatches)
    costs = run_degraded_costs(config, vocab_size)

    def batch(step: int) -> tuple[NodeBatch, float]:
        live_NS = source.live(step)
        if not live_NS.any():
            live_NS = np.ones_like(live_NS)  # with nobody left the cluster waits; here nothing waits
        plan = make_plan(live_NS, "neighbor", microbatches_per_node=_PER_NODE, degraded_costs=costs, slack=0.0)
        exact = np.flatnonzero(~plan.any_degraded_M)
        placed = place(
            Work(exact, plan.degraded),
            plan.layer_levels(config.model.num_layers),
            functools.partial(microbatch, step),
        )
        return placed, len(plan.degraded) / plan.num_microbatches

    return batch


def _exact_gradient(config: Config, held_out: Sequence[np.ndarray]) -> Callable[[Model], Model]:
    tokens_BT = jnp.asarray(np.concatenate(list(itertools.islice(held_out, _HELD_OUT))))

    def loss(params: Model) -> jax.Array:
        total, count = loss_sum(params, tokens_BT, compute_dtype(config.model))
        return total / count.astype(jnp.float32)

    return jax.jit(jax.grad(loss))


def slope(rows: Sequence[Row], failures: str) -> float:
    """Exponent of nT in the mean squared gradient norm, by least squares on logarithms; -0.5 is the rate claimed."""
    chosen = [row for row in rows if row["failures"] == failures]
    x = np.log([row["nodes"] * row["steps"] for row in chosen])
    y = np.log([row["squared_norm"] for row in chosen])
    return float(np.polyfit(x, y, 1)[0]) if len(set(x)) > 1 else math.nan


def ratios(rows: Sequence[Row]) -> list[float]:
    """The norm with failures relative to that without, ascending, of each number of nodes and steps that has both."""
    norms = {(row["nodes"], row["steps"], row["failures"]): row["squared_norm"] for row in rows}
    return sorted(
        norm / norms[nodes, steps, "no"]
        for (nodes, steps, failures), norm in norms.items()
        if failures == "yes" and (nodes, steps, "no") in norms
    )


def _ratio_in_words(rows: Sequence[Row]) -> str:
    found = ratios(rows)
    if not found:
        return ""
    median = float(np.median(found))
    return f" With failures it is {median:.2f} times that without in the median, {found[0]:.2f} to {found[-1]:.2f}."


def report(rows: Sequence[Row]) -> str:
    """The norm by nodes and steps, and the exponents."""
    lines = []
    for nodes, steps in sorted({(row["nodes"], row["steps"]) for row in rows}):
        values = []
        for failures in ("no", "yes"):
            like = (nodes, steps, failures)
            found = [row for row in rows if (row["nodes"], row["steps"], row["failures"]) == like]
            values.append(f"{np.mean([row['squared_norm'] for row in found]):.4g}" if found else "-")
        share = [
            row["degraded"] for row in rows if (row["nodes"], row["steps"], row["failures"]) == (nodes, steps, "yes")
        ]
        lines.append([nodes, steps, nodes * steps, *values, f"{np.mean(share):.0%}" if share else "-"])
    what = (
        f"Momentum SGD ({_MOMENTUM}) on a model of 60,000 parameters, learning rate {_LEARNING_RATE} for one node and "
        f"{STEPS[0]} steps, and proportional to sqrt(n / T); a node is "
        "down an eighth of the time, policy `neighbor`. The figure is the mean over the run of the squared norm of "
        "the exact gradient on held-out text; one seed. Least squares on logarithms gives it as (nT) to the "
        f"power of {slope(rows, 'no'):.2f} without failures and {slope(rows, 'yes'):.2f} with them; the claim is at "
        f"most -0.5.{_ratio_in_words(rows)}"
    )
    columns = ["nodes n", "steps T", "nT", "without failures", "with failures", "degraded"]
    return f"{what}\n\n{table(columns, lines, left=0)}"


def plot(rows: Sequence[Row]) -> Figure:
    """Against nT, on logarithmic axes, beside 1/sqrt(nT)."""
    figure = Figure(figsize=(5.4, 4), layout="constrained")
    axes = figure.subplots()
    for failures, marker in (("no", "o"), ("yes", "x")):
        for nodes in NODES:
            chosen = [row for row in rows if (row["nodes"], row["failures"]) == (nodes, failures)]
            if chosen:
                label = f"n = {nodes}{', failures' if failures == 'yes' else ''}"
                x = [row["nodes"] * row["steps"] for row in chosen]
                axes.loglog(x, [row["squared_norm"] for row in chosen], marker, label=label, alpha=0.8)
    totals = np.array(sorted({row["nodes"] * row["steps"] for row in rows}), float)
    start = np.mean([row["squared_norm"] for row in rows if row["nodes"] * row["steps"] == totals[0]])
    axes.loglog(totals, start * np.sqrt(totals[0] / totals), "k--", linewidth=1, label="1/sqrt(nT)")
    axes.set_xlabel("nT")
    axes.set_ylabel("mean squared gradient norm")
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3, which="both")
    return figure


STUDY = Study(
    title="Convergence of momentum SGD",
    cells=cells,
    columns=("nodes", "steps", "failures", "squared_norm", "degraded", "learning_rate"),
    report=report,
    plot=plot,
)
