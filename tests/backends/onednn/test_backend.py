"""The backend in sessions: layouts, threads, placement, precision."""

from __future__ import annotations

import gc
import os
import signal
import threading
from weakref import ref

import numpy as np
import pytest
from onnx import numpy_helper

import penstock as ps
from penstock.backends.onednn.kernel import PrimitiveCache
from penstock.backends.onednn.library import library
from penstock.compiler.varying_shapes import CHANGED
from penstock.host.threads import core_budget
from penstock.ops.internal.fused import parts
from tests.support.onnx_text import compile_text, model_from_text

pytestmark = [pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")]

rng = np.random.default_rng(5)


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def compiled(text: str, **options) -> ps.Session:
    return compile_text(text, **{"executor": "linear", **options})


def steps(session: ps.Session) -> list[str]:
    return [
        " ".join(part.op.name for part in parts(step.node)) for step in session.inspect.plan.walk()
    ]


@pytest.mark.parametrize(("dims", "fused"), [((64, 16, 16, 16), False), ((4, 128, 64, 128), True)])
def test_batches_of_small_matrices_of_codes_are_multiplied_as_real_numbers(
    dims: tuple[int, ...], fused: bool
) -> None:
    batch, rows, depth, columns = dims
    session = compiled(
        f"""g (uint8[{batch}, {rows}, {depth}] a, uint8[{batch}, {depth}, {columns}] b)
        => (uint8[{batch}, {rows}, {columns}] y) <float s = {{0.5}}, uint8 z = {{128}}>
        {{ da = DequantizeLinear(a, s, z) db = DequantizeLinear(b, s, z) p = MatMul(da, db)
        y = QuantizeLinear(p, s, z) }}"""
    )
    whole = "DequantizeLinear DequantizeLinear MatMul QuantizeLinear"
    assert (steps(session) == [whole]) is fused


def close(text: str, feeds: dict[str, np.ndarray], **options) -> ps.Session:
    """The session of a model, whose outputs are those of NumPy."""
    session = compiled(text, **options)
    expected = compiled(text, backends=["numpy"]).run(feeds)
    for _ in range(2):  # nothing of the first run is left to be seen
        found = session.run(feeds)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=2e-5)
    return session


# Layouts.


BLOCK = """g (float[1, 3, 32, 32] x) => (float[1, 24, 15, 15] y) {
    w0 = ConstantOfShape <value = float[1] {0.1}> (s0)
    s0 = Constant <value_ints = [16, 3, 3, 3]> ()
    w1 = ConstantOfShape <value = float[1] {0.05}> (s1)
    s1 = Constant <value_ints = [16, 16, 3, 3]> ()
    w2 = ConstantOfShape <value = float[1] {0.2}> (s2)
    s2 = Constant <value_ints = [24, 16, 1, 1]> ()
    a = Conv <pads = [1, 1, 1, 1]> (x, w0)
    b = Relu(a)
    c = Conv <pads = [1, 1, 1, 1]> (b, w1)
    d = Add(c, b)
    e = Relu(d)
    f = MaxPool <kernel_shape = [3, 3], strides = [2, 2]> (e)
    h = Sigmoid(f)
    i = Mul(f, h)
    y = Conv(i, w2)
}"""


def test_convolutional_network_copies_only_its_input():
    session = close(BLOCK, {"x": draw(1, 3, 32, 32)})
    found = steps(session)
    assert found.count("Reorder") == 1
    assert found[0] == "Reorder"
    assert len(found) <= 6


@pytest.mark.parametrize("stride", [1, 2])
def test_depthwise_convolution_within_a_network_copies_nothing(stride):
    text = f"""g (float[1, 24, 32, 32] x) => (y) {{
        w0 = ConstantOfShape <value = float[1] {{0.1}}> (s0)
        s0 = Constant <value_ints = [96, 24, 1, 1]> ()
        w1 = ConstantOfShape <value = float[1] {{0.2}}> (s1)
        s1 = Constant <value_ints = [96, 1, 3, 3]> ()
        a = Conv(x, w0)
        b = Relu(a)
        c = Conv <group = 96, strides = [{stride}, {stride}], pads = [1, 1, 1, 1]> (b, w1)
        d = Relu(c)
        w2 = Transpose <perm = [1, 0, 2, 3]> (w0)
        y = Conv(d, w2)
    }}"""
    session = close(text, {"x": draw(1, 24, 32, 32)})
    assert steps(session) == ["Reorder", "Conv Relu", "Conv Relu", "Conv"]


def test_convolution_of_few_filters_within_a_network_runs_on_compiled_kernels():
    text = """g (float[1, 24, 32, 32] x) => (y) {
        w0 = ConstantOfShape <value = float[1] {0.1}> (s0)
        s0 = Constant <value_ints = [32, 24, 3, 3]> ()
        w1 = ConstantOfShape <value = float[1] {0.2}> (s1)
        s1 = Constant <value_ints = [3, 32, 3, 3]> ()
        a = Conv(x, w0)
        y = Conv(a, w1)
    }"""
    session = close(text, {"x": draw(1, 24, 32, 32)})
    assert [step.backend for step in session.inspect.plan.walk()][-1] == "native"


def test_channels_last_network_copies_nothing():
    text = """g (float[1, 20, 20, 8] x) => (float[1, 20, 20, 8] y) {
        w = ConstantOfShape <value = float[1] {0.1}> (s)
        s = Constant <value_ints = [8, 8, 3, 3]> ()
        a = Exp(x)
        b = Transpose <perm = [0, 3, 1, 2]> (a)
        c = Conv <pads = [1, 1, 1, 1]> (b, w)
        d = Transpose <perm = [0, 2, 3, 1]> (c)
        e = Exp(d)
        f = Transpose <perm = [0, 3, 1, 2]> (e)
        h = Conv <pads = [1, 1, 1, 1]> (f, w)
        i = Transpose <perm = [0, 2, 3, 1]> (h)
        y = Neg(i)
    }"""
    session = close(text, {"x": 0.1 * draw(1, 20, 20, 8)})
    assert "Reorder" not in steps(session)
    assert "Transpose" not in steps(session)


def test_channels_last_input_is_read_where_it_is_whatever_its_strides():
    text = """g (float[2, 20, 20, 8] x) => (float[2, 16, 20, 20] y) {
        w = ConstantOfShape <value = float[1] {0.1}> (s)
        s = Constant <value_ints = [16, 8, 3, 3]> ()
        a = Transpose <perm = [0, 3, 1, 2]> (x)
        y = Conv <pads = [1, 1, 1, 1]> (a, w)
    }"""
    x = draw(2, 20, 20, 8)
    session = close(text, {"x": x})
    assert "Reorder" not in steps(session)
    wanted = session.run({"x": x})["y"]
    for strided in (np.asfortranarray(x), np.repeat(x, 2, axis=3)[..., ::2]):
        np.testing.assert_array_equal(session.run({"x": strided})["y"], wanted)


def test_outputs_of_a_run_are_in_c_order():
    session = close(BLOCK, {"x": draw(1, 3, 32, 32)})
    (y,) = session.run({"x": draw(1, 3, 32, 32)}).values()
    assert y.flags.c_contiguous
    assert y.flags.owndata


@pytest.mark.parametrize(
    "shape", [(1, 4, 1, 9), (1, 1, 9, 9), (1, 4, 9, 1), (1, 1, 1, 9), (2, 1, 5, 5)]
)
def test_dims_of_one_need_no_copies(shape):
    n, c, h, w = shape
    text = f"""g (float[{n}, {c}, {h}, {w}] x) => (float[{n}, {c}, {h}, {w}] y) {{
        w = ConstantOfShape <value = float[1] {{0.3}}> (s)
        s = Constant <value_ints = [{c}, {c}, {min(h, 3)}, {min(w, 3)}]> ()
        e = Exp(x)
        a = Conv <pads = [{h > 1:d}, {w > 1:d}, {h > 1:d}, {w > 1:d}]> (e, w)
        b = Relu(a)
        y = Conv <pads = [{h > 1:d}, {w > 1:d}, {h > 1:d}, {w > 1:d}]> (b, w)
    }}"""
    session = close(text, {"x": draw(*shape)}, place={"Conv": "onednn"})
    assert all(
        step.backend == "onednn" for step in session.inspect.plan.walk() if "Conv" in step.node.name
    )


# Threads.


def implementations(session: ps.Session) -> set[int]:
    """For how many threads kernels were compiled."""
    binders = [
        step.kernel.binder for step in session.inspect.plan.walk() if step.kernel is not None
    ]
    caches = [binder for binder in binders if isinstance(binder, PrimitiveCache)]
    return set().union(*[{key[-1] for key in cache._primitives} for cache in caches])


def test_session_uses_the_threads_it_is_given():
    session = compiled(BLOCK, threads=1)
    session.run({"x": draw(1, 3, 32, 32)})
    assert implementations(session) == {1}


@pytest.mark.skipif(core_budget() < 2, reason="needs two cores")
def test_concurrent_runs_divide_the_threads():
    model = BLOCK.replace("32, 32", "96, 96").replace("15, 15", "47, 47")
    session = compiled(model)
    x = draw(1, 3, 96, 96)
    expected = session.run({"x": x})["y"]
    begin = threading.Barrier(4)
    found = []

    def client() -> None:
        begin.wait()
        found.extend(session.run({"x": x})["y"] for _ in range(20))

    clients = [threading.Thread(target=client) for _ in range(4)]
    for each in clients:
        each.start()
    for each in clients:
        each.join()
    assert len(found) == 80
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=1e-5, atol=1e-6)
    assert 1 in implementations(session)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel"])
def test_forked_child_does_not_wait_for_lost_threads(executor):
    session = compiled(
        BLOCK.replace("32, 32", "96, 96").replace("15, 15", "47, 47"), executor=executor
    )
    x = draw(1, 3, 96, 96)
    expected = session.run({"x": x})["y"]
    for _ in range(3):
        session.run({"x": x})
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(30)  # a child that waits for ever is a failure too
            found = session.run({"x": x})["y"]
            status = 0 if np.allclose(found, expected, rtol=1e-5, atol=1e-6) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


# Which of the two runs a node.


DENSE = """g (float[64, 256] x) => (float[64, 256] y) {
    w = ConstantOfShape <value = float[1] {0.1}> (s)
    s = Constant <value_ints = [256, 256]> ()
    a = MatMul(x, w)
    y = Relu(a)
}"""


@pytest.mark.parametrize("place", [{"MatMul": "numpy"}, {"Relu": "numpy"}, {"node:r": "numpy"}])
def test_place_on_another_backend_prevents_fusing(place):
    model = model_from_text(DENSE)
    model.graph.node[-1].name = "r"
    session = ps.compile(model, executor="linear", place=place)
    session.run({"x": draw(64, 256)})
    backends = {step.node.op.name: step.backend for step in session.inspect.plan.walk()}
    assert set(backends) == {"MatMul", "Relu"}
    assert backends["MatMul" if "MatMul" in place else "Relu"] == "numpy"


def test_place_on_onednn_allows_fusing():
    session = compiled(DENSE, place={"MatMul": "onednn"})
    session.run({"x": draw(64, 256)})
    assert steps(session) == ["MatMul Relu"]


def test_autotune_measures_fused_nodes_and_takes_the_faster_backend(monkeypatch):
    from penstock.tuning import cost_table

    seen = []
    record = cost_table.CostTable.record

    def recorded(self, backend, where, threads, seconds):
        # As if NumPy had won.
        seconds = 1e-6 if backend == "numpy" else 1e-3
        seen.append((backend, where.operation))
        record(self, backend, where, threads, seconds)

    monkeypatch.setattr(cost_table.CostTable, "record", recorded)
    x = draw(65, 256)
    text = DENSE.replace("64", "65")
    session = compiled(text, autotune=True)
    session.run({"x": x})
    assert {("numpy", "penstock.Fused"), ("onednn", "penstock.Fused")} <= set(seen)
    assert {step.backend for step in session.inspect.plan.walk()} == {"numpy"}
    # What was measured counts in later sessions.
    seen.clear()
    later = compiled(text)
    later.run({"x": x})
    assert not seen
    assert {step.backend for step in later.inspect.plan.walk()} == {"numpy"}


def test_placement_puts_small_nodes_on_numpy_and_large_ones_on_onednn():
    text = "g (float[{0}, {0}] x) => (float[{0}, {0}] y) {{ y = MatMul(x, x) }}"
    found = {}
    for n in (2, 300):
        session = ps.compile(model_from_text(text.format(n)), backends=["onednn", "numpy"])
        session.run({"x": draw(n, n)})
        (step,) = session.inspect.plan.walk()
        found[n] = step.backend
    assert found[300] == "onednn"
    assert found[2] == "numpy"


# Precision.


@pytest.mark.parametrize("fed", [False, True])
def test_bfloat16_is_used_only_on_request(fed):
    inside = "p = Identity(x) q = Identity(z)" if fed else "p = Abs(x) q = Abs(z)"
    text = f"""g (float[64, 256] x, float[1, 8, 40, 40] z)
        => (float[64, 300] y, float[1, 32, 40, 40] c) {{
        {inside}
        a = MatMul(p, m) y = Relu(a)
        b = Conv <pads = [1, 1, 1, 1]> (q, k) c = Sigmoid(b)
    }}"""
    model = model_from_text(text)
    model.graph.initializer.append(numpy_helper.from_array(draw(256, 300), "m"))
    model.graph.initializer.append(numpy_helper.from_array(draw(32, 8, 3, 3), "k"))
    feeds = {"x": draw(64, 256), "z": draw(1, 8, 40, 40)}
    exact = ps.compile(model, backends=["numpy"]).run(feeds)
    for precision, close_to in (("float32", 1e-5), ("bf16", 5e-2)):
        session = ps.compile(model, executor="linear", precision=precision)
        found = session.run(feeds)
        heavy = [s for s in session.inspect.plan.walk() if {"MatMul", "Conv"} & set(steps_of(s))]
        assert len(heavy) == 2
        narrow = precision == "bf16" and library().bfloat16
        for step in heavy:
            # AMX multiplies 16-bit and 8-bit numbers only, so its name says bfloat16 as well.
            implementation = step.kernel.binder.implementation
            assert (("bf16" in implementation) or ("amx" in implementation)) == narrow
        for name, array in exact.items():
            error = np.abs(found[name] - array).max() / np.abs(array).max()
            assert error < close_to
            if narrow:
                assert error > 1e-5


def steps_of(step) -> list[str]:
    return [part.op.name for part in parts(step.node)]


def test_unknown_precision_is_refused():
    with pytest.raises(
        ValueError, match="precision 'fp8' is not one of float32, tf32, bf16, strict"
    ):
        compiled(DENSE, precision="fp8")


def test_dropped_plans_free_their_primitives(monkeypatch):
    made: list[ref[PrimitiveCache]] = []
    init = PrimitiveCache.__init__

    def kept_in_sight(self: PrimitiveCache, *arguments: object) -> None:
        made.append(ref(self))  # plans are not among the objects that the collector knows
        init(self, *arguments)

    monkeypatch.setattr(PrimitiveCache, "__init__", kept_in_sight)
    model = model_from_text(
        "g (float[N, 64] x) => (float[N, 96] y) { r = Relu(x)\n y = MatMul(r, w) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(draw(64, 96), "w"))
    limits = ps.Limits(max_plans_bytes=1)
    session = ps.compile(model, executor="linear", limits=limits, backends=["onednn", "numpy"])
    for n in range(100, 99 + CHANGED):
        session.run({"x": draw(n, 64)})
    gc.collect()
    caches = [cache for each in made if (cache := each()) is not None]
    rows = [cache.spec.desc.output.dims[0] for cache in caches]
    assert 1 <= len([n for n in rows if 100 <= n < 120]) <= 4
