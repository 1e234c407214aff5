"""What one node computes by itself: sums over microbatches, the update, evaluation. Compiled once, whoever lives or
dies.

The programs are those of ``executor.py``, except that sums and states travel packed (``interconnect.py``).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from mecefo_jax.batches import BatchPlacer, MicrobatchSource, in_parts
from mecefo_jax.config import Config
from mecefo_jax.executables import ExecutableStore
from mecefo_jax.mesh import Work, shardings
from mecefo_jax.node_program import Flat, NodeProgram
from mecefo_jax.processes.interconnect import Packed, as_words, from_words, pack, unpack
from mecefo_jax.state import TrainState, abstract_state
from mecefo_jax.step import NodeBatch, StepMetrics, evaluate, node_gradients, state_for_gradients, update, zero_sums


class Worker:
    """A node's programs and its state, on its own sub-mesh."""

    def __init__(self, config: Config, vocab_size: int, mesh: Mesh, store: ExecutableStore | None = None) -> None:
        """Without a state yet; ``store``: where executables are looked for before compiling."""
        self._config, self.mesh = config, mesh
        self.abstract_state = abstract_state(config, vocab_size, mesh)
        slots = min(2 * config.train.microbatches_per_node, config.num_microbatches)
        self._placer = BatchPlacer(config, mesh, slots)
        self._state: Flat | None = None
        compiled, like_sums = (
            config.compiled_part,
            jax.eval_shape(functools.partial(zero_sums, config=config), self.abstract_state.params),
        )

        def gradients(state: TrainState, batch: NodeBatch) -> Packed:
            return pack(node_gradients(*state_for_gradients(state), batch, compiled, "all"))

        def apply(state: TrainState, packed: Packed) -> tuple[TrainState, StepMetrics]:
            return update(state, unpack(packed, like_sums), compiled)

        def loss(state: TrainState, tokens_BT: Array) -> tuple[Array, Array]:
            return evaluate(state.params, tokens_BT, compiled)

        def from_packed(packed: Packed) -> TrainState:
            return from_words(unpack(packed, as_shapes), self.abstract_state)

        as_shapes = jax.eval_shape(as_words, self.abstract_state)
        program = functools.partial(NodeProgram, submeshes=(mesh,), store=store)
        self._gradients = program(gradients)
        self._add = program(lambda left, right: jax.tree.map(jnp.add, left, right), donate=(0,))
        self._update = program(apply, donate=(0,))
        self._evaluate = program(loss)
        self._to_words = program(lambda state: pack(as_words(state)))
        self._from_words = program(from_packed)

    def compile(self) -> None:
        """Compile what steps and handovers need, before there is a state: nobody shall wait for it later."""
        state, sums, words = Flat.of(self.abstract_state), Flat.of(self.like_sums), Flat.of(self.like_words)
        self._gradients.compile(0, state, Flat.of(self._placer.abstract))
        self._update.compile(0, state, sums)
        self._add.compile(0, sums, sums)
        self._to_words.compile(0, state)
        self._from_words.compile(0, words)

    @property
    def model_compilations(self) -> int:
        """Executables made of the model's forward and backward pass and the update."""
        return self._gradients.compilations + self._update.compilations

    @property
    def state(self) -> TrainState:
        """The state; valid until the next ``update``."""
        assert self._state is not None
        return self._state.tree

    @state.setter
    def state(self, state: TrainState) -> None:
        leaves = jax.device_put(jax.tree.leaves(state), jax.tree.leaves(shardings(self.mesh, state)))
        self._state = Flat(leaves, jax.tree.structure(state))

    @functools.cached_property
    def like_sums(self) -> Packed:
        """Shapes of packed sums."""
        return self._abstract_packed(self._gradients, self.abstract_state, self._placer.abstract)

    @functools.cached_property
    def like_words(self) -> Packed:
        """Shapes of a packed state."""
        return self._abstract_packed(self._to_words, self.abstract_state)

    @property
    def state_bytes(self) -> int:
        """Size of a node's state."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.abstract_state))

    def _abstract_packed(self, program: NodeProgram, *arguments: Any) -> Packed:
        with jax.set_mesh(self.mesh):
            shapes = jax.eval_shape(program.function, *arguments)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            shapes,
            shardings(self.mesh, shapes),
        )

    def sums(
        self,
        step: int,
        work: Work,
        level_ML: np.ndarray,
        microbatch: MicrobatchSource,
        *,
        onto: Packed | None = None,
        on_part: Callable[[], None] = lambda: None,
    ) -> Packed:
        """Packed sums over a piece of work of a step; waits for them.

        Args:
            step: number of the step.
            work: its microbatches.
            level_ML: how far each layer is degraded, for each microbatch of the step (``Plan.layer_levels``).
            microbatch: content of the microbatches.
            onto: sums to add them to, used up.
            on_part: called after each part of the work, of at most two healthy shares.
        """
        assert self._state is not None
        total = None if onto is None else Flat.of(onto)
        for part in in_parts(work, self._placer.slots):
            batch = self._placer(part, level_ML, functools.partial(microbatch, step))
            sums = self._gradients(0, self._state, Flat.of(batch))
            total = sums if total is None else self._add(0, total, sums)
            jax.block_until_ready(total.leaves)
            on_part()
        assert total is not None
        return total.tree

    def update(self, total: Packed) -> StepMetrics:
        """Take the step whose sums over all nodes these are; waits for it."""
        state = self._state
        assert state is not None
        updated = self._update(0, state, Flat.of(total)).leaves
        self._state = Flat(updated[: len(state.leaves)], state.structure)
        return jax.device_get(StepMetrics(*updated[len(state.leaves) :]))

    def words(self) -> Packed:
        """The state's bits."""
        assert self._state is not None
        return self._to_words(0, self._state).tree

    def no_words(self) -> Packed:
        """What adds nothing to another's ``words``."""
        zeros = {dtype: np.zeros(like.shape, like.dtype) for dtype, like in self.like_words.vectors.items()}
        return jax.device_put(Packed(zeros), NamedSharding(self.mesh, P(None, ("fsdp", "tensor"))))

    def take_words(self, words: Packed) -> None:
        """Take over the state with these bits."""
        self._state = self._from_words(0, Flat.of(words))

    def evaluate(self, microbatches: Sequence[np.ndarray]) -> list[tuple[float, int]]:
        """Summed loss in nats and number of tokens of each microbatch."""
        assert self._state is not None
        results = []
        for tokens_BT in microbatches:
            placed = jax.device_put(tokens_BT, NamedSharding(self.mesh, P("fsdp")))
            results.append(self._evaluate(0, self._state, Flat.of(placed)).leaves)
        return [(float(loss), int(count)) for loss, count in jax.device_get(results)]
