"""The bench: its numbers' layout and what must hold between them, on a tiny config; operations by hand."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from mecefo_jax.bench.compiled import TECHNIQUES, microbatch_flops, microbatch_temp_memory, with_variant
from mecefo_jax.bench.plain_step import PlainTrainer, adamw, adamw_with_bases
from mecefo_jax.bench.timing import compile_seconds, degraded_time, random_microbatches, take_turns
from mecefo_jax.config import (
    BasisConfig,
    Config,
    DataConfig,
    DegradedConfig,
    FaultsConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from mecefo_jax.errors import ConfigError
from mecefo_jax.executor import Executor
from mecefo_jax.mesh import make_cluster
from mecefo_jax.state import init_sharded_state
from mecefo_jax.takeover import make_plan
from scripts import bench

VOCAB = 64
TINY = Config(
    model=ModelConfig(hidden_size=32, ffn_size=48, num_layers=2, num_heads=2, vocab_size=VOCAB),
    data=DataConfig(seq_len=16),
    mesh=MeshConfig(num_nodes=2),
    train=TrainConfig(microbatch_size=2, microbatches_per_node=2),
    basis=BasisConfig(rank=8),
)
WIDE_VOCAB = 512
# Wide enough that matrix products outweigh norms, activations and softmax, which the hand count leaves out.
WIDE = dataclasses.replace(
    TINY,
    model=ModelConfig(hidden_size=256, ffn_size=640, num_layers=3, num_heads=2, vocab_size=WIDE_VOCAB),
    data=DataConfig(seq_len=32),
    basis=BasisConfig(rank=16),
)


def one_submesh(config):
    return make_cluster(bench.one_node(config).mesh).submeshes[0]


def with_layers(config, num_layers):
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=num_layers))


def hand_count(config: Config, name: str) -> float:
    """Matrix products of one microbatch, 2 operations a multiply-add; a backward pass is two forward ones."""
    model, rank, T = config.model, config.basis.rank, config.data.seq_len
    b, D, F = config.train.microbatch_size * T, model.hidden_size, model.ffn_size
    attention, ffn = b * (8 * D * D + 4 * T * D), 6 * b * D * F
    head = 3 * 2 * b * D * model.vocab_size
    if name == "exact":
        return model.num_layers * 3 * (attention + ffn) + head
    weights = 3 * 2 * b * rank * (D + F) if "l" in name else ffn
    recomputed = 4 * b * D * F if "r" in name else 0
    return model.num_layers * (attention + 2 * ffn + weights + recomputed) + head


@pytest.mark.parametrize("name", ["exact", *TECHNIQUES])
def test_flops_are_those_of_the_matrix_products(name):
    config = WIDE if name == "exact" else with_variant(WIDE, TECHNIQUES[name], "none")
    flops = microbatch_flops(config, WIDE_VOCAB, one_submesh(WIDE), degraded=name != "exact")
    # Some thirty element-wise operations a layer and token, beside products of 2 D each.
    assert 1.0 <= flops / hand_count(WIDE, name) < 1.04


@pytest.mark.parametrize("degraded", [False, True])
def test_flops_grow_linearly_with_depth(degraded):
    mesh = one_submesh(TINY)
    two, three, five = (
        microbatch_flops(with_layers(TINY, layers), VOCAB, mesh, degraded=degraded) for layers in (2, 3, 5)
    )
    assert five - three == pytest.approx(2 * (three - two))


def test_all_switches_off_costs_as_much_as_exact():
    off = DegradedConfig(skip_attention=False, remat_ffn=False, low_rank=False)
    config, mesh = with_variant(TINY, off, "none"), one_submesh(TINY)
    exact, degraded = (microbatch_flops(config, VOCAB, mesh, degraded=degraded) for degraded in (False, True))
    assert degraded == pytest.approx(exact, rel=0.01)


def test_temporary_memory_by_layer():
    mesh = one_submesh(WIDE)

    def bytes_per_layer(degraded):
        few, many = (
            microbatch_temp_memory(with_layers(WIDE, layers), WIDE_VOCAB, mesh, degraded=degraded) for layers in (3, 6)
        )
        return (many - few) / 3

    model, b = WIDE.model, WIDE.train.microbatch_size * WIDE.data.seq_len
    stream = 4 * b * model.hidden_size
    coordinates = 4 * WIDE.basis.rank * (2 * model.ffn_size + model.hidden_size)
    # Kept of a degraded layer: the input of its feed-forward network; and the sum of its coordinates, and their last.
    assert stream <= bytes_per_layer(degraded=True) <= 1.1 * (stream + 2 * coordinates)
    # Of an exact one: input, query, key, value, attention's and norms' outputs, and gate, up and their product.
    assert bytes_per_layer(degraded=False) >= 6 * stream + 3 * 4 * b * model.ffn_size


def test_plain_step_trains_as_the_executor_does():
    optim = OptimConfig(learning_rate=1e-2, warmup_steps=2)
    config = dataclasses.replace(TINY, mesh=MeshConfig(num_nodes=2, fsdp=2, tensor=2), optim=optim)
    cluster = make_cluster(config.mesh)
    state = init_sharded_state(config, VOCAB, cluster.submeshes[0])
    microbatch = random_microbatches(config, VOCAB)
    plain, with_bases = (PlainTrainer(config, state, cluster, make(config)) for make in (adamw, adamw_with_bases))
    executor = Executor(config, cluster, state)
    plan = make_plan(np.ones((2, 1), bool), "reroute", microbatches_per_node=2, degraded_cost=0.5, slack=0.1)
    losses = []
    for step in range(4):
        plain_losses = [float(trainer.train_step(step, microbatch)) for trainer in (plain, with_bases)]
        losses.append(float(executor.train_step(step, plan, microbatch).loss))
        np.testing.assert_allclose(plain_losses, losses[-1], rtol=1e-5)
    assert losses[-1] < losses[0] - 0.05
    for trainer in (plain, with_bases):
        for ours, theirs in zip(jax.tree.leaves(executor.state.params), jax.tree.leaves(trainer.params), strict=True):
            # Adam divides a gradient by its size, so float noise in small ones moves an entry by parts of 1e-2.
            np.testing.assert_allclose(ours, theirs, atol=5e-4)


def test_plain_step_refuses_microbatches_that_do_not_divide():
    config = dataclasses.replace(TINY, mesh=MeshConfig(num_nodes=5, num_submeshes=3))
    cluster = make_cluster(config.mesh)
    state = init_sharded_state(config, VOCAB, cluster.submeshes[0])
    with pytest.raises(ConfigError, match="10 microbatches do not divide over 3 sub-meshes"):
        PlainTrainer(config, state, cluster, adamw(config))


def test_contenders_take_turns_in_an_order_that_turns_about():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = take_turns(contenders, seconds=0.0)
    assert "".join(calls) == "ab" + "abbaabbaab"
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 5, "b": 5}


def test_a_degraded_microbatch_takes_less_time():
    config = bench.one_node(with_variant(WIDE, TECHNIQUES["ml"], "none"))
    mesh = one_submesh(config)
    state = init_sharded_state(config, WIDE_VOCAB, mesh)
    assert 0.1 < degraded_time(config, state, mesh, WIDE_VOCAB, seconds=0.0) < 1.0


def test_programs_of_a_step_compile():
    seconds = compile_seconds(TINY, VOCAB)
    assert set(seconds) == {"node_program", "update", "reduction"} and min(seconds.values()) > 0


def test_critical_loads():
    config = dataclasses.replace(TINY, train=TrainConfig(microbatches_per_node=4), faults=FaultsConfig(slack=0.1))
    loads = bench.critical_loads(config, 0.5)
    assert loads["neighbor"] == {"1": 1.0, "2": 1.5}  # half of two slices, half of three
    assert loads["reroute"] == {"1": 1.25, "2": 1.5}  # 5 and 6 microbatches where 4 are a slice
    assert loads["drop"] == {"1": 1.0, "2": 1.0}
    assert max(loads["balanced"].values()) <= 1.1
    # Dearer than an exact microbatch: there is a plan all the same, and its load tells the truth.
    assert bench.critical_loads(config, 1.5)["neighbor"]["1"] == 3.0


def test_analysis_allocates_nothing(tmp_path):
    before = len(jax.live_arrays())
    arguments = ["llama_7b", "--analyze", "--json", str(tmp_path / "out.json"), "--model.compute_dtype", "float32"]
    assert bench.main(arguments) == 0
    assert len(jax.live_arrays()) <= before
    results = json.loads((tmp_path / "out.json").read_text())
    assert set(results) == {"run", "degraded_cost", "temp_memory"}
    assert results["run"]["dtype"] == "float32"
    cost, memory = results["degraded_cost"], results["temp_memory"]
    assert set(cost) == {"mrl", "ml", "m"} and set(memory) == {"exact", "mrl", "ml", "m"}
    for remat in ("none", "block"):
        assert all(set(cost[name][remat]) == {"flops"} for name in cost)
        assert all(memory[name][remat] <= memory["exact"][remat] for name in cost)
    assert cost["ml"]["none"]["flops"] <= 0.75 and cost["mrl"]["block"]["flops"] <= 0.75
    assert cost["ml"]["none"]["flops"] < cost["mrl"]["none"]["flops"] < cost["m"]["none"]["flops"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstar"], "did you mean quickstart"),
        (["quickstart", "--basis.rnk", "3"], "rank"),
        (["quickstart", "--workdir", "x"], "no run directory"),
        (["quickstart", "--data.tokenizer", "missing/tokenizer.json"], "model.vocab_size"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert bench.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.slow
def test_layout_of_a_measurement(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "parse", lambda words: (TINY, tmp_path))
    assert bench.main(["quickstart", "--seconds", "0", "--json", str(tmp_path / "out.json")]) == 0
    results = json.loads((tmp_path / "out.json").read_text())
    layout = {
        "degraded_cost": ({"mrl", "ml", "m"}, {"none", "block"}),
        "critical_load": ({"neighbor", "reroute", "balanced", "drop"}, {"1", "2"}),
        "temp_memory": ({"exact", "mrl", "ml", "m"}, {"none", "block"}),
    }
    for key, (outer, inner) in layout.items():
        assert set(results[key]) == outer and all(set(value) == inner for value in results[key].values())
    assert all(set(cost) == {"time", "flops"} for by in results["degraded_cost"].values() for cost in by.values())
    assert set(results["refresh_cost"]) == {"svd", "subspace"}
    assert set(results["compile_s"]) == {"node_program", "update", "reduction"}
    assert results["healthy_overhead"] > 0
    assert set(results) == {*layout, "run", "step_s", "healthy_overhead", "refresh_cost", "compile_s"}
