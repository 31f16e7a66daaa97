"""Encoders of many exporters omit the padding rows of a batch, and answer as ONNX Runtime does.

``python -m bench.zoo.encoders`` makes the archive.
"""

from __future__ import annotations

import asyncio
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.backends.dynamic_shapes import KernelCache
from penstock.build import GraphBuilder
from penstock.host.native import library
from tests.support.sweeps import sweep
from tests.support.timing import SOON

FILE = Path(__file__).parents[1] / "models" / "encoders.zip"
NAMES = sorted(name.removesuffix(".onnx") for name in zipfile.ZipFile(FILE).namelist())
# Windows of ConvBert span rows.
PADDED = {"ConvBertModel_dynamo"}
MOST = 1e-5


def model_of(name: str) -> bytes:
    return zipfile.ZipFile(FILE).read(f"{name}.onnx")


@cache
def session_of(name: str, dead_rows: str = "any") -> ps.Session:
    return ps.compile(model_of(name), cache=False, dead_rows=dead_rows)


@cache
def reference_of(name: str) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model_of(name), providers=["CPUExecutionProvider"])


def feeds_of(session: ps.Session, mask: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = np.where(mask, rng.integers(3, 40, mask.shape), 1)
    given = {"attention_mask": mask, "token_type_ids": rng.integers(0, 2, mask.shape)}
    return {p.name: given.get(p.name, ids).astype(p.type.dtype) for p in session.inputs}


def padded(*lengths: int, rows: int = 24) -> np.ndarray:
    return np.arange(rows) < np.array(lengths)[:, None]


def difference(name: str, dead_rows: str, mask: np.ndarray) -> float:
    """Return the distance of answers from ONNX Runtime's, in rows that must agree."""
    session = session_of(name, dead_rows)
    feeds = feeds_of(session, mask)
    apart = 0.0
    wanted = reference_of(name).run(None, feeds)
    for got, want in zip(session.run(feeds).values(), wanted, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        whole = dead_rows == "any" and want.shape[:2] == mask.shape
        got, want = (got[mask != 0], want[mask != 0]) if whole else (got, want)
        apart = max(apart, float(np.abs(got - want).max(initial=0)))
    return apart


def leaves_out(session: ps.Session) -> bool:
    return any(step.node.op.name == "LiveRows" for step in session.inspect.plan.walk())


def test_plans_for_batches_of_other_lengths_share_kernels_of_packed_rows(monkeypatch) -> None:
    made: list[object] = []
    create = KernelCache.__init__
    monkeypatch.setattr(KernelCache, "__init__", lambda *of: made.append(of) or create(*of))
    session = ps.compile(model_of("BertModel_script"), cache=False, dead_rows="any")
    counts = []
    for rows in (24, 25, 26):  # of which as many are live
        session.run(feeds_of(session, padded(20, 9, 3, 11, rows=rows)))
        counts.append(len(made))
        made.clear()
    assert session.stats.plans_made == 3
    assert counts[0] > 20
    assert max(counts[1:]) <= counts[0] // 4


@pytest.mark.costly
@pytest.mark.parametrize("name", NAMES)
def test_encoders_leave_out_rows_that_pad_and_answer_as_before(name):
    assert difference(name, "any", padded(24, 3, 11, 1)) < MOST
    assert leaves_out(session_of(name, "any")) == (name not in PADDED)
    assert difference(name, "exact", padded(24, 3, 11, 1)) < MOST


@pytest.mark.costly
def test_pooled_encoders_leave_out_rows_without_being_asked():
    pooled = [n for n in NAMES if "_mean" in n or "_first" in n or "Sequence" in n]
    for name in sorted({*pooled} - PADDED):
        difference(name, "exact", padded(24, 3, 11, 1))
        assert leaves_out(session_of(name, "exact")), name


@pytest.mark.costly
@pytest.mark.parametrize("name", sweep(sorted({*NAMES} - PADDED), 4))
@given(data=st.data())
def test_any_mask_gives_the_answers_of_the_padded_batch(name, data):
    batch, rows = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 30))
    kind = data.draw(st.sampled_from(["lengths", "left", "any", "empty"]))
    lengths = data.draw(
        st.lists(st.integers(kind != "empty" or 0, rows), min_size=batch, max_size=batch)
    )
    mask = padded(*lengths, rows=rows)
    if kind == "left":
        mask = mask[:, ::-1]
    if kind == "any":
        bits = data.draw(st.lists(st.booleans(), min_size=mask.size, max_size=mask.size))
        mask = np.array(bits).reshape(mask.shape)
    assert difference(name, data.draw(st.sampled_from(["exact", "any"])), mask) < MOST


MEAN = "BertModel_mean_script"


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams", "interpret"])
def test_all_executors_give_the_same_answers(executor):
    session = ps.compile(model_of(MEAN), executor, cache=False)
    feeds = feeds_of(session, padded(24, 3, 11, 1))
    (want,) = reference_of(MEAN).run(None, feeds)
    (got,) = session.run(feeds).values()
    np.testing.assert_allclose(got, want, rtol=MOST, atol=MOST)
    assert leaves_out(session) == (executor != "interpret")


@pytest.mark.parametrize("backends", [["numpy"], ["torch"], ["torch", "numpy"]])
def test_backends_of_the_hosts_memory_alone_leave_out_rows(backends):
    session = ps.compile(model_of(MEAN), backends=backends, cache=False)
    feeds = feeds_of(session, padded(24, 3, 11, 1))
    (got,) = session.run(feeds).values()
    np.testing.assert_allclose(got, reference_of(MEAN).run(None, feeds)[0], rtol=MOST, atol=MOST)
    assert leaves_out(session) == (backends == ["numpy"])


def test_all_ways_to_run_leave_out_rows():
    session = ps.compile(model_of(MEAN), cache=False)
    feeds = feeds_of(session, padded(24, 3, 11, 1))
    (want,) = reference_of(MEAN).run(None, feeds)
    profile, stream = ps.Profile(), ps.Stream()
    runs = {
        "submit": lambda: session.submit(feeds).result(SOON),
        "arun": lambda: asyncio.run(session.arun(feeds)),
        "timeout": lambda: session.run(feeds, timeout=SOON),
        "observed": lambda: session.run(feeds, observers=[profile]),
        "fetches": lambda: session.run(feeds, list(session.run(feeds))),
        "stream": lambda: stream.run(session, feeds).result(SOON),
    }
    for way, run in runs.items():
        np.testing.assert_allclose(
            next(iter(run().values())), want, rtol=MOST, atol=MOST, err_msg=way
        )
    assert any(row.step.node.op.name == "LiveRows" for row in profile)


def test_batches_of_many_lengths_at_once_answer_as_alone():
    session = ps.compile(model_of(MEAN), cache=False)
    rng = np.random.default_rng(0)
    masks = [padded(*rng.integers(1, 31, 4), rows=int(rng.integers(20, 31))) for _ in range(40)]
    feeds = [feeds_of(session, mask, i) for i, mask in enumerate(masks)]
    wanted = [reference_of(MEAN).run(None, each)[0] for each in feeds]
    with ThreadPoolExecutor(4) as pool:
        for got, want in zip(pool.map(session.run, feeds), wanted, strict=True):
            np.testing.assert_allclose(next(iter(got.values())), want, rtol=MOST, atol=MOST)


def test_fetched_rows_in_the_middle_are_computed_as_the_model_says():
    session = ps.compile(model_of(MEAN), cache=False)
    feeds = feeds_of(session, padded(24, 3, 11, 1))
    whole = ps.compile(model_of(MEAN), "interpret", cache=False)
    rows = next(
        n.outputs[0].name for n in whole.model.graph.nodes if n.op.name == "LayerNormalization"
    )
    (got,), (want,) = session.run(feeds, [rows]).values(), whole.run(feeds, [rows]).values()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=MOST)


def test_saved_session_leaves_out_rows(tmp_path):
    ps.compile(model_of(MEAN), cache=False).save(tmp_path / "encoder.penstock")
    session = ps.open(tmp_path / "encoder.penstock")
    feeds = feeds_of(session, padded(24, 3, 11, 1))
    (got,) = session.run(feeds).values()
    np.testing.assert_allclose(got, reference_of(MEAN).run(None, feeds)[0], rtol=MOST, atol=MOST)
    assert leaves_out(session)


def test_batches_with_and_without_padding_take_turns():
    session = ps.compile(model_of(MEAN), cache=False)
    for mask in [padded(24, 24, 24), padded(24, 3, 3), padded(24, 24, 24), padded(24, 23, 23)]:
        feeds = feeds_of(session, mask)
        (got,) = session.run(feeds).values()
        np.testing.assert_allclose(
            got, reference_of(MEAN).run(None, feeds)[0], rtol=MOST, atol=MOST
        )
    assert session.stats.plans_made == 2


def test_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="dead_rows"):
        ps.compile(model_of(MEAN), dead_rows="zero")


def attention_of(form: str) -> ps.Model:
    """An encoder whose mask is of ``form``: "int", "float", "bool" (what pads), "bias" (of scores), or
    "merged", of integers, with products of three axes."""
    rng = np.random.default_rng(0)
    b = GraphBuilder()
    ids = b.input("input_ids", np.int64, ["samples", "rows"])
    dims = ["samples", 1, 1, "rows"] if form == "bias" else ["samples", "rows"]
    dtype = {"float": np.float32, "bias": np.float32, "bool": np.bool_}.get(form, np.int64)
    mask = b.input("attention_mask", dtype, dims)
    x = b.op("Gather", rng.normal(size=(40, 16)).astype(np.float32), ids)
    q, k, v, o = (rng.normal(size=(16, 16)).astype(np.float32) / 4 for _ in range(4))

    def heads(y):
        split = b.op("Reshape", y, np.array([0, 0, 2, 8]))
        split = b.op("Transpose", split, perm=[0, 2, 1, 3])
        return b.op("Reshape", split, b.op("Concat", [-1], rows, [8], axis=0)) if merged else split

    merged, rows = form == "merged", b.op("Shape", ids, start=1)
    swap = [0, 2, 1] if merged else [0, 1, 3, 2]
    scores = heads(x @ q) @ b.op("Transpose", heads(x @ k), perm=swap) * 0.25
    bias = mask
    if form != "bias":
        kept = b.op("Cast", mask, to=1)
        bias = b.op("Unsqueeze", (kept if form == "bool" else 1 - kept) * -1e9, np.array([1, 2]))
    if merged:
        four = b.op("Concat", [-1], [2], rows, rows, axis=0)
        scores = b.op("Reshape", scores, four) + bias
        scores = b.op("Reshape", scores, b.op("Concat", [-1], rows, rows, axis=0))
    else:
        scores = scores + bias
    y = b.op("Softmax", scores) @ heads(x @ v)
    if merged:
        y = b.op("Reshape", y, b.op("Concat", [-1], [2], rows, [8], axis=0))
    y = b.op("Reshape", b.op("Transpose", y, perm=[0, 2, 1, 3]), np.array([0, 0, 16]))
    b.output("y", x + b.op("Relu", y @ o))
    return b.model()


@pytest.mark.parametrize("form", ["int", "float", "bool", "bias", "merged"])
def test_masks_of_any_type_and_heads_of_all_samples_on_one_axis_are_recognized(form):
    model, mask = attention_of(form), padded(24, 3, 11, 1, 0)
    given = {"bias": (mask[:, None, None] - 1.0) * 1e9, "bool": ~mask}.get(form, mask)
    session = ps.compile(model, cache=False, dead_rows="any")
    feeds = feeds_of(session, mask)
    feeds["attention_mask"] = given.astype(feeds["attention_mask"].dtype)
    first = session.run(feeds)["y"]  # equal feeds use the same plan, also the first time
    assert leaves_out(session)
    np.testing.assert_array_equal(session.run(feeds)["y"], first)
    want = ps.compile(model, "interpret", cache=False).run(feeds)["y"]
    live = mask.copy()
    live[-1] = True  # the mask hides no row, so that all are computed
    np.testing.assert_allclose(first[live], want[live], 1e-5, 1e-5)


@pytest.mark.parametrize("form", ["int", "float", "bool", "bias"])
def test_masks_that_hide_nothing_need_no_look_at_the_plans(form, monkeypatch):
    if library() is None:
        pytest.skip("without compiled kernels, feeds are looked at in Python")
    session = ps.compile(attention_of(form), cache=False, dead_rows="any")
    mask = padded(24, 24, 24, 24)
    feeds = feeds_of(session, mask)
    given = np.zeros((4, 1, 1, 24)) if form == "bias" else ~mask if form == "bool" else mask
    given = feeds["attention_mask"] = given.astype(feeds["attention_mask"].dtype)
    want = session.run(feeds)["y"]
    with monkeypatch.context() as patch:
        patch.setattr(session._plans, "look_up", None)  # which other runs call
        np.testing.assert_array_equal(session.run(feeds)["y"], want)
    assert session.stats.plans_made == 1
    given[1:, ..., 3:] = {"bias": -1e9, "bool": True}.get(form, 0)
    session.run(feeds)
    assert session.stats.plans_made == 2


@pytest.mark.parametrize("form", ["float", "bool"])
def test_opened_session_leaves_out_the_rows_that_the_saved_one_does(form, tmp_path):
    mask = padded(24, 3, 11, 1, 0)
    session = ps.compile(attention_of(form), cache=False, dead_rows="any")
    feeds = feeds_of(session, mask)
    feeds["attention_mask"] = (~mask if form == "bool" else mask).astype(
        feeds["attention_mask"].dtype
    )
    first = session.run(feeds)["y"]
    session.save(tmp_path / "saved.penstock")
    opened = ps.open(tmp_path / "saved.penstock", dead_rows="any")
    np.testing.assert_array_equal(opened.run(feeds)["y"], first)
    assert leaves_out(opened)


@pytest.mark.parametrize("is_opened", [False, True])
def test_integers_that_are_no_masks_are_not_looked_at(is_opened, tmp_path, monkeypatch):
    b = GraphBuilder()
    x, y = [b.input(name, "int64", ["n", 64]) for name in "xy"]
    b.output("z", x * y)
    session = ps.compile(b.model(), cache=False)
    feeds = {"x": np.ones((4, 64), np.int64), "y": np.zeros((4, 64), np.int64)}
    session.run(feeds)
    if is_opened:
        session.save(tmp_path / "saved.penstock")
        session = ps.open(tmp_path / "saved.penstock")
        session.run(feeds)
    monkeypatch.setattr(session._plans, "look_up", None)  # which other runs call
    np.testing.assert_array_equal(session.run(feeds)["z"], 0)
