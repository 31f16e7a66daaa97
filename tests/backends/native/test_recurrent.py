"""Compiled recurrent layers against NumPy's."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from penstock.core.errors import Cancelled
from penstock.core.types import ShapeError
from penstock.host.current_run import working_for
from penstock.ops.internal.recurrence import RECURRENCE
from penstock.ops.registry import MICROSOFT
from tests.support.counting_run import CountingRun
from tests.support.native_kernels import (  # noqa: F401
    LIBRARIES,
    check,
    kernel_of,
    node_of,
    pytestmark,
    threads_of,
)
from tests.support.sweeps import sweep

RANDOM = np.random.default_rng(5)
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
LOOSE = {"rtol": 2e-5, "atol": 2e-6}


def layer_inputs(cell, steps, batch, width, hidden, directions=1, batch_first=False, given=()):
    """Inputs of a layer; those in ``given`` beyond X, W and R."""
    gates = GATES[cell]
    x = (batch, steps, width) if batch_first else (steps, batch, width)
    state = (batch, directions, hidden) if batch_first else (directions, batch, hidden)
    shapes = {
        "X": x,
        "W": (directions, gates * hidden, width),
        "R": (directions, gates * hidden, hidden),
        "B": (directions, 2 * gates * hidden),
        "lengths": (batch,),
        "h": state,
        "c": state,
        "P": (directions, 3 * hidden),
    }
    inputs = []
    for name in list(shapes)[: 8 if cell == "LSTM" else 6]:
        if name not in ("X", "W", "R", *given):
            inputs.append(None)
        elif name == "lengths":
            inputs.append(RANDOM.integers(0, steps + 1, batch).astype(np.int32))
        else:
            # Small weights: larger ones would make the layer chaotic, and rounding errors grow.
            scale = 0.7 / np.sqrt(shapes[name][-1]) if name in "WR" else 0.5
            inputs.append(RANDOM.normal(0, scale, shapes[name]).astype(np.float32))
    return inputs


def check_layer(cell, sizes, given=(), **attrs):
    directions = 2 if attrs.get("direction") == "bidirectional" else 1
    inputs = layer_inputs(cell, *sizes, directions, bool(attrs.get("layout", 0)), given)
    outputs = 3 if cell == "LSTM" else 2
    node = node_of(cell, inputs, [1, 2, 3, 7], outputs, hidden_size=sizes[-1], **attrs)
    check(node, inputs, LOOSE)


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("given", [(), ("B",), ("B", "lengths", "h", "c")])
@pytest.mark.parametrize("sizes", [(5, 1, 3, 4), (3, 9, 40, 33), (40, 2, 7, 96)])
def test_layer_equals_numpy(cell, direction, given, sizes):
    check_layer(cell, sizes, given, direction=direction)


@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_layer_with_the_batch_first_equals_numpy(cell, direction):
    check_layer(cell, (6, 11, 5, 8), ("B", "lengths", "h", "c"), direction=direction, layout=1)


@pytest.mark.parametrize("given", [("B",), ()])
def test_gru_with_the_reset_behind_the_product_equals_numpy(given):
    check_layer("GRU", (6, 3, 5, 20), given, linear_before_reset=1)


@pytest.mark.parametrize("input_forget", [0, 1])
def test_lstm_with_peepholes_and_a_bound_equals_numpy(input_forget):
    given = ("B", "P", "h", "c", "lengths")
    check_layer("LSTM", (6, 3, 5, 20), given, input_forget=input_forget, clip=0.7)


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("Relu", {}),
        ("Affine", {"activation_alpha": [0.5], "activation_beta": [0.1]}),
        ("LeakyRelu", {"activation_alpha": [0.2]}),
        ("ThresholdedRelu", {"activation_alpha": [0.1]}),
        ("ScaledTanh", {"activation_alpha": [0.5], "activation_beta": [1.5]}),
        ("HardSigmoid", {}),
        ("Elu", {}),
        ("Softsign", {}),
        ("Softplus", {}),
    ],
)
@pytest.mark.parametrize("cell", ["RNN", "GRU"])
def test_layer_with_another_activation_equals_numpy(cell, name, attrs):
    names = [name] if cell == "RNN" else ["Sigmoid", name]
    if cell == "GRU" and "activation_alpha" in attrs:
        attrs = dict(attrs)
    check_layer(cell, (4, 3, 5, 18), ("B",), activations=names, **attrs)


@pytest.mark.parametrize("cell", [*GATES, "GRU with the reset behind the product"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("longest", [0, 1, 7, 39])
def test_steps_that_no_sequence_has_are_not_computed(cell, direction, longest):
    name, _, linear = cell.partition(" ")
    given, directions = ("B", "lengths", "h", "c"), 1 + (direction == "bidirectional")
    inputs = layer_inputs(name, 40, 20, 6, 24, directions, given=given)
    rng = np.random.default_rng(longest)
    inputs[4] = rng.integers(0, longest + 1, 20).astype(np.int32)
    inputs[4][:3] = longest
    # What no step computes cannot spoil a state.
    inputs[0] = np.where(np.arange(40)[:, None, None] < longest, inputs[0], np.nan).astype(
        np.float32
    )
    attrs = {"linear_before_reset": 1} if linear else {}
    node = node_of(
        name,
        inputs,
        [1, 2, 3],
        3 if name == "LSTM" else 2,
        direction=direction,
        hidden_size=24,
        **attrs,
    )
    check(node, inputs, LOOSE)


def test_lengths_beyond_the_steps_are_refused_as_by_numpy():
    inputs = layer_inputs("GRU", 4, 2, 3, 5, given=("lengths",))
    inputs[4] = np.array([5, 1], np.int32)
    node = node_of("GRU", inputs, [1, 2], 2, hidden_size=5)
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        assert kernel is not None
        with pytest.raises(ShapeError, match="sequence_lens"):
            kernel.function(*inputs)


def _codes_lstm(dtype, directions, batch, steps, width, hidden, by_column, rng):
    """The inputs of a DynamicQuantizeLSTM of random codes."""
    ends = np.iinfo(dtype)
    columns = (directions, 4 * hidden)
    shape = columns if by_column else (directions,)
    middle = (ends.min + ends.max + 1) // 2

    def matrix(k):
        codes = rng.integers(ends.min, ends.max, (directions, k, 4 * hidden), dtype, endpoint=True)
        zeros = rng.integers(middle - 9, middle + 9, shape, dtype)
        return codes, rng.uniform(0.001, 0.003, shape).astype(np.float32), zeros

    (w, w_scale, w_zero), (r, r_scale, r_zero) = matrix(width), matrix(hidden)
    x = rng.standard_normal((steps, batch, width), np.float32)
    bias = rng.standard_normal((directions, 8 * hidden), np.float32)
    h0, c0 = rng.standard_normal((2, directions, batch, hidden), np.float32)
    p = rng.standard_normal((directions, 3 * hidden), np.float32) if batch > 1 else None
    return [x, w, r, bias, None, h0, c0, p, w_scale, w_zero, r_scale, r_zero]


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize(
    ("directions", "batch", "steps", "width", "hidden"),
    [(1, 1, 9, 5, 7), (2, 3, 5, 64, 33), (2, 1, 4, 8, 32), (1, 70, 3, 10, 12)],
)
def test_lstm_of_codes_equals_numpy(directions, batch, steps, width, hidden, dtype):
    rng = np.random.default_rng(7)
    by_column = batch > 1
    inputs = _codes_lstm(dtype, directions, batch, steps, width, hidden, by_column, rng)
    attrs = {"hidden_size": hidden, "direction": ["reverse", "bidirectional"][directions - 1]}
    node = node_of(
        "DynamicQuantizeLSTM",
        inputs,
        [1, 2, 3, *range(7, 12)],
        outputs=3,
        domain=MICROSOFT,
        **attrs,
    )
    # A state between two codes may become either of them.
    check(node, inputs, {"rtol": 0, "atol": 0.01})


SHARED = {
    "one sequence": ((40, 1, 130, 250), ("B",), {}),
    "a sequence of each length": ((20, 5, 70, 170), ("B", "lengths", "h", "c"), {"layout": 1}),
    "backwards": ((20, 3, 130, 250), ("B", "h", "c"), {"direction": "reverse", "clip": 0.9}),
    "three blocks of rows": ((10, 23, 40, 120), ("B",), {}),
    "two directions in turn": ((30, 1, 300, 257), ("B", "h"), {"direction": "bidirectional"}),
}


@pytest.mark.skipif(not hasattr(LIBRARIES[0].functions, "team_counts"), reason="there is no team")
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("case", SHARED)
@pytest.mark.parametrize("cell", [*GATES, "GRU with the reset behind the product"])
def test_threads_share_each_step_and_compute_the_same_bits(cell, case, threads):
    sizes, given, attrs = SHARED[case]
    if " " in cell:
        cell, attrs = "GRU", {**attrs, "linear_before_reset": 1}
    if cell == "LSTM" and case == "backwards":
        given = (*given, "P")
    directions = 2 if attrs.get("direction") == "bidirectional" else 1
    inputs = layer_inputs(cell, *sizes, directions, bool(attrs.get("layout", 0)), given)
    outputs = 3 if cell == "LSTM" else 2
    node = node_of(cell, inputs, [1, 2, 3, 7], outputs, hidden_size=sizes[-1], **attrs)
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        with threads_of(library, 1):
            wanted = kernel.function(*inputs)
        before = sum(library.functions.team_counts()[:2])
        with threads_of(library, threads):
            results = [kernel.function(*inputs) for _ in range(3)]
        assert sum(library.functions.team_counts()[:2]) - before == 3 * (threads - 1)
        for result in results:
            for y, want in zip(result, wanted, strict=True):
                np.testing.assert_array_equal(y, want, library.level)


@pytest.mark.skipif(not hasattr(LIBRARIES[0].functions, "team_counts"), reason="there is no team")
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize(("directions", "batch", "hidden"), [(1, 1, 257), (1, 9, 100), (2, 3, 224)])
def test_threads_share_each_step_of_codes_and_compute_the_same_bits(
    directions, batch, hidden, threads
):
    rng = np.random.default_rng(8)
    inputs = _codes_lstm("int8", directions, batch, 40, 300, hidden, True, rng)
    attrs = {"hidden_size": hidden, "direction": ["forward", "bidirectional"][directions - 1]}
    constants = [1, 2, 3, *range(7, 12)]
    node = node_of("DynamicQuantizeLSTM", inputs, constants, 3, MICROSOFT, **attrs)
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        with threads_of(library, 1):
            wanted = kernel.function(*inputs)
        before = sum(library.functions.team_counts()[:2])
        with threads_of(library, threads):
            result = kernel.function(*inputs)
        # Directions are items of their own, which two threads take whole.
        shared = directions % threads != 0
        assert not shared or sum(library.functions.team_counts()[:2]) - before == threads - 1
        for y, want in zip(result, wanted, strict=True):
            np.testing.assert_array_equal(y, want, library.level)


def test_threads_that_share_a_layer_refuse_lengths_beyond_the_steps():
    inputs = layer_inputs("LSTM", 4, 2, 100, 300, given=("lengths",))
    inputs[4] = np.array([4, 9], np.int32)
    node = node_of("LSTM", inputs, [1, 2], 3, hidden_size=300)
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        with threads_of(library, 3), pytest.raises(ShapeError, match="sequence_lens"):
            kernel.function(*inputs)


@pytest.mark.costly
@pytest.mark.parametrize("threads", sweep([1, 2], 1))
def test_long_layer_looks_between_its_steps_whether_the_run_must_stop(threads):
    inputs = layer_inputs("GRU", 1500, 1, 256, 1024)
    node = node_of("GRU", inputs, [1, 2], 1, hidden_size=1024)
    kernel, looks = kernel_of(node, LIBRARIES[0]), CountingRun()
    with threads_of(LIBRARIES[0], threads):
        wanted = kernel.function(*inputs)
        result = working_for(looks, kernel.function, *inputs)
        np.testing.assert_array_equal(result, wanted)
        assert looks.looks >= 2
        stopped = CountingRun(last=looks.looks // 2 + 1)
        with pytest.raises(Cancelled):
            working_for(stopped, kernel.function, *inputs)
        assert stopped.looks == stopped.last


SIZES = [(5, 1, 4), (3, 9, 33), (12, 16, 96), (4, 7, 16), (3, 50, 200)]


# Whether a mask is read does not depend on sizes: one kind of mask stands for all in the largest.
@pytest.mark.parametrize(
    ("mask", "sizes"),
    [
        *product([None, np.bool_, np.float32], SIZES[:-1]),
        (np.bool_, SIZES[-1]),
        *[pytest.param(mask, SIZES[-1], marks=pytest.mark.full) for mask in (None, np.float32)],
    ],
)
@pytest.mark.parametrize(
    ("cell", "linear", "places"),
    [
        ("LSTM", 0, (0, 2, 1, 3)),
        ("LSTM", 0, (3, 1, 0, 2)),
        ("GRU", 0, (1, 0, 2)),
        ("GRU", 1, (2, 0, 1)),
        ("RNN", 0, (0,)),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_recurrence_equals_numpy(cell, linear, places, sizes, mask, given):
    steps, batch, units = sizes
    gates, scale = len(places), 0.7 / np.sqrt(units)
    normal = lambda *dims: RANDOM.normal(0, 0.5, dims).astype(np.float32)  # noqa: E731
    weights = RANDOM.normal(0, scale, (1, gates * units, units)).astype(np.float32)
    inputs = [normal(steps, batch, gates * units), weights]
    inputs.append(normal(1, 2 * gates * units) if given else None)
    inputs.append(None if mask is None else (RANDOM.random((steps, batch)) > 0.4).astype(mask))
    inputs.append(normal(batch, units) if given else None)
    if cell == "LSTM":
        inputs.append(normal(batch, units) if given else None)
    attrs = {"cell": cell, "hidden_size": units, "places": places, "linear_before_reset": linear}
    attrs["activations"] = ("Relu",) if cell == "RNN" else ()
    constant = [1, *([2] if given else [])]
    node = node_of(RECURRENCE, inputs, constant, 3 if cell == "LSTM" else 2, **attrs)
    check(node, inputs, LOOSE)


@pytest.mark.parametrize("case", sweep(product([4, 16], ["forward", "reverse"]), 1))
def test_layer_whose_weights_are_far_equals_numpy(case):
    batch, direction = case
    check_layer("LSTM", (3, batch, 24, 1024), ("B", "h", "c"), direction=direction)
