"""Plans of whole networks on oneDNN: attention in blocks, copies of layouts, threads, forks."""

from __future__ import annotations

import gc
import os
import signal
import threading
from functools import partial

import numpy as np
import pytest
from onnx import numpy_helper

import penstock as ps
from penstock.backends.onednn import attention, kernel
from penstock.backends.onednn.kernel import PrimitiveCache
from penstock.backends.onednn.library import library
from penstock.host.current_run import working_for
from penstock.host.threads import core_budget
from penstock.ops.internal.fused import parts
from tests.support.counting_run import CountingRun
from tests.support.onnx_text import compile_text, graph_from_text, model_from_text
from tests.support.timing import SOON

pytestmark = [pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")]

rng = np.random.default_rng(5)


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def compiled(text: str, **options) -> ps.Session:
    return compile_text(text, **{"executor": "linear", **options})


def steps(session: ps.Session) -> list[str]:
    return [" ".join(part.op.name for part in parts(step.node)) for step in session.plan.walk()]


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


# Attention.


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of sixteen rows, for attention of any size."""
    monkeypatch.setattr(attention, "_WORTH", 0)
    monkeypatch.setattr(attention, "_WORTH_HEAD", 0)
    monkeypatch.setattr(attention, "_BLOCK", 1 << 10)


MASKS = {
    "none": "",
    "whole": "float[2, 3, 50, 40] mask",
    "rows": "float[1, 1, 50, 40] mask",
    "keys": "float[2, 1, 1, 40] mask",
    "queries": "float[50, 1] mask",
    "number": "float[1] mask",
}


def attention_text(mask: str, guarded: bool, head: str = "[2, 3, 50, 16]") -> str:
    scores = "b = Add(a, mask)" if mask else "b = Identity(a)"
    guard = "n = IsNaN(p) g = Where(n, zero, p)" if guarded else "g = Identity(p)"
    return f"""g (float{head} q, float[2, 3, 40, 16] k, float[2, 3, 40, 24] v{", " + mask if mask else ""})
        => (float[2, 3, 50, 24] y) <float c = {{0.25}}, float zero = {{0}}> {{
            q1 = Abs(q) v1 = Neg(v)
            t = Transpose <perm = [0, 1, 3, 2]> (k)
            s = Mul(q1, c) a = MatMul(s, t) {scores}
            p = Softmax <axis = -1> (b) {guard}
            z = MatMul(g, v1) y = Neg(z)
        }}"""


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_in_blocks_equals_numpy(mask, guarded):
    feeds = {"q": draw(2, 3, 50, 16), "k": draw(2, 3, 40, 16), "v": draw(2, 3, 40, 24)}
    declared = MASKS[mask]
    if declared:
        shape = [int(n) for n in declared[len("float[") : declared.index("]")].split(",")]
        feeds["mask"] = np.where(rng.random(shape) < 0.2, -np.inf, draw(*shape)).astype(np.float32)
        if mask == "number":
            feeds["mask"] = draw(1)
        if guarded and mask in ("whole", "rows"):
            feeds["mask"][..., 7, :] = -np.inf  # a row of which nothing is left
        elif mask == "queries":
            feeds["mask"] = draw(50, 1)
        elif not guarded:
            feeds["mask"] = np.where(np.isinf(feeds["mask"]), -30, feeds["mask"])
    session = close(attention_text(declared, guarded), feeds)
    names = [name for name in steps(session) if "Softmax" in name]
    middle = " Add" if declared else ""
    guard = " ZeroNaN" if guarded else ""
    assert names == [f"MatMul Mul{middle} Softmax{guard} MatMul"]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("n", [5, 700])  # results in the arena, and those that the run allocates
def test_attention_of_fed_values_equals_numpy(n):
    feeds = {"q": draw(3, 33, 8), "k": draw(3, 8, 21), "v": draw(3, 21, n)}
    text = f"""g (float[3, 33, 8] q, float[3, 8, 21] k, float[3, 21, {n}] v) => (float[3, 33, {n}] y)
        {{ a = MatMul(q, k) p = Softmax <axis = -1> (a) y = MatMul(p, v) }}"""
    session = close(text, feeds)
    assert steps(session) == ["MatMul Softmax MatMul"]
    strided = {name: np.asfortranarray(x) for name, x in feeds.items()}
    np.testing.assert_array_equal(session.run(strided)["y"], session.run(feeds)["y"])


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("in_sequence", [True, False])
def test_attention_reads_and_writes_given_arrays_where_they_are(in_sequence, monkeypatch):
    if not in_sequence:
        monkeypatch.setattr(kernel, "sequence_of", lambda *calls: None)
    text = """g (float[3, 33, 8] q, float[3, 8, 21] k, float[3, 21, 8] v) => (float[3, 33, 8] y)
        { a = MatMul(q, k) p = Softmax <axis = -1> (a) y = MatMul(p, v) }"""
    fed = [{"q": draw(3, 33, 8), "k": draw(3, 8, 21), "v": draw(3, 21, 8)} for _ in range(3)]
    session, reference = compiled(text), compiled(text, backends=["numpy"])
    assert steps(session) == ["MatMul Softmax MatMul"]
    session.run(fed[0])
    copies = []
    monkeypatch.setattr(np, "copyto", lambda *arrays: copies.append(arrays))
    results = [session.run(feeds)["y"] for feeds in fed]
    assert not copies
    for feeds, y in zip(fed, results, strict=True):
        np.testing.assert_allclose(y, reference.run(feeds)["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("where", ["<float[40, 50] m>", ", float[40, 50] m"])
def test_attention_with_a_transposed_mask_takes_no_reference_implementation(where, monkeypatch):
    """oneDNN has only those for operands with gaps in their rows."""
    created = []

    class Recorded(attention.Primitive):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            created.append(self)

    monkeypatch.setattr(attention, "Primitive", Recorded)
    fed, constant = ("", where) if where[0] == "<" else (where, "")
    text = f"""g (float[3, 50, 8] q, float[3, 8, 40] k, float[3, 40, 5] v{fed})
        => (float[3, 50, 5] y) {constant} {{
            t = Transpose <perm = [1, 0]> (m) a = MatMul(q, k) b = Add(a, t)
            p = Softmax <axis = -1> (b) y = MatMul(p, v) }}"""
    model = model_from_text(text)
    feeds = {"q": draw(3, 50, 8), "k": draw(3, 8, 40), "v": draw(3, 40, 5), "m": draw(40, 50)}
    if constant:
        model.graph.initializer.append(numpy_helper.from_array(feeds.pop("m"), "m"))
    session, expected = ps.compile(model), ps.compile(model, backends=["numpy"])
    for _ in range(2):
        y, wanted = session.run(feeds)["y"], expected.run(feeds)["y"]
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
        if fed:
            feeds["m"] = draw(40, 50)
    assert created
    assert not [p.implementation for p in created if p.is_reference_impl]


class Helpers:
    """Takes every ``each``-th job, and runs it on a thread of its own."""

    def __init__(self, each: int) -> None:
        self.each = each
        self.offers = 0
        self.threads: list[threading.Thread] = []

    def offer(self, job) -> bool:
        self.offers += 1
        if self.offers % self.each:
            return False
        self.threads.append(threading.Thread(target=job))
        self.threads[-1].start()
        return True


@pytest.fixture
def three_threads():
    """Kernels that this thread makes and runs have three threads."""
    found = library()
    before = found.threads
    found.set_threads(3)
    yield found
    assert found.threads == 3
    found.set_threads(before)


def heads(feeds: dict[str, np.ndarray]):
    """The kernel of an attention of five heads, and what it makes of ``feeds`` on one thread."""
    text = """g (float[5, 33, 8] q, float[5, 8, 21] k, float[5, 21, 6] v) => (float[5, 33, 6] y)
        { a = MatMul(q, k) p = Softmax <axis = -1> (a) y = MatMul(p, v) }"""
    session = close(text, feeds, threads=1)
    (step,) = session.plan.walk()
    return step.kernel, session.run(feeds)["y"]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("each", "taken"), [(1, 4), (2, 2), (99, 0)])
def test_attention_divides_heads_among_threads(each, taken, monkeypatch, three_threads):
    feeds = {"q": draw(5, 33, 8), "k": draw(5, 8, 21), "v": draw(5, 21, 6)}
    kernel, expected = heads(feeds)
    three_threads.set_threads(3)
    helpers = Helpers(each)
    monkeypatch.setattr(attention, "pool", lambda: helpers)
    for _ in range(2):
        np.testing.assert_array_equal(kernel(*feeds.values()), expected)
    assert helpers.offers == 4  # two runs, three threads
    assert len(helpers.threads) == taken


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("threads", [1, 3])
def test_attention_ends_between_blocks_when_its_run_is_stopped(threads, monkeypatch, three_threads):
    feeds = {"q": draw(5, 33, 8), "k": draw(5, 8, 21), "v": draw(5, 21, 6)}
    monkeypatch.setattr(attention, "_MOST_FLOPS", 0)
    kernel, _ = heads(feeds)
    three_threads.set_threads(threads)
    monkeypatch.setattr(attention, "pool", partial(Helpers, 1))
    whole = CountingRun()
    working_for(whole, kernel, *feeds.values())
    assert whole.looks > 5 * 3 * 3  # a look before each primitive of several blocks of each head
    stopped = CountingRun(last=whole.looks // 2)
    with pytest.raises(ps.Cancelled):
        working_for(stopped, kernel, *feeds.values())
    assert stopped.looks < whole.looks // 2 + threads
    three_threads.set_threads(3)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("own", [True, False])
def test_attention_raises_a_threads_error_when_all_have_ended(own, monkeypatch, three_threads):
    feeds = {"q": draw(5, 33, 8), "k": draw(5, 8, 21), "v": draw(5, 21, 6)}
    kernel, _ = heads(feeds)
    three_threads.set_threads(3)
    helpers = Helpers(1)
    monkeypatch.setattr(attention, "pool", lambda: helpers)
    run, caller, ended = attention._Program.run, threading.current_thread(), []
    caller_ended = threading.Event()

    def broken(self):
        mine = threading.current_thread() is caller
        if not mine:  # still at work when the caller raises
            assert caller_ended.wait(SOON)
        run(self)
        ended.append(self)
        if mine:
            caller_ended.set()
        if mine is own:
            raise KeyboardInterrupt

    monkeypatch.setattr(attention._Program, "run", broken)
    with pytest.raises(KeyboardInterrupt):
        kernel(*feeds.values())
    assert len(ended) == 3


@pytest.mark.usefixtures("small_blocks")
def test_attention_interrupted_waits_for_all_threads(monkeypatch, three_threads):
    feeds = {"q": draw(5, 33, 8), "k": draw(5, 8, 21), "v": draw(5, 21, 6)}
    kernel, _ = heads(feeds)
    three_threads.set_threads(3)
    helpers = Helpers(1)
    monkeypatch.setattr(attention, "pool", lambda: helpers)
    go, wait = threading.Event(), attention.wait

    def interrupted(futures):
        if not go.is_set():
            go.set()
            raise KeyboardInterrupt
        return wait(futures)

    run, caller, ended = attention._Program.run, threading.current_thread(), []

    def late(self):
        if threading.current_thread() is not caller:
            go.wait()
        run(self)
        ended.append(self)

    monkeypatch.setattr(attention._Program, "run", late)
    monkeypatch.setattr(attention, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernel(*feeds.values())
    assert len(ended) == 3


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "text",
    [
        # The softmax is along another axis.
        """g (float[2, 9, 8] q, float[2, 8, 9] k, float[2, 9, 5] v) => (float[2, 9, 5] y)
        { a = MatMul(q, k) p = Softmax <axis = 1> (a) y = MatMul(p, v) }""",
        # What is made of the scores is the second operand.
        """g (float[2, 9, 8] q, float[2, 8, 9] k, float[2, 9, 9] v) => (float[2, 9, 9] y)
        { a = MatMul(q, k) p = Softmax <axis = -1> (a) y = MatMul(v, p) }""",
        # The scores are read by somebody else.
        """g (float[2, 9, 8] q, float[2, 8, 9] k, float[2, 9, 5] v)
            => (float[2, 9, 5] y, float[2, 9, 9] p)
        { a = MatMul(q, k) p = Softmax <axis = -1> (a) y = MatMul(p, v) }""",
        # Values are the same for all heads.
        """g (float[2, 9, 8] q, float[2, 8, 9] k, float[9, 5] v) => (float[2, 9, 5] y)
        { a = MatMul(q, k) p = Softmax <axis = -1> (a) y = MatMul(p, v) }""",
    ],
)
def test_chain_that_only_resembles_attention_is_split(text):
    model = graph_from_text(text)
    feeds = {value.name: draw(*value.type.dims) for value in model.inputs}
    session = close(text, feeds)
    assert not any("Softmax MatMul" in name for name in steps(session))


ONEDNN = ["onednn", "numpy"]  # without native kernels, which are for what is small


def test_small_attention_runs_as_products():
    text = """g (float[2, 9, 8] q, float[2, 8, 9] k, float[2, 9, 5] v) => (float[2, 9, 5] y)
        { a = MatMul(q, k) p = Softmax <axis = -1> (a) y = MatMul(p, v) }"""
    feeds = {"q": draw(2, 9, 8), "k": draw(2, 8, 9), "v": draw(2, 9, 5)}
    assert len(steps(close(text, feeds, backends=ONEDNN))) == 3


@pytest.mark.parametrize(("heads", "positions", "count"), [(250, 49, 3), (10, 260, 1)])
def test_attention_runs_in_blocks_where_a_head_has_many_positions(heads, positions, count):
    shapes = {"q": (heads, positions, 8), "k": (heads, 8, positions), "v": (heads, positions, 4)}
    inputs = ", ".join(f"float{list(shape)} {name}" for name, shape in shapes.items())
    text = f"""g ({inputs}) => (float[{heads}, {positions}, 4] y)
        {{ a = MatMul(q, k) p = Softmax <axis = -1> (a) y = MatMul(p, v) }}"""
    feeds = {name: draw(*shape) for name, shape in shapes.items()}
    assert len(steps(close(text, feeds, backends=ONEDNN))) == count


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
    assert [step.backend for step in session.plan.walk()][-1] == "native"


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
    assert all(step.backend == "onednn" for step in session.plan.walk() if "Conv" in step.node.name)


# Threads.


def implementations(session: ps.Session) -> set[int]:
    """For how many threads kernels were compiled."""
    binders = [step.kernel.binder for step in session.plan.walk() if step.kernel is not None]
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
    backends = {step.node.op.name: step.backend for step in session.plan.walk()}
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
    assert {step.backend for step in session.plan.walk()} == {"numpy"}
    # What was measured counts in later sessions.
    seen.clear()
    later = compiled(text)
    later.run({"x": x})
    assert not seen
    assert {step.backend for step in later.plan.walk()} == {"numpy"}


def test_placement_puts_small_nodes_on_numpy_and_large_ones_on_onednn():
    text = "g (float[{0}, {0}] x) => (float[{0}, {0}] y) {{ y = MatMul(x, x) }}"
    found = {}
    for n in (2, 300):
        session = ps.compile(model_from_text(text.format(n)), backends=["onednn", "numpy"])
        session.run({"x": draw(n, n)})
        (step,) = session.plan.walk()
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
        heavy = [s for s in session.plan.walk() if {"MatMul", "Conv"} & set(steps_of(s))]
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


def test_dropped_plans_free_their_primitives():
    model = model_from_text(
        "g (float[N, 64] x) => (float[N, 96] y) { r = Relu(x)\n y = MatMul(r, w) }"
    )
    model.graph.initializer.append(numpy_helper.from_array(draw(64, 96), "w"))
    limits = ps.Limits(max_plans_bytes=1)
    session = ps.compile(model, executor="linear", limits=limits, backends=["onednn", "numpy"])
    for n in range(100, 120):
        session.run({"x": draw(n, 64)})
    gc.collect()
    caches = [each for each in gc.get_objects() if issubclass(type(each), PrimitiveCache)]
    rows = [cache.spec.desc.output.dims[0] for cache in caches]
    assert 1 <= len([n for n in rows if 100 <= n < 120]) <= 4
