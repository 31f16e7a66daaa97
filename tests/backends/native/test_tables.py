"""Compiled random bits and draws, hashes, lookups and distinct elements against NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.errors import Cancelled
from penstock.core.types import STRING, ShapeError
from penstock.host.current_run import working_for
from tests.support.counting_run import CountingRun
from tests.support.native_kernels import (
    LIBRARIES,
    check,
    check_threads,
    expected,
    kernel_of,
    node_of,
    pytestmark,  # noqa: F401
    threads_of,
)

RNG = np.random.default_rng(0)


def tflite(
    name: str, inputs: list[Any], constants: Any = (), outputs: int = 1, **attrs: Any
) -> Any:
    return node_of(name, inputs, constants, outputs, "tflite", 1, **attrs)


@pytest.mark.parametrize("dtype", ["int32", "uint64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 3), (64, 4), (33_333,)])
@pytest.mark.parametrize(("algorithm", "words"), [(0, 2), (1, 3), (2, 2)])
def test_random_bits_equal_numpys(algorithm, words, shape, dtype):
    # The counter passes 32 bits, and then 64.
    for counter in (2**32 - 70, 2**64 - 70):
        state = np.array([2**63 + 9, counter, 2**40 + 5][:words], np.uint64)
        attrs = {"algorithm": algorithm, "shape": shape, "dtype": dtype}
        check(tflite("RngBitGenerator", [state], outputs=2, **attrs), [state])


@pytest.mark.parametrize("state", [np.zeros(3, np.uint64), np.zeros(2, np.int64)])
def test_state_that_does_not_fit_is_left_to_numpy(state):
    node = tflite("RngBitGenerator", [state], outputs=2, algorithm=2, shape=[4], dtype="int32")
    assert all(kernel_of(node, library) is None for library in LIBRARIES)
    with pytest.raises(ShapeError, match="a state of"):
        expected(node, [state])


@pytest.mark.parametrize("dense", [0, 1])
@pytest.mark.parametrize(
    "size", [0, 1, 4, 5, 12, 13, 28, 29, 60, 61, 63, 64, 68, 123, 124, 125, 300]
)
def test_projections_of_keys_of_any_length_equal_numpys(size, dense):
    x = RNG.integers(0, 256, (7, size)).astype(np.uint8)
    seeds, weights = (RNG.normal(size=dims).astype(np.float32) for dims in ((40, 11), (7,)))
    for inputs in ([seeds, x], [seeds, x, weights]):
        check(tflite("LshProjection", inputs, dense=dense), inputs)
        check_threads(tflite("LshProjection", inputs, dense=dense), inputs)


@pytest.mark.parametrize("bits", [0, 1, 31, 32])
def test_projections_of_any_number_of_bits_equal_numpys(bits):
    inputs = [RNG.normal(size=dims).astype(np.float32) for dims in ((20, bits), (5, 3))]
    for dense in (0, 1):
        check(tflite("LshProjection", inputs, dense=dense), inputs)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("keys", [[4], [-(2**31), 0, 7, 7, 9, 2**31 - 1], [*range(0, 99, 3)]])
@pytest.mark.parametrize("dims", [(), (3,), (2, 3)])
def test_rows_by_key_equal_numpys(dims, keys, dtype):
    table = np.array(keys, dtype)
    wanted = np.concatenate([table, np.array([-(2**31), -1, 5, 8, 2**31 - 1], dtype)])
    for values_dtype in ("bool", "float16", "complex128"):
        values = RNG.integers(0, 9, (len(keys), *dims)).astype(values_dtype)
        for query in (wanted, wanted[:1].reshape(()), wanted[:0].reshape(0, 2)):
            inputs = [query, table, values]
            check(tflite("HashtableLookup", inputs, [1, 2], outputs=2), inputs)


def test_rows_by_key_of_texts_are_left_to_numpy():
    inputs = [np.array(5), np.array([3, 5]), np.array(["a", "b"], STRING)]
    node = tflite("HashtableLookup", inputs, outputs=2)
    assert all(kernel_of(node, library) is None for library in LIBRARIES)
    assert [y.tolist() for y in expected(node, inputs)] == ["b", 1]
    inputs[0] = np.array(4)
    assert [y.tolist() for y in expected(node, inputs)] == ["", 0]


def special(dtype: str, count: int) -> np.ndarray:
    """Few numbers, NaNs of different bits and zeros of both signs among them."""
    x = RNG.integers(-40, 40, count).astype(dtype)
    if x.dtype.kind == "f":
        bits = x.view(f"u{x.itemsize}")
        x[::7], x[1::5], x[2::9], x[3::11] = np.nan, -0.0, np.inf, -np.inf
        bits[::14] = ~bits.dtype.type(0)
        x[4::13] = 0
    return x


DTYPES = ["bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 63, 5000])
@pytest.mark.parametrize("outputs", [1, 2, 3, 4])
def test_distinct_elements_equal_numpys(dtype, count, outputs):
    x = special(dtype, count)
    for ascending in (0, 1):
        check(node_of("Unique", [x], outputs=outputs, sorted=ascending), [x])
    if 2 <= outputs <= 3:
        name = ["Unique", "UniqueWithCounts"][outputs - 2]
        for out_idx in ("int32", "int64"):
            node = node_of(name, [x], (), outputs, "tensorflow", 1, out_idx=out_idx)
            check(node, [x])


PLACES = [("NonZero", ""), ("Where", "tensorflow")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0, 0.003, 0.2, 1])
@pytest.mark.parametrize(
    "dims", [(), (1,), (7,), (0, 3), (5, 1, 3), (300, 2), (3, 7, 4001), (1, 200_003)]
)
def test_places_equal_numpys(dims, share, dtype):
    x = np.asarray(RNG.integers(1, 9, dims)).astype(dtype)
    x[RNG.random(dims) >= share] = 0
    if x.dtype.kind == "f":
        x[RNG.random(dims) < 0.1 * (share < 1)] = -0.0
        x[RNG.random(dims) < 0.1 * (share > 0)] = np.nan
    for name, domain in PLACES:
        check(node_of(name, [x], domain=domain, version=1 if domain else 26), [x])


@pytest.mark.parametrize(
    ("name", "domain", "x", "looks"),
    [
        *[(name, domain, np.ones((3, 2**16), np.int8), 4) for name, domain in PLACES],
        ("Unique", "", np.arange(900_000, dtype=np.int32), 3),
    ],
)
def test_searches_end_in_the_middle_when_their_run_is_stopped(name, domain, x, looks):
    node = node_of(name, [x], domain=domain, version=1 if domain else 26)
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        assert kernel is not None
        whole = CountingRun()
        working_for(whole, kernel.function, x)
        assert whole.looks == looks
        for last in range(1, looks + 1):
            with pytest.raises(Cancelled):
                working_for(CountingRun(last), kernel.function, x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("classes", [1, 2, 15, 16, 1001])
def test_draws_of_rows_equal_those_of_numpys_kernel(classes, rows, dtype):
    """Probabilities of 0 and of 1 among them; of several calls in turn, and by several threads."""
    x = (20 * RNG.normal(size=(rows, classes))).astype(dtype)
    x[1::3, 1:] = -np.inf
    for size, number in ((0, 6), (1, 7), (30, 6)):
        node = node_of("Multinomial", [x], sample_size=size, dtype=number, seed=2.5)
        wanted = node.op.compile(node, [node.inputs[0].type]).function
        kernels = [kernel_of(node, library) for library in LIBRARIES]
        for threads in (1, 3):
            y = wanted(x)
            for library, kernel in zip(LIBRARIES, kernels, strict=True):
                with threads_of(library, threads):
                    np.testing.assert_array_equal(kernel.function(x), y, strict=True)


def test_draws_of_logits_that_are_not_numbers_are_classes():
    x = np.array([[1, np.nan, 2], [np.inf, 0, np.inf], [-np.inf] * 3], np.float32)
    for library in LIBRARIES:
        y = kernel_of(node_of("Multinomial", [x], sample_size=50), library).function(x)
        assert set(y.ravel().tolist()) <= {0, 1, 2}


@pytest.mark.parametrize("dims", [(3,), (2, 0)])
def test_logits_without_classes_are_refused_as_by_numpy(dims):
    x = np.zeros((1, 2), np.float32)
    for library in LIBRARIES:
        with pytest.raises(ShapeError, match="must have shape"):
            kernel_of(node_of("Multinomial", [x]), library).function(np.zeros(dims, np.float32))
