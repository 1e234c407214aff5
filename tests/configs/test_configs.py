"""Named runs: they are what their names and the paper say, and the quickstart shows what it promises."""

import inspect

import numpy as np
import pytest

import configs
from mecefo_jax.faults import make_fault_source


@pytest.mark.parametrize("name", configs.names())
def test_run_is_named_after_its_function_and_documented(name):
    assert configs.get(name).name == name
    assert f"python train.py {name}" in (inspect.getdoc(getattr(configs, name)) or "")


@pytest.mark.parametrize(
    ("name", "shape", "batch", "steps", "billions"),
    [
        ("llama_350m", (1024, 2736, 24, 16), 8192, 6_000, 0.37),
        ("llama_1b", (2048, 5461, 24, 32), 4096, 20_000, 1.34),
        ("llama_7b", (4096, 11_008, 32, 32), 1024, 60_000, 6.74),
    ],
)
def test_llama_runs_have_the_papers_sizes(name, shape, batch, steps, billions):
    config = configs.get(name)
    model = config.model
    assert (model.hidden_size, model.ffn_size, model.num_layers, model.num_heads) == shape
    assert model.vocab_size == config.data.bpe_vocab_size == 32_000
    assert (config.global_batch_size, config.train.steps, config.data.seq_len) == (batch, steps, 256)
    assert config.mesh.num_nodes == 32
    hidden, ffn, layers, _ = shape
    params = layers * (4 * hidden**2 + 3 * hidden * ffn + 2 * hidden) + 2 * 32_000 * hidden + hidden
    assert params / 1e9 == pytest.approx(billions, abs=0.005)


def test_quickstart_sees_failures_recoveries_and_two_nodes_down_at_once():
    config = configs.get("quickstart")
    nodes, steps = config.mesh.num_nodes, config.train.steps
    source = make_fault_source(config.faults, num_nodes=nodes, seed=config.train.seed)
    live_TN = np.stack([np.ones(nodes, bool), *(source.live(step)[:, 0] for step in range(steps))])
    changes_TN = np.diff(live_TN.astype(int), axis=0)
    down_T = (~live_TN).sum(axis=1)
    assert (nodes, steps >= 200) == (8, True)
    assert (changes_TN == -1).sum() == 8
    assert (changes_TN == 1).sum() == 7
    assert down_T.max() == 2
    assert (down_T == 0).sum() > steps // 10
