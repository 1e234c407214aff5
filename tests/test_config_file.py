"""Config files: exact round trips, the types and errors of the command line, files written in one piece."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mecefo_jax.config import Config, DataConfig, FaultsConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from mecefo_jax.config_file import fields, flatten, from_dict, read_config, save_config, to_dict, to_json
from mecefo_jax.errors import ConfigError
from mecefo_jax.identity import check_identity

POSITIVE = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)


@st.composite
def valid_configs(draw):
    """Configs with values of every declared type, floats of any size among them."""
    return Config(
        name=draw(st.from_regex(r"[a-z0-9_]{1,8}", fullmatch=True)),
        model=ModelConfig(
            num_kv_heads=draw(st.sampled_from([None, 1, 2, 4])),
            vocab_size=draw(st.none() | st.integers(1, 2**31 - 1)),
            norm_eps=draw(POSITIVE),
            tie_embeddings=draw(st.booleans()),
            remat=draw(st.sampled_from(["none", "ffn", "block"])),
        ),
        data=DataConfig(source="files", files=tuple(draw(st.lists(st.text(), min_size=1, max_size=3)))),
        mesh=MeshConfig(num_nodes=9, num_submeshes=draw(st.none() | st.integers(1, 9))),
        train=TrainConfig(seed=draw(st.integers(0, 2**31 - 1))),
        optim=OptimConfig(learning_rate=draw(POSITIVE), clip_norm=draw(st.none() | POSITIVE)),
        faults=FaultsConfig(
            scenario="persistent", persistent_nodes=tuple(draw(st.lists(st.integers(0, 8), min_size=1)))
        ),
    )


@given(valid_configs())
def test_json_round_trip_is_exact(config):
    assert from_dict(json.loads(to_json(config))) == config
    assert from_dict(to_dict(config)) == config


def test_saved_file_reads_back_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "new" / "run" / "config.json"
    config = Config(name="saved", optim=OptimConfig(learning_rate=1 / 3))
    save_config(Config(), path)
    save_config(config, path)
    assert read_config(path) == config
    assert [entry.name for entry in path.parent.iterdir()] == ["config.json"]


def test_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"^run directory {re.escape(str(tmp_path))}.*set --workdir"):
        save_config(Config(), tmp_path / "file" / "config.json")


def test_what_a_file_leaves_out_has_its_default():
    assert from_dict({"train": {"steps": 7}}) == Config(train=TrainConfig(steps=7))
    assert from_dict({}) == Config()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optim": {"learning_rat": 1e-3}},
            r"^unknown setting optim\.learning_rat: did you mean optim\.learning_rate\?$",
        ),
        ({"optimizer": {"learning_rate": 1e-3}}, r"^unknown setting optimizer: did you mean "),
        ({"nam": "x"}, r"^unknown setting nam: did you mean name\?$"),
        ({"optim": 3}, r"^optim: got 3, expected a section"),
        ({"train": {"steps": 1.5}}, r"^train\.steps: got 1\.5, expected an integer$"),
        ({"train": {"steps": None}}, r"^train\.steps: got None, expected an integer$"),
        ({"data": {"repeat": "yes"}}, r"^data\.repeat: got 'yes', expected true or false$"),
        ({"train": {"steps": 0}}, r"^train\.steps: got 0"),
    ],
)
def test_mistakes_in_a_file_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(settings)


def test_text_in_a_file_is_parsed_as_on_the_command_line():
    config = from_dict({"data": {"repeat": "false"}, "train": {"steps": "1e4"}, "optim": {"clip_norm": "null"}})
    assert config.data.repeat is False
    assert config.train.steps == 10_000
    assert config.optim.clip_norm is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train": {"steps": 5,}}', "not JSON"),
        ("[1]", "expected an object"),
        ("[" * 200_000, "nested too deeply"),
        ('{"train": {"steps": 5, "steps": 6}}', "steps is set twice"),
        ('{"optim": {"learning_rate": NaN}}', "expected a finite number"),
    ],
)
def test_broken_files_are_refused(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(path)


def test_unreadable_files_are_refused_by_path(tmp_path):
    (tmp_path / "latin.json").write_bytes(b'{"name": "\xe9"}')
    for name in ("latin.json", "missing.json", "."):
        with pytest.raises(ConfigError, match=rf"^config file {re.escape(str(tmp_path / name))}"):
            read_config(tmp_path / name)


def test_settings_are_all_there_by_dotted_name():
    names = set(fields())
    assert {"name", "model.hidden_size", "mesh.num_submeshes", "faults.policy", "eval.batches"} <= names
    assert names == {name for name, _ in flatten(to_dict(Config()))}
    assert {"faults.script", "faults.auto.max_slowdown"} <= names, "also those of a section in a section"


def test_config_files_from_when_there_were_other_switches():
    """Off they mean nothing; on they cannot be obeyed."""
    old = to_dict(Config())
    old["degraded"] |= {"low_rank_attention": False, "complement": False, "sampled_fraction": 0.0}
    del old["degraded"]["sampled_fractions"]
    assert from_dict(old) == Config()
    assert check_identity(old, to_dict(Config())) == []
    del old["degraded"]["sampled_fraction"]
    assert from_dict(old) == Config() and check_identity(old, to_dict(Config())) == []
    half = from_dict(old | {"degraded": old["degraded"] | {"sampled_fraction": 0.5}})
    assert half.degraded.sampled_fractions == (0.5,)
    old["degraded"]["complement"] = True
    for read in (from_dict, lambda settings: check_identity(settings, to_dict(Config()))):
        with pytest.raises(ConfigError, match=r"degraded\.complement: this setting was taken out"):
            read(old)
