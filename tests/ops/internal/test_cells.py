"""LstmCell, GruCell, GruGates and GruState, against the operations that they stand for on ONNX Runtime; and their
compiled kernels against NumPy's."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.backends.native.backend import NativeBackend
from penstock.core.types import ShapeError, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.cells import GRU_CELL, GRU_GATES, GRU_STATE, LSTM_CELL
from tests.support.native_kernels import LIBRARIES
from tests.support.onnx_text import model_from_text

LSTM = """g (float[rows, n4] gates, float[rows, n] c, float[1] bias) => (float[rows, n] h, float[rows, n] d) {
    p0, p1, p2, p3 = Split <axis = -1, num_outputs = 4> (gates)
    i = Sigmoid (p0)
    fb = Add (p1, bias)
    f = Sigmoid (fb)
    o = Sigmoid (p2)
    n = Tanh (p3)
    kept = Mul (f, c)
    new = Mul (i, n)
    d = Add (kept, new)
    t = Tanh (d)
    h = Mul (o, t)
}"""
GRU = """g (float[rows, n3] x, float[rows, n3] y, float[rows, n] s) => (float[rows, n] h) {
    xz, xr, xn = Split <axis = -1, num_outputs = 3> (x)
    yz, yr, yn = Split <axis = -1, num_outputs = 3> (y)
    za = Add (xz, yz)
    ra = Add (xr, yr)
    z = Sigmoid (za)
    r = Sigmoid (ra)
    m = Mul (r, yn)
    na = Add (xn, m)
    n = Tanh (na)
    d = Sub (s, n)
    zd = Mul (z, d)
    h = Add (n, zd)
}"""

GATES = """g (float[rows, n] hz, float[rows, n] hr, float[rows, n] xz, float[rows, n] xr, float[rows, n] s)
    => (float[rows, n] z, float[rows, n] old) {
    za = Add (hz, xz)
    ra = Add (hr, xr)
    z = Sigmoid (za)
    r = Sigmoid (ra)
    old = Mul (r, s)
}"""
STATE = """g (float[rows, n] p, float[rows, n] x, float[rows, n] z, float[rows, n] s) => (float[rows, n] h) {
    a = Add (p, x)
    n = Tanh (a)
    d = Sub (s, n)
    zd = Mul (z, d)
    h = Add (n, zd)
}"""


def session_of(text: str) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model_from_text(text).SerializeToString())


RUNTIMES = {
    LSTM_CELL: session_of(LSTM),
    GRU_CELL: session_of(GRU),
    GRU_GATES: session_of(GATES),
    GRU_STATE: session_of(STATE),
}


def results(op, inputs, outputs, **attrs):
    """Those of NumPy's kernel, and of each compiled one."""
    types = [TensorType(x.dtype, x.shape) for x in inputs]
    values = [Value(f"x{i}", type_) for i, type_ in enumerate(types)]
    inferred = op.infer(types, attrs, [None] * len(types))
    node = Node(op, values, [Value(f"y{i}", t) for i, t in enumerate(inferred)], attrs)
    for kernel in (
        op.compile(node, types),
        *[NativeBackend(n).kernel(node, types) for n in LIBRARIES],
    ):
        assert kernel is not None
        got = kernel.function(*inputs)
        yield got if outputs > 1 else (got,)


@given(
    rows=st.integers(1, 5),
    units=st.integers(1, 70),
    order=st.sampled_from(list(permutations(range(4)))),
    bias=st.sampled_from([0.0, 1.0, -0.5]),
    scale=st.sampled_from([0.1, 3.0, 1e4]),
)
def test_lstm_cell_equals_the_operations_that_it_stands_for(rows, units, order, bias, scale):
    rng = np.random.default_rng(units)
    parts = (rng.standard_normal((4, rows, units)) * scale).astype(np.float32)
    cell = rng.standard_normal((rows, units)).astype(np.float32)
    feeds = {"gates": np.concatenate(parts, -1), "c": cell, "bias": np.array([bias], np.float32)}
    wanted = RUNTIMES[LSTM_CELL].run(None, feeds)
    gates = np.concatenate([parts[order.index(place)] for place in range(4)], -1)
    for got in results(LSTM_CELL, [gates, cell], 2, order=order, forget_bias=bias):
        for y, want in zip(got, wanted, strict=True):
            np.testing.assert_allclose(y, want, rtol=1e-5, atol=2e-6)


@given(
    rows=st.integers(1, 5),
    units=st.integers(1, 70),
    order=st.sampled_from(list(permutations(range(3)))),
    scale=st.sampled_from([0.1, 3.0, 1e4]),
)
def test_gru_cell_equals_the_operations_that_it_stands_for(rows, units, order, scale):
    rng = np.random.default_rng(units)
    x, y = (rng.standard_normal((2, 3, rows, units)) * scale).astype(np.float32)
    state = rng.standard_normal((rows, units)).astype(np.float32)
    feeds = {"x": np.concatenate(x, -1), "y": np.concatenate(y, -1), "s": state}
    (wanted,) = RUNTIMES[GRU_CELL].run(None, feeds)
    x, y = (np.concatenate([part[order.index(i)] for i in range(3)], -1) for part in (x, y))
    for (got,) in results(GRU_CELL, [x, y, state], 1, order=order):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-6)


SIZES = {
    "rows": st.integers(1, 5),
    "units": st.integers(1, 70),
    "scale": st.sampled_from([0.1, 3.0, 1e4]),
    "has_x": st.booleans(),
}


def parts_at(rng, parts, places, count):
    """A tensor of ``count`` parts, of which these are at ``places`` and the others random."""
    filled = list(rng.standard_normal((count, *parts[0].shape)).astype(np.float32))
    for part, place in zip(parts, places, strict=True):
        filled[place] = part
    return np.concatenate(filled, -1)


@given(
    of_h=st.sampled_from(list(permutations(range(3), 2))),
    of_x=st.sampled_from(list(permutations(range(4), 2))),
    **SIZES,
)
def test_gru_gates_equal_the_operations_that_they_stand_for(rows, units, scale, has_x, of_h, of_x):
    rng = np.random.default_rng(units)
    hz, hr, xz, xr = (rng.standard_normal((4, rows, units)) * scale).astype(np.float32)
    state = rng.standard_normal((rows, units)).astype(np.float32)
    if not has_x:
        xz, xr = np.zeros_like(hz), np.zeros_like(hr)
    feeds = {"hz": hz, "hr": hr, "xz": xz, "xr": xr, "s": state}
    wanted = RUNTIMES[GRU_GATES].run(None, feeds)
    inputs = [parts_at(rng, (hz, hr), of_h, 3), state]
    order = of_h
    if has_x:
        inputs.append(parts_at(rng, (xz, xr), of_x, 4))
        order += of_x
    for got in results(GRU_GATES, inputs, 2, order=order):
        for y, want in zip(got, wanted, strict=True):
            np.testing.assert_allclose(y, want, rtol=1e-5, atol=2e-6)


@given(place=st.integers(0, 2), **SIZES)
def test_gru_state_equals_the_operations_that_it_stands_for(rows, units, scale, has_x, place):
    rng = np.random.default_rng(units)
    product, x = (rng.standard_normal((2, rows, units)) * scale).astype(np.float32)
    update, state = rng.standard_normal((2, rows, units)).astype(np.float32)
    x = x if has_x else np.zeros_like(x)
    feeds = {"p": product, "x": x, "z": update, "s": state}
    (wanted,) = RUNTIMES[GRU_STATE].run(None, feeds)
    inputs = [product, update, state] + [parts_at(rng, (x,), (place,), 3)] * has_x
    for (got,) in results(GRU_STATE, inputs, 1, order=(place if has_x else 0,)):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("text", [LSTM, GRU], ids=["lstm", "gru"])
def test_cell_in_a_model_of_open_dims_equals_onnxruntime(text):
    outer = (
        text.replace("rows", "b")
        .replace("n4", "20")
        .replace("n3", "15")
        .replace("[b, n]", "[b, 5]")
    )
    outer = outer.replace("float[1] bias)", "float[1] unused)").replace(
        "{\n    p0", "<float bias = {1}> {\n    p0"
    )
    model, rng = model_from_text(outer), np.random.default_rng(1)
    session = ps.compile(model)
    for rows in (1, 3):
        dims = [[rows if dim == "b" else dim for dim in value.shape] for value in session.inputs]
        feeds = {
            value.name: rng.standard_normal(shape).astype(np.float32)
            for value, shape in zip(session.inputs, dims, strict=True)
        }
        wanted = session_of(outer).run(None, feeds)
        got = list(session.run(feeds).values())
        for y, want in zip(got, wanted, strict=True):
            np.testing.assert_allclose(y, want, rtol=1e-5, atol=2e-6)
    cells = [
        step for step in session.inspect.executor.table.walk() if step.node.op.name.endswith("Cell")
    ]
    assert len(cells) == 1


ORDERS = {
    LSTM_CELL: ([(2, 12), (2, 3)], {"order": (0, 1, 2, 3), "forget_bias": 0.0}),
    GRU_CELL: ([(2, 9), (2, 9), (2, 3)], {"order": (0, 1, 2)}),
    GRU_GATES: ([(2, 6), (2, 3), (2, 9)], {"order": (0, 1, 1, 2)}),
    GRU_STATE: ([(2, 3), (2, 3), (2, 3), (2, 9)], {"order": (2,)}),
}


@pytest.mark.parametrize("op", ORDERS, ids=[op.name for op in ORDERS])
def test_parts_that_are_not_in_their_tensor_are_refused(op):
    def infer(shapes, **attrs):
        types = [TensorType(np.dtype("float32"), shape) for shape in shapes]
        return op.infer(types, {**given_attrs, **attrs}, [None] * len(types))

    shapes, given_attrs = ORDERS[op]
    assert infer(shapes)[0].shape == (2, 3)
    order = given_attrs["order"]
    for wrong in ((*order[:-1], 4), (-1, *order[1:]), (0.5, *order[1:]), order[:-1], (*order, 0)):
        with pytest.raises(ShapeError):
            infer(shapes, order=wrong)
    for i, shape in enumerate(shapes):
        for other in ((1, shape[1]), (2, 2) if op in (LSTM_CELL, GRU_CELL) else (3, shape[1])):
            with pytest.raises(ShapeError):
                infer([*shapes[:i], other, *shapes[i + 1 :]])
