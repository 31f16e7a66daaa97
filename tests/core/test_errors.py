"""Errors: one hierarchy, and texts of bounded length."""

from __future__ import annotations

import difflib
import pickle

import pytest

import penstock as ps
from penstock.core import errors
from penstock.core.errors import PenstockError, shortened, suggest

CLASSES = [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, PenstockError)]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_errors_say_what_they_are_given_and_are_pickled(error):
    raised = error(["the text"]) if error is ps.Unsupported else error("the text")
    assert "the text" in str(raised)
    again = pickle.loads(pickle.dumps(raised))
    assert type(again) is error and str(again) == str(raised)


def test_errors_are_caught_by_the_class_that_all_share():
    assert {ps.InvalidModel, ps.InvalidInput, ps.RunError, ps.LimitExceeded} <= set(CLASSES)
    with pytest.raises(ps.PenstockError):
        raise ps.Cancelled("x")


@pytest.mark.parametrize("length", [1, 10, 1000, 100_000])
def test_shortened_text_has_a_bounded_length_and_both_ends(length):
    text = "<" + "x" * length + ">"
    short = shortened(text, 50)
    assert len(short) <= max(50, len(text)) and len(short) < 200
    assert short == text if len(text) <= 50 else short.startswith("<x")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("CONV", "did you mean 'conv'?"), ("con1", "did you mean 'conv'?"), ("zzz", "it has 'out'")],
)
def test_suggest_prefers_alike_then_close_then_preferred_names(name, hint):
    assert hint in suggest(name, ["conv", "pool", "out"], ["out"])


def test_suggest_lists_the_first_few_of_many_names():
    hint = suggest("zzz", [f"value{i}" for i in range(100)])
    assert hint.endswith("'value7', ...")


def test_suggest_does_not_compare_long_or_very_many_names(monkeypatch):
    long = "N" * 1_000_000
    assert len(suggest(long + "x", [long + "y", "z"])) < 1000
    compared = []
    monkeypatch.setattr(
        difflib, "get_close_matches", lambda name, names, **_: compared.append(names)
    )
    suggest("?", (f"value_{i}" for i in range(3 * errors._MOST_COMPARED)))
    (names,) = compared
    assert len(names) == errors._MOST_COMPARED
