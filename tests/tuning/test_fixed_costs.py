"""Costs that depend on neither shapes nor machines."""

from __future__ import annotations

from math import inf

import pytest

from penstock.backends.native.backend import NativeBackend
from penstock.backends.numpy import NumpyBackend
from penstock.build import GraphBuilder
from penstock.host.native import library
from penstock.ir.graph import Node
from penstock.tuning.fixed_costs import FixedCosts

pytestmark = pytest.mark.skipif(library() is None, reason="needs compiled kernels")


def node(name: str, size: int | None) -> Node:
    b = GraphBuilder()
    producer = b.op(name, b.input("x", "float32", [size])).value.producer
    assert producer is not None
    return producer


def test_first_backend_that_has_a_kernel_is_the_cheapest_for_all_shapes():
    native, numpy = NativeBackend(), NumpyBackend()
    costs = FixedCosts([native, numpy])
    for size in (1, 10**9, None):
        one = node("Exp", size)
        assert costs.cost(one, native) == costs.cost(node("Sin", 7), native)
        assert costs.cost(one, native).seconds < costs.cost(one, numpy).seconds < inf


def test_backend_without_a_kernel_costs_infinitely_much():
    native = NativeBackend()
    assert FixedCosts([native]).cost(node("Asinh", 3), native).seconds == inf
