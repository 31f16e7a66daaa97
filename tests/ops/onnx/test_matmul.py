"""MatMul, Gemm, FusedMatMul and Det."""

import ml_dtypes
import numpy as np
import pytest

from penstock.core.types import FLOAT32, ShapeError, TensorType
from penstock.ops import find
from tests.ops.harness import check_node, node_model, run_ort
from tests.support.onnx_text import compile_text

rng = np.random.default_rng(0)


def draw(*shape, dtype=np.float32):
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 9, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


SHAPES = [
    ((3, 4), (4, 5)),
    ((1, 4), (4, 1)),
    ((4,), (4,)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 3, 4), (1, 4, 5)),
    ((6, 2, 3, 4), (1, 1, 4, 5)),
    ((6, 1, 3, 4), (2, 4, 5)),
    ((3, 4), (6, 2, 4, 5)),
    ((0, 4), (4, 5)),
    ((3, 0), (0, 5)),
    ((2, 3, 0), (0, 5)),
    ((2, 0, 4), (4, 5)),
    ((2, 3, 4), (4, 0)),
]


@pytest.mark.parametrize("a, b", SHAPES)
def test_matmul_matches_the_reference(a, b):
    check_node("MatMul", [draw(*a), draw(*b)])


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("a, b", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((4,), (4,))])
def test_matmul_of_every_dtype_matches_the_definition(a, b, dtype):
    x, y = draw(*a, dtype=dtype), draw(*b, dtype=dtype)
    wide = np.float64 if np.dtype(dtype).kind not in "iu" else np.int64
    want = np.matmul(x.astype(wide), y.astype(wide)).astype(dtype)
    check_node("MatMul", [x, y], expected=[want], rtol=1e-2, atol=1e-2)


def test_matmul_takes_strided_inputs():
    a = draw(5, 4, 3).transpose(2, 1, 0)
    b = draw(7, 10)[::2].T[1:6]
    kernel = find("MatMul").compile(*_node("MatMul", a, b))
    out = np.empty((3, 4, 4), np.float32)
    kernel.into(a, b, out)
    np.testing.assert_allclose(out, np.matmul(a, b), rtol=1e-5, atol=1e-6)


def _node(op, *inputs):
    from penstock.core.types import type_of
    from penstock.frontends.onnx.importer import load_onnx

    (node,) = load_onnx(node_model(op, inputs)).graph.nodes
    return node, [type_of(x) for x in inputs]


@pytest.mark.parametrize("a, b", [((3, 4), (3, 4)), ((2, 3, 4), (3, 4, 5)), ((4,), (3,))])
def test_matmul_with_bad_inputs_is_refused(a, b):
    with pytest.raises(ShapeError):
        check_node("MatMul", [draw(*a), draw(*b)], expected=[])
    kernel = find("MatMul").compile(_node("MatMul", draw(*a), draw(*a))[0], [TensorType()] * 2)
    with pytest.raises(ShapeError):
        kernel(draw(*a), draw(*b))


def test_matmul_of_scalars_is_refused():
    with pytest.raises(ShapeError, match="scalar"):
        check_node("MatMul", [draw(), draw(3)], expected=[])


def test_infer_matmul_keeps_names():
    infer = find("MatMul").infer
    a = TensorType(FLOAT32, ("batch", "length", 64))
    assert infer([a, TensorType(FLOAT32, (64, 10))], {}, [None, None]) == (
        TensorType(FLOAT32, ("batch", "length", 10)),
    )
    b = TensorType(FLOAT32, ("batch", 64, "n"))
    assert infer([a, b], {}, [None, None])[0].shape == ("batch", "length", "n")
    assert infer([a, TensorType()], {}, [None, None]) == (TensorType(FLOAT32, None),)
    with pytest.raises(ShapeError, match="64 and 63"):
        infer([a, TensorType(FLOAT32, (63, 10))], {}, [None, None])


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("c", [None, (), (1,), (5,), (3, 1), (1, 5), (3, 5)])
@pytest.mark.parametrize("alpha, beta", [(1.0, 1.0), (0.5, 2.0), (1.0, 0.0)])
def test_gemm_matches_the_reference(trans_a, trans_b, c, alpha, beta):
    a, b = draw(*((4, 3) if trans_a else (3, 4))), draw(*((5, 4) if trans_b else (4, 5)))
    inputs = [a, b] if c is None else [a, b, draw(*c)]
    attrs = {"transA": trans_a, "transB": trans_b, "alpha": alpha, "beta": beta}
    check_node("Gemm", inputs, attrs)
    check_node("Gemm", inputs, attrs, constants=range(1, len(inputs)))


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("rows", [1, 3])
def test_gemm_with_one_column_seen_many_times(rows, transposed):
    shape = (7, 4) if transposed else (4, 7)
    b = np.broadcast_to(draw(*(1 if size == 7 else size for size in shape)), shape)
    (y,) = check_node("Gemm", [draw(rows, 4), b], {"transB": transposed}, constants=[1])
    assert (y == y[:, :1]).all()


def test_gemm_integers_matches_the_reference():
    a, b, c = (draw(*s, dtype=np.int32) for s in ((3, 4), (4, 5), (5,)))
    check_node("Gemm", [a, b, c], expected=[a @ b + c])
    check_node("Gemm", [a, b, c], {"alpha": 2.0, "beta": 3.0}, expected=[2 * (a @ b) + 3 * c])
    half = (0.5 * (a @ b) + 1.5 * c).astype(np.int32)
    check_node("Gemm", [a, b, c], {"alpha": 0.5, "beta": 1.5}, expected=[half])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_gemm_narrow_matches_the_reference(dtype):
    a, b, c = (draw(*s, dtype=dtype) for s in ((3, 40), (40, 5), (5,)))
    wide = 0.5 * (a.astype(float) @ b.astype(float)) + 2 * c.astype(float)
    attrs = {"alpha": 0.5, "beta": 2.0}
    for constants in ((), (1, 2)):
        check_node("Gemm", [a, b, c], attrs, expected=[wide.astype(dtype)], rtol=0.01,
                   constants=constants)  # fmt: skip


@pytest.mark.parametrize("shapes", [((3, 4), (5, 6)), ((3, 4, 1), (4, 5)), ((3, 4), (4, 5), (4,))])
def test_gemm_with_bad_inputs_is_refused(shapes):
    with pytest.raises(ShapeError):
        check_node("Gemm", [draw(*s) for s in shapes], expected=[])


@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 3, 3), (1, 1), (0, 3, 3), (0, 0), (2, 0, 0)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_det_matches_the_reference(shape, dtype):
    check_node("Det", [draw(*shape, dtype=dtype)])


def test_det_narrow_and_refused():
    x = np.array([[1, 2], [3, 4]], np.float16)
    check_node("Det", [x], expected=[np.array(-2, np.float16)], atol=1e-2)
    with pytest.raises(ShapeError, match="square"):
        check_node("Det", [draw(2, 3)], expected=[])


def test_harness_peer_agrees_with_numpy():
    a, b = draw(2, 3), draw(3, 4)
    (y,) = run_ort(node_model("MatMul", [a, b], opset=21), [a, b])
    np.testing.assert_allclose(y, a @ b, rtol=1e-5)


@pytest.mark.parametrize("dims", [(1, 2), (2, 2), (3, 2, 2)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "other"), [("int64", np.longlong), ("int64", np.int64), ("uint64", np.ulonglong)]
)
def test_matmul_takes_integers_under_any_of_their_names_in_c(dims, dtype, other):
    """``np.longlong`` equals ``np.int64``, but functions of NumPy tell them apart."""
    shape = ", ".join(map(str, dims))
    text = f"""g ({dtype}[{shape}] x) => ({dtype}[{shape}] y) <{dtype}[2, 2] w = {{1, 2, 3, 4}}> {{
        m = MatMul(x, w) y = Add(m, m) }}"""
    x = np.arange(np.prod(dims)).reshape(dims).astype(other)
    session = compile_text(text, backends=["numpy"], executor="linear")
    np.testing.assert_array_equal(session(x), 2 * (x @ np.array([[1, 2], [3, 4]], other)))
