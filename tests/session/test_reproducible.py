"""``reproducible=True``: the same bits for any batch, threads, executor and processor."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.zoo.sample import samples
from bench.zoo.store import flat
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.build import GraphBuilder
from penstock.host.native import load_level
from penstock.ops.internal.fused import parts
from tests.support.frame_runs import inputs
from tests.support.native_kernels import needs_reproducible
from tests.support.onnx_text import compile_text
from tests.support.sweeps import drawn

ENCODERS = Path(__file__).parents[1] / "models" / "encoders.zip"
NAMES = sorted(zipfile.ZipFile(ENCODERS).namelist())
ZOO = {sample.name: (model, feeds) for sample, model, feeds in samples()}
# NumPy computes these by functions with several implementations.
REFUSED = {"jax/jnp_arcsinh"}
# One random result is in each run, and none in each row.
RANDOM = [name for name in ZOO if "rand" in name.lower() or "multinomial" in name.lower()]

pytestmark = needs_reproducible


def session_of(model: Any, **options: Any) -> ps.Session:
    return ps.compile(model, cache=False, reproducible=True, **options)


def digest(values: Sequence[Any]) -> str:
    """A digest of all bits of results."""
    total = hashlib.md5()
    for value in flat(values):
        is_plain = isinstance(value, np.ndarray) and value.dtype != object
        total.update(value.tobytes() if is_plain else repr(value).encode())
    return total.hexdigest()


def encoder(name: str) -> bytes:
    return zipfile.ZipFile(ENCODERS).read(name)


def padded(session: ps.Session, lengths: Sequence[int], rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    mask = np.arange(rows) < np.array(lengths)[:, None]
    # Texts are the same whatever they are padded to.
    ids = np.where(mask, rng.integers(3, 40, (len(lengths), 64))[:, :rows], 1)
    given = {"attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {p.name: given.get(p.name, ids).astype(p.type.dtype) for p in session.inputs}


def rows_of(results: Mapping[str, Any], i: int) -> str:
    return digest([value[i] for value in results.values()])


@pytest.mark.costly
@pytest.mark.parametrize("name", drawn(NAMES, 3))
@given(
    lengths=st.lists(st.integers(0, 24), min_size=1, max_size=6),
    data=st.data(),
    alone=st.booleans(),
)
def test_sample_of_a_padded_batch_has_the_bits_that_it_has_alone(name, lengths, data, alone):
    session = session_of(encoder(name))
    feeds = padded(session, lengths, 24)
    results = session.run(feeds)
    i = data.draw(st.integers(0, len(lengths) - 1))
    others = [] if alone else data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=3))
    some = {key: value[[*others, i]] for key, value in feeds.items()}
    assert rows_of(session.run(some), -1) == rows_of(results, i)


# Attention that is not one node covers all rows, on whose number its bits depend.
POOLED = [n for n in NAMES if ("_mean" in n or "_first" in n) and "Deberta" not in n]


@pytest.mark.costly
@pytest.mark.parametrize("name", drawn(POOLED, 6))
def test_text_has_the_same_bits_whatever_it_is_padded_to(name):
    session = session_of(encoder(name))
    # Texts are drawn by their index: the first is the same in all of these.
    batches = [([7], 7), ([7, 24], 24), ([7, 3, 1], 16), ([7] + [12] * 5, 12), ([7, 35], 35)]
    found = [rows_of(session.run(padded(session, lengths, rows)), 0) for lengths, rows in batches]
    assert len({*found}) == 1
    feeds = padded(session, [24, 7], 24)
    batch = rows_of(session.run(feeds), 1)
    alone = {key: value[1:, :7] for key, value in feeds.items()}
    assert rows_of(session.run(alone), 0) == batch


@pytest.mark.parametrize("name", drawn(sorted({*ZOO} - REFUSED), 40))
def test_model_has_the_same_bits_on_all_executors_and_threads(name):
    model, feeds = ZOO[name]
    wanted = digest([*session_of(model, threads=1).run(feeds).values()])
    for executor in ("linear", "dataflow", "parallel", "streams"):
        session = session_of(model, executor=executor)
        for _ in range(2):
            assert digest([*session.run(feeds).values()]) == wanted, executor


def is_batch(session: ps.Session, feeds: Mapping[str, np.ndarray]) -> bool:
    dims = [port.type.shape for port in session.inputs]
    sizes = {len(x) for x in feeds.values() if np.ndim(x)}
    return all(d and not isinstance(d[0], int) for d in dims) and len(sizes) == 1


@pytest.mark.parametrize("name", drawn(sorted({*ZOO} - REFUSED - {*RANDOM}), 40))
def test_row_has_the_same_bits_in_every_batch(name):
    model, feeds = ZOO[name]
    session = session_of(model)
    if not is_batch(session, feeds):
        pytest.skip("its inputs are no batch")
    wanted = session.run(feeds)
    own = len(next(iter(feeds.values())))
    rolled = {k: np.roll(x, 1, -1) if x.dtype.kind == "f" else x for k, x in feeds.items()}
    for copies in (1, 2, 6):
        batch = {k: np.concatenate([rolled[k]] * copies + [x]) for k, x in feeds.items()}
        results = session.run(batch)
        for key, value in wanted.items():
            rows = np.shape(results[key])[:1]
            if isinstance(value, np.ndarray) and rows == ((copies + 1) * own,):
                assert digest([results[key][-own:]]) == digest([value]), key


PROGRAM = """
import json, sys
from tests.session.test_reproducible import ZOO, digest, encoder, padded, session_of
found = {}
for name in json.loads(sys.argv[1]):
    if name in ZOO:
        model, feeds = ZOO[name]
        session = session_of(model)
    else:
        session = session_of(encoder(name))
        feeds = padded(session, [24, 3, 11], 24)
    found[name] = digest([*session.run(feeds).values()])
print(json.dumps(found))
"""
NARROW = {
    # The names before NumPy 2.4, and those since.
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL "
    "X86_V4 AVX512_SPR",
    "OPENBLAS_CORETYPE": "Haswell",
    "OMP_NUM_THREADS": "1",
    "PENSTOCK_NATIVE": "x86-64-v3",
}


def bits(names: Sequence[str], **environment: str) -> dict[str, str]:
    """Run in a separate process."""
    own = {k: v for k, v in os.environ.items() if k != "PENSTOCK_NATIVE"} | environment
    text = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, json.dumps(names)],
        check=True,
        env=own,
        capture_output=True,
        text=True,
    ).stdout
    found: dict[str, str] = json.loads(text.splitlines()[-1])
    return found


@pytest.mark.costly
@pytest.mark.skipif(
    None in (load_level("x86-64-v4"), load_level("x86-64-v3")), reason="kernels for a single level"
)
def test_processors_without_wide_vectors_give_the_same_bits():
    names = [*NAMES[::4], *sorted({*ZOO} - REFUSED)[::5]]
    assert bits(names, **NARROW) == bits(names)


def test_requests_that_run_together_have_the_bits_that_they_have_alone():
    name = next(n for n in NAMES if "BertModel_mean" in n)
    session = session_of(encoder(name))
    lengths = [3, 24, 11, 7, 1, 16, 9, 20]
    feeds = padded(session, lengths, 24)
    requests = [
        {key: value[i : i + 1, :n] for key, value in feeds.items()} for i, n in enumerate(lengths)
    ]
    alone = [rows_of(session.run(request), 0) for request in requests]
    with ps.Replicas(
        encoder(name),
        max_batch=len(lengths),
        max_batch_tokens=200,
        max_delay=60.0,
        cache=False,
        reproducible=True,
    ) as replicas:
        futures = [replicas.submit(request) for request in requests]
        assert [rows_of(future.result(), 0) for future in futures] == alone
        assert replicas.counts.batches < len(requests)


def test_saved_session_is_reproducible_when_it_is_opened(tmp_path):
    name = NAMES[0]
    session = session_of(encoder(name))
    feeds = padded(session, [5, 24], 24)
    wanted = digest([*session.run(feeds).values()])
    session.save(tmp_path / "model.penstock")
    opened = ps.open(tmp_path / "model.penstock")
    assert opened.options.reproducible
    assert digest([*opened.run(feeds).values()]) == wanted


def test_session_of_the_cache_is_another_one(tmp_path):
    model = encoder(NAMES[0])
    for reproducible in (False, True):
        with ps.compile(model, cache=tmp_path, reproducible=reproducible) as session:
            session.run(padded(session, [5], 8))
    assert len([*tmp_path.glob("*.penstock")]) == 2


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_node_that_numpy_computes_by_the_processor_is_refused(name):
    model, feeds = ZOO[name]
    with pytest.raises(ps.Unsupported, match=r"reproducible=True"):
        session_of(model).run(feeds)
    ps.compile(model, cache=False).run(feeds)


def test_node_whose_shapes_only_the_run_knows_is_refused_there():
    text = "g (float[N] x, bool[N] m) => (float[?] y) { c = Compress(x, m) y = Asinh(c) }"
    session = compile_text(text, reproducible=True)
    with pytest.raises(ps.PenstockError, match=r"(?s)Asinh.*reproducible=True"):
        session.run({"x": np.ones(3, np.float32), "m": np.ones(3, bool)})


def test_constants_are_computed_by_compiled_kernels():
    """NumPy would fold them, by a form of ``exp`` that depends on the processor."""
    b = GraphBuilder()
    x = b.input("x", "float32", [8])
    b.output("y", x + b.op("Exp", b.constant(np.linspace(-1, 1, 8, dtype=np.float32))))
    model = b.model()
    plain, own = ps.compile(model, shapes={}, cache=False), session_of(model, shapes={})
    names = [
        {part.op.name for step in session.inspect.plan.walk() for part in parts(step.node)}
        for session in (plain, own)
    ]
    assert names == [{"Add"}, {"Add", "Exp"}]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"precision": "bf16"}, "precision='bf16'"),
        ({"autotune": True}, "autotune="),
        ({"devices": 2}, "devices="),
        ({"executor": "interpret"}, "executor='interpret'"),
        ({"backends": ["torch"]}, "backends"),
        ({"cluster": ps.SimulatedCluster(2, bandwidth=1e9, latency=1e-3)}, "cluster="),
        ({"expert": ps.ExpertOptions(cost_model=type("C", (), {"cost": None})())}, "cost_model="),
    ],
)
def test_options_that_go_without_it_are_refused(options, says):
    with pytest.raises(ValueError, match=rf"reproducible=True goes with.*{says}"):
        session_of(encoder(NAMES[0]), **options)


@pytest.mark.parametrize("level", ["x86-64-v2", "off"])
def test_machine_without_the_kernels_is_told_what_is_missing(level, monkeypatch):
    from penstock.backends.native import backend

    loaded = load_level(level)
    monkeypatch.setattr(backend, "library", lambda: loaded)
    with pytest.raises(
        ps.PenstockError, match=r"(?s)reproducible=True needs kernels for.*has (x|n)"
    ):
        session_of(encoder(NAMES[0]))


def test_products_that_numpy_makes_ahead_are_refused():
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(s).astype(np.float32) for s in ((4, 1, 2, 3), (4,), (5, 3))]
    b = GraphBuilder()
    words = b.input("x", "int32", [2, 6])
    b.output("y", b.op("WordConvEmbedding", words, *weights, domain="com.microsoft"))
    model = b.model()
    ps.compile(model, shapes={}, cache=False)
    with pytest.raises(ps.Unsupported, match=r"(?s)WordConvEmbedding.*reproducible=True"):
        session_of(model, shapes={})


def test_backends_are_those_that_are_asked_for():
    """NumPy alone computes what is exact; it refuses products that it would have to compute."""
    b = GraphBuilder()
    x = b.input("x", "float32", [2, 2])
    b.output("y", x + x)
    session = session_of(b.model(), backends=["numpy"])
    np.testing.assert_array_equal(session(np.ones((2, 2), np.float32)), 2)
    assert {step.backend for step in session.inspect.plan.walk()} == {"numpy"}
    b = GraphBuilder()
    x = b.input("x", "float32", [2, 2])
    b.output("y", x @ x)
    with pytest.raises(ps.Unsupported, match=r"(?s)MatMul.*reproducible=True"):
        session_of(b.model(), backends=["numpy"], shapes={})


@pytest.mark.parametrize("backends", [None, ["numpy"]])
def test_node_of_a_frame_that_numpy_computes_is_refused(backends):
    g = inputs(x="float32", zero="int32", n="int32")
    left = g.loop("while", "zero", "n")
    g.op("Asinh", "x", name="y", T="float32")
    with pytest.raises(ps.Unsupported, match=r"(?s)Asinh.*reproducible=True"):
        session = session_of(g.bytes(), executor="frames", backends=backends)
        session.run({"x": 1.0, "zero": 0, "n": 2}, [left, "y:0"])


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "frames"])
def test_executor_refuses_a_node_that_numpy_computes(executor):
    text = "g (float[N] x) => (float[N] y) { y = Asinh(x) }"
    with pytest.raises(ps.Unsupported, match=r"(?s)Asinh.*reproducible=True"):
        compile_text(text, reproducible=True, executor=executor).run({"x": np.ones(3, np.float32)})


def numbers(*dims: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(dims).standard_normal(dims).astype(dtype)


ZERO, ONE = np.int64(0), np.int64(1)
# Nodes that NumPy computes to the same bits everywhere: with a text, the feeds of a sample, and
# feeds that all samples share.
BY_NUMPY: dict[str, tuple[str, dict[str, np.ndarray], dict[str, Any]]] = {
    "Trilu": (
        "g (float[N, 5, 4] x, int64 k) => (float[N, 5, 4] y) { y = Trilu(x, k) }",
        {"x": numbers(5, 4)},
        {"k": ONE},
    ),
    **{
        f"CumSum {dtype}": (
            f"g ({dtype}[N, 50] x, int64 k) => ({dtype}[N, 50] y) {{ y = CumSum(x, k) }}",
            {"x": numbers(50, dtype=numpy)},
            {"k": ONE},
        )
        for dtype, numpy in (("float", "float32"), ("double", "float64"), ("float16", "float16"))
    },
    "CumProd": (
        "g (float[N, 9, 3] x, int64 k) => (float[N, 9, 3] y) { y = CumProd <reverse = 1> (x, k) }",
        {"x": numbers(9, 3)},
        {"k": np.int64(-2)},
    ),
    "ScatterElements": (
        """g (float[N, 4] x, int64[N, 7] i, float[N, 7] u) => (float[N, 4] y) {
            y = ScatterElements <axis = 1, reduction = "add"> (x, i, u) }""",
        {"x": numbers(4), "i": np.arange(7) % 3, "u": numbers(7)},
        {},
    ),
    "ScatterND without updates": (
        """g (float[N, 4] x, int64[K, 1] i, float[K, 4] u) => (float[N, 4] y) {
            y = ScatterND <reduction = "max"> (x, i, u) }""",
        {"x": numbers(4)},
        {"i": np.zeros((0, 1), np.int64), "u": numbers(0, 4)},
    ),
    "TensorScatter without updates": (
        """g (float[N, 3, 4] x, float[N, S, 4] u, int64[N] i) => (float[N, 3, 4] y) {
            y = TensorScatter(x, u, i) }""",
        {"x": numbers(3, 4), "u": numbers(0, 4), "i": ZERO},
        {},
    ),
    "DFT": (
        "g (float[N, 12, 2] x, int64 a) => (float[N, 12, 2] y) { y = DFT(x, , a) }",
        {"x": numbers(12, 2)},
        {"a": ONE},
    ),
    "DFT of a prime length": (
        "g (double[N, 4099, 1] x) => (double[N, 2050, 2] y) { y = DFT <onesided = 1> (x) }",
        {"x": numbers(4099, 1, dtype="float64")},
        {},
    ),
    "DFT of half a spectrum": (
        "g (float[N, 9, 2] x) => (float[N, 16, 1] y) { y = DFT <inverse = 1, onesided = 1> (x) }",
        {"x": numbers(9, 2)},
        {},
    ),
    "STFT": (
        """g (float[N, 90, 1] x, float[16] w) => (float[N, F, 9, 2] y) <int64 s = {5}> {
            y = STFT(x, s, w) }""",
        {"x": numbers(90, 1)},
        {"w": np.hanning(16).astype(np.float32)},
    ),
    "sequences": (
        """g (float[N, 4] x, int64 n) => (float[N, 8] y) <int64 one = {1}> {
            s = SplitToSequence <axis = 1> (x, one) e = SequenceAt(s, n) t = SequenceInsert(s, e)
            o = Optional(t) g = OptionalGetElement(o) c = SequenceErase(g, n)
            d = ConcatFromSequence <axis = 1> (c) y = Concat <axis = 1> (d, x) }""",
        {"x": numbers(4)},
        {"n": ONE},
    ),
    "OneHot": (
        "g (int64[N] x, int64 d, float[2] v) => (float[N, K] y) { y = OneHot(x, d, v) }",
        {"x": np.int64(2)},
        {"d": np.int64(5), "v": numbers(2)},
    ),
    "CenterCropPad": (
        """g (float[N, 4] x, int64[1] d) => (float[N, K] y) {
            y = CenterCropPad <axes = [1]> (x, d) }""",
        {"x": numbers(4)},
        {"d": np.int64([7])},
    ),
    "Dropout": (
        "g (float[N, 4] x) => (float[N, 4] y, bool[N, 4] m) { y, m = Dropout(x) }",
        {"x": numbers(4)},
        {},
    ),
}


def result_by_numpy(name: str, others: int = 0, **options: Any) -> bytes:
    """The bits of the last sample of a batch, which ``others`` precede."""
    text, sample, shared = BY_NUMPY[name]
    session = compile_text(text, opset=26, reproducible=True, cache=False, **options)
    rows = {k: np.stack([np.roll(x, 1)] * others + [x]) for k, x in sample.items()}
    (result, *_) = session.run({**rows, **shared}).values()
    return bytes(result[-1].tobytes())


@pytest.mark.parametrize("name", BY_NUMPY)
def test_node_that_numpy_rounds_in_one_order_has_the_same_bits_everywhere(name):
    wanted = result_by_numpy(name)
    for others in (1, 2, 3, 7, 16):
        assert result_by_numpy(name, others) == wanted, others
    for executor in ("linear", "dataflow", "parallel", "streams", "frames"):
        for threads in (1, 2):
            options = {"executor": executor, "threads": threads}
            assert result_by_numpy(name, 3, **options) == wanted, options


NUMPY_PROGRAM = """
from hashlib import md5
from tests.session.test_reproducible import BY_NUMPY, result_by_numpy
print(md5(b"".join(result_by_numpy(name, 4) for name in BY_NUMPY)).hexdigest())
"""


@pytest.mark.costly
def test_nodes_that_numpy_rounds_in_one_order_have_the_same_bits_on_other_processors():
    found = set()
    features = ["", NARROW["NPY_DISABLE_CPU_FEATURES"] + " X86_V3 AVX2 FMA3"]
    for disabled in features:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", NUMPY_PROGRAM],
            env={**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout.splitlines()[-1])
    assert len(found) == 1


def test_running_sum_over_a_constant_axis_has_the_bits_of_that_over_an_axis_of_the_run():
    for dtype, numpy in (("float", "float32"), ("double", "float64"), ("float16", "float16")):
        text = (
            f"g ({dtype}[N, 50] x) => ({dtype}[N, 50] y) <int64 k = {{1}}> {{ y = CumSum(x, k) }}"
        )
        x = numbers(1, 50, dtype=numpy)
        result = compile_text(text, reproducible=True, cache=False).run({"x": x})["y"]
        by_run = compile_text(BY_NUMPY[f"CumSum {dtype}"][0], reproducible=True, cache=False)
        assert result.tobytes() == by_run.run({"x": x, "k": ONE})["y"].tobytes()


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_scatter_of_extremes_by_numpy_is_refused(reduction):
    """Of 0 and -0, NumPy may take either."""
    text = f"""g (float16[4] x, int64[K] i, float16[K] u) => (float16[4] y) {{
        y = ScatterElements <reduction = "{reduction}"> (x, i, u) }}"""
    session = compile_text(text, opset=18, reproducible=True, cache=False, precision="strict")
    x = numbers(4, dtype="float16")
    with pytest.raises(ps.Unsupported, match="reproducible=True"):
        session.run({"x": x, "i": np.int64([0]), "u": x[:1]})
