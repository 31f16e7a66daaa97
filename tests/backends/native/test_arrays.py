"""Compiled copies of arrays against NumPy's, for all layouts and sizes of elements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from penstock.core.types import ShapeError, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.transfer import REORDER
from tests.support.native_kernels import (  # noqa: F401
    LIBRARIES,
    check,
    kernel_of,
    node_of,
    pytestmark,
    threads_of,
)

DTYPES = ["uint8", "float16", "float32", "float64", "complex128"]
FEW = [(2, 67), (3, 70), (4, 129)]
DIMS = [(3,), *FEW, (33, 65), (50, 19), (20, 150), (5, 1, 7), (4, 9, 34), (2, 3, 5, 4), (0, 3)]


def numbers(dims: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 99, dims).astype(dtype)


def layouts(x: np.ndarray) -> list[np.ndarray]:
    """Views of as many elements as ``x``, in other places and orders."""
    gaps = np.repeat(x, 3, axis=-1)[..., 1::3]
    broadcast = np.broadcast_to(x[..., :1], x.shape)
    orders = [x.transpose(order) for order in itertools.permutations(range(x.ndim))]
    return [*orders, gaps, gaps.T, x[..., ::-1], x[::-1].T, broadcast, broadcast.T, x[:, None]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_copy_of_any_layout_has_the_elements_in_c_order(dims, dtype):
    for library in LIBRARIES:
        for view in layouts(numbers(dims, dtype) if len(dims) > 1 else numbers((*dims, 2), dtype)):
            copy = library.functions.copied(view)
            np.testing.assert_array_equal(copy, view, library.level)
            assert copy.flags.c_contiguous and not np.shares_memory(copy, view)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_array_is_refilled_from_any_layout(dims, dtype):
    for library in LIBRARIES:
        for view in layouts(numbers(dims, dtype) if len(dims) > 1 else numbers((*dims, 2), dtype)):
            for target in (np.zeros(view.shape, dtype), np.zeros(view.T.shape, dtype).T):
                assert library.functions.refilled(target, view) is target
                np.testing.assert_array_equal(target, view, library.level)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_parts_are_views_of_numpys_slices(axis):
    for library in LIBRARIES:
        for x in layouts(numbers((4, 5, 6), "float32"))[:8]:
            x = x.reshape(x.shape) if x.ndim == 3 else x[:, 0]
            sizes = (1, 0, x.shape[axis] - 1)
            parts = library.functions.views(axis, sizes, x)
            for part, wanted in zip(parts, np.split(x, [1, 1], axis), strict=True):
                np.testing.assert_array_equal(part, wanted, library.level)
                assert part.strides == wanted.strides or not part.size
                assert np.shares_memory(part, x) or not part.size
            elements = library.functions.views(axis, None, x)
            assert len(elements) == x.shape[axis]
            for i, element in enumerate(elements):
                np.testing.assert_array_equal(element, x.take(i, axis), library.level)


def test_parts_keep_strings():
    for library in LIBRARIES:
        x = np.array([["a", "b"], ["c", "d"]], object)
        first, second = library.functions.views(1, (1, 1), x)
        del x
        assert first.tolist() == [["a"], ["c"]] and second.tolist() == [["b"], ["d"]]


@pytest.mark.parametrize("axis, sizes", [(0, (2, 3)), (0, (-1, 5)), (2, (4,)), (-1, (4,))])
def test_parts_of_sizes_that_do_not_fit_are_refused(axis, sizes):
    for library in LIBRARIES:
        with pytest.raises(ValueError, match=r"out of range|do not fit"):
            library.functions.views(axis, sizes, np.zeros((4, 3), np.int8))


def test_array_is_refilled_from_memory_that_it_shares():
    for library in LIBRARIES:
        x = np.arange(36 * 40, dtype="float32").reshape(36, 40)
        want = x[:36, :36].T.copy()
        memory = np.pad(x.reshape(-1), (0, 99))
        target = memory[7 : 7 + 36 * 36].reshape(36, 36)
        library.functions.refilled(target, memory[: 36 * 40].reshape(36, 40)[:, :36].T)
        np.testing.assert_array_equal(target, want, library.level)


@pytest.mark.parametrize("view", [np.zeros((3, 4)), np.zeros((4, 3), "float32").T])
def test_array_that_is_refilled_has_its_own_shape_and_dtype(view):
    for library in LIBRARIES:
        target = np.ones((4, 3))
        with pytest.raises(ValueError, match="broadcast"):
            library.functions.refilled(target, view)
        target = np.ones((3, 4))
        library.functions.refilled(target, view)
        np.testing.assert_array_equal(target, view)


@pytest.mark.parametrize("size", [0, 1, 5, 8191, 8192, 100_000, 2**20 - 1, 2**20, 3_000_000])
def test_new_arrays_own_memory_that_begins_with_a_line_of_the_cache_if_it_is_large(size):
    for library in LIBRARIES:
        for _ in range(5):
            x = library.functions.empty((size,), np.dtype(np.float32))
            assert (x.shape, x.dtype, x.flags.owndata) == ((size,), np.float32, True)
            assert x.ctypes.data % 64 == 0 or not 2**15 <= x.nbytes < 2**22
            x[:] = np.arange(size)
            for other in (size + 7, size // 2, size):
                before = x.copy()
                x.resize(other, refcheck=False)
                np.testing.assert_array_equal(x[: size // 2], before[: size // 2])
            assert np.empty(9).base is None
    assert np._core.multiarray.get_handler_name(np.empty(1 << 16)) == "default_allocator"


def test_new_arrays_of_wrong_dims_are_refused():
    for library in LIBRARIES:
        empty, dtype = library.functions.empty, np.dtype(np.float32)
        for dims in ((-1,), (2**40, 2**40), (2**62, 4), ("3",), (1,) * 65):
            with pytest.raises((ValueError, TypeError, MemoryError)):
                empty(dims, dtype)
        for given in (((3,),), ([3], dtype), ((3,), "float32")):
            with pytest.raises(TypeError):
                empty(*given)
        assert empty((2, 3), np.dtype(object)).tolist() == [[None] * 3] * 2


def test_copy_of_a_scalar_of_strings_and_of_records_equals_numpy():
    record = np.array([(1, 2.0), (3, 4.0)], "i1,f4")[::-1]
    for x in (np.array(3.0), np.array(["a", "b"], object)[::-1], record):
        for library in LIBRARIES:
            np.testing.assert_array_equal(library.functions.copied(x), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("axis", "dims"),
    [
        (0, [(3, 5), (1, 5)]),
        (1, [(3, 1), (3, 1), (3, 2)]),
        (-1, [(2, 3, 4), (2, 3, 0), (2, 3, 5)]),
        (1, [(2, 3, 4, 5), (2, 7, 4, 5)]),
        (0, [(4,)]),
    ],
)
def test_concat_equals_numpy(axis, dims, dtype):
    inputs = [numbers(shape, dtype) for shape in dims]
    check(node_of("Concat", inputs, axis=axis), inputs)
    strided = [x.swapaxes(0, -1).copy().swapaxes(0, -1) for x in inputs]
    check(node_of("Concat", inputs, axis=axis), strided)


def test_concat_into_memory_with_channels_last_equals_numpy():
    inputs = [numbers((2, channels, 3, 4), "float32") for channels in (3, 8)]
    wanted = np.concatenate(inputs, 1)
    for library in LIBRARIES:
        kernel = kernel_of(node_of("Concat", inputs, axis=1), library)
        target = np.moveaxis(np.empty((2, 3, 4, 11), np.float32), -1, 1)
        kernel.into(*inputs, target)
        np.testing.assert_array_equal(target, wanted)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 3])
def test_threads_divide_a_concat_along_the_outermost_dim_of_its_memory(axis, channels_last):
    lengths = 5, 0, 131, 1
    shapes = [tuple(n if i == axis else (2, 16, 9, 16)[i] for i in range(4)) for n in lengths]
    inputs = [numbers(shape, "int32") for shape in shapes]
    wanted = np.concatenate(inputs, axis)
    target = np.empty(wanted.shape, np.int32)
    if channels_last:
        *inputs, target = (
            np.moveaxis(np.moveaxis(x, 1, -1).copy(), -1, 1) for x in (*inputs, target)
        )
    for library in LIBRARIES:
        kernel = kernel_of(node_of("Concat", inputs, axis=axis), library)
        for threads in (1, 3):
            target[...] = -1
            with threads_of(library, threads):
                kernel.into(*inputs, target)
            np.testing.assert_array_equal(target, wanted, library.level)


@pytest.mark.parametrize("others", [[(2, 4)], [(3, 3)], [(3, 4, 1)]])
def test_concat_of_arrays_that_do_not_fit_raises(others):
    for library in LIBRARIES:
        arrays = [numbers(dims, "float32") for dims in [(3, 4), *others]]
        with pytest.raises(ValueError, match="fit"):
            library.functions.concatenated(1 if others == [(2, 4)] else 0, None, *arrays)
        with pytest.raises(ValueError, match="fit"):
            library.functions.concatenated(0, np.empty((7, 4), np.float32), *arrays[:1])


def test_concat_of_strings_is_left_to_numpy():
    texts = np.array(["a"], object)
    assert all(
        kernel_of(node_of("Concat", [texts, texts], axis=0), lib) is None for lib in LIBRARIES
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("repeats", [(1, 1, 1), (2, 1, 3), (1, 4, 1), (0, 2, 1)])
def test_tile_equals_numpy(repeats, dtype):
    inputs = [numbers((3, 2, 140), dtype), np.array(repeats)]
    for constants in ([], [1]):
        check(node_of("Tile", inputs, constants), inputs)


def test_tile_refuses_a_matrix_of_repeats_and_negative_ones():
    x = numbers((3, 5), "float32")
    kernel = kernel_of(node_of("Tile", [x, np.array([2, 1])]), LIBRARIES[0])
    assert kernel is not None
    with pytest.raises(ShapeError, match="must not be negative"):
        kernel(x, np.array([2, -1]))
    with pytest.raises(ShapeError, match="repeats"):
        node_of("Tile", [x, np.array([[2, 1]])])


@pytest.mark.parametrize("dtype", [*DTYPES, "int8", "int64"])
def test_reorder_kernel_copies_any_layout_into_that_of_its_attribute(dtype):
    order, x = (0, 2, 3, 1), numbers((2, 5, 4, 3), dtype)
    type_ = TensorType(x.dtype, x.shape)
    node = Node(REORDER, [Value("x", type_)], [Value("y", type_)], {"order": order})
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        assert (
            kernel is not None
            and kernel.layout.dims_order == order
            and not kernel.layout.contiguous_inputs
        )
        for given in (x, np.asfortranarray(x), np.repeat(x, 2, axis=-1)[..., ::2]):
            y = np.zeros((2, 4, 3, 5), dtype).transpose(0, 3, 1, 2)
            run, arguments = kernel.bind([given], [y], None)
            run(*arguments)
            np.testing.assert_array_equal(y, given, library.level)
            np.testing.assert_array_equal(kernel.function(given), given)
