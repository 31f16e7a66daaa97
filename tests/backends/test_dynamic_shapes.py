"""Kernels of nodes whose shapes are known only during a run."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar
from weakref import ref

import numpy as np
import pytest
from onnx import numpy_helper

import penstock as ps
from penstock.backends import dynamic_shapes
from penstock.backends.dynamic_shapes import KernelCache
from penstock.backends.native.backend import NativeBackend
from penstock.backends.numpy import NumpyBackend
from penstock.backends.specializing import SpecializingBackend
from penstock.core.types import FLOAT32, TensorType, Type
from penstock.host.native import library
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ops import find
from penstock.ops.common.constant_cache import Reordered
from penstock.ops.internal.fused import parts
from penstock.ops.work_estimate import HOST_RATES, RateTable, Workload
from tests.support.onnx_text import compile_text, model_from_text

pytestmark = pytest.mark.skipif(library() is None, reason="there are no compiled kernels")


class Specialized(SpecializingBackend):
    """Has kernels of products of known shapes, NumPy's, which it takes for ten times as fast."""

    name = "specialized"
    making_s, unbound_s = 0.6e-3, 3e-6
    rates: ClassVar[RateTable] = {"": HOST_RATES[""]._replace(bytes_per_s=50e9, flops_per_s=200e9)}

    def work(self, node: Node) -> Workload | None:
        return super().work(node) if node.op.name == "MatMul" else None

    def supports(self, node: Node) -> bool:
        return node.op.name == "MatMul"

    def static_kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        known = all(isinstance(t, TensorType) and t.static for t in types)
        return node.op.compile(node, types) if known and node.op.name == "MatMul" else None


rng = np.random.default_rng(8)

#  the rows of x whose sum is positive
SELECT = """
    sum = ReduceSum <keepdims = 0> (x, last)
    zero = Constant <value = float {0}> ()
    positive = Greater(sum, zero)
    k = Compress <axis = 0> (x, positive)
"""


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def selected(body: str, **weights: np.ndarray):
    """A model of ``body``, which computes y from k, the rows of x (64 elements) that are chosen."""
    model = model_from_text(
        f"g (float[N, 64] x) => (y) <int64[1] last = {{-1}}> {{ {SELECT} {body} }}"
    )
    model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    return model


def backend_of_operations(session: ps.Session) -> dict[str, str]:
    steps = session.inspect.plan.walk()
    return {" ".join(p.op.name for p in parts(step.node)): step.backend for step in steps}


NETWORK = """
    m = MatMul(k, w)
    sized = Constant <value_ints = [-1, 1, 8, 12]> ()
    image = Reshape(m, sized)
    c = Conv <pads = [1, 1, 1, 1]> (image, filter)
    e = Exp(c)
    one = Constant <value = float {1}> ()
    f = Add(e, one)
    g = Log(f)
    axes = Constant <value_ints = [3]> ()
    r = ReduceMax <keepdims = 0> (g, axes)
    y = Softmax <axis = -1> (r)
"""
WEIGHTS = {"w": draw(64, 96) / 8, "filter": draw(4, 1, 3, 3) / 3}


@pytest.mark.costly
@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "auto"])
def test_nodes_behind_a_data_dependent_one_get_compiled_kernels(executor):
    model = selected(NETWORK, **WEIGHTS)
    session = ps.compile(model, executor=executor)
    reference = ps.compile(model, executor="interpret")
    for rows in (200, 30, 200, 1):
        x = draw(rows, 64)
        expected = reference.run({"x": x})["y"]
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-5)
        backends = backend_of_operations(session)
        assert "numpy" not in (backends["MatMul"], backends["Conv"], backends["Softmax"])
        assert backends["Exp Add Log"] == backends["ReduceMax"] == "native"
    empty = session.run({"x": -np.ones((3, 64), np.float32)})["y"]
    assert empty.shape == (0, 4, 8)


def test_values_of_unknown_rank_get_compiled_kernels():
    model = model_from_text("""
        g (bool c, float[3, 40] x) => (y) {
            both = If (c) <
                then_branch = t () => (a) { axes = Constant <value_ints = [1]> ()
                                            a = Unsqueeze(x, axes) },
                else_branch = e () => (b) { b = Neg(x) }>
            e = Exp(both)
            f = Neg(e)
            last = Constant <value_ints = [-1]> ()
            y = ReduceSum <keepdims = 0> (f, last)
        }""")
    session, reference = ps.compile(model), ps.compile(model, executor="interpret")
    for c in (True, False, True):
        feeds = {"c": np.array(c), "x": draw(3, 40)}
        y = session.run(feeds)["y"]
        assert y.shape == ((3, 1) if c else (3,))
        np.testing.assert_allclose(y, reference.run(feeds)["y"], rtol=1e-5)
    backends = backend_of_operations(session)
    assert backends["Exp Neg"] == backends["ReduceSum"] == "native"


def test_contents_that_decide_shapes_are_looked_at():
    #  the count largest columns of a batch of any size, as images of that size
    session = compile_text("""
        g (float[3, 40] x, int64[N] ones) => (float[3, K] y, float[1, 1, 3, M] z) {
            axes = Constant <value_ints = [0]> ()
            count = ReduceSum <keepdims = 1> (ones, axes)
            y, places = TopK <axis = 1> (x, count)
            shape = Constant <value_ints = [1, 1, 3, 40]> ()
            image = Reshape(x, shape)
            whole = Constant <value_ints = [1, 1, 3]> ()
            sizes = Concat <axis = 0> (whole, count)
            z = Resize <mode = "linear"> (image, , , sizes)
        }""")
    x = draw(3, 40)
    for count in (5, 11, 5):
        y, z = session.run({"x": x, "ones": np.ones(count, np.int64)}).values()
        np.testing.assert_array_equal(y, -np.sort(-x, axis=1)[:, :count])
        assert z.shape == (1, 1, 3, count)
    backends = backend_of_operations(session)
    assert backends["TopK"] == "native" and backends["Resize"] != "numpy"


def test_arithmetic_on_lists_of_integers_stays_on_numpy():
    session = compile_text("""
        g (int64[N] x) => (int64[M] y) {
            places = NonZero(x)
            axes = Constant <value_ints = [0]> ()
            list = Squeeze(places, axes)
            two = Constant <value_ints = [2]> ()
            y = Mul(list, two)
        }""")
    np.testing.assert_array_equal(session.run({"x": np.ones(5, np.int64)})["y"], [0, 2, 4, 6, 8])
    assert backend_of_operations(session)["Mul"] == "numpy"


def test_products_of_unknown_rows_get_one_thread_of_numpy_beside_those_of_kernels(monkeypatch):
    seen = []
    make = KernelCache._make
    monkeypatch.setattr(
        KernelCache, "_make", lambda *args: seen.append(NumpyBackend().threads) or make(*args)
    )
    session = ps.compile(selected("y = MatMul(k, w)", w=draw(64, 2000)), threads=2)
    NumpyBackend().set_threads(2)
    session.run({"x": np.ones((300, 64), np.float32)})
    assert (seen, NumpyBackend().threads) == ([1], 2)


# Caches.


@pytest.fixture
def at_once(monkeypatch):
    """Make kernels when their shapes are first met, whether that pays or not."""
    monkeypatch.setattr(dynamic_shapes, "_WORTH_ESTIMATING", 0)
    monkeypatch.setattr(Specialized, "making_s", 0)
    monkeypatch.setattr(NativeBackend, "making_s", 0)


def product() -> tuple[Node, list]:
    weight = Value("w", const=draw(32, 16))
    node = Node(find("MatMul"), [Value("x", TensorType(FLOAT32, (None, 32))), weight], [Value("y")])
    return node, [value.type for value in node.inputs]


@pytest.fixture
def made(monkeypatch) -> list:
    """The types of the first inputs of all kernels that are made."""
    static_kernel, types_ = Specialized.static_kernel, []

    def counted(self, node, types):
        types_.append(types[0])
        return static_kernel(self, node, types)

    monkeypatch.setattr(Specialized, "static_kernel", counted)
    return types_


def test_cache_keeps_a_bounded_number_of_kernels(monkeypatch, at_once, made):
    node, types = product()
    monkeypatch.setattr(dynamic_shapes, "_MOST_KERNELS", 4)
    kernel, w = Specialized().kernel(node, types), node.inputs[1].const
    for n in (*range(11, 50), 49, 48, 47, 46):
        x = draw(n * 16, 32)
        np.testing.assert_allclose(kernel(x, w), x @ w, rtol=1e-4, atol=1e-5)
    assert len(made) == 39
    kernel(draw(45 * 16, 32), w)
    assert len(made) == 40
    # What does not fit is said as NumPy would say it.
    with pytest.raises(Exception, match="33"):
        kernel(draw(5, 33), w)


def test_kernels_are_counted_once_many_were_added(monkeypatch):
    counted = []
    monkeypatch.setattr(KernelCache, "nbytes", lambda self: counted.append(self) or 0)
    node, types = product()
    backend = Specialized()
    kernel = backend.kernel(node, types)
    for _ in range(90):
        backend.caches.make_room(backend.most_bytes)
    assert kernel is not None and len(counted) == 2


def test_free_memory_is_given_back_once_kernels_took_much(monkeypatch):
    given = []
    monkeypatch.setattr(dynamic_shapes, "give_back_memory", lambda: given.append(True))
    backend = Specialized()
    for _ in range(400):
        backend.caches.make_room(backend.most_bytes)
    assert len(given) == 2


@pytest.mark.costly
def test_thousand_shapes_take_bounded_memory(at_once):
    session = ps.compile(
        selected("m = MatMul(k, w) y = Tanh(m)", w=WEIGHTS["w"]),
        backends=[Specialized(), "numpy"],
        limits=ps.Limits(max_plans_bytes=1 << 20),
    )
    session.run({"x": np.ones((1, 64), np.float32)})
    before = session.memory.plans
    most = 0
    for rows in range(2, 1002):
        session.run({"x": np.ones((1002, 64), np.float32) * (np.arange(1002) < rows)[:, None]})
        most = max(most, session.memory.plans)
    caches = [x for x in gc.get_objects() if issubclass(type(x), KernelCache)]
    assert before + (1 << 19) < most <= before + (1 << 20) + (1 << 18)
    assert all(1 <= len(cache.kernels) <= 128 for cache in caches if cache.kernels)


def test_dropped_plans_free_their_kernels(at_once):
    session = ps.compile(
        selected("m = MatMul(k, w) y = Tanh(m)", w=WEIGHTS["w"]), backends=[Specialized(), "numpy"]
    )
    session.run({"x": np.ones((70, 64), np.float32)})
    gc.disable()  # nothing waits for the collector
    try:
        nodes = [step.node for step in session.inspect.plan.walk()]

        def caches() -> int:
            kept = [x for x in gc.get_objects() if issubclass(type(x), KernelCache)]
            return sum(cache.node in nodes and len(cache.kernels) for cache in kept)

        assert caches() >= 1
        session.close()
        assert caches() == 0
    finally:
        gc.enable()


def test_threads_share_kernels_of_many_shapes(monkeypatch, at_once):
    monkeypatch.setattr(dynamic_shapes, "_MOST_KERNELS", 2)
    session = ps.compile(
        selected("m = MatMul(k, w) y = Tanh(m)", w=WEIGHTS["w"]), backends=[Specialized(), "numpy"]
    )
    feeds = [np.ones((rows, 64), np.float32) * 0.1 for rows in (1, 20, 300, 40, 5)]
    padded = [np.concatenate([x, np.zeros((300 - len(x), 64), np.float32)]) for x in feeds]
    expected = [np.tanh(x @ WEIGHTS["w"]) for x in feeds]

    def run(i: int) -> None:
        result = session.run({"x": padded[i % 5]})["y"]
        np.testing.assert_allclose(result, expected[i % 5], rtol=1e-4, atol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(200)))


LOOP = """
    most = Constant <value = float {100}> ()
    start = Constant <value = bool {1}> ()
    y = Loop <body = step (int64 i, bool go, float[M, 64] s)
        => (bool again, float[M, 64] t) {
            t = MatMul(s, w)
            a = Abs(t)
            largest = ReduceMax <keepdims = 0> (a)
            again = Less(largest, most)
        }> (, start, k)
"""


def test_bodies_of_loops_make_their_kernels_once(made):
    model = selected(LOOP, w=np.eye(64, dtype=np.float32) * 2)
    session = ps.compile(model, backends=[Specialized(), "numpy"])
    for _ in range(3):
        y = session.run({"x": np.ones((1000, 64), np.float32)})["y"]
        np.testing.assert_array_equal(y, np.full((1000, 64), 128, np.float32))
    assert backend_of_operations(session)["MatMul"] == "specialized"
    assert made == [TensorType(FLOAT32, (1000, 64))]


def test_kernels_are_made_once_they_pay(made):
    node, types = product()
    kernel, w = Specialized().kernel(node, types), node.inputs[1].const
    for rows in range(1, 600):
        kernel(draw(rows % 400, 32), w)
    assert not made
    for _ in range(1000):
        kernel(draw(300, 32), w)
    assert made == [TensorType(FLOAT32, (300, 32))]
    kernel(draw(40_000, 32), w)  # pays at once
    assert len(made) == 2


def test_copies_of_a_node_share_kernels_and_their_memory(made):
    node, types = product()
    backend, w = Specialized(), node.inputs[1].const
    kernels = [
        backend.kernel(one, types) for one in (node, node.derived(node.inputs, node.outputs))
    ]
    for kernel in kernels:
        kernel(draw(40_000, 32), w)
    assert len(made) == 1
    (cache,) = backend.caches._caches.values()
    assert cache.nbytes() == sum(kernel.shapes.cached_bytes() for kernel in kernels) > 0
    del cache, kernels, kernel
    assert not backend.caches._caches  # they go with the last plan


def test_results_without_elements_need_no_kernel(made):
    node, types = product()
    backend = Specialized()
    kernel, w = backend.kernel(node, types), node.inputs[1].const
    results = [kernel(draw(0, 32), w) for _ in range(3)]
    assert [(y.shape, y.dtype) for y in results] == [((0, 16), FLOAT32)] * 3
    (cache,) = backend.caches._caches.values()
    assert list(cache.kernels) == [(0, 32)] and cache.kernels[(0, 32)] is not cache._plain
    assert not made


def test_result_of_inputs_without_elements_is_computed_once_and_copied():
    x, axes = Value("x", TensorType(FLOAT32, (None, 4))), Value("axes", const=np.array([0]))
    node = Node(find("ReduceSum"), [x, axes], [Value("y", TensorType(FLOAT32, (1, 4)))])
    backend = NativeBackend()
    kernel = backend.kernel(node, [x.type, axes.type])
    results = [kernel(draw(0, 4), axes.const) for _ in range(2)]
    (cache,) = backend.caches._caches.values()
    assert cache.kernels[(0, 4)] is not cache._plain
    results[0][:] = 7  # the caller's own
    results.append(kernel(draw(0, 4), axes.const))
    for result in results[1:]:
        np.testing.assert_array_equal(result, np.zeros((1, 4)))
    np.testing.assert_array_equal(kernel(np.ones((3, 4), np.float32), axes.const), [[3] * 4])


def test_result_that_depends_on_another_input_is_not_kept():
    x, y = Value("x", TensorType(FLOAT32, (None,))), Value("y", TensorType(FLOAT32, (2,)))
    places = Value("places", TensorType(np.dtype("int64"), (None,)))
    node = Node(find("ScatterElements"), [y, places, x], [Value("z", y.type)])
    kernel = NativeBackend().kernel(node, [value.type for value in node.inputs])
    for number in (1, 2):
        got = kernel(np.full(2, number, np.float32), np.zeros(0, np.int64), draw(0))
        np.testing.assert_array_equal(got, [number] * 2)


def test_loops_in_python_are_replaced_at_once():
    backend = NativeBackend()
    boxes, scores = TensorType(FLOAT32, (1, None, 4)), TensorType(FLOAT32, (1, 1, None))
    most = Value("most", const=np.array([9], np.int64))
    values = [Value("boxes", boxes), Value("scores", scores), most]
    node = Node(find("NonMaxSuppression"), values, [Value("y")])
    kernel = backend.kernel(node, [value.type for value in node.inputs])
    (cache,) = backend.caches._caches.values()
    x = np.array([[[0, 0, 1, 1], [5, 5, 6, 6]]], np.float32)
    chosen = kernel(x, np.array([[[0.5, 0.7]]], np.float32), most.const)
    np.testing.assert_array_equal(chosen, [[0, 0, 1], [0, 0, 0]])
    assert [key[:2] for key in cache.kernels] == [((1, 2, 4), (1, 1, 2))]


def test_kernels_of_all_shapes_of_a_convolution_pack_its_weights_once(monkeypatch):
    from penstock.backends.native import convolution

    packed = []
    pack = convolution._packed
    monkeypatch.setattr(convolution, "_packed", lambda *args: packed.append(1) or pack(*args))
    w = Value("w", const=np.ones((3, 64, 5, 5), np.float32))
    x = Value("x", TensorType(np.dtype(np.float32), (1, 64, 9, None)))
    attrs = {"pads": [2, 2, 2, 2]}
    node = Node(find("Conv"), [x, w], [Value("y")], attrs)
    node.outputs[0].type = TensorType(np.dtype(np.float32), (1, 3, 9, None))
    kernel = NativeBackend().kernel(node, [x.type, w.type])
    for width in range(40, 80, 8):
        assert kernel.function(np.ones((1, 64, 9, width), np.float32), w.const).shape[3] == width
    assert len(packed) == 2  # once for the question whether there is a kernel, once for all widths


@pytest.fixture
def convolution():
    model = model_from_text(
        "g (float[1, 64, H, W] x) => (y) { y = Conv <pads = [1, 1, 1, 1]> (x, w) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(draw(64, 64, 3, 3), "w"))
    return model


def after_many_shapes(model) -> ps.Session:
    """A session whose plan has an open height and width, after runs on 16 sizes of images."""
    session = ps.compile(model)
    for size in range(20, 36):
        session.run({"x": draw(1, 64, size, size + 1)})
    (step,) = [s for s in session.inspect.plan.walk() if s.node.op.name == "Conv"]
    assert step.kernel is not None and step.kernel.shapes.cached_bytes is not None
    return session


def test_weights_stay_in_the_order_of_kernels(convolution, monkeypatch):
    given_back = []
    array = Reordered.array
    monkeypatch.setattr(Reordered, "array", lambda self: given_back.append(self) or array(self))
    session, plain = after_many_shapes(convolution), ps.compile(convolution, backends=["numpy"])
    for size in (3, 40):
        x = draw(1, 64, size, size)
        np.testing.assert_allclose(session(x), plain(x), rtol=1e-4, atol=1e-4)
    assert not given_back


def test_kernels_of_runs_hold_no_copy_of_their_node(convolution, monkeypatch):
    nodes, typed = [], dynamic_shapes._typed

    def recorded(*arguments):
        node = typed(*arguments)
        nodes.append(ref(node))
        return node

    monkeypatch.setattr(dynamic_shapes, "_typed", recorded)
    session = after_many_shapes(convolution)
    session(draw(1, 64, 50, 50))
    gc.collect()
    assert nodes and not any(node() for node in nodes)
