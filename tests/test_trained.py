"""Models read from run directories: the parameters and the tokenizer are those of the run."""

import shutil

import jax
import numpy as np
import pytest

from mecefo_jax import trainer
from mecefo_jax.checkpoint import Checkpointer
from mecefo_jax.config import CheckpointConfig, Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from mecefo_jax.errors import CheckpointError, ConfigError, DataError
from mecefo_jax.mesh import make_cluster
from mecefo_jax.state import abstract_state
from mecefo_jax.trained import open_trained
from tests.tiny import assert_trees_equal

STEPS = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a finished run with a trained tokenizer, without the data that it was trained on."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "words.txt").write_text(" ".join(np.random.default_rng(0).choice(["alpha", "beta"], 4000)))
    data = DataConfig(
        source="files",
        files=(str(folder / "words.txt"),),
        seq_len=8,
        tokenizer="bpe",
        bpe_vocab_size=262,
        cache_dir=str(folder / "prepared"),
    )
    config = Config(
        model=ModelConfig(hidden_size=16, ffn_size=24, num_layers=2, num_heads=2),
        data=data,
        mesh=MeshConfig(num_nodes=2),
        train=TrainConfig(steps=STEPS, microbatch_size=1),
        checkpoint=CheckpointConfig(every=2),
    )
    trainer.run(config, folder / "run")
    shutil.rmtree(folder / "prepared")
    (folder / "words.txt").unlink()
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_newest_parameters_and_the_tokenizer(finished):
    model = open_trained(finished)
    assert (model.step, model.config.model.vocab_size) == (STEPS, 262) == (STEPS, model.tokenizer.vocab_size)
    text = "alpha beta alpha"
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    abstract = abstract_state(model.config, 262, make_cluster(MeshConfig(num_nodes=1)).submeshes[0])
    checkpoints = Checkpointer(finished / "checkpoints", keep=9, on_event=lambda *_: None)
    _, state, _ = checkpoints.restore(abstract)
    checkpoints.close()
    assert_trees_equal(jax.tree.leaves(model.params), jax.tree.leaves(state.params))


def test_step_can_be_chosen_and_must_be_there(finished):
    early = open_trained(finished, step=2)
    assert early.step == 2
    assert not np.array_equal(early.params.embedding[...], open_trained(finished).params.embedding[...])
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3 in .*; there are steps 2, 4"):
        open_trained(finished, step=3)


def test_damaged_newest_step_gives_way_and_nothing_is_changed(run):
    manifest = run / "checkpoints" / "4" / "manifest.json"
    manifest.write_text("{")
    (run / "checkpoints" / "6.saving").mkdir()  # a run that is going on saves just now
    assert open_trained(run).step == 2
    assert manifest.exists() and (run / "checkpoints" / "6.saving").exists()
    with pytest.raises(CheckpointError, match="step 4: "):
        open_trained(run, step=4)


def test_what_is_missing_is_named(run, tmp_path):
    with pytest.raises(ConfigError, match="not a run directory"):
        open_trained(tmp_path)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="no complete checkpoint in"):
        open_trained(run)
    (run / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="tokenizer.json: cannot be read"):
        open_trained(run)


def test_run_without_a_kept_tokenizer_prepares_its_data_again(run):
    shutil.rmtree(run / "tokenizer")
    with pytest.raises(DataError, match="words.txt"):
        open_trained(run)


def test_other_shapes_than_the_checkpoint_are_refused(run):
    config = (run / "config.json").read_text().replace('"ffn_size": 24', '"ffn_size": 32')
    (run / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match="holds another train state"):
        open_trained(run)
