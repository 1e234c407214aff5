"""Our model against Hugging Face's LLaMA, an implementation that shares nothing with it; skipped without PyTorch."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mecefo_jax.config import ModelConfig
from mecefo_jax.model import init_model

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from scripts import compare_torch  # noqa: E402

VOCAB = 61
TOLERANCE = 1e-5  # both sides compute in float32
SHAPES = {
    "mha": ModelConfig(hidden_size=32, ffn_size=56, num_layers=3, num_heads=4, rope_base=500.0, norm_eps=1e-4),
    "gqa": ModelConfig(hidden_size=32, ffn_size=56, num_layers=2, num_heads=4, num_kv_heads=2),
    "tied": ModelConfig(hidden_size=32, ffn_size=56, num_layers=2, num_heads=4, tie_embeddings=True),
    "gqa_tied": ModelConfig(
        hidden_size=32, ffn_size=56, num_layers=2, num_heads=4, num_kv_heads=1, tie_embeddings=True
    ),
}


@pytest.fixture
def optax_promotion():
    """Optax raises floats to integer step counts."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(params=SHAPES)
def pair(request):
    """Our parameters, their model with the same weights, and tokens; weights larger than at initialization."""
    config = SHAPES[request.param]
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim > 2 else leaf, init_model(config, VOCAB, seed=3))
    tokens = np.random.default_rng(0).integers(VOCAB, size=(2, 18), dtype=np.int32)
    return params, compare_torch.hugging_face_model(params, config, VOCAB), tokens


def test_logits_agree_over_the_whole_sequence(pair):
    params, theirs, tokens = pair
    ours = np.asarray(jax.jit(lambda params, tokens: params(tokens, jnp.dtype(jnp.float32)))(params, tokens))
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor(tokens, dtype=torch.int64)).logits.numpy()
    assert np.abs(ours - logits).max() < TOLERANCE * np.abs(logits).max()


def test_losses_and_gradients_of_every_weight_agree(pair):
    params, theirs, tokens = pair
    loss, grads = jax.jit(jax.value_and_grad(compare_torch.mean_loss))(params, tokens)
    their_loss = compare_torch.torch_mean_loss(theirs, torch.tensor(tokens, dtype=torch.int64))
    their_loss.backward()
    assert float(loss) == pytest.approx(their_loss.item(), rel=TOLERANCE)
    their_grads = {name: weight.grad.numpy() for name, weight in theirs.named_parameters()}
    ours = compare_torch.hugging_face_weights(grads)
    assert ours.keys() == their_grads.keys()
    for name, grad in their_grads.items():
        assert np.abs(ours[name] - grad).max() < TOLERANCE * np.abs(grad).max(), name


@pytest.mark.slow
def test_a_step_changes_the_weights_alike(pair, optax_promotion):
    """AdamW's first step moves an entry by the learning rate times the sign of its gradient: only clear ones count."""
    params, theirs, tokens = pair
    compare_torch.torch_parts(theirs, tokens)["step"]()
    (stepped, _), _ = compare_torch.jax_parts(params, tokens)["step"]()
    ours = compare_torch.hugging_face_weights(stepped)
    for name, weight in theirs.named_parameters():
        gradient = np.abs(weight.grad.numpy())
        clear = gradient > 1e-3 * gradient.max()
        difference = np.abs(ours[name] - weight.detach().numpy())[clear]
        assert clear.mean() > 0.3 and difference.max() < 1e-2 * compare_torch.LEARNING_RATE, name


def test_different_losses_are_refused(pair):
    params, theirs, tokens = pair
    compare_torch.check_losses(params, theirs, tokens)
    with torch.no_grad():
        theirs.model.norm.weight *= 1.1
    with pytest.raises(ArithmeticError, match="losses differ"):
        compare_torch.check_losses(params, theirs, tokens)


@pytest.mark.slow
def test_the_numbers_are_written_and_fit_each_other(monkeypatch, tmp_path, capsys, optax_promotion):
    size = compare_torch.Size(model=SHAPES["gqa"], vocab_size=VOCAB, batch_size=2, seq_len=8)
    monkeypatch.setattr(compare_torch, "sizes", lambda: {"small": size})
    path = tmp_path / "numbers.json"
    assert compare_torch.main(["small", "--rounds", "3", "--json", str(path)]) == 0
    numbers = json.loads(path.read_text())["sizes"]["small"]
    assert list(numbers) == ["product", "forward", "gradient", "step"]
    for part in numbers.values():
        assert part["jax_tokens_per_s"] == pytest.approx(16 / part["jax_s"])
        assert part["torch_tokens_per_s"] == pytest.approx(16 / part["torch_s"])
        assert part["ratio"] > 0
    assert "ours / PyTorch" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["nosuchsize"], ["tiny", "--rounds", "0"]])
def test_a_mistaken_command_line_is_refused_in_one_line(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare_torch.main(words)
    assert "error: " in capsys.readouterr().err.splitlines()[-1]
