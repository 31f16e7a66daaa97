"""Compiled recurrent layers against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.backends.native.recurrent import recurrent_seconds
from penstock.backends.onednn.backend import OneDnnBackend
from penstock.backends.onednn.library import library as onednn_library
from penstock.ops.registry import MICROSOFT
from tests.support.native_kernels import check, node_of, pytestmark  # noqa: F401

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


def test_lengths_beyond_the_steps_are_refused_as_by_numpy():
    from penstock.types import ShapeError
    from tests.support.native_kernels import LIBRARIES, kernel_of

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
    return [x, w, r, bias, None, h0, c0, None, w_scale, w_zero, r_scale, r_zero]


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
        [1, 2, 3, *range(8, 12)],
        outputs=3,
        domain=MICROSOFT,
        **attrs,
    )
    # A state between two codes may become either of them.
    check(node, inputs, {"rtol": 0, "atol": 0.01})


@pytest.mark.skipif(onednn_library() is None, reason="there is no oneDNN")
def test_small_layers_run_on_compiled_kernels_and_large_ones_on_onednn():
    chosen = []
    for hidden, rows in ((16, 1), (16, 16), (128, 16), (512, 4), (16, 0)):
        x = np.zeros((16, rows, hidden), np.float32)
        w = np.zeros((1, 4 * hidden, hidden), np.float32)
        node = node_of("LSTM", [x, w, w], [1, 2], hidden_size=hidden)
        chosen.append(recurrent_seconds(node) < OneDnnBackend().seconds(node))
    assert chosen == [True, True, False, False, True]
