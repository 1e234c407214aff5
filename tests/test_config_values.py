"""Values of settings: what each declared type takes from text and from JSON, and what it refuses."""

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mecefo_jax.config_values import check_fits, check_range, convert, nearest
from mecefo_jax.errors import ConfigError

SCALARS = [bool, int, float]


@pytest.mark.parametrize(
    ("value", "declared", "expected"),
    [
        ("1e4", int, 10_000),
        (1e4, int, 10_000),
        ("-3", int, -3),
        ("10.0", int, 10),
        ("3e-4", float, 3e-4),
        (1, float, 1.0),
        ("false", bool, False),
        ("True", bool, True),
        (False, bool, False),
        ("null", int | None, None),
        ("None", float | None, None),
        (None, int | None, None),
        ("7", int | None, 7),
        ("a", Literal["a", "b"], "a"),
        ("none", Literal["none", "a"], "none"),
        ("1,2, 3", tuple[int, ...], (1, 2, 3)),
        (["1", "2"], tuple[int, ...], (1, 2)),
        ([1, 2], tuple[int, ...], (1, 2)),
        ("1,,2,", tuple[int, ...], (1, 2)),
        ("", tuple[str, ...], ()),
        (["a,b.txt", ""], tuple[str, ...], ("a,b.txt", "")),
        ("a.txt", tuple[str, ...], ("a.txt",)),
        ("null", str, "null"),
        ("1", str, "1"),
    ],
)
def test_value_is_parsed_by_its_declared_type(value, declared, expected):
    parsed = convert(value, declared, "key")
    assert parsed == expected
    assert type(parsed) is type(expected)


@pytest.mark.parametrize(
    ("value", "declared"),
    [
        ("1.5", int),
        (1.5, int),
        (True, int),
        ("1e9999999999", int),
        (1e300, int),
        ("nan", int),
        ("", int),
        ("null", int),
        (None, int),
        ([1], int),
        ("nan", float),
        ("inf", float),
        (math.nan, float),
        ("1e400", float),
        (10**400, float),
        (True, float),
        ("null", float),
        ("no", bool),
        ("0", bool),
        (0, bool),
        (1, bool),
        (None, bool),
        (1, str),
        (None, str),
        ("c", Literal["a", "b"]),
        (None, Literal["none", "a"]),
        (["a"], Literal["a", "b"]),
        ("1,x", tuple[int, ...]),
        ("1_000", int),
        ("\uff11\uff12", int),
        ("\u0663", float),
        ("1_0.5", float),
        ("1_0,2", tuple[int, ...]),
        (5, tuple[int, ...]),
        ({"a": 1}, tuple[str, ...]),
    ],
)
def test_value_of_another_type_is_refused_by_name(value, declared):
    with pytest.raises(ConfigError, match=r"^some\.key: got .*, expected ") as refused:
        convert(value, declared, "some.key")
    assert "\n" not in str(refused.value)


def test_misspelt_choice_names_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean reroute\?"):
        convert("reruote", Literal["neighbor", "reroute", "drop"], "faults.policy")


@given(st.integers(-(2**63 - 1), 2**63 - 1))
def test_every_integer_survives_its_text(number):
    assert convert(str(number), int, "key") == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_float_survives_its_text(number):
    assert convert(repr(number), float, "key") == number


@given(st.text(), st.sampled_from(SCALARS))
def test_any_text_is_parsed_or_refused_in_one_line(text, declared):
    try:
        assert type(convert(text, declared, "key")) is declared
    except ConfigError as refused:
        assert len(str(refused).splitlines()) == 1


def test_limits_are_shown_in_full():
    with pytest.raises(ConfigError, match="got 2097152, expected a number at least 1 and at most 1048576$"):
        check_range("key", 2**21, at_least=1, at_most=2**20)


def test_no_count_below_the_smallest_is_named():
    with pytest.raises(ConfigError, match="nearest that work: 260$"):
        check_fits("key", 258, lambda count: count % 4 == 0, "a multiple of 4", smallest=258)


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_nearest_counts_fit_and_are_nearest(value, divisor):
    def fits(count):
        return count % divisor == 0

    try:
        check_fits("key", value, fits, "a multiple")
    except ConfigError as refused:
        named = [int(word) for word in str(refused).rpartition(": ")[2].split(" or ")]
        multiples = [divisor * (value // divisor), divisor * (value // divisor + 1)]
        assert named == [count for count in multiples if count > 0]
    else:
        assert fits(value)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 1.5, math.nan, math.inf])
def test_range_excludes_its_open_ends_and_what_is_not_a_number(value):
    with pytest.raises(ConfigError, match="above 0 and below 1"):
        check_range("key", value, above=0, below=1)


@pytest.mark.parametrize("value", [0, 0.5, 1, None])
def test_range_includes_its_closed_ends(value):
    check_range("key", value, at_least=0, at_most=1)


def test_nearest_name_weighs_the_last_part():
    options = ["optim.learning_rate", "train.log_every", "optim.weight_decay", "data.seq_len"]
    assert nearest("learning_rate", options) == "optim.learning_rate"
    assert nearest("train.seq_len", options) == "data.seq_len"
