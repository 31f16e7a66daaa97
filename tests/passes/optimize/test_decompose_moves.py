"""TensorFlow's moves, expressed by ONNX's operations."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.types import TensorType
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ops.registry import TENSORFLOW, find
from penstock.passes.pipeline import optimize

rng = np.random.default_rng(4)


def numbers(*dims, dtype="float32"):
    return (rng.standard_normal(dims) * 9).astype(dtype)


def graph_of(name, inputs, constants, attrs, dims=None):
    """A graph of one node, and what its NumPy kernel computes. ``dims``: those declared of x0."""
    op = find(name, TENSORFLOW)
    types = [TensorType(x.dtype, x.shape) for x in inputs]
    consts = [x if i in constants else None for i, x in enumerate(inputs)]

    def node(types, y):
        pairs = enumerate(zip(types, consts, strict=True))
        return Node(op, [Value(f"x{i}", t, const=x) for i, (t, x) in pairs], [y], attrs)

    expected = op.compile(node(types, Value("y")), types).function(*inputs)
    if dims is not None:
        types[0] = TensorType(inputs[0].dtype, dims)
    made = node(types, Value("y"))
    fed = [value for value in made.inputs if value.const is None]
    return Graph(fed, made.outputs, [made]), np.asarray(expected)


def int32(*x):
    return np.array(x, np.int32)


PAIRS = int32([1, 1], [0, 2])
DIAGONAL = int32(0), int32(-1), int32(-1)
ROUNDING = {"min": -6.0, "max": 11.5, "num_bits": 8, "narrow_range": False}
CASES = {
    "to batch": (
        "SpaceToBatchND",
        [numbers(2, 4, 6, 3), int32(2, 3), np.zeros((2, 2), np.int32)],
        [1, 2],
        {},
    ),
    "to batch, padded": ("SpaceToBatchND", [numbers(2, 4, 7, 3), int32(2, 3), PAIRS], [1, 2], {}),
    "rows to batch": ("SpaceToBatchND", [numbers(2, 6, 5), int32(3), int32([0, 0])], [1, 2], {}),
    "whole to batch": ("SpaceToBatchND", [numbers(2, 6), int32(3), int32([2, 1])], [1, 2], {}),
    "nothing to batch": ("SpaceToBatchND", [numbers(1, 4, 0), int32(2), int32([0, 0])], [1, 2], {}),
    "codes to batch": (
        "SpaceToBatchND",
        [numbers(1, 4, 4, 2, dtype="int8"), int32(2, 2), PAIRS],
        [1, 2],
        {},
    ),
    "to space": (
        "BatchToSpaceND",
        [numbers(12, 4, 5, 3), int32(2, 3), np.zeros((2, 2), np.int32)],
        [1, 2],
        {},
    ),
    "to space, cropped": ("BatchToSpaceND", [numbers(12, 4, 5, 3), int32(2, 3), PAIRS], [1, 2], {}),
    "rows to space": ("BatchToSpaceND", [numbers(6, 4), int32(3), int32([1, 2])], [1, 2], {}),
    "depth": ("SpaceToDepth", [numbers(2, 6, 4, 3)], [], {"block_size": 2, "data_format": "NHWC"}),
    "from depth": (
        "DepthToSpace",
        [numbers(2, 3, 4, 18)],
        [],
        {"block_size": 3, "data_format": "NHWC"},
    ),
    "select": ("Select", [numbers(3, 4) > 0, numbers(3, 4), numbers(3, 4)], [], {}),
    "select rows": ("Select", [numbers(3) > 0, numbers(3, 4, 2), numbers(3, 4, 2)], [], {}),
    "select all": ("Select", [np.array(True), numbers(3, 4), numbers(3, 4)], [], {}),
    "fill": ("Fill", [int32(2, 3), numbers()], [0], {}),
    "pack": ("Pack", [numbers(3, 4), numbers(3, 4)], [], {"axis": 1}),
    "pack first": ("Pack", [numbers(3, 4), numbers(3, 4)], [], {"axis": -3}),
    "pack last": ("Pack", [numbers(3), numbers(3), numbers(3)], [], {"axis": -1}),
    "any": ("Any", [numbers(3, 4, 5) > 1, int32(0, 2)], [1], {"keep_dims": True}),
    "all": ("All", [numbers(3, 4, 5) > -9, int32(-1)], [1], {}),
    "diagonal": ("MatrixDiag", [numbers(2, 3)], [], {}),
    "padded diagonal": (
        "MatrixDiagV3",
        [numbers(4), *DIAGONAL, np.array(7, np.float32)],
        [1, 2, 3, 4],
        {},
    ),
    "tall diagonal": (
        "MatrixDiagV3",
        [numbers(3), int32(0), int32(4), int32(-1), np.array(7, np.float32)],
        [1, 2, 3, 4],
        {},
    ),
    **{
        f"diagonal of {rows} x {columns}": (
            "MatrixSetDiagV3",
            [numbers(2, rows, columns, dtype="int8"), numbers(2, 3, dtype="int8"), int32(0)],
            [2],
            {},
        )
        for rows, columns in ((3, 3), (3, 5), (4, 3))
    },
    "rounded": ("FakeQuantWithMinMaxArgs", [numbers(5, 40)], [], ROUNDING),
    "image of a gradient": (
        "Conv2DBackpropInput",
        [numbers(2, 4, 4, 5), numbers(4, 3, 3, 2), int32(2, 6, 8, 10)],
        [1, 2],
        {"strides": [2, 2], "dilations": [1, 1], "padding": "SAME"},
    ),
    "volume of a gradient": (
        "Conv3DBackpropInputV2",
        [numbers(1, 4, 2, 4, 2), numbers(4, 3, 2, 3, 2), int32(4, 9, 3)],
        [1, 2],
        {"strides": [2, 2, 1], "dilations": [1, 1, 1], "padding": "VALID"},
    ),
}


def run(graph, inputs, constants):
    feeds = {f"x{i}": x for i, x in enumerate(inputs) if i not in constants}
    return ps.compile(Model({"main": graph}, "main")).run(feeds)["y"]


@pytest.mark.parametrize("name", CASES)
def test_moves_of_known_shapes_are_expressed_and_equal_numpy_s(name):
    operation, inputs, constants, attrs = CASES[name]
    graph, expected = graph_of(operation, inputs, constants, attrs)
    y = run(graph, inputs, constants)
    assert y.dtype == expected.dtype
    # Sums of products are rounded in the order of another kernel.
    rtol = 1e-5 if "gradient" in name else 0
    np.testing.assert_allclose(y, expected, rtol=rtol, atol=100 * rtol)
    graph, _ = graph_of(operation, inputs, constants, attrs)
    optimize(graph)
    assert [node.op.domain for node in graph.nodes] == [""] * len(graph.nodes)


KEPT = {
    "fed blocks": ("SpaceToBatchND", [numbers(2, 4), int32(2), int32([0, 0])], [2], {}),
    "channels second": (
        "SpaceToDepth",
        [numbers(2, 4, 4, 4)],
        [],
        {"block_size": 2, "data_format": "NCHW"},
    ),
    "fed dims": ("Fill", [int32(2, 3), numbers()], [], {}),
    "fed axes": ("Any", [numbers(3, 4) > 0, int32(0)], [], {}),
    "no axes": ("All", [numbers(3, 4) > 0, np.zeros(0, np.int32)], [1], {}),
    "upper diagonal": ("MatrixSetDiagV3", [numbers(4, 4), numbers(3), int32(1)], [2], {}),
    "fed size": (
        "Conv2DBackpropInput",
        [numbers(1, 4, 4, 5), numbers(4, 3, 3, 2), int32(8, 10)],
        [1],
        {"strides": [2, 2], "dilations": [1, 1], "padding": "SAME"},
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_not_known_is_left_to_the_operation(name):
    operation, inputs, constants, attrs = KEPT[name]
    graph, expected = graph_of(operation, inputs, constants, attrs)
    np.testing.assert_array_equal(run(graph, inputs, constants), expected)
    graph, _ = graph_of(operation, inputs, constants, attrs)
    optimize(graph)
    assert operation in [node.op.name for node in graph.nodes]


def test_operation_that_others_wait_for_is_kept():
    operation, inputs, constants, attrs = CASES["pack"]
    graph, _ = graph_of(operation, inputs, constants, attrs)
    waiting = Node(find("Identity"), graph.inputs[:1], [Value("z")], {}, control_inputs=graph.nodes)
    graph.nodes = [*graph.nodes, waiting]
    graph.outputs = [*graph.outputs, *waiting.outputs]
    optimize(graph)
    assert operation in [node.op.name for node in graph.nodes]


def test_images_of_an_unknown_batch_are_left_to_the_operation():
    _, inputs, constants, attrs = CASES["depth"]
    graph, expected = graph_of("SpaceToDepth", inputs, constants, attrs, dims=(None, 6, 4, 3))
    np.testing.assert_array_equal(run(graph, inputs, constants), expected)


def test_blocks_that_do_not_fit_are_refused_by_the_operation():
    _, inputs, constants, attrs = CASES["rows to batch"]
    graph, _ = graph_of("SpaceToBatchND", inputs, constants, attrs, dims=(2, 5, 5))
    with pytest.raises(ps.PenstockError, match="must be divisible by block_shape"):
        run(graph, [numbers(2, 5, 5), *inputs[1:]], constants)
