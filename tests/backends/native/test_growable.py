"""Arrays that grow where they lie never change what anyone else holds."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.native.growable import GrowableBuffers
from tests.support.native_kernels import LIBRARIES, pytestmark  # noqa: F401

libraries = pytest.mark.parametrize("library", LIBRARIES, ids=lambda each: each.level)


def rows(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def begin(x: np.ndarray) -> int:
    return int(x.__array_interface__["data"][0])


@libraries
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_rows_are_added_where_the_others_lie_until_the_room_is_full(library, axis):
    appended = partial(library.functions.appended, GrowableBuffers(), axis)
    shape = [2, 3, 4]
    shape[axis] = 0
    x, copies, parts = np.zeros(shape, np.float32), 0, []
    shape[axis] = 1
    for i in range(200):
        parts.append(rows(*shape) + i)
        y = appended(x, parts[-1])
        copies += begin(y) != begin(x)
        np.testing.assert_array_equal(y, np.concatenate(parts, axis))
        x = y
    assert copies == 4  # rooms of 32, 66, 134 and 270 rows


@libraries
def test_array_that_shares_rows_cannot_be_written(library):
    y = library.functions.appended(GrowableBuffers(), 0, rows(3, 2), rows(1, 2))
    with pytest.raises(ValueError, match="read-only"):
        y[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        y.setflags(write=True)


@libraries
def test_second_array_from_the_same_rows_has_rows_of_its_own(library):
    appended = partial(library.functions.appended, GrowableBuffers())
    x = appended(0, rows(3, 2), rows(1, 2))
    first, second = appended(0, x, np.ones((1, 2), np.float32)), appended(0, x, rows(1, 2) * 0)
    assert begin(first) == begin(x) != begin(second)
    assert first[-1, 0] == 1
    assert second[-1, 0] == 0
    third = appended(0, first, rows(1, 2))
    assert begin(third) == begin(first)


@libraries
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:2],
        lambda x: x[1:],
        lambda x: x[:, :1],
        lambda x: x[::2],
        lambda x: x.view(np.int32),
        lambda x: x.T,
        lambda x: x[None],
        lambda x: x.copy(),
    ],
)
def test_views_and_copies_grow_into_memory_of_their_own(library, view):
    x = view(library.functions.appended(GrowableBuffers(), 0, rows(3, 3), rows(1, 3)))
    before = x.copy()
    y = library.functions.appended(GrowableBuffers(), 0, x, before[:1])
    assert not np.shares_memory(x, y)
    np.testing.assert_array_equal(y, np.concatenate([before, before[:1]]))


@libraries
@pytest.mark.parametrize("dtype", ["int8", "float16", "int64", "complex128", "bool"])
def test_rows_of_any_size_are_added(library, dtype):
    x = np.arange(12).reshape(3, 4).astype(dtype)
    y = library.functions.appended(GrowableBuffers(), 1, x, x[:, :1])
    z = library.functions.appended(GrowableBuffers(), 1, y, x)
    assert begin(y) == begin(z)
    np.testing.assert_array_equal(z, np.concatenate([x, x[:, :1], x], 1))


@libraries
def test_arrays_that_do_not_fit_are_refused(library):
    appended = partial(library.functions.appended, GrowableBuffers())
    for axis, x, y in [
        (0, rows(2, 3), rows(2, 4)),
        (2, rows(2, 3), rows(2, 3)),
        (-3, rows(2, 3), rows(2, 3)),
        (0, rows(2, 3), rows(3)),
        (0, rows(2, 3), np.ones((2, 3))),
        (0, np.array(["a"], object), np.array(["b"], object)),
    ]:
        with pytest.raises(ValueError, match="do not fit"):
            appended(axis, x, y)
    with pytest.raises(TypeError, match="arrays"):
        appended(0, rows(2, 3), None)


@libraries
def test_threads_that_add_to_the_same_rows_do_not_meet(library):
    base = library.functions.appended(GrowableBuffers(), 0, rows(40, 64), rows(1, 64))

    def add(number: int) -> np.ndarray:
        x = base
        for _ in range(20):
            x = library.functions.appended(
                GrowableBuffers(), 0, x, np.full((1, 64), number, np.float32)
            )
        return x

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(add, range(32)))
    for number, result in enumerate(results):
        np.testing.assert_array_equal(result[:41], base)
        assert (result[41:] == number).all()


@libraries
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=30))
def test_trees_of_arrays_keep_their_contents(library, moves):
    """Add rows to any array made so far: all of them stay as they were."""
    arrays = [(rows(2, 0, 3), rows(2, 0, 3))]
    for i, (place, count) in enumerate(moves):
        x, wanted = arrays[place % len(arrays)]
        new = rows(2, count, 3) + i
        y = library.functions.appended(GrowableBuffers(), 1, x, new)
        arrays.append((y, np.concatenate([wanted, new], 1)))
        for array, contents in arrays:
            np.testing.assert_array_equal(array, contents)


@libraries
def test_threads_that_add_to_the_same_rows_each_get_rows_of_their_own(library):
    threads = 6
    appended = partial(library.functions.appended, GrowableBuffers(), 0)
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(300):
            x = appended(rows(3, 2), rows(1, 2))
            barrier = threading.Barrier(threads)

            def add(i: int, x=x, barrier=barrier) -> np.ndarray:
                added = np.full((1, 2), i, np.float32)
                barrier.wait()
                return appended(x, added)

            ys = list(pool.map(add, range(threads)))
            assert [y[-1, 0] for y in ys] == [*range(threads)]
            assert sum(begin(y) == begin(x) for y in ys) == 1
