"""Exports are what Hugging Face's LLaMA computes, conversions change no bit, and what cannot be converted is refused.

The reference is LLaMA's public definition in float64 (``tests/llama_reference.py``), and transformers itself where it
is installed: it is no part of requirements.txt, since the wheels of PyTorch on PyPI bring gigabytes of CUDA.
"""

import dataclasses
import json
import pathlib
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mecefo_jax import trainer
from mecefo_jax.config import BasisConfig, Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from mecefo_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, read_tokenizer, train_bpe
from mecefo_jax.errors import CheckpointError, ConfigError, DataError, RunError
from mecefo_jax.huggingface import (
    can_compare_logits,
    largest_logit_difference,
    read_pretrained,
    require_equal_weights,
    whole_folder,
    write_model,
    write_run,
)
from mecefo_jax.huggingface.configuration import from_llama_config
from mecefo_jax.huggingface.tokenizer_files import byte_content
from mecefo_jax.huggingface.weights import read_params
from mecefo_jax.trained import TrainedModel, abstract_params, open_trained
from tests import llama_reference
from tests.tiny import assert_trees_equal

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "na\u00efve \u6570 text"] * 5
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VOCAB, SEQ = 271, 48
TOLERANCE = 1e-5
"""Logits of order 1 in float32: 6e-8 times the root of some 1e3 roundings is 2e-6, and attention adds a little."""
COMMON = {"hidden_size": 32, "ffn_size": 56, "num_heads": 4, "vocab_size": VOCAB, "max_seq_len": SEQ}
SHAPES = {
    "mha": ModelConfig(num_layers=3, rope_base=500.0, norm_eps=3e-2, **COMMON),
    "gqa": ModelConfig(num_layers=2, rope_base=500000.0, norm_eps=3e-2, num_kv_heads=2, **COMMON),
    "tied": ModelConfig(num_layers=2, rope_base=77.5, norm_eps=3e-2, tie_embeddings=True, **COMMON),
    "gqa_tied": ModelConfig(
        num_layers=2, rope_base=500.0, norm_eps=3e-2, num_kv_heads=1, tie_embeddings=True, **COMMON
    ),
}
BYTE_TOKENIZER = ByteTokenizer()
needs_transformers = pytest.mark.skipif(not can_compare_logits(), reason="torch and transformers are not installed")


def random_model(config: ModelConfig, tokenizer: Tokenizer = BYTE_TOKENIZER) -> TrainedModel:
    """Weights of a model that has learned something: scales that differ, and logits and attention scores of order 1."""
    rng, whole = np.random.default_rng(5), Config(model=config, data=DataConfig(seq_len=8))

    def redrawn(path, leaf):
        name = jax.tree_util.keystr(path)
        if "scale" in name:
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), jnp.float32)
        # Queries and keys are large, so that attention is far from an average.
        size = 1.7 if ".query." in name or ".key." in name else 0.3 if "head" in name or "embedding" in name else 1.0
        fan_in = 8 if "embedding" in name else leaf.shape[-2]
        return jnp.asarray(size * rng.normal(size=leaf.shape) / np.sqrt(fan_in), jnp.float32)

    params = jax.tree_util.tree_map_with_path(redrawn, abstract_params(whole))
    return TrainedModel(config=whole, params=params, tokenizer=tokenizer, step=7)


def exported(folder: pathlib.Path, trained: TrainedModel, **options) -> pathlib.Path:
    with whole_folder(folder) as torn:
        write_model(torn, trained, **options)
    return folder


def our_logits(trained: TrainedModel, tokens: np.ndarray) -> np.ndarray:
    forward = jax.jit(lambda params, tokens_BT: params(tokens_BT, jnp.dtype(jnp.float32)))
    return np.asarray(forward(trained.params, tokens[None]))[0]


def settings_of(folder: pathlib.Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def weights_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: array for file in files for name, array in safetensors.numpy.load_file(file).items()}


@pytest.fixture(scope="module")
def bpe() -> HuggingFaceTokenizer:
    return train_bpe(iter(TEXTS), 270)


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, tmp_path_factory):
    """A model and its export."""
    trained = random_model(SHAPES[request.param])
    return trained, exported(tmp_path_factory.mktemp("hf") / request.param, trained)


@pytest.fixture(scope="module")
def gqa(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("hf") / "gqa", random_model(SHAPES["gqa"]))


@pytest.fixture
def folder(gqa, tmp_path):
    return shutil.copytree(gqa, tmp_path / "folder")


TOKENS = np.random.default_rng(2).integers(VOCAB, size=SEQ, dtype=np.int32)


def test_logits_are_those_of_the_definition(pair):
    trained, folder = pair
    settings, weights = settings_of(folder), weights_of(folder)
    ours = our_logits(trained, TOKENS)
    reference, probabilities = llama_reference.forward(settings, weights, TOKENS)
    assert 0.3 < np.abs(reference).max() < 10
    assert probabilities[:, :, SEQ // 2 :].max(-1).mean() > 5 * 2 / SEQ  # far from an average over all keys
    assert np.abs(ours - reference).max() < TOLERANCE
    # Each of these settings matters to the comparison.
    for name, other in (("rms_norm_eps", 1e-6), ("rope_parameters", {"rope_theta": 10000.0})):
        assert np.abs(ours - llama_reference.logits(settings | {name: other}, weights, TOKENS)).max() > 100 * TOLERANCE


@needs_transformers
@pytest.mark.slow
def test_transformers_computes_the_same_and_continues_alike(pair):
    import torch
    import transformers

    trained, folder = pair
    difference, largest = largest_logit_difference(folder, trained, "float32")
    assert difference < TOLERANCE and largest > 0.3
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == torch.float32
    prompt = TOKENS[:9]
    generated = theirs.generate(
        torch.tensor(prompt[None], dtype=torch.int64),
        attention_mask=torch.ones((1, 9), dtype=torch.int64),
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
    )[0].numpy()
    ours = prompt
    while len(ours) < 15 and ours[-1] != trained.tokenizer.eos_id:
        ours = np.append(ours, our_logits(trained, ours)[-1].argmax()).astype(np.int32)
    assert len(ours) > 11
    np.testing.assert_array_equal(generated, ours)


@pytest.mark.parametrize("shape", SHAPES)
def test_ours_to_theirs_and_back_changes_no_bit(shape, tmp_path):
    trained = random_model(SHAPES[shape])
    pretrained = read_pretrained(exported(tmp_path / "hf", trained))
    assert (pretrained.tokenizer, pretrained.notes) == (BYTE_TOKENIZER, ())
    assert pretrained.model == dataclasses.replace(SHAPES[shape], num_kv_heads=SHAPES[shape].kv_heads)
    back = read_params(dataclasses.replace(trained.config, model=pretrained.model), pretrained.stored)
    assert_trees_equal(jax.tree.leaves(back), jax.tree.leaves(trained.params))


def test_an_imported_run_opens_like_a_trained_one(gqa, tmp_path):
    trained = random_model(SHAPES["gqa"])
    write_run_whole(tmp_path / "run", read_pretrained(gqa))
    back = open_trained(tmp_path / "run")
    assert (back.config.model, back.tokenizer, back.step) == (trained.config.model, BYTE_TOKENIZER, 0)
    assert_trees_equal(jax.tree.leaves(back.params), jax.tree.leaves(trained.params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_theirs_to_ours_and_back_changes_no_byte(dtype, tmp_path, bpe):
    first = exported(tmp_path / "first", random_model(SHAPES["gqa"], bpe), dtype=dtype, max_shard_bytes=30_000)
    write_run_whole(tmp_path / "run", read_pretrained(first))
    second = exported(tmp_path / "second", open_trained(tmp_path / "run"), dtype=dtype, max_shard_bytes=30_000)
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in second.iterdir()) and len(files) > 6
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


BASE = Config(
    data=DataConfig(seq_len=8, validation_fraction=0.1),
    mesh=MeshConfig(num_nodes=2, num_submeshes=1),
    train=TrainConfig(steps=2, microbatch_size=1),
    optim=OptimConfig(learning_rate=1e-4, warmup_steps=0),
    basis=BasisConfig(rank=4),
)


def write_run_whole(run: pathlib.Path, pretrained, base: Config = BASE) -> Config:
    with whole_folder(run) as torn:
        return write_run(torn, run, pretrained, base)


def test_bfloat16_is_rounded_to_nearest_even(tmp_path):
    trained = random_model(SHAPES["tied"])
    weights = weights_of(exported(tmp_path / "exact", trained))
    rounded = weights_of(exported(tmp_path / "rounded", trained, dtype="bfloat16"))
    for name, exact in weights.items():
        bits = exact.view(np.uint32)
        upper = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        np.testing.assert_array_equal(rounded[name].view(np.uint16), upper)
    require_equal_weights(tmp_path / "rounded", trained, "bfloat16")
    assert settings_of(tmp_path / "rounded")["dtype"] == settings_of(tmp_path / "rounded")["torch_dtype"] == "bfloat16"


def test_float16_is_read_exactly(folder):
    halves = {name: array.astype(np.float16) for name, array in weights_of(folder).items()}
    safetensors.numpy.save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    config = Config(model=SHAPES["gqa"], data=DataConfig(seq_len=8))
    query = read_params(config, read_pretrained(folder).stored).blocks.attention.query.kernel[...]
    expected = halves["model.layers.1.self_attn.q_proj.weight"].astype(np.float32).T
    assert query.dtype == jnp.float32
    np.testing.assert_array_equal(query[1], expected)


def test_shards_keep_to_their_size_and_hold_the_same(gqa, tmp_path):
    trained, limit = random_model(SHAPES["gqa"]), 20_000
    sharded = exported(tmp_path / "shards", trained, max_shard_bytes=limit)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    one = weights_of(gqa)
    assert sorted(index["weight_map"]) == sorted(one)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in one.values())
    files = sorted(sharded.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, 7)]
    for file in files:
        held = safetensors.numpy.load_file(file)
        assert len(held) == 1 or sum(array.nbytes for array in held.values()) <= limit
        for name, array in held.items():
            assert index["weight_map"][name] == file.name
            np.testing.assert_array_equal(array, one[name])
    require_equal_weights(sharded, trained, "float32")
    assert {path.stat().st_mode for path in files} == {(sharded / "config.json").stat().st_mode}  # as the umask has it


def test_no_more_than_a_shard_is_held(tmp_path):
    shape = ModelConfig(hidden_size=128, ffn_size=344, num_layers=6, vocab_size=VOCAB, max_seq_len=SEQ)
    trained, limit = random_model(shape), 400_000
    exported(tmp_path / "warm", trained, max_shard_bytes=limit)  # what is made once is made now
    tracemalloc.start()
    folder = exported(tmp_path / "hf", trained, max_shard_bytes=limit)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert total > 10 * limit and 0.5 * limit < peak < 1.5 * limit  # half a shard for names and JSON


def test_altered_weights_and_settings_are_found(folder):
    trained = random_model(SHAPES["gqa"])
    require_equal_weights(folder, trained, "float32")
    settings = settings_of(folder)
    (folder / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-5}))
    with pytest.raises(RunError, match="norm_eps reads 1e-05, but is 0.03"):
        require_equal_weights(folder, trained, "float32")
    (folder / "config.json").write_text(json.dumps(settings))
    weights = weights_of(folder)
    weights["model.norm.weight"][3] = np.nextafter(weights["model.norm.weight"][3], np.float32(9))
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    with pytest.raises(RunError, match="model.norm.weight is not what was written"):
        require_equal_weights(folder, trained, "float32")


def encoder(folder: pathlib.Path) -> tokenizers.Tokenizer:
    """The file as transformers uses it when ``split_special_tokens`` is set."""
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.encode_special_tokens = json.loads((folder / "tokenizer_config.json").read_text())["split_special_tokens"]
    return model


BYTES = tokenizers.Tokenizer.from_str(byte_content())
BYTES.encode_special_tokens = True


@given(text=TEXT)
def test_the_byte_tokenizer_has_an_equivalent_file(text):
    for words in (text, f"<s>{text}</s>"):
        assert BYTES.encode(words).ids == list(words.encode())


@given(ids=st.lists(st.integers(0, 257)))
def test_the_byte_tokenizer_decodes_alike_also_what_is_no_text(ids):
    assert BYTES.decode(ids, skip_special_tokens=True) == ByteTokenizer().decode(ids)


def test_tokenizers_are_written_with_bos_and_eos(gqa, tmp_path, bpe):
    assert BYTES.get_vocab_size() == 258
    with_bpe = exported(tmp_path / "bpe", random_model(SHAPES["gqa"], bpe))
    for folder, tokenizer in ((gqa, ByteTokenizer()), (with_bpe, bpe)):
        model, declared = encoder(folder), json.loads((folder / "tokenizer_config.json").read_text())
        assert model.token_to_id(declared["bos_token"]) == tokenizer.bos_id == settings_of(folder)["bos_token_id"]
        assert model.token_to_id(declared["eos_token"]) == tokenizer.eos_id == settings_of(folder)["eos_token_id"]
        for text in (*TEXTS, "<s> spelled out </s>"):
            assert model.encode(text).ids == tokenizer.encode(text).tolist()


def word_level(folder: pathlib.Path) -> HuggingFaceTokenizer:
    """A tokenizer whose file asks for what ours does not do: truncation, padding, BOS by itself."""
    folder.mkdir()
    vocabulary = {"<unk>": 0, "start": 1, "stop": 2, "a": 3, "b": 9}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # type: ignore[assignment]
    model.enable_truncation(3)
    model.enable_padding(length=8)
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "start", "eos_token": "stop"}')
    return read_tokenizer(str(folder))


@needs_transformers
@pytest.mark.slow
def test_auto_tokenizer_encodes_and_decodes_alike(tmp_path, bpe):
    import transformers

    words = word_level(tmp_path / "words")
    for number, tokenizer in enumerate((ByteTokenizer(), bpe, words)):
        folder = exported(tmp_path / str(number), random_model(SHAPES["gqa"], tokenizer))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
        assert theirs.model_max_length == SEQ
        for text in (*TEXTS, "<s> spelled out </s> a start b stop b a b", "a  .  b , it 's\n\n"):
            ids = tokenizer.encode(text).tolist()
            assert theirs.encode(text) == theirs(text)["input_ids"] == ids
            if tokenizer is not words:
                assert theirs.decode([tokenizer.bos_id, *ids], skip_special_tokens=True) == text


@pytest.mark.slow
def test_training_goes_on_from_an_import(folder):
    """Two updates of about the learning rate each leave the weights near the imported ones; fresh ones are far."""
    run = folder.parent / "run"
    (folder.parent / "words.txt").write_text(" ".join(np.random.default_rng(0).choice(["alpha", "beta"], 400)))
    data = DataConfig(
        source="files", files=(str(folder.parent / "words.txt"),), seq_len=8, cache_dir=str(run) + "_data"
    )
    config = write_run_whole(run, read_pretrained(folder), dataclasses.replace(BASE, data=data))
    before = open_trained(run)
    assert (before.step, before.config.name, before.config.data.tokenizer) == (0, "run", "bytes")
    summary = trainer.run(config, run)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "resumed"] == [0]
    assert [event["change"].split(":")[0] for event in events if event["kind"] == "config_changed"] == [
        "data.fingerprint"
    ]
    after = open_trained(run)
    assert (summary["steps"], after.step) == (2, 2)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), before.params, after.params)
    # By Cauchy-Schwarz Adam's first and second update are at most 1 and 1.0002 here; decay adds 1% of a weight below 3.
    assert 0 < max(jax.tree.leaves(moved)) < 2.1 * config.optim.learning_rate


def test_a_run_of_another_tokenizer_is_refused(folder, bpe):
    imported = exported(folder.parent / "bpe", random_model(SHAPES["gqa"], bpe))
    (folder.parent / "words.txt").write_text("alpha beta " * 200)
    files = DataConfig(source="files", files=(str(folder.parent / "words.txt"),), cache_dir=str(folder.parent / "data"))
    base = dataclasses.replace(BASE, data=dataclasses.replace(files, seq_len=8))
    run = folder.parent / "run"
    config = write_run_whole(run, read_pretrained(imported), base)
    assert config.data.tokenizer == str(run / "tokenizer" / "tokenizer.json")
    kept = read_tokenizer(config.data.tokenizer)
    assert kept == open_trained(run).tokenizer == dataclasses.replace(bpe, name=config.data.tokenizer)
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer="bytes"))
    with pytest.raises(ConfigError, match="data.tokenizer: saved .*tokenizer.json.*, now .*bytes"):
        trainer.run(other, run)


REFUSED = {
    "attention_bias": True,
    "mlp_bias": True,
    "attention_dropout": 0.1,
    "hidden_act": "gelu",
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "head_dim": 16,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "rope_parameters": {"rope_type": "linear", "rope_theta": 500000.0, "factor": 2.0},
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "quantization_config": {"quant_method": "awq"},
    "hidden_size": None,
    "num_attention_heads": 3,
    "rms_norm_eps": "tiny",
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_without_a_counterpart_are_refused_by_name(name, folder):
    settings = settings_of(folder)
    (folder / "config.json").write_text(json.dumps(settings | {name: REFUSED[name]}))
    expected = {"num_attention_heads": "num_heads", "rms_norm_eps": "norm_eps"}.get(name, name)
    with pytest.raises(ConfigError, match=expected) as caught:
        read_pretrained(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "said",
    [
        {"rope_theta": 123.0},
        {"rope_theta": 123, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 123.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 123.0}, "rope_theta": 123.0},
    ],
)
def test_old_and_new_ways_to_say_the_same(said):
    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = from_llama_config(sizes | {"vocab_size": 9} | said, "x")
    silent = {"rope_base": 123.0, "norm_eps": 1e-6, "max_seq_len": 2048, "num_kv_heads": 4, "tie_embeddings": False}
    assert {name: getattr(model, name) for name in silent} == silent


def without(weights, name):
    return {key: array for key, array in weights.items() if key != name}


NORM, HEAD = "model.layers.1.input_layernorm.weight", "lm_head.weight"
DAMAGED = {
    "missing": (lambda w: without(w, NORM), f"{NORM} is missing"),
    "untied": (lambda w: without(w, HEAD), "lm_head.weight is missing"),
    "unexpected": (lambda w: w | {"model.layers.0.self_attn.q_proj.bias": w[NORM]}, "q_proj.bias is not expected"),
    "extra layer": (lambda w: w | {"model.layers.2.input_layernorm.weight": w[NORM]}, "layers.2.* not expected"),
    "rows": (
        lambda w: w | {HEAD: w[HEAD][:-1].copy()},
        r"lm_head.weight is \[270, 32\], but by config.json \[271, 32\]",
    ),
    "dtype": (lambda w: w | {NORM: w[NORM].astype(np.int8)}, f"{NORM} is of dtype I8"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_other_tensors_are_refused_by_name(kind, folder):
    change, message = DAMAGED[kind]
    safetensors.numpy.save_file(change(weights_of(folder)), folder / "model.safetensors")
    with pytest.raises(DataError, match=message):
        read_pretrained(folder)


def test_a_tied_head_may_be_there_if_it_is_the_embedding(tmp_path):
    folder = exported(tmp_path / "hf", random_model(SHAPES["tied"]))
    weights = weights_of(folder)
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    embedding = weights["model.embed_tokens.weight"]
    safetensors.numpy.save_file(weights | frequencies | {HEAD: embedding}, folder / "model.safetensors")
    read_pretrained(folder)
    safetensors.numpy.save_file(weights | {HEAD: embedding + 1}, folder / "model.safetensors")
    with pytest.raises(
        DataError, match="lm_head.weight is not model.embed_tokens.weight, though config.json ties them"
    ):
        read_pretrained(folder)


def test_too_many_tokens_are_refused_and_other_ids_told(folder, bpe):
    settings = settings_of(folder)
    for name in ("bos_token_id", "eos_token_id"):
        (folder / "config.json").write_text(json.dumps(settings | {name: 3}))
        assert f"{name} is 3 in config.json, but 25" in read_pretrained(folder).notes[0]
    tokenizer = tokenizers.Tokenizer.from_str(byte_content())
    tokenizer.add_tokens([f"extra{n}" for n in range(14)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(DataError, match="the tokenizer has 272 entries, but the embedding 271 rows"):
        read_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_and_damaged_files_are_named(name, folder):
    for spoil in (lambda path: path.write_bytes(path.read_bytes()[:40]), lambda path: path.unlink()):
        spoil(folder / name)
        with pytest.raises(DataError, match=name):
            read_pretrained(folder)
    (folder / "pytorch_model.bin").touch()
    if name == "model.safetensors":
        with pytest.raises(DataError, match="but pytorch_model.bin; load it in transformers"):
            read_pretrained(folder)


def test_an_index_must_fit_its_files(tmp_path):
    folder = exported(tmp_path / "hf", random_model(SHAPES["gqa"]), max_shard_bytes=20_000)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    wrong = {
        "holds no": index["weight_map"] | {NORM: index["weight_map"][HEAD]},
        "does not list": without(index["weight_map"], NORM),
        "names files outside": index["weight_map"] | {NORM: "../elsewhere.safetensors"},
        "gone.safetensors: cannot be read": index["weight_map"] | {NORM: "gone.safetensors"},
    }
    for message, weight_map in wrong.items():
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(DataError, match=message):
            read_pretrained(folder)


def test_a_folder_is_whole_or_not_there(tmp_path):
    target = tmp_path / "out"
    with pytest.raises(CheckpointError, match="out: cannot be written .*No space left"), whole_folder(target) as torn:
        (torn / "half").touch()
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
    target.mkdir()
    with whole_folder(target) as torn:
        (torn / "file").touch()
        assert list(target.iterdir()) == []
    assert [path.name for path in target.iterdir()] == ["file"] and list(tmp_path.iterdir()) == [target]
    with pytest.raises(ConfigError, match="out: exists already, and nothing is overwritten"), whole_folder(target):
        raise AssertionError
    with pytest.raises(ConfigError, match="file/x: cannot be made"), whole_folder(target / "file" / "x"):
        raise AssertionError


@needs_transformers
@pytest.mark.slow
def test_a_model_saved_by_transformers_is_imported(tmp_path, bpe):
    import torch
    import transformers

    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-3,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    theirs = transformers.LlamaForCausalLM(settings).eval()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    bpe.save(tmp_path / "hf")
    pretrained = read_pretrained(tmp_path / "hf")
    assert pretrained.notes == ()
    write_run_whole(tmp_path / "run", pretrained)
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor(TOKENS[None], dtype=torch.int64)).logits[0].numpy()
    assert np.abs(logits).max() > 0.3
    assert np.abs(our_logits(open_trained(tmp_path / "run"), TOKENS) - logits).max() < TOLERANCE * np.abs(logits).max()
    again = exported(tmp_path / "again", open_trained(tmp_path / "run"))
    before, after = weights_of(tmp_path / "hf"), weights_of(again)
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    said, kept = (transformers.AutoConfig.from_pretrained(path).to_dict() for path in (tmp_path / "hf", again))
    said["initializer_range"] = kept["initializer_range"]  # of no meaning to weights that are there
    said["_name_or_path"] = kept["_name_or_path"]
    assert {name: kept.get(name) for name in said} == said  # transformers 4 keeps rope_parameters without reading it
