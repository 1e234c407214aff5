"""Microbatches on their way to a node's devices: cut into calls of the gradient program, and placed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mecefo_jax.config import Config
from mecefo_jax.mesh import Work
from mecefo_jax.step import NodeBatch

MicrobatchSource = Callable[[int, int], np.ndarray]
"""``(step, microbatch id) -> int32[B, T+1]``."""


def in_parts(share: Work, slots: int) -> list[Work]:
    """A share cut into pieces of at most ``slots`` microbatches; one, maybe empty, if it fits."""
    exact, degraded = share.exact, share.degraded
    total = len(exact) + len(degraded)
    parts = []
    for start in range(0, max(total, 1), slots):
        stop, boundary = start + slots, len(exact)
        low = slice(max(start - boundary, 0), max(stop - boundary, 0))
        parts.append(Work(exact[start:stop], degraded[low]))
    return parts


@dataclasses.dataclass(frozen=True)
class BatchPlacer:
    """Makes ``NodeBatch``es on a sub-mesh."""

    config: Config
    mesh: Mesh
    slots: int
    """Microbatches that one batch has room for."""

    def __call__(self, part: Work, level_ML: np.ndarray, microbatch: Callable[[int], np.ndarray]) -> NodeBatch:
        """The batch of a piece of work.

        Args:
            part: at most ``slots`` microbatches.
            level_ML: how far each layer is degraded, for each microbatch of the step (``Plan.layer_levels``).
            microbatch: content of a microbatch.
        """
        ids = np.concatenate([part.exact, part.degraded]).astype(np.int32)
        used, train, seq_len = len(ids), self.config.train, self.config.data.seq_len
        tokens_SBT = np.zeros((self.slots, train.microbatch_size, seq_len + 1), np.int32)
        for slot, microbatch_id in enumerate(ids):
            tokens_SBT[slot] = microbatch(int(microbatch_id))
        unused = self.slots - used
        arrays = {
            "tokens_SBT": tokens_SBT,
            "ids_S": np.pad(ids, (0, unused)),
            "level_SL": np.pad(level_ML[ids].astype(np.int8), ((0, unused), (0, 0))),
            "num_exact": np.int32(len(part.exact)),
            "num_degraded": np.int32(len(part.degraded)),
        }
        return NodeBatch(**jax.device_put(arrays, self.shardings))

    @property
    def shardings(self) -> dict[str, NamedSharding]:
        """Of a ``NodeBatch``, by field: rows of microbatches over ``fsdp``, the rest whole."""
        whole = {field.name: NamedSharding(self.mesh, P()) for field in dataclasses.fields(NodeBatch)}
        return whole | {"tokens_SBT": NamedSharding(self.mesh, P(None, "fsdp"))}

    @property
    def abstract(self) -> NodeBatch:
        """Shapes, dtypes and shardings of a batch."""
        config, slots = self.config, self.slots
        shapes: dict[str, Any] = {
            "tokens_SBT": ((slots, config.train.microbatch_size, config.data.seq_len + 1), np.int32),
            "ids_S": ((slots,), np.int32),
            "level_SL": ((slots, config.model.num_layers), np.int8),
            "num_exact": ((), np.int32),
            "num_degraded": ((), np.int32),
        }
        leaves: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=self.shardings[name])
            for name, (shape, dtype) in shapes.items()
        }
        return NodeBatch(**leaves)
