"""Kernels for arrays of any shapes, against NumPy's."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from penstock.backends.native import family_of
from penstock.backends.native.backend import NativeBackend
from penstock.backends.native.kernel import open_site
from penstock.core.checkpoints import checkpoint
from penstock.core.types import TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.fused import fused
from penstock.ops.registry import find
from tests.support.native_kernels import LIBRARIES, pytestmark  # noqa: F401

rng = np.random.default_rng(4)


def draw(*shape, dtype="float32"):
    return (rng.normal(size=shape) * 3).astype(dtype)


def open_node(name, inputs, constants=(), **attrs):
    """A node of inputs whose ranks are known and whose dims are not, but for ``constants``."""
    values = [
        Value(f"x{i}", TensorType(x.dtype, x.shape if i in constants else (None,) * x.ndim))
        for i, x in enumerate(inputs)
    ]
    for i in constants:
        values[i].set_constant(inputs[i])
    return inferred(name, values, **attrs)


def inferred(name, values, **attrs):
    op = find(name, "", 24)
    consts = [value.const for value in values]
    (type_, *_) = op.infer([value.type for value in values], attrs, consts)
    return Node(op, values, [Value("y", type_)], attrs)


def _ahead_of_cache(library, node, types, otherwise):
    call = family_of(node).ahead_of_cache(open_site(library, node, types))
    return None if call is None else partial(call[0], otherwise, checkpoint, call[1])


def refused(*inputs):
    raise AssertionError("there is no kernel for these")


def check(node, calls, tolerance=None, otherwise=refused):
    """Compare results of ``node`` with NumPy's for the inputs of each of ``calls``."""
    types = [value.type for value in node.inputs]
    plain = node.op.compile(node, types).function
    for library in LIBRARIES:
        function = _ahead_of_cache(library, node, types, otherwise)
        assert function is not None
        for inputs in calls:
            with np.errstate(all="ignore"):
                wanted = plain(*inputs)
            result = function(*inputs)
            assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
            if tolerance is None:
                np.testing.assert_array_equal(result, wanted)
            else:
                np.testing.assert_allclose(result, wanted, rtol=tolerance, atol=tolerance)


def views(*shape, dtype="float32"):
    """Arrays of a shape in several layouts."""
    wide = draw(*shape[:-1], 2 * shape[-1], dtype=dtype)
    turned = draw(*shape[::-1], dtype=dtype)
    return [draw(*shape, dtype=dtype), wide[..., ::2], turned.T]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "left, right",
    [
        ((2, 8, 1, 32), (2, 8, 32, 77)),
        ((1, 4, 3, 20), (1, 1, 20, 5)),
        ((3, 1, 2, 7), (1, 7, 1)),
        ((5, 6, 9), (5, 9, 64)),
        ((1, 3), (3, 1200)),
        ((4, 1), (1, 3)),
        ((2, 1, 1500), (2, 1500, 64)),
    ],
)
def test_products_of_any_layouts_are_close_to_numpy(left, right, dtype):
    turned = np.swapaxes(draw(*right[:-2], *right[:-3:-1], dtype=dtype), -1, -2)
    calls = [(draw(*left, dtype=dtype), b) for b in (draw(*right, dtype=dtype), turned)]
    tolerance = 1e-3 if dtype == "float32" else 1e-11
    node = open_node("MatMul", calls[0])
    check(node, calls, tolerance)
    # Some of these have no one stride from matrix to matrix.
    calls = [(a, calls[0][1]) for a in views(*left, dtype=dtype)]
    check(node, calls, tolerance, otherwise=np.matmul)


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_softmax_along_the_last_axis_is_close_to_numpy(name, dtype):
    calls = [(draw(2, 3, length, dtype=dtype),) for length in (1, 7, 64, 3000)]
    check(open_node(name, calls[0], axis=-1), calls, 1e-5)


@pytest.mark.parametrize("name", ["Add", "Less", "Div", "Max"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
def test_arithmetic_broadcasts_as_numpy_does(name, dtype):
    calls = []
    for a, b in [((2, 3, 700), (2, 3, 700)), ((2, 3, 5), (1, 3, 1)), ((4, 1, 9), (1, 6, 1))]:
        calls += [(x, y) for x in views(*a, dtype=dtype) for y in views(*b, dtype=dtype)]
    with np.errstate(divide="ignore"):
        check(open_node(name, calls[0]), calls)


def test_constants_widen_the_rank_of_results():
    one = np.ones((1, 1, 1), np.float32)
    check(open_node("Mul", [draw(3, 4), one], constants=[1]), [(draw(5, 6), one)])


def test_results_without_elements_have_the_dims_of_numpys():
    calls = [(draw(0, 3), draw(1, 3)), (draw(2, 0), draw(1, 1)), (draw(0, 3), draw(0, 1))]
    check(open_node("Mul", calls[0]), calls)
    check(open_node("Less", calls[0]), calls)


def test_arrays_of_unknown_rank_broadcast_as_numpy_does():
    values = [Value(name, TensorType(np.dtype("float32"))) for name in "ab"]
    shapes = [((), ()), ((3,), (2, 1)), ((2, 3, 4), (4,)), ((1,), ()), ((0,), (2, 1))]
    calls = [tuple([np.asarray(draw(*shape)) for shape in pair]) for pair in shapes]
    check(inferred("Sub", values), calls)


def test_chains_are_computed_in_one_pass():
    x, scale = draw(1, 8, 1, 5), np.float32(0.25)[None]
    product = open_node("Mul", [x, scale], constants=[1])
    values = [*product.outputs, Value("m", TensorType(np.dtype("float32"), (None,) * 4))]
    node = fused([product, inferred("Add", values)])
    calls = [(draw(1, 8, 2, n), scale, draw(1, 1, 1, n)) for n in (3, 40, 600)]
    check(node, calls)


@pytest.mark.parametrize(
    "name, inputs",
    [
        ("MatMul", [draw(2, 3), draw(4, 5)]),
        ("MatMul", [draw(3, 0), draw(0, 5)]),
        ("Add", [draw(2, 3), draw(4, 5)]),
        ("Add", [draw(0, 3), draw(2, 3)]),
        ("Add", [draw(2, 3), np.ndarray((2, 3), np.float32, bytes(25), 1)]),
        ("Softmax", [draw(3, 4).T]),
    ],
)
def test_what_no_kernel_takes_is_computed_otherwise(name, inputs):
    node = open_node(name, inputs) if name != "MatMul" else open_node(name, [draw(2, 2)] * 2)
    for library in LIBRARIES:
        types = [value.type for value in node.inputs]
        function = _ahead_of_cache(library, node, types, lambda *inputs: inputs)
        assert all(a is b for a, b in zip(function(*inputs), inputs, strict=True))


def test_backend_keeps_no_kernels_for_each_shape():
    node = open_node("MatMul", [draw(2, 3), draw(3, 4)])
    kernel = NativeBackend(LIBRARIES[0]).kernel(node, [value.type for value in node.inputs])
    for length in range(1, 300):
        kernel.function(draw(1, length), draw(length, 5))
    assert kernel.shapes.cached_bytes() == 0
