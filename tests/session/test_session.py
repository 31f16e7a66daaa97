"""Sessions: feeds, fetches, errors, plans by shapes, threads, pickling."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import queue
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, product

import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.session import plan_cache
from tests.support.onnx_text import compile_text, model_from_text
from tests.support.timing import SOON, wait_until

AFFINE = """affine (float[N, 3] x, float[3] scale) => (float[N, 3] y, float[N, 3] z) <float[3] b = {1, 2, 3}> {
    product = Mul(x, scale)
    y = Add(product, b)
    z = Neg(y)
}"""


@pytest.fixture
def proto() -> onnx.ModelProto:
    return model_from_text(AFFINE)


@pytest.fixture
def session(proto) -> ps.Session:
    return ps.compile(proto)


X = np.arange(6, dtype=np.float32).reshape(2, 3)
BIAS = np.array([1, 2, 3], np.float32)
SCALE = np.array([1, 10, 100], np.float32)


class Begun(ps.Observer):
    """Signals when a run has begun."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def run_begin(self, run) -> None:
        self.event.set()


def endless() -> ps.Session:
    return compile_text("""g (float[4] x, int64 n) => (float[4] y) {
            y = Loop (n, , x) <body = b (int64 i, bool c, float[4] v) => (bool d, float[4] w) {
                d = Identity(c) w = Add(v, v) }> }""")


FOREVER = {"x": np.zeros(4, np.float32), "n": np.array(2**62)}


def test_run_by_name_and_call_by_position(session):
    outputs = session.run({"x": X, "scale": SCALE})
    assert list(outputs) == ["y", "z"]
    np.testing.assert_array_equal(outputs["y"], X * SCALE + [1, 2, 3])
    y, z = session(X, SCALE)
    np.testing.assert_array_equal(z, -y)


def test_inputs_and_outputs_are_described(session):
    assert [str(p) for p in session.inputs] == ["x: float32[N, 3]", "scale: float32[3]"]
    assert [p.name for p in session.outputs] == ["y", "z"]
    assert "x: float32[N, 3]" in repr(session)


def test_any_value_can_be_fetched_and_only_what_it_needs_runs(session):
    outputs = session.run({"x": X, "scale": SCALE}, fetches=["product"])
    assert list(outputs) == ["product"]
    np.testing.assert_array_equal(outputs["product"], X * SCALE)
    # x alone is not enough for y, but y can be fed itself.
    outputs = session.run({"y": X}, fetches=["z"])
    np.testing.assert_array_equal(outputs["z"], -X)


def test_session_feeds_an_intermediate_value(session):
    outputs = session.run({"product": X}, fetches=["y"])
    np.testing.assert_array_equal(outputs["y"], X + BIAS)


def test_a_constant_can_be_fed(session):
    outputs = session.run({"x": X, "scale": SCALE, "b": np.zeros(3, np.float32)}, fetches=["y"])
    np.testing.assert_array_equal(outputs["y"], X * SCALE)


def test_targets_are_run_but_not_returned(session):
    assert list(session.run({"x": X, "scale": SCALE}, ["y"], ["z"])) == ["y"]


def test_subgraph_is_compiled_once(session):
    for _ in range(3):
        session.run({"x": X, "scale": SCALE}, fetches=["product"])
        session.run({"scale": SCALE, "x": X}, fetches=["product"])
    assert len(session._subgraphs) == 1


def test_fetches_in_another_order_share_a_plan(session):
    feeds = {"x": X, "scale": SCALE}
    orders = (["z", "product"], ["product", "z"], ["product", "z", "product"])
    for fetches in orders:
        outputs = session.run(feeds, fetches, ["y"])
        assert list(outputs) == list(dict.fromkeys(fetches))
        np.testing.assert_array_equal(outputs["product"], X * SCALE)
        assert outputs["z"].shape == X.shape
        later = session.submit(feeds, fetches, ["y"]).result(SOON)
        assert list(later) == list(outputs)
    assert len(session._subgraphs) == 1
    assert session.memory.count == 1
    # targets are a set too, and what is fetched of all outputs in another order is no other part
    session.run(feeds, ["z"], ["y", "product"])
    session.run(feeds, ["z"], ["product", "y"])
    assert session.memory.count == 2
    names = [port.name for port in session.outputs]
    assert list(session.run(feeds, names[::-1])) == names[::-1]
    session.run(feeds)
    assert len(session._subgraphs) == 2
    assert session.memory.count == 3


def test_remembered_requests_are_bounded(session):
    names = ["x", "scale", "product", "y", "z"]
    feeds = {"x": X, "scale": SCALE}
    for fetches in islice(product(names, repeat=5), 400):
        session.run(feeds, fetches)
    assert len(session._subgraphs._requests) <= 256


def test_plan_is_compiled_for_each_set_of_shapes(session):
    for n in (1, 2, 3, 2, 1):
        x = np.ones((n, 3), np.float32)
        assert session.run({"x": x, "scale": SCALE})["y"].shape == (n, 3)
    assert session.memory.count == 3


def test_plans_are_dropped_beyond_their_limit(proto):
    session = ps.compile(proto, limits=ps.Limits(max_plans_bytes=3000))
    for n in range(1, 100):
        x = np.ones((n, 3), np.float32)
        np.testing.assert_array_equal(
            session.run({"x": x, "scale": SCALE}, ["z"])["z"], -(x * SCALE + [1, 2, 3])
        )
    assert session.memory.count < 30
    assert session.memory.arenas <= 3000


def test_a_plan_for_given_shapes_is_compiled_ahead(proto):
    session = ps.compile(proto, shapes={"x": (4, 3)})
    assert session.memory.count == 1
    assert "float32[4, 3]" in session.source
    session.run({"x": np.ones((4, 3), np.float32), "scale": SCALE})
    assert session.memory.count == 1


def test_without_shapes_there_is_no_plan_to_show(session):
    with pytest.raises(ps.InvalidInput, match="no plan yet"):
        _ = session.source


def test_plans_without_arena_count_towards_the_limit():
    #  one node, and no arena: the plan's bytes are its program
    session = compile_text(
        "g (float[N] x) => (float[N] y) { y = Neg(x) }",
        backends=["numpy"],
        limits=ps.Limits(max_plans_bytes=100_000),
    )
    for n in range(200):
        session(np.zeros(n, np.float32))
    assert session.memory.arenas == 0
    assert 2 <= session.memory.count < 30


def test_plans_of_all_subgraphs_are_bounded_together(proto):
    session = ps.compile(proto, limits=ps.Limits(max_plans_bytes=100_000))
    for n in range(1, 40):
        feeds = {"x": np.ones((n, 3), np.float32), "scale": SCALE}
        for fetches in (["y"], ["z"], ["product"]):
            session.run(feeds, fetches)
    assert session.memory.count < 30


@pytest.mark.costly
def test_remembered_subgraphs_are_bounded():
    chain = " ".join(f"v{i + 1} = Neg(v{i})" for i in range(300))
    session = compile_text(f"g (float[2] v0) => (float[2] y) {{ {chain} y = Exp(v300) }}")
    x = np.ones(2, np.float32)
    for i in range(1, 300):
        assert session.run({"v0": x}, [f"v{i}"])[f"v{i}"][0] == (-1) ** i
    assert len(session._subgraphs) <= 256
    assert session.memory.count <= 257
    assert session.run({"v0": x}, ["v1"])["v1"][0] == -1


def test_concurrent_runs_compile_a_new_plan_once(proto, monkeypatch):
    session = ps.compile(proto)
    compiled, running = [], []
    compile_one = session._compiler.compile

    def compile_slowly(graph, values, *options):
        compiled.append(values[0].shape)
        wait_until(lambda: len(running) == 8)
        return compile_one(graph, values, *options)

    monkeypatch.setattr(session._compiler, "compile", compile_slowly)
    start = threading.Barrier(8)

    def job(n: int) -> None:
        start.wait()
        running.append(n)
        session.run({"x": np.ones((n, 3), np.float32), "scale": SCALE})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(job, [1, 2] * 4))
    assert sorted(compiled) == [(1, 3), (2, 3)]


def test_run_of_a_cached_plan_does_not_wait_for_a_compilation(proto, monkeypatch):
    session = ps.compile(proto)
    feeds = [{"x": np.ones((n, 3), np.float32), "scale": SCALE} for n in (1, 2, 3)]
    for each in feeds[:2]:
        session.run(each)
    compile_one, go_on, begun = session._compiler.compile, threading.Event(), threading.Event()

    def compile_slowly(graph, values, *options):
        begun.set()
        assert go_on.wait(60)
        return compile_one(graph, values, *options)

    monkeypatch.setattr(session._compiler, "compile", compile_slowly)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(session.run, feeds[2])
        assert begun.wait(60)
        for each in feeds[:2]:
            session.run(each)
        go_on.set()
        assert slow.result()["y"].shape == (3, 3)


# Feeds.


@pytest.mark.parametrize(
    "value",
    [
        [[0, 1, 2], [3, 4, 5]],
        X[::-1][::-1],
        np.asfortranarray(X),
        memoryview(X),
        X.astype(">f4").astype(np.float32),
    ],
)
def test_lists_numbers_and_arrays_can_be_fed(session, value):
    y = session.run({"x": value, "scale": SCALE})["y"]
    np.testing.assert_array_equal(y, X * SCALE + [1, 2, 3])


def test_objects_with_array_or_dlpack_can_be_fed(session):
    class Array:
        def __array__(self, dtype=None, copy=None):
            return X

    class Tensor:
        def __dlpack__(self, **options):
            return X.__dlpack__(**options)

        def __dlpack_device__(self):
            return X.__dlpack_device__()

    for value in (Array(), Tensor()):
        y = session.run({"x": value, "scale": SCALE})["y"]
        np.testing.assert_array_equal(y, X * SCALE + [1, 2, 3])


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"y0": X, "scale": SCALE}, r"'y0'.*did you mean 'y'"),
        ({"x": X}, r"not fed: 'scale'"),
        ({"x": X, "scale": SCALE, "extra": X}, r"cannot feed 'extra'"),
        ({"x": X.astype(np.float64), "scale": SCALE}, r"'x' must be float32, not float64.*astype"),
        ({"x": X[0], "scale": SCALE}, r"'x' has rank 2.*shape \(3,\)"),
        ({"x": X.T, "scale": SCALE}, r"'x' must have 3 at axis 1.*shape \(3, 2\)"),
        ({"x": "text", "scale": SCALE}, r"'x'"),
        ({"x": None, "scale": SCALE}, r"'x'"),
        ({"x": [[1, 2, 3], [4]], "scale": SCALE}, r"'x'"),
        ({"x": [[1j, 2, 3]], "scale": SCALE}, r"'x'.*complex128 does not fit"),
    ],
)
def test_wrong_feeds_are_explained(session, feeds, message):
    with pytest.raises(ps.InvalidInput, match=message):
        session.run(feeds)


def test_feeds_must_be_a_mapping(session):
    with pytest.raises(ps.InvalidInput, match="list"):
        session.run([X, SCALE])


def test_array_that_cannot_be_read_raises_invalid_input(session):
    class Broken:
        def __array__(self, dtype=None, copy=None):
            raise KeyError("x")

    with pytest.raises(ps.InvalidInput, match=r"'x'.*Broken"):
        session.run({"x": Broken(), "scale": SCALE})


def test_session_checks_the_dtype_of_a_fed_intermediate_value(session):
    assert session.run({"product": [[1, 2, 3]]}, ["y"])["y"].tolist() == [[2, 4, 6]]
    with pytest.raises(ps.InvalidInput, match="'product' must be float32, not float64"):
        session.run({"product": X.astype(np.float64)}, ["y"])


def test_plans_depend_on_dtypes_that_the_model_leaves_open():
    x, y, z = (ps.ir.graph.Value(name) for name in "xyz")
    nodes = [
        ps.ir.graph.Node(ps.ops.find("Exp"), [x], [y]),
        ps.ir.graph.Node(ps.ops.find("Neg"), [y], [z]),
    ]
    session = ps.compile(ps.ir.graph.Model({"g": ps.ir.graph.Graph([x], [z], nodes)}, "g"))
    for dtype in (np.float32, np.float64, np.float32):
        z = session(np.ones(3, dtype))
        assert z.dtype == dtype
        np.testing.assert_allclose(z, -np.exp(np.ones(3, dtype)), 1e-6)
    # Values with a type of their own need not be arrays.
    assert session(np.float32(0)).shape == ()
    assert session(1.0).dtype == np.float64


def test_elements_of_a_sequence_must_have_the_dims_that_are_declared():
    #  plans depend on them: an element of shape (1,) would be broadcast where (2,) was planned
    session = compile_text("""g (seq(float[2]) s) => (float[2] y) <int64 first = {0}> {
                a = SequenceAt(s, first) b = Neg(a) y = Exp(b) }""")
    np.testing.assert_allclose(session([np.zeros(2, np.float32)]), [1, 1])
    for shape in ((1,), (3,), (1, 2), ()):
        with pytest.raises(ps.InvalidInput, match=r"'s\[0\]'"):
            session([np.zeros(shape, np.float32)])


def test_elements_of_a_sequence_may_have_different_dims_of_one_name():
    session = compile_text("""g (seq(float[N]) s) => (int64[1] y) <int64 first = {0}, int64 second = {1}> {
                a = SequenceAt(s, first) b = SequenceAt(s, second)
                m = Shape(a) n = Shape(b) y = Sub(m, n) }""")
    assert session([np.zeros(5, np.float32), np.zeros(3, np.float32)]).tolist() == [2]


def test_shapes_that_the_model_cannot_take_raise_invalid_input(session):
    session = compile_text(
        "g (float[N] x) => (float[N] y) <float[3] k = {1, 2, 3}> { y = Add(x, k) }"
    )
    assert session(np.zeros(1, np.float32)).shape == (3,)
    with pytest.raises(ps.InvalidInput, match=r"x: float32\[4\].*Add"):
        session(np.zeros(4, np.float32))


def test_dims_of_one_name_must_be_equal():
    session = compile_text("g (float[N] a, float[N] b) => (float[N] c) { c = Add(a, b) }")
    with pytest.raises(ps.InvalidInput, match=r"dim 'N' at axis 0 is 1, but 3 at 'a'"):
        session(np.ones(3, np.float32), np.ones(1, np.float32))


def test_unknown_fetches_are_explained(session):
    with pytest.raises(ps.InvalidInput, match=r"cannot fetch 'produkt'.*'product'"):
        session.run({"x": X, "scale": SCALE}, fetches=["produkt"])
    with pytest.raises(ps.InvalidInput, match=r"did you mean \['y'\]"):
        session.run({"x": X, "scale": SCALE}, fetches="y")


def test_session_checks_the_number_of_positional_inputs(session):
    with pytest.raises(ps.InvalidInput, match="1 inputs given"):
        session(X)


def test_unknown_options_are_refused(proto):
    with pytest.raises(ValueError, match="linear"):
        ps.compile(proto, executor="lineal")
    with pytest.raises(ValueError, match="numpy"):
        ps.compile(proto, backends=["cuda"])
    for threads in (0, -1):
        with pytest.raises(ValueError, match=f"threads={threads}: .* at least 1"):
            ps.compile(proto, threads=threads)
    with pytest.raises(ps.InvalidInput, match="cannot feed 'w'"):
        ps.compile(proto, shapes={"w": (1,)})


@pytest.mark.parametrize("shape", [(2,), (None, 3), (-1, 3), ("N", 3), (2.0, 3)])
def test_shapes_to_compile_for_must_be_shapes(proto, shape):
    with pytest.raises(ps.InvalidInput, match="'x'"):
        ps.compile(proto, shapes={"x": shape})


def test_shapes_may_be_numpy_integers(proto):
    assert ps.compile(proto, shapes={"x": np.array([4, 3])}).memory.count == 1


def test_session_needs_a_shape_for_an_input_of_unknown_rank():
    x = ps.ir.graph.Value("x", ps.core.types.TensorType(np.dtype(np.float32)))
    y = ps.ir.graph.Value("y")
    graph = ps.ir.graph.Graph([x], [y], [ps.ir.graph.Node(ps.ops.find("Exp"), [x], [y])])
    with pytest.raises(ps.InvalidInput, match="every dim"):
        ps.compile(ps.ir.graph.Model({"g": graph}, "g"), shapes={})


def test_strings_can_be_fed_and_returned():
    session = compile_text(
        "g (string[N] a, string[N] b) => (string[N] c) { c = StringConcat(a, b) }"
    )
    assert session(["a", "b"], np.array(["c", "d"]))[1] == "bd"


# Lifetime.


def test_closed_session_refuses_runs(session):
    with session:
        session(X, SCALE)
    with pytest.raises(ps.PenstockError, match="closed"):
        session(X, SCALE)
    with pytest.raises(ps.PenstockError, match="closed"):
        session.run({"x": X, "scale": SCALE}, fetches=["y"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_child_forked_during_a_compilation_can_compile(proto):
    session = ps.compile(proto)
    held, end = threading.Event(), threading.Event()

    def hold() -> None:
        with plan_cache._LOCK, session._subgraphs.main.lock:
            held.set()
            end.wait(SOON)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(SOON)
    child = os.fork()
    if not child:
        good = False
        try:
            good = session(np.ones((5, 3), np.float32), SCALE)[0].shape == (5, 3)
        finally:
            os._exit(0 if good else 1)
    end.set()
    thread.join(SOON)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    session(np.ones((5, 3), np.float32), SCALE)


def test_observer_of_another_class_is_refused(session):
    feeds = {"x": X, "scale": SCALE}
    for options in ({"trace": True}, {"observers": [print]}, {"trace": ps.Trace}):
        with pytest.raises(TypeError, match="does not observe: trace= takes"):
            session.run(feeds, **options)
        with pytest.raises(TypeError, match="does not observe"):
            session.submit(feeds, **options)


def test_close_frees_plans_and_arenas(session):
    session(X, SCALE)
    session.run({"x": X, "scale": SCALE}, ["product"])
    session.close()
    assert session.memory == (ps.session.facts.Memory(0, 0, 0, 0))


def test_running_run_ends_after_its_session_is_closed():
    session = endless()
    token = ps.CancelToken()
    with ThreadPoolExecutor(1) as pool:
        begun = Begun()
        run = pool.submit(session.run, FOREVER, cancel=token, observers=[begun])
        assert begun.event.wait(SOON)
        session.close()
        session.trim()
        token.cancel()
        with pytest.raises(ps.Cancelled):
            run.result()
    assert session.memory.count == 0


def test_deleted_session_frees_its_arenas_at_once():
    session = compile_text("g (float[N] x) => (float[N] y) { a = Exp(x) y = Neg(a) }")
    session(np.zeros(1_000_000, np.float32))
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(session.inspect.executor)
        del session
        assert gone() is None
    finally:
        gc.enable()


def test_errors_keep_their_fields_when_pickled():
    for error in (ps.InvalidModel(["a", "b"]), ps.InvalidInput("x"), ps.Unsupported([])):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)


def test_trim_gives_arenas_back(session):
    session(X, SCALE)
    before = session.memory.arenas
    session.trim()
    assert session.memory.arenas == 0 <= before
    np.testing.assert_array_equal(session(X, SCALE)[0], X * SCALE + [1, 2, 3])


# Other ways to run.


def test_run_async_returns_before_the_run_and_calls_back(session):
    gate, ended = threading.Event(), queue.Queue()

    class Waits(ps.Observer):
        def run_begin(self, run):
            assert gate.wait(SOON)

    x = {"x": X, "scale": SCALE}
    assert session.run_async(lambda *end: ended.put(end), x, observers=[Waits()]) is None
    assert ended.empty()
    gate.set()
    outputs, error = ended.get(timeout=SOON)
    np.testing.assert_array_equal(outputs["y"], session.run(x)["y"])
    assert error is None
    session.run_async(lambda *end: ended.put(end), {"nope": 1})
    outputs, error = ended.get(timeout=SOON)
    assert outputs is None
    assert isinstance(error, ps.InvalidInput)


def test_submit_and_arun_return_the_outputs_of_run(session):
    feeds = {"x": X, "scale": SCALE}
    wanted = session.run(feeds)["y"]
    futures = [session.submit(feeds) for _ in range(20)]
    for future in futures:
        np.testing.assert_array_equal(future.result()["y"], wanted)

    async def many():
        return await asyncio.gather(*(session.arun(feeds, ["y"]) for _ in range(20)))

    for outputs in asyncio.run(many()):
        np.testing.assert_array_equal(outputs["y"], wanted)


@pytest.mark.parametrize("given", [True, False])
def test_cancelling_a_task_cancels_its_run_and_no_other(given):
    session = endless()
    futures: list[Future] = []

    def submit(*arguments, **options):
        futures.append(ps.Session.submit(session, *arguments, **options))
        return futures[-1]

    session.submit = submit  # type: ignore[method-assign]
    token = ps.CancelToken()
    options = {"cancel": token} if given else {"cancel": None}

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(session.arun(FOREVER, **options), 0.05)
        error = await asyncio.to_thread(futures[0].exception, SOON)
        assert isinstance(error, ps.Cancelled)
        assert not token.cancelled
        # The token still cancels others.
        begun = Begun()
        task = asyncio.ensure_future(session.arun(FOREVER, cancel=token, observers=[begun]))
        assert await asyncio.to_thread(begun.event.wait, SOON)
        token.cancel()
        with pytest.raises(ps.Cancelled):
            await task

    asyncio.run(main())


def test_source_shows_the_origin_of_each_line(proto):
    session = ps.compile(proto, backends=["numpy"])
    session(X, SCALE)
    assert "multiply(" in session.source
    assert "# Add_1 in the model" in session.source or "Add" in session.source


def test_tracebacks_show_lines_of_generated_code():
    session = compile_text("g (float[3] x, int64[N] i) => (float[N] y) { y = Gather(x, i) }")
    import traceback

    with pytest.raises(ps.RunError) as caught:
        session(np.zeros(3, np.float32), np.array([5]))
    assert "gather_0(" in "".join(traceback.format_exception(caught.value))


def test_importing_penstock_imports_neither_onnx_nor_numpy():
    code = "import sys, penstock; print([m for m in ('onnx', 'numpy', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("executor", ["auto", "dataflow", "frames", "interpret"])
def test_run_string_inputs_take_strings_and_nothing_else(executor):
    text = "g (string[N] a, string[N] b) => (string[N] y) { y = StringConcat(a, b) }"
    session = compile_text(text, executor=executor)
    feeds = {"a": np.array(["a", "b"], object), "b": np.array([b"c", b"d"], object)}
    assert session.run(feeds)["y"].tolist() == ["ac", "bd"]
    other = {"a": np.array([b"\xff"], object), "b": np.array(["a"], object)}  # no UTF-8
    assert session.run(other)["y"].tolist() == ["\udcffa"]
    for element in (1, 1.5, None, ["a"]):
        wrong = np.empty(2, object)
        wrong[:] = ["a", element]
        for name in ("a", "b"):
            with pytest.raises(ps.InvalidInput, match=f"input '{name}'"):
                session.run({**feeds, name: wrong})


def test_run_array_with_masked_elements_is_refused(session):
    masked = np.ma.array(X, mask=X > 2)
    with pytest.raises(ps.InvalidInput, match="input 'x' has masked elements"):
        session.run({"x": masked, "scale": SCALE})
    assert session.run({"x": masked.filled(0), "scale": SCALE})["y"].shape == (2, 3)
