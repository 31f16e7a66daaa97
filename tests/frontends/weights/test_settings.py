from __future__ import annotations

import pytest

import penstock as ps
from penstock.frontends.weights.settings import Settings, unsupported

VALUES = {
    "n": 3,
    "x": 0.5,
    "flag": True,
    "text": "a",
    "list": [1, 2],
    "group": {"m": 4},
    "none": None,
}
SETTINGS = Settings("config.json", VALUES, defaults={"m": 8})


def test_values_have_their_types() -> None:
    assert SETTINGS.count("n") == 3
    assert SETTINGS.number("x") == 0.5
    assert SETTINGS.flag("flag")
    assert SETTINGS.text("text") == "a"
    assert SETTINGS.elements("list", 2) == [1, 2]
    group = SETTINGS.inner("group")
    assert group is not None
    assert group.count("m") == 4


def test_missing_value_has_the_default_of_the_architecture_first() -> None:
    assert SETTINGS.count("m", 9) == 8
    assert SETTINGS.count("k", 9) == 9
    assert SETTINGS.count("none", 9) == 9
    assert SETTINGS.optional_count("k") == 0
    assert SETTINGS.flag("k", True)
    assert SETTINGS.elements("k", 2) is None
    assert SETTINGS.inner("k") is None


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "1", None, 1 << 40, [1]])
def test_count_of_another_kind_is_refused_with_its_key(value: object) -> None:
    settings = Settings("config.json", {"a.n": value}, "a.")
    with pytest.raises(ps.InvalidModel, match=r"'a\.n' of config\.json .*whole number"):
        settings.count("n")


@pytest.mark.parametrize("value", ["x", True, float("nan"), float("inf"), [0.5]])
def test_number_of_another_kind_is_refused(value: object) -> None:
    with pytest.raises(ps.InvalidModel, match="number is needed"):
        Settings("config.json", {"x": value}).number("x")


def test_other_kinds_are_refused() -> None:
    with pytest.raises(ps.InvalidModel, match="true or false"):
        SETTINGS.flag("n")
    with pytest.raises(ps.InvalidModel, match="a text"):
        SETTINGS.text("n")
    with pytest.raises(ps.InvalidModel, match="a list of 3 elements"):
        SETTINGS.elements("list", 3)
    with pytest.raises(ps.InvalidModel, match="a group of settings"):
        SETTINGS.inner("n")


def test_unsupported_names_the_feature_and_what_to_do() -> None:
    error = unsupported("a thing", "do that", "config.json")
    assert "a thing: not supported here: do that (used by config.json)" in str(error)
