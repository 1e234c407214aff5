"""The bench: its numbers' layout and what must hold between them, on a tiny config; operations by hand."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mecefo_jax.bench import timing
from mecefo_jax.bench.compiled import REMATS, TECHNIQUES, microbatch_flops, microbatch_temp_memory, with_variant
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
from mecefo_jax.errors import ConfigError, RunError
from mecefo_jax.executor import Executor
from mecefo_jax.mesh import make_cluster
from mecefo_jax.model import init_model
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
# Wide and short enough that products with weights outweigh norms, activations and attention scores (T / 2D of their
# layer's projections), which the hand count leaves out.
WIDE = dataclasses.replace(
    TINY,
    model=ModelConfig(hidden_size=256, ffn_size=640, num_layers=3, num_heads=2, vocab_size=WIDE_VOCAB),
    data=DataConfig(seq_len=8),
    train=TrainConfig(microbatch_size=8),
    basis=BasisConfig(rank=16),
)


VARIANTS = TECHNIQUES | {
    "s": DegradedConfig(skip_attention=False, remat_ffn=False, low_rank=False, sampled_fractions=(0.5,)),
}
VARIANTS["sf"] = dataclasses.replace(VARIANTS["s"], sample_ffn=True)


def one_submesh(config):
    return make_cluster(bench.one_node(config).mesh).submeshes[0]


def with_layers(config, num_layers):
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=num_layers))


def hand_count(config: Config, name: str) -> float:
    """Products with weights in one microbatch, 2 operations a multiply-add; a backward pass is two forward ones."""
    model, rank = config.model, config.basis.rank
    b, D, F = config.train.microbatch_size * config.data.seq_len, model.hidden_size, model.ffn_size
    attention, ffn = 8 * b * D * D, 6 * b * D * F
    head = 3 * 2 * b * D * model.vocab_size
    if name == "exact":
        return model.num_layers * 3 * (attention + ffn) + head
    weights = 3 * 2 * b * rank * (D + F) if "l" in name else ffn / 2 if "s" in name else ffn
    recomputed = 4 * b * D * F if "r" in name else 0
    kept = 1.5 * attention if "s" in name else 0  # input gradients, and weight gradients of half of the tokens
    inputs = 0.75 * ffn if "f" in name else ffn
    return model.num_layers * (attention + kept + ffn + inputs + weights + recomputed) + head


def test_hand_count_example():
    one_layer = with_layers(WIDE, 1)
    assert hand_count(one_layer, "exact") - hand_count(one_layer, "ml") == 64 * (
        2 * 8 * 256 * 256 + 6 * 256 * 640 - 6 * 16 * (256 + 640)
    )


@pytest.mark.parametrize(
    ("name", "remat"),
    [("exact", "none"), ("exact", "block"), ("mrl", "none"), ("ml", "none"), ("s", "none"), ("sf", "none")],
)
def test_flops_are_those_of_the_matrix_products(name, remat):
    config = with_variant(WIDE, WIDE.degraded if name == "exact" else VARIANTS[name], remat)
    flops = microbatch_flops(config, WIDE_VOCAB, one_submesh(WIDE), degraded=name != "exact")
    expected = hand_count(WIDE, name)
    if remat == "block":  # all products but the last are done again
        model, b = WIDE.model, WIDE.train.microbatch_size * WIDE.data.seq_len
        D, F = model.hidden_size, model.ffn_size
        expected += model.num_layers * b * (8 * D * D + 4 * D * F)
    assert 1.0 <= flops / expected < 1.06


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


@pytest.mark.slow
def test_plain_step_trains_as_the_executor_does():
    optim = OptimConfig(learning_rate=1e-2, warmup_steps=2)
    config = dataclasses.replace(TINY, mesh=MeshConfig(num_nodes=2, fsdp=2, tensor=2), optim=optim)
    cluster = make_cluster(config.mesh)
    state = init_sharded_state(config, VOCAB, cluster.submeshes[0])
    microbatch = random_microbatches(config, VOCAB)
    plain = PlainTrainer(config, state, cluster, adamw(config))
    executor = Executor(config, cluster, state)
    plan = make_plan(np.ones((2, 1), bool), "reroute", microbatches_per_node=2, degraded_costs=[0.5], slack=0.1)
    losses = []
    for step in range(4):
        plain_loss = float(plain.train_step(step, microbatch))
        losses.append(float(executor.train_step(step, plan, microbatch).loss))
        assert plain_loss == pytest.approx(losses[-1], rel=1e-5)
    assert losses[-1] < losses[0] - 0.05
    for ours, theirs in zip(jax.tree.leaves(executor.state.params), jax.tree.leaves(plain.params), strict=True):
        # Adam divides a gradient by its size, so float noise in small ones moves an entry by parts of 1e-2.
        np.testing.assert_allclose(ours, theirs, atol=5e-4)


def test_bases_do_not_change_the_plain_update():
    params = init_model(TINY.model, VOCAB, 0)
    grads = jax.tree.map(lambda leaf: jnp.sin(1e3 * leaf), params)
    updates = []
    for optimizer in (adamw(TINY), adamw_with_bases(TINY)):
        transformation = optax.with_extra_args_support(optimizer)
        with jax.numpy_dtype_promotion("standard"):
            updates.append(transformation.update(grads, transformation.init(params), params, moment=params)[0])
    for plain, with_bases in zip(*map(jax.tree.leaves, updates), strict=True):
        np.testing.assert_allclose(plain, with_bases, rtol=1e-6, atol=1e-9)


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
    assert 0.1 < degraded_time(config, state, mesh, WIDE_VOCAB, seconds=0.5) < 1.0


def test_what_is_lost_in_the_noise_is_not_reported(monkeypatch):
    noise = {f"{kind}_{number}": np.ones(5) for kind in ("exact", "degraded") for number in ("few", "many")}
    monkeypatch.setattr(timing, "take_turns", lambda contenders, seconds: noise)
    mesh = one_submesh(TINY)
    state = init_sharded_state(TINY, VOCAB, mesh)
    with pytest.raises(RunError, match=r"too busy for 0\.5 s of measurement; give it more"):
        degraded_time(bench.one_node(TINY), state, mesh, VOCAB, seconds=0.5)


def test_programs_of_a_step_compile():
    seconds = compile_seconds(TINY, VOCAB)
    assert set(seconds) == {"node_program", "update", "reduction"} and min(seconds.values()) > 0


def test_critical_loads():
    config = dataclasses.replace(TINY, train=TrainConfig(microbatches_per_node=4), faults=FaultsConfig(slack=0.1))
    loads = bench.critical_loads(config, [0.5])
    assert loads["neighbor"] == {"1": 1.0, "2": 1.5}  # half of two slices, half of three
    assert loads["reroute"] == {"1": 1.25, "2": 1.5}  # 5 and 6 microbatches where 4 are a slice
    assert loads["drop"] == {"1": 1.0, "2": 1.0}
    assert loads["auto"] == {"1": 1.0, "2": 1.0}  # balanced's, within 0.01
    assert max(loads["balanced"].values()) <= 1.1
    # Dearer than an exact microbatch: there is a plan all the same, and its load tells the truth.
    assert bench.critical_loads(config, [1.5])["neighbor"]["1"] == 3.0
    # Five microbatches fit into four at the second level, six do not.
    assert bench.critical_loads(config, [0.9, 0.8])["balanced"] == {
        "1": pytest.approx(4.4 / 4),
        "2": pytest.approx(4.8 / 4),
    }


@pytest.mark.slow
def test_analysis_of_7b_allocates_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "REMATS", ("none",))
    monkeypatch.setattr(bench, "TECHNIQUES", {"ml": TECHNIQUES["ml"]})
    before = len(jax.live_arrays())
    arguments = ["llama_7b", "--analyze", "--json", str(tmp_path / "out.json"), "--model.compute_dtype", "float32"]
    assert bench.main(arguments) == 0
    assert len(jax.live_arrays()) <= before
    results = json.loads((tmp_path / "out.json").read_text())
    assert set(results) == {"run", "degraded_cost", "temp_memory"}
    assert results["run"]["dtype"] == "float32"
    assert 0.5 < results["degraded_cost"]["ml"]["none"]["flops"] <= 0.75
    assert 2**28 < results["temp_memory"]["ml"]["none"] <= results["temp_memory"]["exact"]["none"]


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
    monkeypatch.setattr(bench, "TECHNIQUES", {"mrl": TECHNIQUES["mrl"]})
    monkeypatch.setattr(bench, "REMATS", ("none",))
    monkeypatch.setattr(bench, "degraded_time", lambda *arguments: 0.6)
    assert bench.main(["quickstart", "--seconds", "0", "--json", str(tmp_path / "out.json")]) == 0
    results = json.loads((tmp_path / "out.json").read_text())
    layout = {
        "degraded_cost": ({"mrl"}, {"none"}),
        "critical_load": ({"neighbor", "reroute", "balanced", "drop", "auto"}, {"1", "2"}),
        "temp_memory": ({"exact", "mrl"}, {"none"}),
    }
    for key, (outer, inner) in layout.items():
        assert set(results[key]) == outer and all(set(value) == inner for value in results[key].values())
    assert set(results["degraded_cost"]["mrl"]["none"]) == {"time", "flops"} and results["own_degraded_cost"] == 0.6
    assert set(results["refresh_cost"]) == {"svd", "subspace"}
    assert set(results["compile_s"]) == {"node_program", "update", "reduction"}
    assert results["healthy_overhead"] > 0
    assert set(results) == {
        *layout,
        "run",
        "step_s",
        "healthy_overhead",
        "own_degraded_cost",
        "refresh_cost",
        "compile_s",
    }


def test_names_of_variants():
    assert tuple(TECHNIQUES) == ("mrl", "ml", "m") and REMATS == ("none", "block")
    for name, switches in TECHNIQUES.items():
        used = {"m": switches.skip_attention, "r": switches.remat_ffn, "l": switches.low_rank}
        assert "".join(letter for letter, on in used.items() if on) == name
