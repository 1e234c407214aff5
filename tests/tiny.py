"""A tiny cluster: eight nodes, three layers, sixteen microbatches a step, one of them mostly padding."""

import functools

import jax
import numpy as np

from mecefo_jax.config import BasisConfig, Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from mecefo_jax.executor import Executor
from mecefo_jax.mesh import make_cluster
from mecefo_jax.state import init_sharded_state
from mecefo_jax.takeover import Plan, make_plan

VOCAB, LAYERS, NODES, PER_NODE, SEQ = 64, 3, 8, 2, 16
ONE_DEVICE = MeshConfig(num_nodes=NODES)
FOUR_DEVICES = MeshConfig(num_nodes=NODES, fsdp=2, tensor=2, num_submeshes=2)


def tiny_config(mesh: MeshConfig = ONE_DEVICE, **sections) -> Config:
    return Config(
        model=ModelConfig(hidden_size=32, ffn_size=48, num_layers=LAYERS, num_heads=4, num_kv_heads=2),
        mesh=mesh,
        data=DataConfig(seq_len=SEQ),
        train=TrainConfig(microbatch_size=2, microbatches_per_node=NODES * PER_NODE // mesh.num_nodes, steps=100),
        **({"basis": BasisConfig(rank=4)} | sections),
    )


@functools.cache
def microbatches(step: int = 0) -> np.ndarray:
    """``[M, B, T+1]``; microbatch 6 (of node 3) is mostly padding."""
    tokens = np.random.default_rng(step).integers(0, VOCAB, (NODES * PER_NODE, 2, SEQ + 1)).astype(np.int32)
    tokens[6, 0, 5:] = -1
    tokens[6, 1] = -1
    return tokens


def source(step: int, microbatch_id: int) -> np.ndarray:
    return microbatches(step)[microbatch_id]


def plan_for(dead, policy: str, config: Config) -> Plan:
    """``dead``: nodes, or pairs (node, stage)."""
    live = np.ones((config.mesh.num_nodes, config.faults.num_stages), bool)
    for unit in dead:
        live[unit] = False
    per_node = config.train.microbatches_per_node
    return make_plan(live, policy, microbatches_per_node=per_node, degraded_costs=[0.6], slack=0.1)


def make_executor(config: Config) -> Executor:
    cluster = make_cluster(config.mesh)
    return Executor(config, cluster, init_sharded_state(config, VOCAB, cluster.submeshes[0]))


def assert_trees_equal(left, right) -> None:
    """Bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, left, right)
