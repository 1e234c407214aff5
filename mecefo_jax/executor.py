"""Runs plans on the cluster: one step, one set of live nodes after another.

Holds each live sub-mesh's copy of the train state. A dead node's copy is gone; one that comes back receives the state
of a live one. All calls but ``evaluate`` return before the devices are done.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PyTree

from mecefo_jax.batches import BatchPlacer, MicrobatchSource, in_parts
from mecefo_jax.config import Config
from mecefo_jax.mesh import Cluster, Work, live_mesh, reassign, shardings, spec_of, stack, views
from mecefo_jax.model import loss_sum
from mecefo_jax.node_program import Flat, NodeProgram
from mecefo_jax.state import TrainState
from mecefo_jax.step import (
    LayerMasks,
    NodeBatch,
    Objective,
    StepMetrics,
    Sums,
    evaluate,
    make_reduction,
    node_gradients,
    state_for_gradients,
    update,
)
from mecefo_jax.takeover import Plan


class Programs:
    """What is compiled for a cluster: node programs once, and a reduction for each set of live sub-meshes."""

    def __init__(self, config: Config, cluster: Cluster, objective: Objective):
        """Compile nothing yet."""
        masks: LayerMasks = "all" if config.faults.granularity == "node" else "by_layer"

        def sums(state: TrainState, batch: NodeBatch) -> Sums:
            return _with_leading_axis(node_gradients(*state_for_gradients(state), batch, config, masks, objective))

        def apply(state: TrainState, sums: Sums) -> tuple[TrainState, StepMetrics]:
            return update(state, _without_leading_axis(sums), config)

        def loss(state: TrainState, tokens_BT: Int[Array, "B T+1"]) -> tuple[Array, Array]:
            return evaluate(state.params, tokens_BT, config, objective)

        def add(left: Sums, right: Sums) -> Sums:
            return jax.tree.map(jnp.add, left, right)

        self._cluster = cluster
        self.gradients = NodeProgram(sums, cluster.submeshes)
        self.add = NodeProgram(add, cluster.submeshes, donate=(0,))
        self.update = NodeProgram(apply, cluster.submeshes, donate=(0,))
        self.evaluate = NodeProgram(loss, cluster.submeshes)

    def reduce(self, own: Mapping[int, Flat]) -> dict[int, Flat]:
        """The total of the live sub-meshes' sums, as each of them holds it."""
        live, parts = tuple(own), list(own.values())
        mesh, reduction = _reduction(self._cluster, live, tuple(spec_of(leaf) for leaf in parts[0].leaves))
        reduced = reduction(stack([part.leaves for part in parts], mesh))
        shares = views(reduced, [self._cluster.submeshes[index] for index in live])
        return {index: Flat(leaves, parts[0].structure) for index, leaves in zip(live, shares, strict=True)}


@functools.lru_cache(maxsize=64)
def _reduction(
    cluster: Cluster, live: tuple[int, ...], specs: tuple[P, ...]
) -> tuple[Mesh, Callable[[PyTree], PyTree]]:
    """The mesh of the live sub-meshes, and the reduction on it."""
    mesh = live_mesh(cluster, live)
    return mesh, make_reduction(list(specs), mesh)


@functools.lru_cache(maxsize=8)
def programs_for(config: Config, cluster: Cluster, objective: Objective) -> Programs:
    """The programs of a config's ``compiled_part``, shared by all runs of this process that it is equal for."""
    return Programs(config, cluster, objective)


class Executor:
    """The cluster's states, and the running of plans on them."""

    def __init__(self, config: Config, cluster: Cluster, state: TrainState, objective: Objective = loss_sum):
        """Start with every node live.

        Args:
            config: of the run.
            cluster: where it runs.
            state: on any one sub-mesh (or on the default device); its buffers are used up.
            objective: what is minimized; by default the loss of predicting each token from those before it.
        """
        self._config, self._cluster = config, cluster
        self._programs = programs_for(config.compiled_part, cluster, objective)
        self._shardings = [jax.tree.leaves(shardings(mesh, state)) for mesh in cluster.submeshes]
        self._placers = [BatchPlacer(config, mesh, self.slots) for mesh in cluster.submeshes]
        flat = Flat.of(state)
        self._states = {index: self._copy(flat, index) for index in range(len(cluster.submeshes))}

    @property
    def model_compilations(self) -> int:
        """Executables compiled of the model's forward and backward pass and the update."""
        return self._programs.gradients.compilations + self._programs.update.compilations

    @property
    def state(self) -> TrainState:
        """The state, as one live sub-mesh holds it. Valid until the next ``train_step``."""
        return self._states[min(self._states)].tree

    @property
    def slots(self) -> int:
        """Microbatches that one call of the gradient program takes; a larger share takes several calls.

        Twice a healthy share: what a node has that covers for one neighbour.
        """
        share = self._config.train.microbatches_per_node * self._cluster.nodes_per_submesh
        return min(2 * share, self._config.num_microbatches)

    def set_live(self, submeshes: Sequence[int]) -> None:
        """Drop the states of sub-meshes without a live node; give those that are back a live one's state.

        Nodes fail within a step. So where all that held the state fail while others come back, these have it from them.
        """
        source = next((index for index in submeshes if index in self._states), min(self._states))
        self._states = {
            index: self._states[index] if index in self._states else self._copy(self._states[source], index)
            for index in submeshes
        }

    def _copy(self, state: Flat, index: int) -> Flat:
        """A state on another sub-mesh."""
        return Flat(jax.device_put(state.leaves, self._shardings[index]), state.structure)

    def train_step(self, step: int, plan: Plan, microbatch: MicrobatchSource) -> StepMetrics:
        """Dispatch one step: gradients on each live sub-mesh, their sum, the update on each.

        Args:
            step: number of the step, handed to ``microbatch``.
            plan: who computes what.
            microbatch: content of the microbatches.

        Returns:
            What the update reports, on a device.
        """
        for index, sums in self.step_sums(step, plan, microbatch).items():
            state = self._states[index]
            updated = self._programs.update(index, state, sums).leaves
            # The result is the pair (state, metrics): its leaves are those of the one, then those of the other.
            self._states[index] = Flat(updated[: len(state.leaves)], state.structure)
        return StepMetrics(*updated[len(state.leaves) :])

    def step_sums(self, step: int, plan: Plan, microbatch: MicrobatchSource) -> dict[int, Flat]:
        """The step's ``Sums`` over all nodes, as each live sub-mesh holds them; leaves ``[1, ...]``."""
        work = reassign(self._cluster, plan)
        if set(work) != set(self._states):
            self.set_live(list(work))
        level_ML = plan.layer_levels(self._config.model.num_layers)
        return self._programs.reduce(
            {
                index: self._node_sums(index, share, level_ML, functools.partial(microbatch, step))
                for index, share in work.items()
            }
        )

    def evaluate(self, microbatches: Sequence[np.ndarray]) -> tuple[float, int]:
        """Summed loss in nats and number of tokens, over the live sub-meshes; waits for the result.

        The total is summed by microbatch in float64, so it does not depend on how many sub-meshes share the work.
        """
        live = list(self._states)
        results = []
        for number, tokens in enumerate(microbatches):
            index = live[number % len(live)]
            placed = jax.device_put(tokens, NamedSharding(self._cluster.submeshes[index], P("fsdp")))
            results.append(self._programs.evaluate(index, self._states[index], Flat.of(placed)))
        fetched = jax.device_get([result.leaves for result in results])
        return float(sum(float(loss) for loss, _ in fetched)), int(sum(int(tokens) for _, tokens in fetched))

    def _node_sums(
        self, index: int, share: Work, level_ML: np.ndarray, microbatch: Callable[[int], np.ndarray]
    ) -> Flat:
        """This sub-mesh's sums over its share, in as many calls as its slots need."""
        total = None
        for part in in_parts(share, self.slots):
            batch = self._placers[index](part, level_ML, microbatch)
            sums = self._programs.gradients(index, self._states[index], Flat.of(batch))
            total = sums if total is None else self._programs.add(index, total, sums)
        assert total is not None
        return total


def _with_leading_axis(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[None], tree)


def _without_leading_axis(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], tree)
