"""Compiled dense layers against NumPy's kernels of their parts."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from onnx import numpy_helper

import penstock as ps
from penstock.backends import native
from penstock.backends.native import dense
from penstock.backends.native.kernel import site_of
from penstock.ir.graph import Node, Value
from penstock.ops.common.constant_cache import copies_of
from penstock.ops.internal.fused import fused, parts
from tests.support.native_kernels import (
    LIBRARIES,
    check,
    kernel_of,
    node_of,
    pytestmark,  # noqa: F401
    threads_of,
)
from tests.support.onnx_text import model_from_text

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
RNG = np.random.default_rng(7)

# Rows, inner and columns: of parts of panels and of rows of x, of several blocks.
SIZES = [
    (1, 1, 1),
    (4, 3, 8),
    (1, 16, 16),
    (1, 130, 200),
    (2, 17, 64),
    (5, 128, 128),
    (6, 129, 80),
    (7, 300, 70),
    (13, 64, 97),
    (31, 260, 112),
    (40, 515, 130),
    (49, 16, 33),
    (200, 20, 48),
    (500, 130, 65),
]


@pytest.fixture(autouse=True)
def same_numbers(monkeypatch):
    """Each test draws the same numbers, whatever runs before it."""
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(7))


def draw(*dims: int) -> np.ndarray:
    return RNG.normal(size=dims).astype(np.float32)


def chain(x: np.ndarray, w: np.ndarray, *others, op: str = "MatMul", **attrs):
    """A product with a constant matrix and what follows it, as one node, and its inputs. ``others``
    are operations, with their second operand and whether that is a constant, if they have one."""
    nodes = [node_of(op, [x, w], constants=[1], **attrs)]
    arrays = [x, w]
    y = np.empty(nodes[0].outputs[0].type.dims, np.float32)
    for name, *operand in others:
        second = operand[:1]
        node = node_of(name, [y, *second], constants=[1] if operand[1:] == [True] else [])
        node.inputs = (nodes[-1].outputs[0], *node.inputs[1:])
        nodes.append(node)
        arrays += second
    return (fused(nodes) if others else nodes[0]), arrays


def layer(rows: int, inner: int, columns: int, *others):
    return chain(draw(rows, inner), draw(inner, columns) / inner**0.5, *others)


def kernels_of(node: Node) -> set[str]:
    """The names of the compiled kernels."""
    found = [kernel_of(node, library) for library in LIBRARIES]
    return {kernel.binder.implementation.partition(":")[0] for kernel in found if kernel}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_product_of_any_sizes_equals_numpy(sizes):
    node, arrays = layer(*sizes)
    check(node, arrays, CLOSE)
    assert kernels_of(node) == {"dense"}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bias_and_matrix_are_added(sizes):
    rows, _, columns = sizes
    for others in (
        [("Add", draw(columns), True)],
        [("Add", draw(1, columns), True), ("Add", draw(rows, columns), False)],
        [("Add", draw(rows, columns), False)],
        [("Add", draw(1), True), ("Add", draw(rows, columns), True)],
    ):
        node, arrays = layer(*sizes, *others)
        check(node, arrays, CLOSE)
        assert kernels_of(node) == {"dense"}


@pytest.mark.parametrize(
    "sizes",
    [(3, 20, 24), (7, 300, 70), (200, 20, 600), (9, 16, 1100), (1, 33, 100), (1, 1100, 1100)],
    ids=str,
)
def test_what_follows_is_computed_in_place(sizes):
    rows, _, columns = sizes
    for others in (
        [("Gelu",)],
        [("Add", draw(columns), True), ("Relu",)],
        [("Add", draw(columns), True), ("Tanh",), ("Add", draw(rows, columns), False)],
        [("Mul", draw(columns), False), ("Add", draw(rows, 1), False), ("Sigmoid",)],
        [
            ("Mul", draw(rows, 1), False),
            ("Div", np.array([3], np.float32), False),
            ("Sub", draw(1, 1), True),
        ],
        [("Max", draw(1, columns), True), ("Mul", draw(rows, columns), False)],
    ):
        node, arrays = layer(*sizes, *others)
        check(node, arrays, CLOSE)
        assert kernels_of(node) == {"dense"}


@pytest.mark.parametrize("rows", [1, 2, 30])
@pytest.mark.parametrize("columns", [1, 16, 40, 64, 130])
def test_sums_are_bounded_and_nan_stays(rows, columns):
    for inner in (1, 2, 77, 513):
        x, w = draw(rows, inner), draw(inner, columns)
        x[:, 0] = np.nan if inner == 2 else x[:, 0]
        low, high = np.array([-0.5], np.float32), np.array([0.75], np.float32)
        for others in (
            [("Relu",)],
            [("Max", low, True), ("Min", high, True)],
            [
                ("Add", draw(columns), True),
                ("Add", draw(rows, columns), False),
                ("Min", high, True),
            ],
        ):
            node, arrays = chain(x, w, *others)
            check(node, arrays, CLOSE)
            assert kernels_of(node) == {"dense"}


def test_operands_broadcast_over_leading_dims():
    x, w = draw(2, 3, 5, 20), draw(20, 72)
    for dims in ((3, 1, 72), (2, 1, 1, 1), (2, 1, 5, 72), (5, 1), (2, 3, 5, 72), ()):
        node, arrays = chain(x, w, ("Mul", draw(*dims), False), ("Abs",))
        check(node, arrays, CLOSE)
        assert kernels_of(node) == {"dense"}


def test_input_itself_may_be_added_and_multiplied():
    x, w = draw(9, 48), draw(48, 48)
    for names in (["Add"], ["Mul"], ["Add", "Sub"]):
        node, _ = chain(x, w, *[(name, x, False) for name in names])
        first, *rest = node.attrs["region"].nodes
        for part in rest:
            part.inputs = (part.inputs[0], first.inputs[0])
        node = fused([first, *rest])
        assert len(node.inputs) == 2
        check(node, [x, w], CLOSE)
        assert kernels_of(node) == {"dense"}


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("third", [None, (40,), (1, 40), (1,), (), (9, 40)], ids=str)
def test_gemm_with_its_third_operand(transposed, third):
    x, w = draw(9, 70), draw(40, 70) if transposed else draw(70, 40)
    for beta, constant in ((1.0, True), (0.5, True), (1.0, False)):
        inputs = [x, w] if third is None else [x, w, draw(*third)]
        constants = [1, 2] if constant and third is not None else [1]
        node = node_of("Gemm", inputs, constants, transB=transposed, beta=beta)
        matrix = third == (9, 40)
        if third is None or (beta == 1 if matrix else constant):
            check(node, inputs, CLOSE)
            assert kernels_of(node) == {"dense"}
        else:
            assert "dense" not in kernels_of(node)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_numbers_are_those_of_numpy(special):
    x, w, b = draw(20, 40), draw(40, 70), draw(70)
    x[3, 5] = w[7, 69] = b[1] = special
    check(*chain(x, w, ("Add", b, True)), CLOSE)
    check(*chain(x, w, ("Add", b, True), ("Relu",)), CLOSE)


def test_wide_layers_are_close_to_sums_in_float64():
    node, (x, w) = layer(33, 4000, 50)
    wanted = x.astype(np.float64) @ w
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        assert kernel is not None
        assert np.abs(kernel.function(x, w) - wanted).max() < 3e-6


def test_items_are_enough_for_all_cores(monkeypatch):
    counts = {}
    for cores in (1, 2, 16):
        monkeypatch.setattr(native, "core_budget", lambda cores=cores: cores)
        for rows, columns in ((8, 768), (128, 768), (2000, 64)):
            node, _ = layer(rows, 32, columns)
            types = [value.type for value in node.inputs]
            site = site_of(LIBRARIES[0], node, types)
            counts[cores, rows] = dense.dense_call(site).items
    assert counts == {
        (1, 8): 12,
        (1, 128): 12,
        (1, 2000): 11,
        (2, 8): 12,
        (2, 128): 12,
        (2, 2000): 11,
        (16, 8): 12,
        (16, 128): 36,
        (16, 2000): 32,
    }


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(1, 700, 3000), (300, 128, 64), (49, 768, 768)], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(threads, sizes):
    node, arrays = layer(*sizes, ("Add", draw(sizes[2]), True), ("Gelu",))
    for library in LIBRARIES:
        kernel = kernel_of(node, library)
        assert kernel is not None
        alone = kernel.function(*arrays)
        with threads_of(library, threads):
            np.testing.assert_array_equal(kernel.function(*arrays), alone)


OTHERS = {
    "vector": (draw(40), draw(40, 40), "MatMul", {}),
    "float64": (np.ones((9, 40)), np.ones((40, 40)), "MatMul", {}),
    "several matrices": (draw(2, 9, 40), draw(2, 40, 40), "MatMul", {}),
    "long and narrow": (draw(2, 20000), draw(20000, 3), "MatMul", {}),
    "no columns": (draw(9, 40), draw(40, 0), "MatMul", {}),
    "no rows": (draw(0, 40), draw(40, 40), "MatMul", {}),
    "transposed": (draw(40, 9), draw(40, 40), "Gemm", {"transA": 1}),
    "factor": (draw(9, 40), draw(40, 40), "Gemm", {"alpha": 0.5}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_products_are_left_to_others(case):
    x, w, op, attrs = OTHERS[case]
    node = node_of(op, [x, w], constants=[1], **attrs)
    assert "dense" not in kernels_of(node)
    assert "dense" not in kernels_of(node_of(op, [x, w], **attrs))


def test_what_widens_a_result_is_left_to_others():
    node, _ = layer(1, 20, 24, ("Add", draw(7, 24), False))
    assert not kernels_of(node)


@pytest.mark.parametrize("transposed", [0, 1])
def test_plans_of_all_numbers_of_rows_hold_a_matrix_once(transposed):
    w = draw(130, 200) if transposed else draw(200, 130)
    values = ", ".join(map(str, w.reshape(-1)))
    model = ps.load(
        model_from_text(
            f"""g (float[N, 200] x) => (float[N, 130] y)
            <float{list(w.shape)} w = {{{values}}}>
            {{ y = Gemm <transB = {transposed}> (x, w) }}"""
        )
    )
    (value,) = [v for node in model.graph.nodes for v in node.inputs if v.const is not None]
    session = ps.compile(model, backends=["native", "numpy"])
    matrix = w.T if transposed else w
    for rows in (1, 16, 130, 700):
        x = draw(rows, 200)
        np.testing.assert_allclose(session.run({"x": x})["y"], x @ matrix, **CLOSE)
    session.trim()
    gc.collect()
    assert value.held is None
    back = value.const
    assert [array.size for array in copies_of([Value("back", const=back)])[0].values()] == [
        200 * 144
    ]
    np.testing.assert_array_equal(back, w)


def test_layers_of_encoders_run_as_one_step_each():
    model = model_from_text(
        """g (float[1, 16, 64] x) => (float[1, 16, 64] y) {
        p = MatMul(x, w) q = Add(p, b) r = Gelu(q) s = MatMul(r, v) t = Add(s, c) y = Add(t, x) }"""
    )
    for name, array in {
        "w": draw(64, 192),
        "b": draw(192),
        "v": draw(192, 64),
        "c": draw(64),
    }.items():
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    session = ps.compile(model, executor="linear")
    steps = [
        (step.backend, [part.op.name for part in parts(step.node)])
        for step in session.inspect.plan.steps
    ]
    assert steps == [("native", ["MatMul", "Add", "Gelu"]), ("native", ["MatMul", "Add", "Add"])]
