"""The cost model against numbers worked out by hand, and the relations that must hold between costs."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mecefo_jax.config import Config, DegradedConfig, FaultsConfig, ModelConfig
from mecefo_jax.membership import run_degraded_costs
from mecefo_jax.takeover.cost import degraded_costs, degraded_flops, exact_flops

# D = 4, F = 6, L = 2, two heads of which one for keys and values; b = 10 tokens, T = 5, V = 7.
TINY = {"hidden_size": 4, "ffn_size": 6, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
SIZES = {"microbatch_tokens": 10, "seq_len": 5, "vocab_size": 7}
# Forward, by hand, per layer. q and o: 2 * 10*4*4 each; k and v: 2 * 10*4*2 each; scores and values: 2 * 10*5*4 each.
ATTENTION = 2 * 320 + 2 * 160 + 2 * 400
# Gate, up and down: 2 * 10*4*6 each.
ONE_FFN_PRODUCT = 480
FFN = 3 * ONE_FFN_PRODUCT
# Forward, and the gradients of both operands: 3 * 2 * 10*4*7.
HEAD = 1680

NOTHING = DegradedConfig(skip_attention=False, remat_ffn=False, low_rank=False)
ALL_SWITCHES = [
    DegradedConfig(skip_attention=m, remat_ffn=r, low_rank=low)
    for m, r, low in itertools.product([False, True], repeat=3)
]


@pytest.mark.parametrize(
    ("remat", "recomputed"), [("none", 0), ("ffn", 2 * ONE_FFN_PRODUCT), ("block", ATTENTION + 2 * ONE_FFN_PRODUCT)]
)
def test_exact_by_hand(remat, recomputed):
    expected = 2 * (3 * (ATTENTION + FFN) + recomputed) + HEAD
    assert exact_flops(ModelConfig(**TINY, remat=remat), **SIZES) == expected


# Rank 3. Gate and up [4, 6]: 2*10*(4*3 + 3*6) = 600 each; down [6, 4]: the same.
LOW_RANK = 3 * 600
# Query, key, value and out without scores.
PROJECTIONS = 2 * 320 + 2 * 160
# Of half of five tokens: two, to even.
SAMPLED = 2 / 5
# Half of the way from two to five, rounded up.
FFN_TOKENS = 4 / 5


@pytest.mark.parametrize(
    ("switches", "remat", "backward"),
    [
        ("m", "none", 2 * FFN),
        ("r", "none", 2 * ATTENTION + 2 * FFN + 2 * ONE_FFN_PRODUCT),
        ("l", "none", 2 * ATTENTION + FFN + LOW_RANK),
        ("ml", "none", FFN + LOW_RANK),
        ("mrl", "none", FFN + LOW_RANK + 2 * ONE_FFN_PRODUCT),
        ("ml", "ffn", FFN + LOW_RANK + 2 * ONE_FFN_PRODUCT),
        ("ml", "block", FFN + LOW_RANK + 2 * ONE_FFN_PRODUCT),
        ("mrl", "block", FFN + LOW_RANK + 2 * ONE_FFN_PRODUCT),
        ("l", "block", 3 * ATTENTION + FFN + LOW_RANK + 2 * ONE_FFN_PRODUCT),
        ("s", "none", 2 * ATTENTION + (SAMPLED - 1) * PROJECTIONS + (1 + SAMPLED) * FFN),
        ("s", "ffn", 2 * ATTENTION + (SAMPLED - 1) * PROJECTIONS + (1 + SAMPLED) * FFN + 2 * ONE_FFN_PRODUCT),
        ("sf", "none", 2 * ATTENTION + (SAMPLED - 1) * PROJECTIONS + (FFN_TOKENS + SAMPLED) * FFN),
        ("ms", "none", (1 + SAMPLED) * FFN),
        ("ls", "none", 2 * ATTENTION + FFN + LOW_RANK),
    ],
)
def test_degraded_by_hand(switches, remat, backward):
    degraded = DegradedConfig(
        skip_attention="m" in switches,
        remat_ffn="r" in switches,
        low_rank="l" in switches,
        sampled_fractions=(0.5,) if "s" in switches else (),
        sample_ffn="f" in switches,
    )
    expected = 2 * (ATTENTION + FFN + backward) + HEAD
    assert degraded_flops(ModelConfig(**TINY, remat=remat), degraded, rank=3, **SIZES) == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("remat", ["none", "ffn", "block"])
def test_with_all_switches_off_a_degraded_microbatch_costs_as_much(remat):
    assert degraded_costs(ModelConfig(**TINY, remat=remat), NOTHING, rank=3, **SIZES) == (1.0,)


def test_each_fraction_is_a_level_of_its_own_cost():
    def costs(*fractions):
        degraded = DegradedConfig(skip_attention=False, low_rank=False, sampled_fractions=fractions)
        return degraded_costs(ModelConfig(**TINY), degraded, rank=3, **SIZES)

    assert costs(0.75, 0.5, 0.25) == (*costs(0.75), *costs(0.5), *costs(0.25))
    assert costs(0.75) > costs(0.5) > costs(0.25)


def test_where_the_first_cost_is_configured_the_others_follow_in_proportion():
    switches = DegradedConfig(skip_attention=False, low_rank=False, sampled_fractions=(0.75, 0.25))
    counted = run_degraded_costs(Config(degraded=switches), 256)
    told = run_degraded_costs(Config(degraded=switches, faults=FaultsConfig(degraded_cost=0.97)), 256)
    assert told[0] == 0.97 and told[1] / told[0] == pytest.approx(counted[1] / counted[0], rel=1e-12)


@pytest.mark.parametrize("degraded", ALL_SWITCHES)
def test_rank_is_clipped_to_the_input_size_of_each_weight(degraded):
    model = ModelConfig(**TINY)
    at_largest_input = degraded_costs(model, degraded, rank=6, **SIZES)
    assert degraded_costs(model, degraded, rank=1000, **SIZES) == at_largest_input
    if degraded.low_rank:
        assert degraded_costs(model, degraded, rank=5, **SIZES) < at_largest_input


@settings(deadline=None)
@given(
    hidden=st.integers(1, 64).map(lambda n: 64 * n),
    ffn=st.integers(64, 8192),
    rank=st.integers(1, 16),
    remat=st.sampled_from(["none", "ffn", "block"]),
)
def test_skipping_attention_and_a_low_rank_always_save_and_recomputing_always_costs(hidden, ffn, rank, remat):
    model = ModelConfig(hidden_size=hidden, ffn_size=ffn, num_heads=2, remat=remat)
    sizes = {"microbatch_tokens": 512, "seq_len": 128, "vocab_size": 256}

    def cost(switches):
        degraded = DegradedConfig(skip_attention="m" in switches, remat_ffn="r" in switches, low_rank="l" in switches)
        return degraded_costs(model, degraded, rank=rank, **sizes)[0]

    for r in ("", "r"):
        assert cost("m" + r) < cost(r)
        assert cost(r + "l") < cost(r)
        assert cost("m" + r + "l") < 1
    assert (cost("r") > 1) == (remat == "none")


def test_the_paper_s_7b_by_hand():
    # Per token and layer: attention 8 * 4096^2 + 4 * 256 * 4096 = 138 M, feed-forward 6 * 4096 * 11008 = 271 M;
    # low rank 6 * 128 * 15104 = 11.6 M; head 6 * 32000 * 4096 / 32 = 24.6 M.
    model = ModelConfig(hidden_size=4096, ffn_size=11008, num_layers=32, num_heads=32)
    sizes = {"rank": 128, "microbatch_tokens": 4096, "seq_len": 256, "vocab_size": 32000}
    ml = DegradedConfig(remat_ffn=False)
    expected = (138.41 + 270.53 + 270.53 + 11.60 + 24.58) / (3 * (138.41 + 270.53) + 24.58)
    assert degraded_costs(model, ml, **sizes)[0] == pytest.approx(expected, rel=1e-4)
    block = ModelConfig(hidden_size=4096, ffn_size=11008, num_layers=32, num_heads=32, remat="block")
    recomputed = 138.41 + 180.36
    expected = (138.41 + 270.53 + 270.53 + 11.60 + 180.36 + 24.58) / (3 * (138.41 + 270.53) + recomputed + 24.58)
    assert degraded_costs(block, DegradedConfig(), **sizes)[0] == pytest.approx(expected, rel=1e-4)
