"""Requests of unequal lengths run together, and each gets what it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.build import GraphBuilder
from penstock.serving.unequal import UnequalRequests
from tests.session.test_padding import model_of
from tests.support.timing import SOON

MEAN, WHOLE = "BertModel_mean_script", "BertModel_script"
MASKS = UnequalRequests(["mask"], frozenset({"rows"}))


def request(length: int, seed: int = 0, rows: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, 40, (rows, length))
    mask, types = np.ones_like(ids), np.zeros_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def answers(outputs: dict) -> list[np.ndarray]:
    return list(outputs.values())


@pytest.mark.costly
@pytest.mark.parametrize("name", [MEAN, WHOLE])
def test_requests_of_any_lengths_get_what_they_get_alone(name):
    alone = ps.compile(model_of(name), "interpret", cache=False)
    lengths = np.random.default_rng(0).integers(1, 40, 40)
    requests = [request(int(n), i, 1 + i % 3) for i, n in enumerate(lengths)]
    options = {"max_batch": 16, "max_batch_tokens": 400, "max_delay": 0.01, "cache": False}
    with ps.Replicas(model_of(name), 1, **options) as replicas:
        futures = [replicas.submit(feeds) for feeds in requests]
        for feeds, future in zip(requests, futures, strict=True):
            wanted = answers(alone.run(feeds))
            for got, want in zip(answers(future.result(SOON)), wanted, strict=True):
                assert got.shape == want.shape
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        assert replicas.counts.batches < len(requests)


def test_batches_have_no_more_tokens_than_asked_for():
    seen = []
    options = {"max_batch": 100, "max_batch_tokens": 64, "queue": 100, "cache": False}
    with ps.Replicas(model_of(MEAN), 1, **options) as replicas:
        join = replicas._batching.joined

        def joined(requests):
            seen.append(sum(feeds["input_ids"].size for feeds in requests))
            return join(requests)

        replicas._batching.joined = joined
        futures = [replicas.submit(request(20, i)) for i in range(20)]
        for future in futures:
            future.result(SOON)
    assert seen
    assert max(seen) <= 64


def test_request_whose_inputs_differ_in_length_runs_alone_and_says_why():
    feeds = request(8)
    feeds["attention_mask"] = feeds["attention_mask"][:, :5]
    options = {"max_batch": 4, "max_batch_tokens": 64, "cache": False}
    with ps.Replicas(model_of(MEAN), 1, **options) as replicas:
        with pytest.raises(ps.PenstockError):
            replicas.run(feeds)
        assert len(answers(replicas.run(request(8)))[0]) == 1


def test_lengths_that_the_model_does_not_take_when_rounded_up_are_run():
    lengths = [39, 38, 37, 36]  # there are 40 positions, and 64 is the next multiple
    options = {"max_batch": 8, "max_batch_tokens": 1000, "max_delay": 0.05, "cache": False}
    alone = ps.compile(model_of(MEAN), "interpret", cache=False)
    with ps.Replicas(model_of(MEAN), 1, **options) as replicas:
        for _ in range(2):
            futures = [replicas.submit(request(n, n)) for n in lengths]
            for n, future in zip(lengths, futures, strict=True):
                (got,), (want,) = answers(future.result(SOON)), answers(alone.run(request(n, n)))
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        assert not replicas._batching.rounds


def test_model_without_a_mask_is_refused():
    b = GraphBuilder()
    x = b.input("x", np.float32, ["rows", "length", 4])
    b.output("y", b.op("Relu", x))
    with pytest.raises(ValueError, match="no input is a mask"):
        ps.Replicas(b.model(), max_batch=4, max_batch_tokens=10)


def test_model_whose_answers_depend_on_padding_is_refused():
    b = GraphBuilder()
    mask = b.input("mask", np.int64, ["rows", "length"])
    x = b.input("x", np.float32, ["rows", "length"])
    bias = (1 - b.op("Cast", mask, to=1)) * -1e4
    weights = b.op("Softmax", x + bias)
    b.output("y", b.op("ReduceMean", weights, np.array([1]), keepdims=0))  # 1 / length
    with pytest.raises(
        ValueError, match="output 'y' of a request changes if the request is padded"
    ):
        ps.Replicas(b.model(), max_batch=4, max_batch_tokens=10)


def attention(hide: float, output: Callable[[GraphBuilder, Any], Any]) -> ps.Model:
    """Attention of rows to those that a mask does not hide by ``hide``."""
    b, table = GraphBuilder(), np.random.default_rng(0).normal(size=(100, 16))
    ids = b.input("ids", np.int64, ["rows", "length"])
    mask = b.input("mask", np.int64, ["rows", "length"])
    x = b.op("Unsqueeze", b.op("Gather", table.astype(np.float32), ids), np.array([1]))
    bias = b.op("Unsqueeze", (1 - b.op("Cast", mask, to=1)) * hide, np.array([1, 2]))
    scores = x @ b.op("Transpose", x, perm=[0, 1, 3, 2]) * 0.25 + bias
    b.output("y", output(b, b.op("Squeeze", b.op("Softmax", scores) @ x, np.array([1]))))
    return b.model()


def shifted(b: GraphBuilder, y: Any) -> Any:
    """Rows behind attention that read the next one, where that is large."""
    rest = b.op("Slice", y, np.array([1]), np.array([1 << 40]), np.array([1]))
    last = b.op("Slice", y, np.array([-1]), np.array([1 << 40]), np.array([1]))
    return y + b.op("Relu", b.op("Concat", rest, last, axis=1) - 50.0)


def test_model_in_which_rows_may_act_on_others_is_refused_by_the_node():
    # No trial of two requests shows it.
    with pytest.raises(ValueError, match=r"cannot be batched by tokens.*slice.*Omit"):
        ps.Replicas(attention(-1e4, shifted), max_batch=4, max_batch_tokens=10)


def test_mask_that_hides_rows_but_nearly_is_refused():
    with pytest.raises(
        ValueError, match="output 'y' of a request changes if the request is padded"
    ):
        ps.Replicas(attention(-10.0, lambda _, y: y), max_batch=4, max_batch_tokens=10)


def test_batch_of_shapes_without_a_proof_runs_one_request_at_a_time(monkeypatch):
    options = {"max_batch": 4, "max_batch_tokens": 100, "max_delay": 0.05, "cache": False}
    with ps.Replicas(model_of(MEAN), 1, **options) as replicas:

        def refuse(session, feeds):
            raise ps.PenstockError("no proof")

        monkeypatch.setattr("penstock.serving.unequal.check_hidden_rows", refuse)
        futures = [replicas.submit(request(n, n)) for n in (30, 20)]
        found = [answers(future.result(SOON)) for future in futures]
        assert replicas.counts.batches == 3
    alone = ps.compile(model_of(MEAN), "interpret", cache=False)
    for n, (got,) in zip((30, 20), found, strict=True):
        np.testing.assert_allclose(got, *answers(alone.run(request(n, n))), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"max_batch_tokens": 8}, {"max_batch": 4, "max_batch_tokens": 0}]
)
def test_tokens_need_batches_and_a_number(options):
    with pytest.raises(ValueError, match="max_batch"):
        ps.Replicas(model_of(MEAN), **options)


@given(data=st.data())
def test_what_is_joined_is_split_as_it_was(data):
    sizes = data.draw(
        st.lists(st.tuples(st.integers(1, 3), st.integers(1, 70)), min_size=1, max_size=6)
    )
    requests = []
    for i, size in enumerate(sizes):
        x = np.random.default_rng(i).integers(1, 99, size)
        requests.append({"ids": x, "mask": np.ones_like(x)})
    batch = MASKS.joined(requests)
    rows, longest = sum(n for n, _ in sizes), max(n for _, n in sizes)
    count, length = batch["ids"].shape
    assert rows <= count < 2 * rows
    assert longest <= length < longest + 32
    assert batch["mask"].sum() == sum(n * m for n, m in sizes) + count - rows
    outputs = {"rows": batch["ids"], "sums": batch["ids"].sum(1)}
    for feeds, parts in zip(requests, MASKS.split(outputs, requests), strict=True):
        np.testing.assert_array_equal(parts["rows"], feeds["ids"])
        np.testing.assert_array_equal(parts["sums"], feeds["ids"].sum(1))
    assert MASKS.split({"rows": batch["ids"][: rows - 1]}, requests) is None


def test_requests_of_other_dtypes_or_dims_are_not_joined():
    x = np.ones((1, 4, 3), np.float32)
    assert MASKS.key({"x": x}) == MASKS.key({"x": x[:, :2]})
    assert MASKS.key({"x": x}) != MASKS.key({"x": x[..., :2]})
    assert MASKS.key({"x": x}) != MASKS.key({"x": x.astype(np.float64)})
    assert MASKS.key({"x": x, "y": x[:, :2]}) is None
    assert MASKS.key({"x": x[:, :0]}) is None
    assert MASKS.key({"x": x[0, 0]}) is None
