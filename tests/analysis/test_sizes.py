"""Tensors that cannot fit are refused before a run."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.analysis.sizes import check_sizes
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.registry import find


def graph_of(shape, const=None) -> Graph:
    op = find("Add")
    assert op is not None
    x, y = Value("x", TensorType(FLOAT32, ())), Value("y", TensorType(FLOAT32, shape))
    node = Node(op, [x, x if const is None else Value("k", const=const)], [y], name="add")
    return Graph([x], [y], [node])


@pytest.mark.parametrize("shape", [(4, 5), (0, 9), (None, 1 << 40), ()])
def test_tensors_within_the_limits_are_accepted(shape):
    check_sizes(graph_of(shape), ps.Limits(max_bytes=80))


@pytest.mark.parametrize(
    ("shape", "limits", "text"),
    [
        ((4, 6), ps.Limits(max_bytes=80), "takes 96 bytes"),
        ((1, 1, 1), ps.Limits(max_dims=2), "3 dims, more than Limits.max_dims = 2"),
        ((1 << 31, 1 << 31), ps.Limits(), "more than memory can hold"),
        ((0, 1 << 62), ps.Limits(), "more than memory can hold"),
    ],
)
def test_tensor_beyond_a_limit_is_refused_with_its_node(shape, limits, text):
    with pytest.raises(ps.LimitExceeded, match=text) as caught:
        check_sizes(graph_of(shape), limits)
    assert "add" in str(caught.value)


def test_constant_with_strides_of_0_counts_in_full():
    wide = np.broadcast_to(np.float32(1), (100,))
    with pytest.raises(ps.LimitExceeded, match="takes 400 bytes"):
        check_sizes(graph_of((), wide), ps.Limits(max_bytes=80))
