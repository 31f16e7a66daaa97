"""Errors: one hierarchy, and texts of bounded length."""

from __future__ import annotations

import pickle

import pytest

import penstock as ps
from penstock.core import errors
from penstock.core.errors import PenstockError, shortened

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
