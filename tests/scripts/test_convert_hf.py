"""The command line that converts models: what it writes, checks, says and refuses."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
import safetensors.numpy

from mecefo_jax.config import BasisConfig, Config, DataConfig, ModelConfig
from mecefo_jax.data.tokenizer import ByteTokenizer
from mecefo_jax.huggingface import Pretrained, can_compare_logits, whole_folder, write_model
from mecefo_jax.huggingface import importing as imports
from mecefo_jax.model import init_model
from mecefo_jax.trained import TrainedModel, open_trained
from scripts import convert_hf

MODEL = ModelConfig(hidden_size=16, ffn_size=24, num_layers=2, num_heads=2, vocab_size=258, max_seq_len=64)
SMALL = ["--data.seq_len", "16", "--basis.rank", "4"]


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    """A folder of transformers."""
    params = jax.jit(lambda: init_model(MODEL, 258, 0))()
    config = Config(model=MODEL, data=DataConfig(seq_len=8), basis=BasisConfig(rank=4))
    folder = tmp_path_factory.mktemp("hf") / "model"
    with whole_folder(folder) as torn:
        write_model(torn, TrainedModel(config=config, params=params, tokenizer=ByteTokenizer(), step=0))
    return folder


@pytest.fixture(scope="module")
def run_dir(hf_dir):
    assert convert_hf.main(["import", str(hf_dir), str(hf_dir.parent / "run"), *SMALL]) == 0
    return hf_dir.parent / "run"


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setattr(convert_hf, "can_compare_logits", lambda: False)


def test_an_import_takes_the_shape_of_the_folder_and_the_settings_of_the_line(run_dir):
    config = open_trained(run_dir).config
    assert (config.model.hidden_size, config.model.vocab_size, config.data.seq_len) == (16, 258, 16)
    assert (config.basis.rank, config.name, config.mesh.num_nodes) == (4, "run", 8)
    assert json.loads((run_dir / "config.json").read_text())["basis"]["rank"] == 4


def test_an_export_without_transformers_is_compared_bit_for_bit(run_dir, hf_dir, tmp_path, no_torch, capsys):
    assert convert_hf.main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "the weights read back are equal bit for bit" in said
    assert "logits were not compared, since torch and transformers are not installed" in said
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (hf_dir / name).read_bytes()


def test_shards_dtype_and_step_are_as_asked(run_dir, tmp_path, no_torch):
    options = ["--dtype", "bfloat16", "--max-shard-size", "9KB", "--step", "0", "--no-check"]
    assert convert_hf.main(["export", str(run_dir), str(tmp_path / "out"), *options]) == 0
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) > 1
    arrays = [array for file in files for array in safetensors.numpy.load_file(file).values()]
    assert {array.dtype.name for array in arrays} == {"bfloat16"}


@pytest.mark.skipif(not can_compare_logits(), reason="torch and transformers are not installed")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_compared_with_transformers(run_dir, tmp_path, capsys, dtype):
    assert convert_hf.main(["export", str(run_dir), str(tmp_path / "out"), "--dtype", dtype]) == 0
    assert "check: logits of transformers and ours differ by " in capsys.readouterr().out


@pytest.mark.parametrize("difference", [1.01e-3, float("nan")])
def test_different_logits_leave_nothing_behind(run_dir, tmp_path, monkeypatch, capsys, difference):
    monkeypatch.setattr(convert_hf, "can_compare_logits", lambda: True)
    monkeypatch.setattr(convert_hf, "largest_logit_difference", lambda *_: (difference, 10.0))
    assert convert_hf.main(["export", str(run_dir), str(tmp_path / "out")]) == 1
    assert "error: the logits differ by more than 0.0001 of the largest" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(convert_hf, "largest_logit_difference", lambda *_: (0.99e-3, 10.0))
    assert convert_hf.main(["export", str(run_dir), str(tmp_path / "out")]) == 0


def test_weights_that_read_back_otherwise_leave_nothing_behind(run_dir, tmp_path, monkeypatch, capsys, no_torch):
    def write_wrongly(folder: pathlib.Path, trained: TrainedModel, **options):
        params = jax.tree.map(lambda leaf: leaf + jnp.float32(1e-3), trained.params)
        write_model(folder, TrainedModel(**(vars(trained) | {"params": params})), **options)

    monkeypatch.setattr(convert_hf, "write_model", write_wrongly)
    assert convert_hf.main(["export", str(run_dir), str(tmp_path / "out")]) == 1
    assert "is not what was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def refused(words, capsys) -> str:
    """The error line; the exit code is that of a mistake, and it is one line."""
    assert convert_hf.main([str(word) for word in words]) in (2, 3, 4)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_mistakes_are_told_in_a_line_and_nothing_is_written(run_dir, hf_dir, tmp_path, capsys):
    out = tmp_path / "out"
    assert "not a run directory" in refused(["export", hf_dir.parent, out], capsys)
    assert "no checkpoint of step 3" in refused(["export", run_dir, out, "--step", 3], capsys)
    assert "nothing is overwritten" in refused(["export", run_dir, hf_dir], capsys)
    assert "nothing is overwritten" in refused(["import", hf_dir, run_dir], capsys)
    assert "config.json: cannot be read" in refused(["import", tmp_path, out], capsys)
    assert "model.hidden_size: is taken from the folder" in refused(
        ["import", hf_dir, out, "--model.hidden_size", 32], capsys
    )
    assert "data.tokenizer: is taken from the folder" in refused(
        ["import", hf_dir, out, "--data.tokenizer", "bpe"], capsys
    )
    assert "unknown run nosuch" in refused(["import", hf_dir, out, "--config", "nosuch"], capsys)
    assert "data.seq_len: got 65, expected at most model.max_seq_len (64)" in refused(
        ["import", hf_dir, out, "--data.seq_len", 65], capsys
    )
    assert "expected --section.field VALUE alone" in refused(["import", hf_dir, out, "--workdir", out], capsys)
    assert "name: got 'a b', expected letters" in refused(["import", hf_dir, tmp_path / "a b"], capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_shorter_model_shortens_the_sequences_of_the_named_config(hf_dir, tmp_path, monkeypatch):
    """The quickstart's are of 128 tokens, the model is meant for 64."""
    written: list[Config] = []

    def record(folder: pathlib.Path, final: pathlib.Path, pretrained: Pretrained, base: Config):
        written.append(imports.run_config(final, pretrained, base))

    monkeypatch.setattr(convert_hf, "write_run", record)
    assert convert_hf.main(["import", str(hf_dir), str(tmp_path / "run"), "--model.remat=ffn"]) == 0
    assert written[0].data.seq_len == 64
    assert (written[0].model.remat, written[0].train.microbatch_size) == ("ffn", 2)


@pytest.mark.parametrize(
    "words",
    [[], ["convert"], ["export", "a"], ["export", "a", "b", "--max-shard-size", "0GB"], ["export", "a", "b", "c"]],
)
def test_a_mistaken_command_line_is_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        convert_hf.main(words)
    assert "error: " in capsys.readouterr().err.splitlines()[-1]
