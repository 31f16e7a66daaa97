"""Copies with dims in another order in memory, on oneDNN."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from onnx import helper

from penstock.backends.onednn.backend import OneDnnBackend
from penstock.backends.onednn.library import library
from penstock.core.types import TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.transfer import REORDER
from tests.backends.onednn.forced import check, proto_of, ran_on

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")

rng = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


class Later:
    """Stands for an array that is known only during the run."""


def reordering(shape, order):
    """The kernel, and memory for its result."""
    kind = TensorType(np.dtype(np.float32), shape)
    node = Node(REORDER, [Value("x", kind)], [Value("y", kind)], {"order": order}, name="r")
    backend = OneDnnBackend()
    kernel = backend.kernel(node, [kind])
    assert kernel is not None
    wide = np.full([shape[axis] for axis in order] or shape, np.nan, np.float32)
    return kernel, wide.transpose(np.argsort(order)) if order else wide


@pytest.mark.parametrize("shape", [(6,), (5, 7), (4, 17, 5), (2, 3, 4, 5), (1, 3, 2, 5, 4)])
def test_reorder_into_every_order_of_dims(shape):
    rank = len(shape)
    for order in [(), *itertools.islice(itertools.permutations(range(rank)), 30)]:
        for lies in itertools.islice(itertools.permutations(range(rank)), 12):
            kernel, y = reordering(shape, order)
            x = np.ascontiguousarray(draw(*shape).transpose(lies)).transpose(np.argsort(lies))
            function, arguments = kernel.bind([x], [y], None)
            function(*arguments)
            np.testing.assert_array_equal(y, x)
            if order:
                assert y.transpose(order).flags.c_contiguous


def test_reorder_of_strided_arrays():
    kernel, y = reordering((2, 3, 4, 5), (0, 2, 3, 1))
    x = draw(2, 6, 4, 11)[:, ::2, :, 3:8]
    function, arguments = kernel.bind([x], [y], None)
    function(*arguments)
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("lies", [(0, 1, 2, 3), (0, 2, 3, 1)])
def test_reorder_of_arrays_given_during_the_run(lies):
    kernel, y = reordering((2, 3, 4, 5), (0, 2, 3, 1))
    later = Later()
    function, arguments = kernel.bind([later], [y], None)
    assert arguments == (later,)
    for _ in range(3):
        x = np.ascontiguousarray(draw(2, 3, 4, 5).transpose(lies)).transpose(np.argsort(lies))
        function(x)
        np.testing.assert_array_equal(y, x)


def test_plan_inserts_reorders_where_layouts_change():
    feeds = {"x": draw(1, 3, 9, 9)}
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Transpose", ["a"], ["t"], perm=[0, 1, 3, 2]),
        helper.make_node("Conv", ["t", "w"], ["c"]),
        helper.make_node("LayerNormalization", ["c", "scale"], ["y"], axis=-1),
    ]
    proto = proto_of(nodes, feeds, ["y"], {"w": draw(8, 3, 3, 3), "scale": draw(7)})
    session = check(proto, feeds, "LayerNormalization")
    assert ran_on(session, "Reorder") == {"onednn"}


def test_reorder_of_other_dtypes_has_no_kernel():
    kind = TensorType(np.dtype(np.int64), (2, 3))
    node = Node(REORDER, [Value("x", kind)], [Value("y", kind)], {"order": (1, 0)}, name="r")
    assert OneDnnBackend().kernel(node, [kind]) is None
