"""Validation of configs: mistakes are refused when the config is made, in the user's own keys, with what would do."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mecefo_jax.config import (
    BasisConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    DegradedConfig,
    EvalConfig,
    FaultsConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    TrackConfig,
    TrainConfig,
    check_devices,
    check_vocab_size,
)
from mecefo_jax.errors import ConfigError

SECTIONS = {
    "model": ModelConfig,
    "data": DataConfig,
    "mesh": MeshConfig,
    "train": TrainConfig,
    "optim": OptimConfig,
    "degraded": DegradedConfig,
    "basis": BasisConfig,
    "faults": FaultsConfig,
    "checkpoint": CheckpointConfig,
    "eval": EvalConfig,
    "track": TrackConfig,
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.hidden_size", 0),
        ("model.num_layers", 0),
        ("model.vocab_size", 0),
        ("model.rope_base", 1.0),
        ("model.norm_eps", 0.0),
        ("model.remat", "all"),
        ("data.seq_len", 0),
        ("data.bpe_vocab_size", 256),
        ("data.validation_fraction", 0.0),
        ("data.validation_fraction", 1.0),
        ("data.tokenizer", ""),
        ("data.cache_dir", ""),
        ("mesh.num_nodes", 0),
        ("mesh.fsdp", 0),
        ("mesh.tensor", -1),
        ("mesh.num_submeshes", 0),
        ("mesh.num_submeshes", 9),
        ("train.steps", 0),
        ("train.microbatch_size", 0),
        ("train.microbatches_per_node", 0),
        ("train.seed", -1),
        ("train.seed", 2**31),
        ("train.log_every", 0),
        ("train.max_skipped_in_a_row", 0),
        ("optim.learning_rate", 0.0),
        ("optim.learning_rate", float("nan")),
        ("optim.warmup_steps", -1),
        ("optim.final_fraction", 1.1),
        ("optim.weight_decay", -0.1),
        ("optim.beta1", 1.0),
        ("optim.beta2", -0.1),
        ("optim.eps", 0.0),
        ("optim.clip_norm", 0.0),
        ("optim.clip_norm", float("inf")),
        ("basis.rank", 0),
        ("basis.refresh_every", 0),
        ("faults.slack", -0.1),
        ("faults.min_live_nodes", 0),
        ("degraded.sampled_fractions", (0.0,)),
        ("degraded.sampled_fractions", (1.5, 0.5)),
        ("degraded.sampled_fractions", (0.25, 0.5)),
        ("degraded.sampled_fractions", (0.5, 0.5)),
        ("faults.degraded_cost", 0.0),
        ("faults.degraded_cost", 1.5),
        ("faults.step_seconds", 0.0),
        ("faults.fail_every_steps", 0.0),
        ("faults.back_after_steps", -1.0),
        ("faults.frequency", 0.0),
        ("faults.num_stages", 0),
        ("checkpoint.every", -1),
        ("checkpoint.keep", 0),
        ("eval.every", -1),
        ("eval.batches", 0),
        ("track.trackers", ("mlflow",)),
        ("track.trackers", ("wandb", "wandb")),
        ("track.project", "without a tracker"),
    ],
)
def test_value_out_of_range_is_refused_by_name(key, value):
    section, _, field = key.partition(".")
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: got "):
        SECTIONS[section](**{field: value})


@pytest.mark.parametrize(
    ("section", "field"),
    [
        (section, field.name)
        for section in SECTIONS.values()
        for field in dataclasses.fields(section)
        if section is not MeshConfig and field.type in (int, int | None)
    ],
)
def test_every_integer_fits_the_32_bits_of_compiled_programs(section, field):
    with pytest.raises(ConfigError, match=rf"\.{field}: got 2147483648, expected a number at most 2147483647$"):
        section(**{field: 2**31})


def test_every_item_of_a_list_fits_32_bits():
    with pytest.raises(ConfigError, match=r"^faults\.persistent_nodes: got 2147483648"):
        FaultsConfig(scenario="persistent", persistent_nodes=(1, 2**31))


@pytest.mark.parametrize("field", ["num_nodes", "fsdp", "tensor", "num_submeshes"])
def test_meshes_beyond_any_cluster_are_refused(field):
    with pytest.raises(ConfigError, match=rf"^mesh\.{field}: got 1048577, .*at most 1048576$"):
        MeshConfig(**({"num_nodes": 2**20} | {field: 2**20 + 1}))


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        (TrainConfig, "steps", "5"),
        (TrainConfig, "steps", 5.5),
        (DataConfig, "repeat", 1),
        (DataConfig, "files", ["a.txt"]),
        (FaultsConfig, "persistent_nodes", (1.5,)),
        (ModelConfig, "tie_embeddings", None),
    ],
)
def test_value_of_another_type_is_refused_in_python_too(section, field, value):
    with pytest.raises(ConfigError, match=rf"\.{field}: got .*, expected "):
        section(**{field: value})


def test_section_of_another_type_is_refused():
    with pytest.raises(ConfigError, match=r"^model: got .*, expected a ModelConfig"):
        Config(model=TrainConfig())


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a b", "-x"])
def test_name_must_do_as_a_directory(name):
    with pytest.raises(ConfigError, match="^name: got "):
        Config(name=name)


@pytest.mark.parametrize(
    ("field", "value", "nearest"),
    [("num_heads", 5, "4 or 8"), ("num_heads", 128, "64"), ("num_kv_heads", 3, "2 or 4")],
)
def test_heads_must_divide_the_width_evenly(field, value, nearest):
    with pytest.raises(ConfigError, match=rf"^model\.{field}: got {value}, .*nearest that work: {nearest}$"):
        ModelConfig(**{field: value})


@given(st.integers(1, 512), st.integers(1, 64))
def test_accepted_heads_have_an_even_size(hidden, heads):
    try:
        model = ModelConfig(hidden_size=hidden, num_heads=heads)
    except ConfigError:
        assert hidden % heads or (hidden // heads) % 2
    else:
        assert model.head_size * heads == hidden
        assert model.head_size % 2 == 0
        assert model.kv_heads == heads


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": ModelConfig(hidden_size=96, num_heads=6), "mesh": MeshConfig(tensor=4)},
            r"^model\.num_heads: got 6, expected a multiple of mesh\.tensor \(4\); nearest that work: 4 or 8$",
        ),
        (
            {"model": ModelConfig(num_heads=8, num_kv_heads=2), "mesh": MeshConfig(tensor=4)},
            r"^model\.num_kv_heads: got 2, .*; nearest that work: 4$",
        ),
        (
            {"model": ModelConfig(ffn_size=5461), "mesh": MeshConfig(tensor=2)},
            r"^model\.ffn_size: got 5461, .*: 5460 or 5462$",
        ),
        (
            {"model": ModelConfig(vocab_size=32_001), "mesh": MeshConfig(tensor=4)},
            r"^model\.vocab_size: got 32001, .*: 32000 or 32004$",
        ),
        (
            {"mesh": MeshConfig(fsdp=3), "model": ModelConfig(hidden_size=128, num_heads=4)},
            r"^model\.hidden_size: got 128, expected a multiple of mesh\.fsdp \(3\); nearest that work: 120 or 144$",
        ),
        (
            {"mesh": MeshConfig(fsdp=4), "train": TrainConfig(microbatch_size=6)},
            r"^train\.microbatch_size: got 6, .*: 4 or 8$",
        ),
        (
            {"model": ModelConfig(max_seq_len=128)},
            r"^data\.seq_len: got 256, expected at most model\.max_seq_len \(128\)$",
        ),
        (
            {"optim": OptimConfig(warmup_steps=50), "train": TrainConfig(steps=50)},
            r"^optim\.warmup_steps: got 50, expected less than train\.steps \(50\)$",
        ),
        (
            {"faults": FaultsConfig(granularity="stage", num_stages=3)},
            r"^faults\.num_stages: got 3, expected a divisor of model\.num_layers \(4\); nearest that work: 2 or 4$",
        ),
        (
            {"faults": FaultsConfig(min_live_nodes=9)},
            r"^faults\.min_live_nodes: got 9, expected at most mesh\.num_nodes \(8\)",
        ),
        (
            {"faults": FaultsConfig(scenario="persistent", persistent_nodes=(1, 8))},
            r"^faults\.persistent_nodes: got 8",
        ),
    ],
)
def test_sections_that_do_not_fit_are_refused_with_what_would(sections, message):
    with pytest.raises(ConfigError, match=message):
        Config(**sections)


@given(
    hidden=st.sampled_from([64, 96, 128]),
    heads=st.integers(1, 8),
    ffn=st.integers(1, 64),
    fsdp=st.integers(1, 4),
    tensor=st.integers(1, 4),
    size=st.integers(1, 8),
)
def test_every_accepted_config_divides_over_its_devices(hidden, heads, ffn, fsdp, tensor, size):
    try:
        config = Config(
            model=ModelConfig(hidden_size=hidden, num_heads=heads, ffn_size=ffn),
            mesh=MeshConfig(fsdp=fsdp, tensor=tensor),
            train=TrainConfig(microbatch_size=size),
        )
    except ConfigError:
        divides = [hidden % (2 * heads), heads % tensor, ffn % tensor, hidden % fsdp, size % fsdp]
        assert any(divides)
    else:
        shards = [(heads, tensor), (config.model.kv_heads, tensor), (ffn, tensor), (hidden, fsdp), (size, fsdp)]
        assert all(dim % axis == 0 for dim, axis in shards)


@pytest.mark.parametrize(
    ("section", "arguments", "field"),
    [
        (DataConfig, {"source": "files"}, "data.files"),
        (DataConfig, {"source": "tfds"}, "data.tfds_name"),
        (FaultsConfig, {"scenario": "persistent"}, "faults.persistent_nodes"),
        (FaultsConfig, {"scenario": "trace"}, "faults.trace_file"),
        (FaultsConfig, {"scenario": "script"}, "faults.script"),
    ],
)
def test_choice_without_its_own_setting_is_refused(section, arguments, field):
    with pytest.raises(ConfigError, match=rf"^{re.escape(field)}: got nothing"):
        section(**arguments)


@pytest.mark.parametrize("project", ["two words", "a/b", "-x"])
def test_project_that_no_tracker_can_have_is_refused(project):
    with pytest.raises(ConfigError, match=rf"^track\.project: got '{project}', expected letters"):
        TrackConfig(trackers=("trackio",), project=project)


@pytest.mark.parametrize("arguments", [{"num_stages": 2}, {"granularity": "stage"}])
def test_stages_and_granularity_must_agree(arguments):
    with pytest.raises(ConfigError, match=r"^faults\.num_stages"):
        FaultsConfig(**arguments)


def test_one_device_and_one_node_suffice():
    check_devices(MeshConfig(num_nodes=1), 1)
    check_devices(MeshConfig(num_nodes=32, num_submeshes=1), 1)


@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 16))
def test_too_few_devices_are_refused_with_both_counts_and_a_way_out(nodes, fsdp, tensor, available):
    mesh = MeshConfig(num_nodes=nodes, fsdp=fsdp, tensor=tensor)
    try:
        check_devices(mesh, available)
    except ConfigError as refused:
        assert nodes * fsdp * tensor > available
        assert f"need {nodes * fsdp * tensor} devices, got {available};" in str(refused)
        way_out = re.search(r"--mesh\.num_submeshes (\d+)", str(refused))
        shrunk = dataclasses.replace(mesh, num_submeshes=int(way_out.group(1)))
        if fsdp * tensor <= available:
            check_devices(shrunk, available)
    else:
        assert nodes * fsdp * tensor <= available


def test_vocabulary_from_the_tokenizer_is_checked_alike():
    check_vocab_size(32_000, MeshConfig(tensor=4))
    with pytest.raises(ConfigError, match="32000 or 32004"):
        check_vocab_size(32_001, MeshConfig(tensor=4))
    with pytest.raises(ConfigError, match=r"got 258, .*; nearest that work: 260$"):
        check_vocab_size(258, MeshConfig(tensor=4), smallest=258)
    with pytest.raises(ConfigError, match=r"got 262, .*; nearest that work: 260 or 264$"):
        check_vocab_size(262, MeshConfig(tensor=4), smallest=258)


def test_batch_is_counted_over_all_nodes():
    config = Config(mesh=MeshConfig(num_nodes=3), train=TrainConfig(microbatch_size=5, microbatches_per_node=7))
    assert config.num_microbatches == 21
    assert config.global_batch_size == 105


def live_config(**cluster) -> Config:
    settings = {"coordinator": "127.0.0.1:1234", "process_id": 1, "num_processes": 9} | cluster
    return Config(faults=FaultsConfig(scenario="live"), cluster=ClusterConfig(**settings))


def test_nodes_as_processes_are_a_complete_description():
    assert live_config().cluster.is_real and not Config().cluster.is_real
    assert live_config().compiled_part == Config().compiled_part


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"coordinator": "localhost"}, "cluster.coordinator: got 'localhost', expected host:port"),
        ({"process_id": None}, "cluster.process_id: got none with cluster.coordinator"),
        ({"process_id": 9}, "cluster.process_id: got 9, expected less than cluster.num_processes (9)"),
        ({"num_processes": 8}, "cluster.num_processes: got 8, expected at least 9"),
        ({"heartbeat_seconds": 60}, "cluster.heartbeat_seconds: got 60, expected less than cluster.progress_seconds"),
        ({"collective_seconds": 61}, "cluster.collective_seconds: got 61, expected less than"),
        ({"first_step_seconds": 59}, "cluster.first_step_seconds: got 59, expected at least"),
        ({"heartbeat_seconds": 0}, "cluster.heartbeat_seconds: got 0"),
    ],
)
def test_wrong_clusters_are_refused_in_the_users_own_keys(cluster, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        live_config(**cluster)


def test_live_failures_and_processes_need_each_other():
    with pytest.raises(ConfigError, match=r"faults.scenario: got live with cluster.coordinator ''"):
        Config(faults=FaultsConfig(scenario="live"))
    cluster = ClusterConfig(coordinator="auto")
    with pytest.raises(ConfigError, match="faults.scenario: got none with cluster.coordinator 'auto'"):
        Config(cluster=cluster)
    with pytest.raises(ConfigError, match="faults.granularity: got stage"):
        faults = FaultsConfig(scenario="live", granularity="stage", num_stages=2)
        Config(model=ModelConfig(num_layers=4), cluster=cluster, faults=faults)


def test_no_more_fractions_than_are_worth_compiling():
    with pytest.raises(ConfigError, match=r"^degraded\.sampled_fractions: got 17, expected at most 16"):
        DegradedConfig(sampled_fractions=tuple((20 - index) / 20 for index in range(17)))


@pytest.mark.parametrize("low_rank", [False, True])
def test_a_sampled_feed_forward_needs_to_know_how_much(low_rank):
    with pytest.raises(ConfigError, match=r"^degraded\.sample_ffn: got true without degraded\.sampled_fractions"):
        DegradedConfig(low_rank=low_rank, sample_ffn=True)
