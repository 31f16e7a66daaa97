"""Constants are held in the layouts of primitives alone, and given back from there exactly."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

import penstock as ps
from penstock.backends.onednn.library import library
from penstock.ir.graph import Model
from tests.support.processes import end_of

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")

RNG = np.random.default_rng(0)


def net(
    op: str,
    x: list[Any],
    w: np.ndarray,
    outputs: tuple[str, ...] = ("y",),
    more: tuple[onnx.NodeProto, ...] = (),
    **attrs: Any,
) -> onnx.ModelProto:
    """One operation with weights w, and ``more`` nodes."""
    info, code = helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    nodes = [helper.make_node(op, ["x", "w"], ["y"], **attrs), *more]
    ends = [info("x", code, x)], [info(name, code, None) for name in outputs]
    graph = helper.make_graph(nodes, "net", *ends, [numpy_helper.from_array(w, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def loaded(proto: onnx.ModelProto) -> tuple[Model, Any]:
    """The model, and the value of its weights."""
    model = ps.load(proto)
    (value,) = {v for node in model.graph.nodes for v in node.inputs if v and v.name == "w"}
    return model, value


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


CASES: Mapping[str, tuple[str, list[Any], tuple[int, ...], dict[str, Any]]] = {
    "convolution": ("Conv", [1, 24, 9, 9], (40, 24, 3, 3), {}),
    "grouped convolution": ("Conv", [1, 64, 9, 9], (128, 32, 3, 3), {"group": 2}),
    "convolution along a line": ("Conv", [1, 48, 30], (96, 48, 5), {}),
    "transposed convolution": ("ConvTranspose", [1, 40, 9, 9], (40, 30, 3, 3), {}),
    "grouped transposed convolution": (
        "ConvTranspose",
        [1, 40, 9, 9],
        (40, 30, 3, 3),
        {"group": 2},
    ),
    "product": ("MatMul", [50, 70], (70, 130), {}),
    "flipped product": ("Gemm", [50, 70], (130, 70), {"transB": 1}),
}


BACKENDS = ["onednn", "numpy"]  # without the compiled kernels, which take small products


@pytest.mark.parametrize("case", CASES)
def test_weights_are_given_back_bit_by_bit(case: str) -> None:
    op, x, shape, attrs = CASES[case]
    bits = RNG.integers(0, 2**32, shape, np.uint32)  # NaN, infinities and denormal numbers too
    model, value = loaded(net(op, x, bits.view(np.float32), **attrs))
    session = ps.compile(model, threads=1, backends=BACKENDS)
    session.run({"x": np.zeros(x, np.float32)})
    if value.held is not None:
        assert case == "grouped transposed convolution"
        return
    assert session.memory.weights >= bits.nbytes
    assert value.held is None, "to ask for its size reads no weights"
    assert np.array_equal(value.const.view(np.uint32), bits)
    assert value.const.shape == shape
    assert not value.const.flags.writeable
    assert value.const is value.const


@pytest.mark.parametrize("case", CASES)
def test_plans_for_more_shapes_read_the_same_weights(case: str) -> None:
    op, x, shape, attrs = CASES[case]
    w = normal(*shape)
    proto = net(op, ["N", *x[1:]], w, **attrs)
    model, value = loaded(proto)
    session, reference = ps.compile(model, backends=BACKENDS), ps.compile(proto, backends=["numpy"])
    holders = {}
    for n in (1, 2, 5, 1, 6, 7, 8, 9, 10, 11):
        feeds = {"x": normal(n, *x[1:])}
        out, expected = session.run(feeds)["y"], reference.run(feeds)["y"]
        np.testing.assert_allclose(out, expected, atol=1e-4 * np.abs(expected).max())
        if n == 2:
            session.trim()
        if value.held is None:
            resident_in = value._rematerialize.__self__
            holders[id(resident_in)] = resident_in
    if case != "grouped transposed convolution":
        (resident_in,) = holders.values()
        assert len(resident_in._copies) <= 2, "a copy for each layout, not for each plan"


def test_weights_that_another_plan_has_read_are_let_go_by_trim_and_after_many_plans() -> None:
    model, value = loaded(net("MatMul", ["N", 70], normal(70, 130)))
    session = ps.compile(model, backends=BACKENDS)
    held = []
    for n in range(1, 10):
        session.run({"x": normal(n, 70)})
        held.append(value.held is not None)
    assert held == [False, *[True] * 6, False, True]
    session.trim()
    assert value.held is None


def two_products(n: int = 256) -> tuple[Model, Any, weakref.ref[Any], np.ndarray]:
    """The model, the value of its weights, their array in the order of the file, and the same."""
    graph = f"""g (float[{n}, {n}] x) => (float[{n}, {n}] y) {{
        a = MatMul(x, w) b = Neg(x) c = MatMul(b, w) d = Sin(a) e = Cos(c) y = Mul(d, e) }}"""
    proto = parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]>\n{graph}')
    weights = normal(n, n)
    proto.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    model, value = loaded(proto)
    return model, value, weakref.ref(value.held), weights


@pytest.mark.parametrize("backends", [BACKENDS, ["onednn", "native", "numpy"]])
@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "frames", "streams"])
def test_weights_are_held_once_by_each_executor(executor: Any, backends: list[str]) -> None:
    model, value, file_order, weights = two_products()
    session, x = (
        ps.compile(model, executor=executor, threads=2, backends=backends),
        normal(256, 256),
    )
    expected = np.sin(x @ weights) * np.cos(-x @ weights)
    for _ in range(3):
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, atol=1e-3)
        assert value.held is None
        assert file_order() is None, "another object holds the weights in the order of the file"
    assert session.memory.weights == weights.nbytes
    trace = ps.Trace()
    np.testing.assert_allclose(session.run({"x": x}, trace=trace)["y"], expected, atol=1e-3)
    np.testing.assert_array_equal(session.run({}, ["w"])["w"], weights)


def test_results_that_count_against_a_budget_are_bounded_by_the_sizes_of_weights() -> None:
    model, _, _, weights = two_products()
    most = 4 * weights.nbytes  # not all results at once
    options: dict[str, Any] = {"executor": "dataflow", "backends": BACKENDS}
    session = ps.compile(model, limits=ps.Limits(max_bytes=most), **options)
    x = normal(256, 256)
    expected = np.sin(x @ weights) * np.cos(-x @ weights)
    np.testing.assert_allclose(session.run({"x": x})["y"], expected, atol=1e-3)
    assert "None)" not in session.inspect.executor.source
    unlimited = ps.compile(model, **options)
    unlimited.run({"x": x})
    assert "None)" in unlimited.inspect.executor.source


def test_weights_are_held_once_while_runs_show_how_they_are_best_run() -> None:
    """With two threads runs are timed, observed on one thread and run as tasks, for a while."""
    n = 248  # the costs of such nodes are known from no other test
    model, value, file_order, weights = two_products(n)
    session, x = ps.compile(model, threads=2, backends=BACKENDS), normal(n, n)
    expected = np.sin(x @ weights) * np.cos(-x @ weights)
    runs_sampled = 0
    for _ in range(60):
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, atol=1e-3)
        assert value.held is None
        assert file_order() is None, "another object holds the weights in the order of the file"
        runs_sampled += getattr(session.inspect.executor, "sampler", None) is not None
    assert runs_sampled > 5  # the first that is observed is the fifth


def test_weights_that_an_observer_has_seen_are_let_go_with_the_observed_plan() -> None:
    model, value = loaded(net("MatMul", [50, 70], normal(70, 130)))
    session = ps.compile(model, threads=1, backends=BACKENDS)
    session.run({"x": normal(50, 70)})
    observed = session.inspect.executor.observed()
    assert value.held is None
    seen = weakref.ref(value.peek)
    assert seen() is not None, "the observed plan holds them"
    del observed
    assert seen() is None
    assert value.held is None


def test_weights_that_numpy_reads_as_well_are_held() -> None:
    w = normal(70, 130)
    more = (helper.make_node("Cos", ["w"], ["c"]), helper.make_node("Neg", ["w"], ["z"]))
    model, value = loaded(net("MatMul", [50, 70], w, ("y", "w", "c"), more))
    session = ps.compile(model, backends=BACKENDS)
    for _ in range(2):
        out = session.run({"x": np.zeros((50, 70), np.float32)})
        assert np.array_equal(out["w"], w)
    assert value.held is not None


def test_other_fetches_and_backends_read_weights_that_were_let_go() -> None:
    w = normal(70, 130)
    model, value = loaded(net("MatMul", ["N", 70], w))
    session, x = ps.compile(model, backends=BACKENDS), normal(50, 70)
    expected = session.run({"x": x})["y"]
    assert value.held is None
    assert np.array_equal(session.run({}, ["w"])["w"], w)
    for options in ({"backends": ["numpy"]}, {"executor": "dataflow"}, {"executor": "frames"}):
        out = ps.compile(model, **options).run({"x": x})["y"]
        np.testing.assert_allclose(out, expected, atol=1e-3)
    session.close()
    assert np.array_equal(value.const, w)


def test_observed_runs_and_other_numbers_of_threads_agree_after_weights_were_let_go() -> None:
    model = ps.load(net("MatMul", [50, 70], normal(70, 130)))
    session, feeds = ps.compile(model, backends=BACKENDS), {"x": normal(50, 70)}
    expected = session.run(feeds)["y"]
    trace = ps.Trace()
    np.testing.assert_allclose(session.run(feeds, trace=trace)["y"], expected, rtol=1e-4, atol=1e-4)
    futures = [session.submit(feeds) for _ in range(8)]
    for future in futures:
        np.testing.assert_allclose(future.result()["y"], expected, rtol=1e-4, atol=1e-4)
    session.profile(feeds, runs=1)
    np.testing.assert_allclose(session.run(feeds)["y"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {}])
def test_rounded_and_scaled_weights_are_never_given_back(options: dict[str, Any]) -> None:
    w = normal(512, 512)
    attrs = {} if options else {"alpha": 0.3}
    model, value = loaded(net("MatMul" if options else "Gemm", [512, 512], w, **attrs))
    ps.compile(model, **options).run({"x": normal(512, 512)})
    assert np.array_equal(value.const, w)


RESIDENT = """
import numpy as np
import penstock as ps
from tests.backends.onednn.test_weights import net

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def measured(n):
    w = np.ones((n, 8, 1024), np.float32).reshape(n * 8, 1024)
    proto = net("MatMul", [8, n * 8], w)
    del w
    session = ps.compile(proto)
    del proto
    session.run({"x": np.ones((8, n * 8), np.float32)})
    return session

small = measured(8)  # the first primitive loads the library's code
before = resident()
session = measured(2048)
print(resident() - before)
"""


def test_weights_are_in_memory_once() -> None:
    assert int(end_of(RESIDENT)) < 1.2 * 2048 * 8 * 1024 * 4
