"""Nodes of models with functions, counted before these are expanded."""

from __future__ import annotations

from penstock.frontends.common.expansion import Census, expanded_sizes


def test_sizes_of_functions_include_those_that_they_call() -> None:
    functions = {
        "outer": Census(2, {"inner": 2}),
        "inner": Census(3, {"leaf": 1, "Neg": 2}),
        "leaf": Census(5, {}),
    }
    sizes = expanded_sizes(functions)
    assert sizes == {"leaf": 5, "inner": 8, "outer": 18}
    assert Census(1, {"outer": 3, "Relu": 4}).expanded(sizes) == 55


def test_functions_that_double_are_counted_without_expansion() -> None:
    functions = {i: Census(2, {i - 1: 2} if i else {}) for i in range(200)}
    assert expanded_sizes(functions)[199] == 2**201 - 2
