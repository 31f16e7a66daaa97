"""RNN, GRU and LSTM against ONNX Runtime, and against a plain float64 loop for what it lacks."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
T, B, WIDTH, H = 5, 3, 4, 6


def data(
    kind: str,
    *,
    directions: int = 1,
    bias: bool = True,
    lengths: list[int] | None = None,
    states: bool = False,
    peepholes: bool = False,
    layout: int = 0,
    dtype: Any = np.float32,
    sizes: tuple[int, int, int, int] = (T, B, WIDTH, H),
) -> list[Any]:
    rng = np.random.default_rng(7)
    t, b, i, h = sizes
    n, g = directions, GATES[kind]

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype)

    state = (b, n, h) if layout else (n, b, h)
    inputs: list[Any] = [
        normal(b, t, i) if layout else normal(t, b, i),
        normal(n, g * h, i),
        normal(n, g * h, h),
        normal(n, 2 * g * h) if bias else None,
        None if lengths is None else np.array(lengths, np.int32),
        normal(*state) if states else None,
    ]
    if kind == "LSTM":
        inputs += [normal(*state) if states else None, normal(n, 3 * h) if peepholes else None]
    while inputs[-1] is None:
        inputs.pop()
    return inputs


def check(kind: str, inputs: list[Any], **attrs: Any) -> None:
    check_node(
        kind,
        inputs,
        {"hidden_size": H, **attrs},
        expected="ort",
        opset=14,
        outputs=3 if kind == "LSTM" else 2,
        rtol=1e-4,
        atol=1e-5,
    )


DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("lengths", [None, [5, 2, 3], [1, 1, 4]])
@pytest.mark.parametrize(("bias", "states"), [(True, True), (True, False), (False, True)])
def test_recurrent_layer_in_each_direction_matches_ort(
    kind: str, direction: str, lengths: list[int] | None, bias: bool, states: bool
) -> None:
    inputs = data(kind, directions=DIRECTIONS[direction], bias=bias, lengths=lengths, states=states)
    check(kind, inputs, direction=direction)


@pytest.mark.parametrize("linear", [0, 1])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_gru_linear_before_reset(linear: int, direction: str, bias: bool) -> None:
    inputs = data("GRU", directions=DIRECTIONS[direction], states=True, bias=bias)
    check("GRU", inputs, direction=direction, linear_before_reset=linear)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("lengths", [None, [5, 2, 3]])
def test_lstm_with_peepholes_matches_the_reference(
    direction: str, lengths: list[int] | None
) -> None:
    inputs = data(
        "LSTM", directions=DIRECTIONS[direction], states=True, peepholes=True, lengths=lengths
    )
    check("LSTM", inputs, direction=direction)


@pytest.mark.parametrize("kind", GATES)
def test_recurrent_layer_with_clip_matches_ort(kind: str) -> None:
    check(kind, data(kind, states=True), clip=0.4)


def test_lstm_with_input_forget_matches_ort() -> None:
    check("LSTM", data("LSTM", states=True), input_forget=1)


ACTIVATIONS = [
    ("Relu", "Sigmoid", "Tanh"),
    ("HardSigmoid", "Softsign", "Relu"),
    ("Sigmoid", "LeakyRelu", "Tanh"),
    ("Sigmoid", "ThresholdedRelu", "Affine"),
    ("Sigmoid", "ScaledTanh", "Softplus"),
    ("sigmoid", "elu", "Softsign"),
]


@pytest.mark.parametrize("names", ACTIVATIONS, ids="-".join)
@pytest.mark.parametrize("kind", GATES)
def test_recurrent_layer_with_each_activation_matches_ort(
    kind: str, names: tuple[str, ...]
) -> None:
    count = {"RNN": 1, "GRU": 2, "LSTM": 3}[kind]
    inputs = data(kind, states=True)
    inputs[1] *= 0.3
    inputs[2] *= 0.3
    attrs: dict[str, Any] = {"activations": [*names[3 - count :]]}
    if "ScaledTanh" in names:
        attrs.update(activation_alpha=[0.8], activation_beta=[0.6])
    if "Affine" in names and count > 1:
        attrs.update(activation_alpha=[0.5, 0.7], activation_beta=[0.1])
    elif "Affine" in names:
        attrs.update(activation_alpha=[0.7], activation_beta=[0.1])
    if "LeakyRelu" in names and count > 1:
        attrs.update(activation_alpha=[0.2])
    check(kind, inputs, **attrs)


@pytest.mark.parametrize("kind", GATES)
def test_recurrent_activations_of_each_direction(kind: str) -> None:
    count = {"RNN": 1, "GRU": 2, "LSTM": 3}[kind]
    names = ["Sigmoid", "Tanh", "Tanh"][-count:] + ["HardSigmoid", "Relu", "Softsign"][-count:]
    inputs = data(kind, directions=2, states=True)
    inputs[1] *= 0.3
    inputs[2] *= 0.3
    check(kind, inputs, direction="bidirectional", activations=names)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("lengths", [None, [5, 2, 3]])
def test_recurrent_batch_first_matches_the_reference(
    kind: str, direction: str, lengths: list[int] | None
) -> None:
    """Layout 1 says the same as layout 0 with transposed inputs and outputs."""
    n = DIRECTIONS[direction]
    inputs = data(kind, directions=n, states=True, lengths=lengths, layout=1)
    attrs = {"hidden_size": H, "direction": direction}
    count = 3 if kind == "LSTM" else 2
    turned = [
        x.swapaxes(0, 1) if i in (0, 5, 6) and x is not None else x for i, x in enumerate(inputs)
    ]
    y, *states = check_node(
        kind, turned, attrs, outputs=count, expected="ort", opset=14, rtol=1e-4, atol=1e-5
    )
    wanted = [y.transpose(2, 0, 1, 3), *(s.swapaxes(0, 1) for s in states)]
    check_node(kind, inputs, {**attrs, "layout": 1}, outputs=count, expected=wanted, opset=14)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("constants", [(1, 2), (1, 2, 3)])
def test_recurrent_constant_weights_matches_the_reference(
    kind: str, constants: tuple[int, ...]
) -> None:
    attrs = {"hidden_size": H}
    inputs = data(kind, states=True)
    wanted = check_node(kind, inputs, attrs, outputs=2)
    check_node(kind, inputs, attrs, outputs=2, constants=constants, expected=wanted)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(
    "flags",
    [f for f in itertools.product([True, False], repeat=3) if any(f)],
    ids=lambda f: "".join("yn"[not x] for x in f),
)
@pytest.mark.parametrize("lengths", [None, [5, 2, 3]])
def test_recurrent_outputs_left_out(
    kind: str, flags: tuple[bool, ...], lengths: list[int] | None
) -> None:
    count = 3 if kind == "LSTM" else 2
    flags = flags[:count]
    if not any(flags):
        pytest.skip("no output")
    inputs, attrs = data(kind, states=True, lengths=lengths), {"hidden_size": H}
    every = check_node(
        kind, inputs, attrs, outputs=count, expected="ort", opset=14, rtol=1e-4, atol=1e-5
    )
    wanted = [y for y, flag in zip(every, flags, strict=True) if flag]
    check_node(kind, inputs, attrs, outputs=flags, expected=wanted)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, 1e-6), (np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2)]
)
def test_recurrent_of_every_dtype_matches_the_definition(
    kind: str, dtype: Any, tolerance: float
) -> None:
    inputs = data(kind, states=True, dtype=dtype)
    wide = [None if x is None else x.astype(np.float32) for x in inputs]
    count = 3 if kind == "LSTM" else 2
    attrs = {"hidden_size": H}
    wanted = check_node(
        kind, wide, attrs, outputs=count, expected="ort", opset=14, rtol=1e-4, atol=1e-5
    )
    wanted = [y.astype(dtype) for y in wanted]
    check_node(kind, inputs, attrs, outputs=count, expected=wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (1, 1, 3, 4)])
def test_recurrent_small_and_empty(kind: str, sizes: tuple[int, int, int, int]) -> None:
    t, b, _, h = sizes
    inputs = data(kind, sizes=sizes, states=True)
    model_h = inputs[5]
    count = 3 if kind == "LSTM" else 2
    if t == 0:
        wanted: Any = [np.zeros((0, 1, b, h), np.float32), model_h, *inputs[6:7]]
    elif b == 0:
        wanted = [np.zeros((t, 1, 0, h), np.float32), *[np.zeros((1, 0, h), np.float32)] * 2]
    else:
        wanted = "reference"
    check_node(
        kind,
        inputs,
        {"hidden_size": h},
        outputs=count,
        expected=wanted[:count] if isinstance(wanted, list) else wanted,
    )


@pytest.mark.parametrize("kind", GATES)
def test_recurrent_empty_sequences_keep_the_initial_state(kind: str) -> None:
    inputs = data(kind, lengths=[0, 5, 0], states=True)
    count = 3 if kind == "LSTM" else 2
    full = data(kind, lengths=[5, 5, 5], states=True)
    y, *states = check_node(
        kind,
        full,
        {"hidden_size": H},
        outputs=count,
        expected="ort",
        opset=14,
        rtol=1e-4,
        atol=1e-5,
    )
    y = y.copy()
    y[:, :, [0, 2]] = 0
    wanted = [y]
    for state, initial in zip(states, inputs[5:], strict=False):
        kept = state.copy()
        kept[:, [0, 2]] = initial[:, [0, 2]]
        wanted.append(kept)
    check_node(kind, inputs, {"hidden_size": H}, outputs=count, expected=wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"lengths": [6, 1, 1]}, "sequence_lens"), ({"lengths": [-1, 1, 1]}, "sequence_lens")],
)
def test_recurrent_bad_lengths_matches_the_reference(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        check_node("LSTM", data("LSTM", **change), {"hidden_size": H}, expected=[None])


@pytest.mark.parametrize(
    ("index", "shape"),
    [
        (0, (T, WIDTH)),
        (1, (1, 4 * H, WIDTH + 1)),
        (1, (2, 4 * H, WIDTH)),
        (2, (1, 4 * H, H + 1)),
        (2, (1, 4 * H - 1, H)),
        (3, (1, 4 * H)),
        (5, (1, B + 1, H)),
        (6, (1, B, H + 1)),
    ],
)
def test_recurrent_bad_shapes_matches_the_reference(index: int, shape: tuple[int, ...]) -> None:
    inputs = data("LSTM", states=True)
    inputs[index] = np.zeros(shape, np.float32)
    with pytest.raises(ShapeError):
        check_node("LSTM", inputs, expected=[None])
    op = find("LSTM")
    assert op is not None
    types = [None if x is None else TensorType(x.dtype, x.shape) for x in inputs]
    with pytest.raises(ShapeError):
        op.infer(types, {}, [None] * len(types))


@pytest.mark.parametrize(
    "attrs",
    [
        {"direction": "sideways"},
        {"activations": ["Tanh"]},
        {"activations": ["Tanh", "Sinus", "Tanh"]},
    ],
)
def test_recurrent_bad_attributes_matches_the_reference(attrs: dict[str, Any]) -> None:
    with pytest.raises(ShapeError):
        check_node("LSTM", data("LSTM"), attrs, expected=[None])


def test_recurrent_layer_infers_symbolic_dims() -> None:
    op = find("LSTM")
    assert op is not None
    f = np.dtype(np.float32)
    x, w = TensorType(f, ("t", "b", None)), TensorType(f, (2, 24, 3))
    kinds = op.infer([x, w, TensorType()], {"direction": "bidirectional"}, [None] * 3)
    assert [k.shape for k in kinds] == [("t", 2, "b", 6), (2, "b", 6), (2, "b", 6)]
    kinds = op.infer([TensorType()] * 3, {"layout": 1, "hidden_size": 7}, [None] * 3)
    assert [k.shape for k in kinds] == [(None, None, 1, 7), (None, 1, 7), (None, 1, 7)]
