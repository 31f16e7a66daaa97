"""The internal Attention, against the operations that it stands for on ONNX Runtime; and its compiled kernel."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.native.attention import attention_over_any_keys
from penstock.core.types import ShapeError, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.attention import ATTENTION
from tests.support.native_kernels import LIBRARIES
from tests.support.onnx_text import model_from_text

SPELLED = """g (float[b, h, n, d] q, float[b, h, t, d] k, float[b, h, t, e] v, float[b1, h1, n1, t] bias,
    float[1] scale) => (float[b, h, n, e] y) {
    t = Transpose <perm = [0, 1, 3, 2]> (k)
    s = MatMul (q, t)
    m = Mul (s, scale)
    a = Add (m, bias)
    p = Softmax <axis = -1> (a)
    y = MatMul (p, v)
}"""
RUNTIME = onnxruntime.InferenceSession(model_from_text(SPELLED).SerializeToString())


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def node_of(inputs, scale=0.5, zeros=""):
    shapes = [None if x is None else list(x.shape) for x in inputs]
    for i, axis in enumerate((None, 2, 2, -1)):  # only the run knows the number of keys
        if axis is not None and shapes[i] is not None:
            shapes[i][axis] = None
    types = [
        None if shape is None else TensorType(np.dtype("float32"), tuple(shape)) for shape in shapes
    ]
    attrs = {"scale": scale, "zeros": zeros}
    values = [None if t is None else Value(f"x{i}", t) for i, t in enumerate(types)]
    (result,) = ATTENTION.infer(types, attrs, [None] * 4)
    return Node(ATTENTION, values, [Value("y", result)], attrs), types


def refused(*inputs):
    raise AssertionError("there is no kernel for these")


def results(inputs, **attrs):
    """Those of NumPy's kernel, and of each compiled one, which must not call it."""
    node, types = node_of(inputs, **attrs)
    with np.errstate(all="ignore"):
        yield ATTENTION.compile(node, types).function(*inputs)
    for library in LIBRARIES:
        function = attention_over_any_keys(library, node, types).function
        _, *others = function.args
        yield function.func(refused, *others, *inputs)


@given(
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 3),
    rows=st.integers(1, 5),
    keys=st.integers(1, 300),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    scale=st.floats(-2, 2),
    whole=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_attention_equals_the_operations_that_it_stands_for(
    batch, groups, repeats, rows, keys, sizes, scale, whole
):
    dims = batch, groups * repeats, rows
    q, k = draw(1, *dims, sizes[0]), draw(2, batch, groups, keys, sizes[0])
    v = draw(3, batch, groups, keys, sizes[1])
    bias = draw(4, *[dim if own else 1 for dim, own in zip(dims, whole, strict=True)], keys)
    feeds = {"q": q, "k": k.repeat(repeats, 1), "v": v.repeat(repeats, 1), "bias": bias}
    feeds["scale"] = np.array([scale], np.float32)
    (wanted,) = RUNTIME.run(None, feeds)
    for y in results([q, k, v, bias], scale=float(feeds["scale"][0])):
        np.testing.assert_allclose(y, wanted, rtol=2e-4, atol=2e-5)


def test_attention_reads_queries_and_keys_with_gaps():
    q, room = draw(1, 1, 3, 4, 8).transpose(0, 2, 1, 3), draw(2, 1, 2, 50, 8)
    k, v = room[:, :, :17], room[:, :, 20:37]
    dense = [np.ascontiguousarray(x) for x in (q, k, v)]
    wanted, *_ = results([*dense, None])
    for y in results([q, k, v, None]):
        np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("zeros", ["", "nan", "unseen"])
def test_row_that_sees_no_key_is_nan_or_zero(zeros):
    inputs = [draw(1, 1, 2, 2, 8), draw(2, 1, 2, 5, 8), draw(3, 1, 2, 5, 8)]
    bias = np.zeros((1, 1, 2, 5), np.float32)
    bias[0, 0, 1] = -np.inf
    node, types = node_of([*inputs, bias], zeros=zeros)
    with np.errstate(all="ignore"):
        kernels = [attention_over_any_keys(library, node, types) for library in LIBRARIES]
        kernels.append(ATTENTION.compile(node, types))
        every = [kernel.function(*inputs, bias) for kernel in kernels]
    for y in every:
        assert np.isfinite(y[:, :, 0]).all()
        np.testing.assert_array_equal(y[:, :, 1], 0 if zeros else np.nan)


@pytest.mark.skipif(not LIBRARIES, reason="there are no compiled kernels")
def test_arrays_that_do_not_fit_are_left_to_numpy():
    q, k, v = draw(1, 1, 4, 1, 8), draw(2, 1, 2, 5, 8), draw(3, 1, 2, 5, 8)
    node, types = node_of([q, k, v, None])
    for library in LIBRARIES:
        function = attention_over_any_keys(library, node, types).function
        _, *others = function.args
        for inputs in (
            [q, k[:, :, :0], v[:, :, :0], None],
            [q, k[:, :, :, ::2], v, None],
            [q, k, v[:, :, :4], None],
            [q[:, :3], k, v, None],
            [q, k, v, draw(4, 1, 1, 1, 4)],
            [q, k, v, draw(4, 1, 5)],
            [draw(1, 1, 4, 4097, 8), k, v, None],
            [draw(1, 1, 4, 1, 513), draw(1, 1, 2, 5, 513), v, None],
            [q[0], k, v, None],
        ):
            with pytest.raises(AssertionError, match="no kernel"):
                function.func(refused, *others, *inputs)


@pytest.mark.parametrize("lead", [(), (2,), (1, 3)])
def test_attention_of_several_biases_and_leading_dims_equals_its_formula(lead):
    q, k, v = draw(1, *lead, 4, 5, 8), draw(2, *lead, 2, 8, 7), draw(3, *lead, 2, 7, 6)
    biases = [draw(4, 4, 5, 7), draw(5, 1, 7)]
    types = [TensorType(x.dtype, x.shape) for x in (q, k, v, *biases)]
    values = [Value(f"x{i}", t) for i, t in enumerate(types)]
    attrs = {"scale": 0.5, "softcap": 1.5, "keys_last": 1}
    (result,) = ATTENTION.infer(types, attrs, [None] * 5)
    node = Node(ATTENTION, values, [Value("y", result)], attrs)
    scores = 1.5 * np.tanh(q @ k.repeat(2, -3) * 0.5 / 1.5) + biases[0] + biases[1]
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    y = ATTENTION.compile(node, types).function(q, k, v, *biases)
    assert result.shape == y.shape
    np.testing.assert_allclose(y, weights @ v.repeat(2, -3), rtol=1e-5, atol=1e-6)


def test_nan_and_unseen_rows_are_told_apart():
    inputs = [draw(1, 1, 2, 2, 8), draw(2, 1, 2, 5, 8), draw(3, 1, 2, 5, 8)]
    inputs[0][0, 0, 0] = np.nan
    bias = np.zeros((1, 1, 2, 5), np.float32)
    bias[0, 0, 1] = -np.inf
    for zeros, first in (("nan", 0), ("unseen", np.nan)):
        node, types = node_of([*inputs, bias], zeros=zeros)
        with np.errstate(all="ignore"):
            y = ATTENTION.compile(node, types).function(*inputs, bias)
        np.testing.assert_array_equal(y[0, 0, 0], first)
        np.testing.assert_array_equal(y[0, 0, 1], 0)
        assert np.isfinite(y[0, 1, 0]).all()


SHAPES = {"q": (2, 4, 6, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 3), "bias": (4, 1, 5)}
UNFIT = {
    "rank": {"k": (2, 5, 8)},
    "batch": {"v": (1, 2, 5, 3)},
    "groups": {"k": (2, 1, 5, 8)},
    "heads": {"k": (2, 3, 5, 8), "v": (2, 3, 5, 3)},
    "size": {"k": (2, 2, 5, 6)},
    "positions": {"v": (2, 2, 6, 3)},
    "bias": {"bias": (4, 2, 5)},
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_operands_whose_dims_do_not_fit_are_refused(unfit: str) -> None:
    def infer(shapes, **attrs):
        types = [TensorType(np.dtype("float32"), shape) for shape in shapes.values()]
        (type_,) = ATTENTION.infer(types, {"scale": 0.5, **attrs}, [None] * len(types))
        return type_.shape

    assert infer(SHAPES) == (2, 4, 6, 3)
    assert infer({**SHAPES, "k": (2, 2, 8, 5)}, keys_last=1) == (2, 4, 6, 3)
    with pytest.raises(ShapeError):
        infer({**SHAPES, **UNFIT[unfit]})
    with pytest.raises(ShapeError, match="keys"):
        infer(SHAPES, keys_last=1)
