"""Products and convolutions whose inputs a model rounds to bfloat16, beside ONNX Runtime, which runs
each node, and NumPy in float64."""

from __future__ import annotations

from collections import Counter

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import penstock as ps
from penstock.host.native import library
from penstock.passes.lowering.round_operands import RoundOperands
from penstock.passes.pipeline import optimize
from tests.support.graphs import interpret
from tests.support.native_kernels import needs_reproducible
from tests.support.onnx_text import model_from_text
from tests.support.passes import fusing_context

LOADED = library()
ROUNDS = LOADED is not None and bool(LOADED.multiplies_bfloat16)

ROUNDED = "x16 = Cast<to=16>(x) xr = Cast<to=1>(x16) w = Cast<to=1>(w16) "


def draw(*dims: int) -> np.ndarray:
    return np.random.default_rng(dims).normal(size=dims).astype(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def model_of(body: str, x: str, y: str, w: np.ndarray, b: np.ndarray | None = None) -> bytes:
    """A model with the weights ``w`` in bfloat16, as ``w16``, and others in float32, as ``b``."""
    stored = w.astype(ml_dtypes.bfloat16)
    declared = f"float[{','.join(map(str, (1,) if b is None else b.shape))}] b"
    dims = ",".join(map(str, w.shape))
    text = f"g (float[{x}] x, bfloat16[{dims}] w16, {declared}) => (float[{y}] y) {{ {body} }}"
    proto = model_from_text(text, opset=19)
    del proto.graph.input[1:]
    raw = stored.tobytes()
    proto.graph.initializer.append(
        helper.make_tensor("w16", TensorProto.BFLOAT16, w.shape, raw, raw=True)
    )
    if b is not None:
        proto.graph.initializer.append(numpy_helper.from_array(b, "b"))
    return proto.SerializeToString()


def their_answer(data: bytes, x: np.ndarray) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )


def kernels(session: ps.Session) -> Counter[tuple[str, str]]:
    """The steps of the plan: their operations, and the dtype that operands are rounded to."""
    steps = [step for step in session.inspect.plan.steps if step.node.op.name != "Reorder"]
    return Counter(
        (step.node.attrs.get("ops", step.node.op.name), step.kernel.operand_dtype) for step in steps
    )


def rounding(session: ps.Session) -> int:
    return sum(n for (_, dtype), n in kernels(session).items() if dtype == "bfloat16")


def casts(session: ps.Session) -> int:
    """Casts of steps that are not a product or convolution that rounds its operands itself."""
    return sum(
        n * ops.split().count("Cast") for (ops, dtype), n in kernels(session).items() if not dtype
    )


# Of Conv, Gemm and MatMul: the nodes behind the Casts, x, y, weights, bias, and the exact product.
PRODUCTS = {
    "Conv": (
        "c = Conv<pads=[1,1,1,1]>(xr, w, b) y = Relu(c)",
        *("1,32,9,7", "1,24,9,7", draw(24, 32, 3, 3), draw(24)),
    ),
    "Gemm": (
        "c = Gemm<transB=1>(xr, w, b) y = Relu(c)",
        *("13,64", "13,48", draw(48, 64), draw(48)),
    ),
    "MatMul": (
        "c = MatMul(xr, w) d = Add(c, b) y = Sigmoid(d)",
        *("2,7,64", "2,7,48", draw(64, 48) / 8, draw(48)),
    ),
    "MatMul of odd dims": (
        "c = MatMul(xr, w) d = Add(c, b) y = Relu(d)",
        *("3,1,33", "3,1,21", draw(33, 21), draw(21)),
    ),
}


def exact(name: str, x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The answer with rounded operands, and all else in float64."""
    a, m = rounded(x), rounded(w)
    if name == "Conv":
        padded = np.pad(a, ((0, 0), (0, 0), (1, 1), (1, 1)))
        seen = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
        product = np.einsum("ncijkl,fckl->nfij", seen, m) + b[:, None, None]
    else:
        product = a @ (m.T if name == "Gemm" else m) + b
    return 1 / (1 + np.exp(-product)) if name == "MatMul" else np.maximum(product, 0)


@pytest.mark.parametrize("name", PRODUCTS)
def test_rounded_product_has_the_answer_of_onnxruntime_and_of_exact_sums(name):
    body, dims, y, w, b = PRODUCTS[name]
    data, x = model_of(ROUNDED + body, dims, y, w, b), draw(*map(int, dims.split(",")))
    session = ps.compile(data)
    ours, (theirs,) = session(x), their_answer(data, x)
    wanted = exact(name, x, w, b)
    most = np.abs(wanted).max()
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5 * most)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * most)
    plain = "w = Cast<to=1>(w16) " + body.replace("xr", "x")
    full = ps.compile(model_of(plain, dims, y, w, b))(x)
    assert 0 < np.abs(ours - full).max() < 1e-2 * most


@pytest.mark.parametrize("name", PRODUCTS)
def test_rounded_product_is_one_step_without_casts_where_the_processor_has_bfloat16(name):
    body, dims, y, w, b = PRODUCTS[name]
    session = ps.compile(model_of(ROUNDED + body, dims, y, w, b))
    session(draw(*map(int, dims.split(","))))
    assert (casts(session), rounding(session)) == ((0, 1) if ROUNDS else (2, 0))
    if ROUNDS:
        ((ops, _),) = kernels(session)
        assert ops.startswith("Cast Cast") and ops.split()[-1] in ("Relu", "Sigmoid")


@pytest.mark.parametrize(
    "options",
    [{"precision": "strict"}, pytest.param({"reproducible": True}, marks=needs_reproducible)],
    ids=str,
)
@pytest.mark.parametrize("name", PRODUCTS)
def test_casts_stay_if_sums_are_to_be_those_of_other_processors(name, options):
    body, dims, y, w, b = PRODUCTS[name]
    data, x = model_of(ROUNDED + body, dims, y, w, b), draw(*map(int, dims.split(",")))
    session = ps.compile(data, **options)
    wanted = exact(name, x, w, b)
    np.testing.assert_allclose(session(x), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert (casts(session), rounding(session)) == (2, 0)


def test_other_readers_of_a_rounded_value_get_it_rounded():
    w = draw(16, 16)
    body = ROUNDED + "c = MatMul(xr, w) d = Neg(xr) e = Add(c, xr) y = Concat<axis=1>(d, e, xr)"
    data, x = model_of(body, "5,16", "5,48", w), draw(5, 16)
    session = ps.compile(data)
    ours = session(x)
    np.testing.assert_array_equal(ours[:, :16], -rounded(x))
    np.testing.assert_array_equal(ours[:, 32:], rounded(x))
    np.testing.assert_allclose(ours, their_answer(data, x)[0], atol=1e-5)
    assert rounding(session) == ROUNDS


@pytest.mark.parametrize("addend", ["x", "xr"])
@pytest.mark.parametrize("op", ["MatMul", "Conv"])
def test_sum_behind_a_product_adds_what_the_model_says(op, addend):
    w = draw(16, 16) if op == "MatMul" else draw(16, 16, 1, 1)
    dims = "7,16" if op == "MatMul" else "1,16,7,5"
    data = model_of(ROUNDED + f"c = {op}(xr, w) y = Add(c, {addend})", dims, dims, w / 1000)
    x = draw(*map(int, dims.split(",")))
    session = ps.compile(data)
    ours = session(x)
    m = rounded(w / 1000).reshape(16, 16)
    product = rounded(x) @ m if op == "MatMul" else np.einsum("fc,nchw->nfhw", m, rounded(x))
    np.testing.assert_allclose(ours, product + (x if addend == "x" else rounded(x)), atol=1e-6)
    assert rounding(session) == ROUNDS


def test_products_share_one_rounding_and_chains_end_before_it():
    w = draw(32, 32) / 6
    body = (
        ROUNDED + "a = MatMul(xr, w) b1 = Relu(a) c = MatMul(xr, w) d = Mul(b1, c) "
        "d16 = Cast<to=16>(d) dr = Cast<to=1>(d16) y = MatMul(dr, w)"
    )
    data, x = model_of(body, "9,32", "9,32", w), draw(9, 32)
    session = ps.compile(data)
    np.testing.assert_allclose(session(x), their_answer(data, x)[0], atol=1e-4)
    if ROUNDS:
        assert casts(session) == 0 and rounding(session) >= 2


def test_weights_that_bfloat16_does_not_hold_are_left():
    w = draw(32, 24)
    body = "x16 = Cast<to=16>(x) xr = Cast<to=1>(x16) c = MatMul(xr, b) y = Relu(c)"
    data, x = model_of(body, "9,32", "9,24", draw(1, 1), w), draw(9, 32)
    session = ps.compile(data)
    wanted = np.maximum(rounded(x) @ w.astype(np.float64), 0)
    np.testing.assert_allclose(session(x), wanted, atol=1e-5)
    assert (casts(session), rounding(session)) == (2, 0)


@pytest.mark.parametrize(
    ("x", "w", "attrs"), [("1,3,8,8", (8, 3, 3, 3), ""), ("1,8,8,8", (8, 1, 3, 3), "<group=8>")]
)
def test_convolutions_without_such_a_kernel_are_left(x, w, attrs):
    data = model_of(ROUNDED + f"y = Conv{attrs}(xr, w)", x, "1,8,6,6", draw(*w))
    session, image = ps.compile(data), draw(*map(int, x.split(",")))
    np.testing.assert_allclose(session(image), their_answer(data, image)[0], atol=1e-4)
    assert (casts(session), rounding(session)) == (2, 0)


def test_rows_of_unknown_number_are_rounded():
    w = draw(64, 48)
    some = "z = NonZero(b) i = Squeeze(z) some = Gather(x, i) "
    body = some + ROUNDED.replace("(x)", "(some)") + "y = MatMul(xr, w)"
    flags = (np.arange(40) % 3 == 0).astype(np.float32)
    data = model_of(body, "40,64", "n,48", w, flags)
    session, x = ps.compile(data), draw(40, 64)
    for _ in range(3):
        wanted = rounded(x[::3]) @ rounded(w)
        np.testing.assert_allclose(session(x), wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("accepts", [True, False])
def test_pass_asks_the_policy_and_keeps_what_is_computed(accepts):
    body, dims, y, w, b = PRODUCTS["Gemm"]
    data = model_of(ROUNDED + body, dims, y, w, b)
    graph, before = ps.load(data).graph, ps.load(data).graph
    for each in (graph, before):
        optimize(each)
    assert RoundOperands().run(graph, fusing_context(lambda node: accepts)) == accepts
    names = Counter(node.attrs.get("ops", node.op.name) for node in graph.walk())
    rest = {"Cast Cast Gemm": 1} if accepts else {"Cast": 2, "Gemm": 1}
    assert names == {**rest, "Relu": 1}
    x = draw(13, 64)
    for got, want in zip(interpret(graph, [x]), interpret(before, [x]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_saved_session_rounds_as_well(tmp_path):
    body, dims, y, w, b = PRODUCTS["MatMul"]
    session, x = ps.compile(model_of(ROUNDED + body, dims, y, w, b)), draw(2, 7, 64)
    ours = session(x)
    session.save(tmp_path / "a.penstock")
    again = ps.compile(tmp_path / "a.penstock")
    np.testing.assert_array_equal(again(x), ours)
    assert kernels(again) == kernels(session)
