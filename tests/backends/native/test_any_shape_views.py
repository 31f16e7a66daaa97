"""Views of shapes that only the run knows, against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.native.any_shape import any_shape_view
from penstock.core.types import TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.registry import find
from tests.support.native_kernels import LIBRARIES, pytestmark  # noqa: F401

rng = np.random.default_rng(4)


def numbers(*given, dtype="int64"):
    return np.array(given, dtype)


def node_of(name, inputs, **attrs):
    """A node of open dims and of numbers that no one knows."""
    op = find(name, "", 24)
    types = [None if x is None else TensorType(x.dtype, (None,) * x.ndim) for x in inputs]
    values = [None if t is None else Value(f"x{i}", t) for i, t in enumerate(types)]
    (type_,) = op.infer(types, attrs, [None] * len(types))
    return Node(op, values, [Value("y", type_)], attrs)


def check(node, inputs, *, refused=False):
    """Compare the result, or the error, with NumPy's, whose kernel is called only if ``refused``."""
    types = [None if value is None else value.type for value in node.inputs]
    plain = node.op.compile(node, types).function
    for library in LIBRARIES:
        called: list[int] = []

        def otherwise(*x, called=called):
            called.append(1)
            return plain(*x)

        (_, *others) = any_shape_view(library, node, types).function.args
        function = getattr(library.functions, node.op.name.lower())
        try:
            result = function(otherwise, *others, *inputs)
        except ValueError as error:
            with pytest.raises(type(error)):
                plain(*inputs)
        else:
            wanted = plain(*inputs)
            assert (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
            np.testing.assert_array_equal(result, wanted)
        assert bool(called) == refused


DTYPES = ["float32", "int64", "bool", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_are_expanded_as_numpy_does(dtype):
    x = rng.normal(size=(3, 1, 4)).astype(dtype)
    for shape in ((3, 5, 4), (2, 3, 1, 1), (1,), (), (0, 1), (3, 0, 4)):
        check(node_of("Expand", [x, numbers(*shape)]), [x, numbers(*shape)])
    for shape in ((2, 5, 4), (-1,)):
        check(node_of("Expand", [x, numbers(*shape)]), [x, numbers(*shape)], refused=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_are_reshaped_as_numpy_does(dtype):
    dense = rng.normal(size=(2, 3, 4)).astype(dtype)
    for x in (dense, dense.transpose(2, 0, 1), np.broadcast_to(dense[:, :1], (2, 3, 4))):
        for shape in ((6, 4), (-1,), (4, -1, 2), (0, -1), (1, 24, 1), (2, 3, 4)):
            inputs = [x, numbers(*shape)]
            check(node_of("Reshape", inputs), inputs)
        for shape in ((5, -1), (-1, -1), (7,), (-2, 12), (2, 3, 4, 0), (2**62, 4, 4)):
            inputs = [x, numbers(*shape)]
            check(node_of("Reshape", inputs), inputs, refused=True)
    empty = [np.zeros((0, 6), dtype), numbers(0, 2, 7)]
    check(node_of("Reshape", empty), empty, refused=True)
    empty = [np.zeros((0, 3), dtype), numbers(3, 0)]
    check(node_of("Reshape", empty, allowzero=1), empty, refused=True)


@pytest.mark.parametrize("bound", ["int64", "int32"])
def test_arrays_are_sliced_as_numpy_does(bound):
    x = rng.normal(size=(5, 6, 7))[:, ::2]
    highest = np.iinfo(bound).max
    for begin, end, axis, step in [
        ((1,), (3,), (0,), (1,)),
        ((-2, 0), (highest, -1), (2, 1), (3, 2)),
        ((4, 9, -highest), (2, 12, 3), (0, -1, 1), (1, 1, 1)),
        ((0,), (5,), (0,), (highest,)),
    ]:
        inputs = [x, *[numbers(*part, dtype=bound) for part in (begin, end, axis, step)]]
        check(node_of("Slice", inputs), inputs)
        check(node_of("Slice", inputs[:3]), inputs[:3])
        check(node_of("Slice", [*inputs[:3], None, inputs[4]]), [*inputs[:3], None, inputs[4]])
    for axis, step in (((0,), (-1,)), ((3,), (1,)), ((0,), (0,))):
        inputs = [x, *[numbers(*part, dtype=bound) for part in ((3,), (1,), axis, step)]]
        check(node_of("Slice", inputs), inputs, refused=True)


def test_integers_are_counted_as_numpy_does():
    for bounds in ((0, 9, 1), (5, -4, -2), (3, 3, 1), (7, 2, 1), (-3, 9, 5), (0, 1, 100)):
        inputs = [np.array(bound) for bound in bounds]
        check(node_of("Range", inputs), inputs)
    for bounds in ((0, 2**40, 2**38), (0, 5, 0)):
        inputs = [np.array(bound) for bound in bounds]
        check(node_of("Range", inputs), inputs, refused=True)
    inputs = [np.array(bound, np.int32) for bound in (9, -4, -3)]
    check(node_of("Range", inputs), inputs)
    inputs = [np.array(bound, np.int16) for bound in (0, 4, 1)]
    check(node_of("Range", inputs), inputs, refused=True)


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_are_counted_as_numpy_does(dtype):
    for bounds in (
        (0, 2, 0.5),
        (0.1, 1, 0.1),
        (3, -1e3, -0.7),
        (3, 3, 1),
        (7, 2, 1e-30),
        (0, 1e6, 1),
    ):
        inputs = [np.array(bound, dtype) for bound in bounds]
        check(node_of("Range", inputs), inputs)
    for bounds in ((0, 1, 0), (np.inf, 0, 1), (0, np.inf, 1), (0, 1, np.nan), (0, 1, 1e-7)):
        inputs = [np.array(bound, dtype) for bound in bounds]
        check(node_of("Range", inputs), inputs, refused=True)


def test_results_hold_what_they_are_views_of_and_cannot_be_written():
    x = rng.normal(size=(1, 4))
    for library in LIBRARIES:
        inputs = [x.copy(), numbers(3, 4)]
        (kernel,) = [any_shape_view(library, node_of("Expand", inputs), [TensorType(x.dtype)] * 2)]
        y = kernel.function(*inputs)
        del inputs
        np.testing.assert_array_equal(y, np.broadcast_to(x, (3, 4)))
        assert not y.flags.writeable
