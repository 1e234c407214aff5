"""Wall times, as medians of ratios: contenders take turns in one process, so that what disturbs one disturbs all.

Legend: S slots, L layers, B microbatch size, T sequence length, R rounds.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from mecefo_jax.bench.plain_step import PlainTrainer, adamw, adamw_with_bases
from mecefo_jax.config import Config
from mecefo_jax.degraded.basis import BasisState, Method, low_rank_ffn
from mecefo_jax.errors import RunError
from mecefo_jax.executor import Executor, MicrobatchSource
from mecefo_jax.membership import plan_for
from mecefo_jax.mesh import Cluster, live_mesh, make_cluster, partition_specs, shardings
from mecefo_jax.model import Model, ffn_kernel_mask
from mecefo_jax.node_program import Flat, NodeProgram
from mecefo_jax.optimizer import basis_state
from mecefo_jax.state import TrainState, abstract_state, init_sharded_state
from mecefo_jax.step import NodeBatch, make_reduction, node_gradients, state_for_gradients, update

_SLOTS = 17
_MIN_ROUNDS = 5
_LONG_ENOUGH_S = 0.2  # a loop that takes so long is timed to about a percent


def take_turns(contenders: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, Float[np.ndarray, "R"]]:
    """Wall times of each contender in each round, the order turned about from round to round.

    Args:
        contenders: calls that dispatch work; a call counts until every array of the process is ready.
        seconds: rounds go on for so long, and for at least five.

    Returns:
        Seconds by contender. The first call of each, which compiles, is not counted.
    """
    for contender in contenders.values():
        _timed(contender)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds
    names = list(contenders)
    while len(times[names[0]]) < _MIN_ROUNDS or time.perf_counter() < end:
        for name in names:
            times[name].append(_timed(contenders[name]))
        names.reverse()
    return {name: np.array(times[name]) for name in contenders}


def healthy_step_times(config: Config, vocab_size: int, seconds: float) -> dict[str, Float[np.ndarray, "R"]]:
    """Times of a healthy step: ``ours``, ``plain``, and ``plain_with_bases`` whose optimizer holds the bases too.

    No basis is refreshed meanwhile: that is measured on its own.
    """
    config = _without_refresh(config)
    cluster = make_cluster(config.mesh)
    state = init_sharded_state(config, vocab_size, cluster.submeshes[0])
    microbatch = random_microbatches(config, vocab_size)
    plain = PlainTrainer(config, state, cluster, adamw(config))
    with_bases = PlainTrainer(config, state, cluster, adamw_with_bases(config))
    return take_turns(
        {
            "ours": _stepper(config, cluster, state, microbatch),
            "plain": lambda: plain.train_step(0, microbatch),
            "plain_with_bases": lambda: with_bases.train_step(0, microbatch),
        },
        seconds,
    )


def degraded_time(config: Config, state: TrainState, mesh: Mesh, vocab_size: int, seconds: float) -> float:
    """Time of a degraded microbatch over that of an exact one, on one sub-mesh.

    Each is the slope of ``node_gradients`` between a few microbatches and many, so that what a call costs once cancels.

    Args:
        config: of the run; its remat and techniques count.
        state: on the sub-mesh; only parameters and bases are read.
        mesh: the sub-mesh.
        vocab_size: rows of the embedding table.
        seconds: duration of the measurement.

    Raises:
        RunError: many microbatches took no longer than one, so that the time of one is lost in the machine's noise.
    """
    batch = _batch(config, mesh, vocab_size)
    program = _compile_gradients(config, state, batch, mesh)

    def run(num_exact: int, num_degraded: int) -> Callable[[], Any]:
        counts = jax.device_put((np.int32(num_exact), np.int32(num_degraded)), NamedSharding(mesh, P()))
        counted = dataclasses.replace(batch, num_exact=counts[0], num_degraded=counts[1])
        return lambda: program(state, counted)

    for warm_up in (run(2, 0), run(2, 0)):
        one = _timed(warm_up) / 2
    many = int(np.clip(np.ceil(_LONG_ENOUGH_S / one), 3, _SLOTS - 1)) + 1
    contenders = {
        "exact_few": run(1, 0),
        "exact_many": run(many, 0),
        "degraded_few": run(0, 1),
        "degraded_many": run(0, many),
    }
    times = take_turns(contenders, seconds)
    degraded, exact = (np.median(times[f"{kind}_many"] - times[f"{kind}_few"]) for kind in ("degraded", "exact"))
    if min(degraded, exact) <= 0:
        raise RunError(
            f"{many} microbatches took no longer than one: this machine is too busy for {seconds:g} s of measurement; "
            "give it more with --seconds"
        )
    return float(degraded / exact)


def refresh_times(config: Config, vocab_size: int, seconds: float) -> dict[str, Float[np.ndarray, "R"]]:
    """Times of one refresh of all bases on all nodes, by ``svd`` and by ``subspace``, and of a healthy ``step``."""
    config = _without_refresh(config)
    cluster = make_cluster(config.mesh)
    state = init_sharded_state(config, vocab_size, cluster.submeshes[0])
    contenders = {method: _refresher(config, cluster, state, method) for method in ("svd", "subspace")}
    step = _stepper(config, cluster, state, random_microbatches(config, vocab_size))
    return take_turns({"step": step, **contenders}, seconds)


def compile_seconds(config: Config, vocab_size: int) -> dict[str, float]:
    """Seconds to trace and compile the programs of a step, each alone, from shapes."""
    cluster = make_cluster(config.mesh)
    mesh, num_submeshes = cluster.submeshes[0], len(cluster.submeshes)
    state = abstract_state(config, vocab_size, mesh)
    batch = jax.eval_shape(lambda: _random_batch(config, vocab_size))
    gradients = _gradients_function(config)
    sums = jax.eval_shape(gradients, state, batch)

    def on_mesh(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> float:
        start = time.perf_counter()
        with jax.set_mesh(mesh):
            out = shardings(mesh, jax.eval_shape(function, *args))
            jax.jit(function, out_shardings=out, donate_argnums=donate).lower(*args).compile()
        return time.perf_counter() - start

    seconds = {
        "node_program": on_mesh(gradients, state, batch),
        "update": on_mesh(lambda state, sums: update(state, sums, config), state, sums, donate=(0,)),
    }
    whole_mesh = live_mesh(cluster, range(num_submeshes))
    specs = jax.tree.map(lambda spec: P(None, *spec), partition_specs(sums), is_leaf=lambda leaf: isinstance(leaf, P))
    stacked = jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(
            (num_submeshes, *leaf.shape), leaf.dtype, sharding=NamedSharding(whole_mesh, P("data", *spec[1:]))
        ),
        sums,
        specs,
    )
    start = time.perf_counter()
    make_reduction(specs, whole_mesh).lower(stacked).compile()  # type: ignore[attr-defined]
    return seconds | {"reduction": time.perf_counter() - start}


def random_microbatches(config: Config, vocab_size: int) -> MicrobatchSource:
    """The same random tokens in every step."""
    shape = (config.num_microbatches, config.train.microbatch_size, config.data.seq_len + 1)
    tokens_MBT = np.random.default_rng(config.train.seed).integers(0, vocab_size, shape, np.int32)
    return lambda step, microbatch_id: tokens_MBT[microbatch_id]


def _timed(contender: Callable[[], Any]) -> float:
    start = time.perf_counter()
    result = contender()
    jax.block_until_ready((result, jax.live_arrays()))  # the state of all nodes too, which no result shows
    return time.perf_counter() - start


def _stepper(config: Config, cluster: Cluster, state: TrainState, microbatch: MicrobatchSource) -> Callable[[], Any]:
    """A healthy step of the executor."""
    executor = Executor(config, cluster, jax.tree.map(jnp.copy, state))  # it donates what it is given
    plan = plan_for(config, np.ones((config.mesh.num_nodes, 1), bool), (1.0,))
    return lambda: executor.train_step(0, plan, microbatch)


def _refresher(config: Config, cluster: Cluster, state: TrainState, method: Method) -> Callable[[], Any]:
    """A refresh of all bases on all sub-meshes, from the weights; from the moment it costs the same."""
    transformation = low_rank_ffn(config.basis.rank, 1, ffn_mask=ffn_kernel_mask, source="weight", method=method)

    def refresh(params: Model, bases: BasisState) -> BasisState:
        return transformation.update(params, bases, params)[1]

    program = NodeProgram(refresh, cluster.submeshes)
    read = (state.params, basis_state(state.opt_state))
    placed = [jax.device_put(read, shardings(mesh, read)) for mesh in cluster.submeshes]
    arguments = [tuple(map(Flat.of, own)) for own in placed]
    return lambda: [program(index, *own).leaves for index, own in enumerate(arguments)]


def _gradients_function(config: Config) -> Callable[..., Any]:
    """``node_gradients`` as the executor compiles it."""
    return lambda state, batch: node_gradients(*state_for_gradients(state), batch, config=config, layer_masks="all")


def _compile_gradients(config: Config, state: TrainState, batch: NodeBatch, mesh: Mesh) -> jax.stages.Compiled:
    function = _gradients_function(config)
    with jax.set_mesh(mesh):
        out = shardings(mesh, jax.eval_shape(function, state, batch))
        return jax.jit(function, out_shardings=out).lower(state, batch).compile()


def _random_batch(config: Config, vocab_size: int) -> NodeBatch:
    shape = (_SLOTS, config.train.microbatch_size, config.data.seq_len + 1)
    return NodeBatch(
        tokens_SBT=jax.random.randint(jax.random.key(config.train.seed), shape, 0, vocab_size, jnp.int32),
        ids_S=jnp.zeros((_SLOTS,), jnp.int32),
        level_SL=jnp.ones((_SLOTS, config.model.num_layers), jnp.int8),
        num_exact=jnp.int32(0),
        num_degraded=jnp.int32(0),
    )


def _batch(config: Config, mesh: Mesh, vocab_size: int) -> NodeBatch:
    """Random tokens for all slots, on the sub-mesh."""
    batch = _random_batch(config, vocab_size)
    whole = NamedSharding(mesh, P())
    specs = dataclasses.replace(jax.tree.map(lambda _: whole, batch), tokens_SBT=NamedSharding(mesh, P(None, "fsdp")))
    return jax.device_put(batch, specs)


def _without_refresh(config: Config) -> Config:
    return dataclasses.replace(config, basis=dataclasses.replace(config.basis, refresh_every=2**30))
