"""Nodes of models with functions, counted before these are expanded."""

from __future__ import annotations

from graphlib import CycleError

import pytest

from penstock.frontends.common.expansion import expanded_size, expanded_sizes


def test_sizes_of_functions_include_those_that_they_call() -> None:
    functions = {
        "outer": {None: 2, "inner": 2},
        "inner": {None: 3, "leaf": 1, "Neg": 2},
        "leaf": {None: 5},
    }
    sizes = expanded_sizes(functions)
    assert sizes == {None: 1, "leaf": 5, "inner": 8, "outer": 18}
    assert expanded_size({None: 1, "outer": 3, "Relu": 4}, sizes) == 55


def test_functions_that_double_are_counted_without_expansion() -> None:
    functions = {i: {None: 2} | ({i - 1: 2} if i else {}) for i in range(200)}
    assert expanded_sizes(functions)[199] == 2**201 - 2


def test_functions_that_call_each_other_are_named_callee_before_caller() -> None:
    functions = {"a": {"b": 1}, "b": {"leaf": 1, "c": 1}, "c": {"d": 1, "b": 2}, "d": {"Add": 1}}
    with pytest.raises(CycleError) as caught:
        expanded_sizes(functions)
    assert caught.value.args[1] in (["b", "c", "b"], ["c", "b", "c"])


def test_functions_that_call_themselves_are_refused() -> None:
    with pytest.raises(CycleError):
        expanded_sizes({"a": {"b": 1}, "b": {"b": 1}})


def test_cycle_of_20000_functions_does_not_recurse() -> None:
    calls = {i: {None: 1, i + 1: 1} for i in range(20_000)}
    assert expanded_sizes(calls)[0] == 20_000
    calls[20_000] = {0: 1}
    with pytest.raises(CycleError) as caught:
        expanded_sizes(calls)
    assert len(caught.value.args[1]) == 20_002
