"""Kernels of runs that formulas make: for ever new shapes few are compiled, and answers stay equal."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.backends import dynamic_shapes
from penstock.backends.dynamic_shapes import KernelCache
from penstock.backends.native.backend import NativeBackend
from penstock.build import GraphBuilder
from penstock.core.types import FLOAT32, INT64, TensorType
from penstock.host.native import library
from penstock.ir.graph import Node, Value
from penstock.ops.registry import standard

pytestmark = pytest.mark.skipif(library() is None, reason="there are no compiled kernels")


def weights(rng, *dims):
    return (rng.standard_normal(dims) / 8).astype(np.float32)


def encoder() -> ps.Model:
    """A layer of an encoder with a bias of any length."""
    rng, b = np.random.default_rng(0), GraphBuilder()
    x = b.input("x", np.float32, ["batch", "length", 64])
    bias = b.input("bias", np.float32, ["batch", 1, 1, "length"])
    heads = []
    for _ in range(3):
        own = b.op("Add", b.op("MatMul", x, weights(rng, 64, 64)), weights(rng, 64))
        split = b.op("Reshape", own, np.array([0, 0, 4, 16]))
        heads.append(b.op("Transpose", split, perm=[0, 2, 1, 3]))
    q, k, v = heads
    scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = b.op("Softmax", b.op("Add", b.op("Mul", scores, np.float32(0.25)), bias))
    context = b.op("Transpose", b.op("MatMul", scores, v), perm=[0, 2, 1, 3])
    y = b.op("Add", x, b.op("Reshape", context, np.array([0, 0, 64])))
    y = b.op("LayerNormalization", y, weights(rng, 64), weights(rng, 64))
    b.output("y", b.op("Add", y, b.op("Tanh", b.op("MatMul", y, weights(rng, 64, 64)))))
    return b.model()


def network() -> ps.Model:
    """Convolutions of images, among them transposed ones, and pooling."""
    rng, b = np.random.default_rng(0), GraphBuilder()
    x = b.input("x", np.float32, [1, 16, "height", "width"])
    y = b.op("Relu", b.op("Conv", x, weights(rng, 32, 16, 3, 3), pads=[1] * 4, strides=[2, 2]))
    z = b.op("HardSwish", b.op("Conv", y, weights(rng, 32, 1, 5, 5), group=32, pads=[2] * 4))
    z = b.op("MaxPool", z, kernel_shape=[3, 3], pads=[1] * 4)
    z = b.op("Mul", z, b.op("Sigmoid", b.op("GlobalAveragePool", z)))
    z = b.op("ConvTranspose", b.op("Add", z, y), weights(rng, 32, 16, 2, 2), strides=[2, 2])
    b.output("y", b.op("Softmax", z, axis=1))
    return b.model()


def feeds_of(model: ps.Model, rng: np.random.Generator) -> dict[str, np.ndarray]:
    sizes = {"batch": int(rng.integers(1, 4)), "length": int(rng.integers(1, 90))}
    sizes |= {name: 2 * int(rng.integers(3, 40)) for name in ("height", "width")}
    feeds = {}
    for value in model.graph.inputs:
        assert isinstance(value.type, TensorType) and value.type.shape is not None
        dims = [sizes.get(dim, dim) for dim in value.type.shape]
        feeds[value.name] = rng.standard_normal(dims).astype(np.float32)
    return feeds


@pytest.mark.parametrize("build", [encoder, network])
@pytest.mark.parametrize("at_once", [False, True])
def test_answers_of_random_shapes_are_those_of_numpy_and_of_plans_for_them(
    monkeypatch, build, at_once
):
    made = []
    by_formula = KernelCache._by_formula
    monkeypatch.setattr(
        KernelCache,
        "_by_formula",
        lambda self, inputs: made.append(by_formula(self, inputs)) or made[-1],
    )
    if at_once:  # also where NumPy's kernel is faster
        monkeypatch.setattr(dynamic_shapes, "_gain", lambda *_: 1.0)
    model, rng = build(), np.random.default_rng(1)
    session, plain = (
        ps.compile(model, cache=False),
        ps.compile(model, backends=["numpy"], cache=False),
    )
    for i in range(70):
        feeds = feeds_of(model, rng)
        result = session.run(feeds)["y"]
        np.testing.assert_allclose(result, plain.run(feeds)["y"], rtol=1e-4, atol=1e-5)
        if i % 10 == 9:
            exact = ps.compile(model, cache=False).run(feeds)["y"]
            np.testing.assert_allclose(result, exact, rtol=1e-5, atol=1e-6)
    assert sum(function is not None for function in made) > 70


def opened(model: ps.Model) -> ps.Session:
    """A session that has met many shapes."""
    session, rng = ps.compile(model, cache=False), np.random.default_rng(2)
    for _ in range(60):
        session.run(feeds_of(model, rng))
    return session


def test_further_shapes_compile_few_kernels(monkeypatch):
    monkeypatch.setattr(dynamic_shapes, "_gain", lambda *_: 1.0)
    session, compiled = opened(encoder()), []
    static_kernel = NativeBackend.static_kernel
    monkeypatch.setattr(
        NativeBackend,
        "static_kernel",
        lambda self, *of: compiled.append(of) or static_kernel(self, *of),
    )
    rng = np.random.default_rng(3)
    for _ in range(50):
        session.run(feeds_of(encoder(), rng))
    nodes = [step.node for step in session.inspect.plan.walk()]
    assert len(compiled) < 50 * len(nodes) / 20


def product(rows: int | None = None) -> tuple[NativeBackend, Node]:
    x = Value("x", TensorType(FLOAT32, (rows, 32)))
    w = Value("w", const=weights(np.random.default_rng(0), 32, 48))
    return NativeBackend(), Node(standard("MatMul"), [x, w], [Value("y")])


@pytest.fixture
def cache(monkeypatch) -> KernelCache:
    """That of a product of rows of 32, after 20 numbers of rows."""
    monkeypatch.setattr(dynamic_shapes, "_gain", lambda *_: 1.0)
    backend, node = product()
    types = [value.type for value in node.inputs]
    cache = KernelCache(backend, node, types, (), True)
    for rows in range(40, 60):
        run(cache, rows)
    return cache


def run(cache: KernelCache, *dims: int) -> np.ndarray:
    x = np.ones(dims if len(dims) > 1 else (*dims, 32), np.float32)
    return cache.function()(x, cache.node.inputs[1].const)


def test_third_kernel_and_further_ones_are_made_by_a_formula(cache):
    assert (len(cache.kernels), cache._compiled, cache._made) == (20, 2, 18)
    np.testing.assert_allclose(run(cache, 61)[60], run(cache, 40)[0], rtol=1e-6)


def test_formula_does_not_make_what_the_operation_does_not_take(cache):
    with pytest.raises(Exception, match="33"):
        run(cache, 50, 33)


def test_rows_with_other_choices_get_another_formula(cache):
    for rows in range(1, 20):
        assert run(cache, 1000 * rows).shape == (1000 * rows, 48)
        assert run(cache, rows).shape == (rows, 48)
    assert 1 < len(cache._formulas) <= dynamic_shapes._MOST_FORMULAS
    assert run(cache, 0).shape == (0, 48)


def test_formulas_count_as_memory_and_are_dropped_with_kernels(cache):
    caches = cache.backend.caches
    caches.add(cache)
    before = cache.nbytes()
    assert before > len(cache.kernels) * dynamic_shapes._KERNEL_BYTES
    for _ in range(dynamic_shapes._LOOK_EVERY):
        caches.make_room(0)
    assert (cache.nbytes(), cache.kernels, cache._formulas) == (0, {}, [])
    assert run(cache, 50).shape == (50, 48)


def test_kernel_of_a_formula_tells_errors_as_numpy_does(monkeypatch):
    monkeypatch.setattr(dynamic_shapes, "_gain", lambda *_: 1.0)
    x = Value("x", const=np.arange(300, dtype=np.float32).reshape(100, 3))
    places = Value("i", TensorType(INT64, (None, 7)))
    node = Node(standard("Gather"), [x, places], [Value("y")], {"axis": 0})
    types = [value.type for value in node.inputs]
    function = (cache := KernelCache(NativeBackend(), node, types, (), True)).function()
    for rows in range(1, 20):
        i = np.full((rows, 7), rows)
        np.testing.assert_array_equal(function(x.const, i), x.const[i])
    assert cache._made
    with pytest.raises(Exception, match="100") as told:
        function(x.const, np.full((30, 7), 100))
    with pytest.raises(type(told.value)):
        node.op.compile(node, types).function(x.const, np.full((30, 7), 100))


def test_untraceable_kernels_are_compiled_for_each_shape(monkeypatch):
    monkeypatch.setattr(dynamic_shapes, "_gain", lambda *_: 1.0)
    x = Value("x", TensorType(FLOAT32, (1, 3, None, None)))
    scales = Value("s", const=np.array([1, 1, 2, 2], np.float32))
    node = Node(standard("Resize"), [x, None, scales], [Value("y")])
    types = [None if value is None else value.type for value in node.inputs]
    cache = KernelCache(NativeBackend(), node, types, (), True)
    function = cache.function()
    for size in range(4, 12):
        y = function(np.ones((1, 3, size, 5), np.float32), None, scales.const)
        assert y.shape == (1, 3, 2 * size, 10)
    assert (len(cache.kernels), cache._formulas) == (8, [])
    assert cache._traced < 3


def test_time_lost_on_new_shapes_adds_up_to_a_formula(monkeypatch):
    backend, node = product()
    gain = backend.making_s / 3
    monkeypatch.setattr(dynamic_shapes, "_gain", lambda *_: gain)
    monkeypatch.setattr(dynamic_shapes, "_WORTH_ESTIMATING", 0)
    types = [value.type for value in node.inputs]
    cache = KernelCache(backend, node, types, (), False)
    cache.weights = {}  # NumPy's kernel may read them
    for rows in range(40, 80):
        run(cache, rows)
    assert cache._made > 10
    assert len(cache.kernels) < 30
