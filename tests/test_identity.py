"""What a resumed run may change."""

import copy

import pytest

from mecefo_jax.config import Config
from mecefo_jax.config_file import to_dict
from mecefo_jax.errors import ConfigError
from mecefo_jax.identity import check_identity

BASE = to_dict(Config()) | {"data": to_dict(Config())["data"] | {"fingerprint": "abc"}}


def changed(**settings) -> dict:
    config = copy.deepcopy(BASE)
    for name, value in settings.items():
        section, field = name.split("__")
        config[section][field] = value
    return config


def test_an_unchanged_config_says_nothing():
    assert check_identity(BASE, copy.deepcopy(BASE)) == []


@pytest.mark.parametrize(
    "name, value",
    [
        ("model__hidden_size", 256),
        ("model__num_kv_heads", 2),
        ("model__vocab_size", 300),
        ("model__tie_embeddings", True),
        ("data__seq_len", 128),
        ("data__fingerprint", "abd"),
        ("train__seed", 1),
        ("train__microbatch_size", 8),
        ("basis__rank", 64),
        ("basis__source", "weight"),
    ],
)
def test_an_identity_field_is_refused_with_both_values(name, value):
    dotted = name.replace("__", ".")
    section, field = name.split("__")
    with pytest.raises(ConfigError) as caught:
        check_identity(BASE, changed(**{name: value}))
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    old = {None: "null"}.get(BASE[section][field], BASE[section][field])
    assert str(dotted) in str(caught.value) and str(value).lower() in str(caught.value).lower()
    assert name == "model__num_kv_heads" or str(old).lower() in str(caught.value).lower()


def test_all_refused_fields_are_named_at_once():
    with pytest.raises(ConfigError, match=r"model\.num_layers: saved 4, now 6; train\.seed: saved 0, now 3"):
        check_identity(BASE, changed(model__num_layers=6, train__seed=3))


def test_nodes_may_change_if_the_microbatches_of_a_step_do_not():
    assert check_identity(BASE, changed(mesh__num_nodes=4, train__microbatches_per_node=4)) == []
    with pytest.raises(ConfigError, match=r"num_nodes x train.microbatches_per_node\): saved 16, now 8"):
        check_identity(BASE, changed(mesh__num_nodes=4))


def test_a_moved_tokenizer_with_the_same_fingerprint_is_the_same():
    moved = changed(data__tokenizer="/elsewhere/tokenizer.json")
    assert check_identity(BASE, moved) == ['data.tokenizer: saved "bytes", now "/elsewhere/tokenizer.json"']
    del moved["data"]["fingerprint"]
    with pytest.raises(ConfigError, match="data.tokenizer"):
        check_identity(BASE, moved)


def test_a_changed_schedule_warns_with_both_learning_rates():
    now = changed(train__steps=400, optim__learning_rate=5e-4)
    rate = {0.001: 7e-4, 0.0005: 4e-4}
    lines = check_identity(BASE, now, learning_rate=lambda config: rate[config["optim"]["learning_rate"]])
    assert lines == [
        "optim.learning_rate: saved 0.001, now 0.0005",
        "train.steps: saved 200, now 400",
        "learning rate from here: 0.0007 -> 0.0004",
    ]


def test_other_changes_are_told_and_housekeeping_is_not():
    now = changed(
        faults__policy="balanced",
        degraded__low_rank=False,
        model__remat="block",
        checkpoint__every=1,
        track__trackers=["wandb"],
    )
    now["name"] = "other"
    assert check_identity(BASE, now) == [
        "degraded.low_rank: saved true, now false",
        'faults.policy: saved "auto", now "balanced"',
        'model.remat: saved "none", now "block"',
    ]


def test_flat_and_nested_forms_and_tuples_compare_equal():
    flat = {
        f"{section}.{field}": value
        for section, fields in BASE.items()
        if section != "name"
        for field, value in fields.items()
    }
    nested = changed(faults__persistent_nodes=[], data__files=())
    assert check_identity({**flat, "name": "run"}, nested) == []


def test_explicit_kv_heads_equal_to_the_heads_are_the_same_model():
    assert check_identity(BASE, changed(model__num_kv_heads=4)) == []


def test_a_field_that_one_side_lacks_is_told_not_refused():
    older = copy.deepcopy(BASE)
    del older["model"]["norm_eps"]
    assert check_identity(older, BASE) == ["model.norm_eps: saved (not there), now 1e-05"]
