"""Limits are numbers of the kinds that they bound."""

from __future__ import annotations

import re

import pytest

import penstock as ps


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("max_bytes", -1, "a whole number of at least 0 is needed, or None for no bound"),
        ("max_nodes_per_byte", float("nan"), "a number of at least 0 is needed, or None"),
    ],
)
def test_limit_below_zero_is_refused(name, value, needed):
    with pytest.raises(ValueError, match=re.escape(f"Limits.{name} = {value!r}: {needed}")):
        ps.Limits(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("max_bytes", "1", "a whole number of at least 0 is needed, or None for no bound"),
        ("max_bytes", 1e9, "a whole number of at least 0 is needed, or None for no bound"),
        ("max_nodes", True, "a whole number of at least 0 is needed, or None for no bound"),
        ("max_depth", None, "a whole number of at least 0 is needed"),
        ("max_dims", 1.5, "a whole number of at least 0 is needed"),
    ],
)
def test_limit_of_another_type_is_refused(name, value, needed):
    with pytest.raises(TypeError, match=re.escape(f"Limits.{name} = {value!r}: {needed}")):
        ps.Limits(**{name: value})


def test_limits_may_be_fractions_where_they_are_ratios_and_none_where_they_say_so():
    assert ps.Limits(max_nodes_per_byte=0.5, max_bytes=None, max_dims=0).max_dims == 0


def test_representation_has_the_limits_that_differ_from_the_default_ones():
    assert repr(ps.Limits()) == "Limits()"
    assert repr(ps.Limits(max_depth=3, max_nodes=None)) == "Limits(max_nodes=None, max_depth=3)"
