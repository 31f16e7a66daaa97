"""ChosenMatMul: products with gathered matrices become one node where that computes the same, which
copies no matrix, and equals ONNX Runtime's Gather and MatMul in NumPy and in each compiled kernel."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import penstock as ps
from penstock.backends.native.backend import NativeBackend
from penstock.core.types import ShapeError, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops.internal.chosen_product import CHOSEN_MATMUL
from penstock.passes.pipeline import optimize
from tests.support.native_kernels import LIBRARIES
from tests.support.onnx_text import graph_from_text, model_from_text

LEFT = "w = Gather (m, i) y = MatMul (w, x) }"
RIGHT = "w = Gather (m, i) y = MatMul (x, w) }"
TURNED = "g = Gather (m, i) w = Transpose <perm = [0, 2, 1]> (g) y = MatMul (x, w) }"


def text_of(x: str, m: str, i: str, y: str, body: str) -> str:
    index = f"int64[{i}]" if i else "int64"
    return f"t (float[{x}] x, float[{m}] m, {index} i) => (float[{y}] y) {{ {body}"


FORMS = {
    "columns": text_of("5, 40, 1", "4, 70, 40", "5", "5, 70, 1", LEFT),
    "rows": text_of("5, 1, 40", "4, 40, 70", "5", "5, 1, 70", RIGHT),
    "several rows": text_of("5, 3, 40", "4, 40, 64", "5", "5, 3, 64", RIGHT),
    "turned": text_of("5, 2, 40", "4, 70, 40", "5", "5, 2, 70", TURNED),
    "turned columns": text_of(
        *("5, 40, 1", "4, 40, 70", "5", "5, 70, 1"), TURNED.replace("(x, w)", "(w, x)")
    ),
    "tuples of one index": text_of(
        *("5, 40, 1", "4, 70, 40", "5, 1", "5, 70, 1"), LEFT.replace("Gather", "GatherND")
    ),
    "tokens of several experts": text_of("3, 1, 1, 40", "4, 40, 70", "3, 2", "3, 2, 1, 70", RIGHT),
    "columns of several experts": text_of("3, 1, 40, 1", "4, 70, 40", "3, 2", "3, 2, 70, 1", LEFT),
    "one row": text_of("1, 1, 40", "4, 40, 70", "5", "5, 1, 70", RIGHT),
    "experts of several tokens": text_of("1, 2, 1, 40", "4, 40, 70", "3, 2", "3, 2, 1, 70", RIGHT),
    "a single index": text_of("1, 40", "4, 40, 70", "", "1, 70", RIGHT),
    "open dims": text_of("n, 1, 40", "4, 40, 70", "n", "n, 1, 70", RIGHT),
    "a wide product": text_of("2, 1, 2000", "3, 2000, 33", "2", "2, 1, 33", RIGHT),
}
OTHERS = {
    "many rows": text_of("5, 30, 40", "4, 40, 70", "5", "5, 30, 70", RIGHT),
    "other batches": text_of("2, 5, 1, 40", "4, 40, 70", "5", "2, 5, 1, 70", RIGHT),
    "indices that add a dim": text_of("5, 1, 40", "4, 40, 70", "5, 1", "5, 5, 1, 70", RIGHT),
    "one matrix of several rows": text_of("5, 1, 40", "4, 40, 70", "1", "5, 1, 70", RIGHT),
    "another axis": text_of(
        *("4, 1, 40", "4, 40, 70", "70", "4, 1, 70"), RIGHT.replace("Gather", "Gather <axis = 2>")
    ),
    "columns of columns": text_of("5, 40, 2", "4, 70, 40", "5", "5, 70, 2", LEFT),
    "small matrices": text_of("5, 1, 4", "4, 4, 7", "5", "5, 1, 7", RIGHT),
}


def feeds_of(session: ps.Session, indices: list[int] | None = None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    feeds = {}
    for port in session.inputs:
        dims = [dim if isinstance(dim, int) else 5 for dim in port.type.shape]
        feeds[port.name] = (
            rng.integers(-3, 3, dims)
            if port.name == "i"
            else rng.standard_normal(dims).astype(np.float32)
        )
    if indices is not None:
        feeds["i"] = np.array(indices)
    return feeds


def check(text: str, wanted: int) -> None:
    graph = graph_from_text(text)
    optimize(graph)
    names = [node.op.name for node in graph.walk()]
    assert names.count("ChosenMatMul") == wanted
    assert sum(name.startswith("Gather") for name in names) == 1 - wanted
    model = model_from_text(text)
    runtime = onnxruntime.InferenceSession(model.SerializeToString())
    for threads in (1, 2):
        session = ps.compile(model, threads=threads)
        feeds = feeds_of(session)
        (want,) = runtime.run(None, feeds)
        (got,) = session.run(feeds).values()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", FORMS.values(), ids=FORMS)
def test_product_with_gathered_matrices_is_one_node(text):
    check(text, 1)


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_other_product_with_a_gather_stays_as_it_is(text):
    check(text, 0)


@pytest.mark.parametrize("backends", [None, ["numpy"]])
@pytest.mark.parametrize("index", [4, -5])
@pytest.mark.parametrize("form", ["columns", "rows"])
def test_index_out_of_range_is_an_error(backends, index, form):
    session = ps.compile(model_from_text(FORMS[form]), backends=backends)
    with pytest.raises(ps.PenstockError, match=f"index {index} is out of range"):
        session.run(feeds_of(session, [0, 1, index, 3, 0]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_kernels_equal_products_of_copies(dtype, transposed, columns):
    rng = np.random.default_rng(5)
    matrices = rng.standard_normal((4, 67, 67)).astype(dtype)
    x, indices = rng.standard_normal((3, 1, 67)).astype(dtype), rng.integers(-4, 4, (3, 2, 1))
    chosen = matrices[indices[..., 0]]
    wanted = x[:, None] @ (chosen.swapaxes(-1, -2) if transposed else chosen)
    attrs = {"transposed": transposed, "columns": columns}
    operand = x[:, None]
    if columns:
        operand, wanted = operand.swapaxes(-1, -2).copy(), wanted.swapaxes(-1, -2)
    arrays = [operand, matrices, indices]
    types = [TensorType(array.dtype, array.shape) for array in arrays]
    (inferred,) = CHOSEN_MATMUL.infer(types, attrs, [None] * 3)
    values = [Value(f"x{i}", type_) for i, type_ in enumerate(types)]
    node = Node(CHOSEN_MATMUL, values, [Value("y", inferred)], attrs)
    kernels = [CHOSEN_MATMUL.compile(node, types)]
    kernels += [NativeBackend(library).kernel(node, types) for library in LIBRARIES]
    for kernel in kernels:
        assert kernel is not None
        got = kernel.function(*arrays)
        assert got.shape == inferred.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_operands_whose_dims_do_not_fit_are_refused() -> None:
    def infer(x, matrices, indices, **attrs):
        dtypes = np.dtype("float32"), np.dtype("float32"), np.dtype("int64")
        pairs = zip(dtypes, (x, matrices, indices), strict=True)
        types = [TensorType(dtype, shape) for dtype, shape in pairs]
        given = {"transposed": False, "columns": False, **attrs}
        return CHOSEN_MATMUL.infer(types, given, [None] * 3)[0].shape

    assert infer((5, 1, 40), (4, 40, 70), (5,)) == (5, 1, 70)
    for x, matrices, indices in (
        ((5, 1, 41), (4, 40, 70), (5,)),
        ((5, 1, 40), (40, 70), (5,)),
        ((5, 1, 40), (4, 40, 70), (5, 2)),
        ((4, 1, 40), (4, 40, 70), (5,)),
        ((40,), (4, 40, 70), (5,)),
    ):
        with pytest.raises(ShapeError):
            infer(x, matrices, indices)
    with pytest.raises(ShapeError, match="x"):
        infer((5, 1, 40), (4, 40, 70), (5,), transposed=True)
    with pytest.raises(ShapeError, match="x"):
        infer((5, 2, 40), (4, 40, 70), (5,), columns=True)
