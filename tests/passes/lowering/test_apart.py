"""What a padded batch computes before rows are packed is what each sample computes alone, or a node is
named that may let padding in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.build import GraphBuilder
from penstock.session.ahead import check_hidden_rows
from tests.session.test_padding import NAMES, PADDED, feeds_of, model_of, padded
from tests.support.native_kernels import needs_reproducible

ROWS = np.array([1])
Change = Callable[[GraphBuilder, dict[str, Any]], None]


def encoder(change: Change) -> ps.Session:
    """Attention of rows ``x`` to those of the mask; ``change`` changes what goes into it."""
    b, table = GraphBuilder(), np.random.default_rng(0).normal(size=(100, 16))
    ids = b.input("ids", np.int64, ["samples", "rows"])
    mask = b.input("mask", np.int64, ["samples", "rows"])
    parts = {"ids": ids, "mask": mask, "kept": b.op("Cast", mask, to=1)}
    parts["x"] = b.op("Gather", table.astype(np.float32), ids)
    change(b, parts)
    x = b.op("Unsqueeze", parts["x"], ROWS)
    bias = b.op("Unsqueeze", (1 - parts["kept"]) * -1e4, np.array([1, 2]))
    weights = b.op("Softmax", x @ b.op("Transpose", x, perm=[0, 1, 3, 2]) * 0.25 + bias)
    b.output("y", b.op("Squeeze", weights @ x, ROWS))
    return ps.compile(b.model(), cache=False, dead_rows="any")


def check(session: ps.Session) -> None:
    check_hidden_rows(
        session, {"ids": np.ones((2, 16), np.int64), "mask": np.ones((2, 16), np.int64)}
    )


def assert_apart(session: ps.Session, feeds: dict[str, np.ndarray], lengths: list[int]) -> None:
    """Samples of a padded batch have the answers that they have alone."""
    together = session.run(feeds)
    for i, length in enumerate(lengths):
        alone = session.run({name: x[i : i + 1, :length] for name, x in feeds.items()})
        for name, y in together.items():
            own = y[i : i + 1]
            if own.shape != alone[name].shape:
                own = own[:, :length]
            np.testing.assert_allclose(own, alone[name], rtol=1e-4, atol=1e-5)


def of_lengths(b: GraphBuilder, parts: dict[str, Any]) -> None:
    length = b.op("ReduceSum", parts["kept"], ROWS, keepdims=1)
    parts["kept"] = parts["kept"] * b.op("Sign", length)


def of_sums_before(b: GraphBuilder, parts: dict[str, Any]) -> None:
    places = b.op("CumSum", parts["mask"], np.array(1))
    table = np.ones((30, 16), np.float32)
    parts["x"] = parts["x"] + b.op("Gather", table, places)


def of_conditions(b: GraphBuilder, parts: dict[str, Any]) -> None:
    ends = b.op("Cast", b.op("Equal", parts["ids"], np.array(7)), to=1)
    parts["kept"] = parts["kept"] * (b.op("ReduceSum", ends, ROWS, keepdims=1) + 1.0)


def of_neighbours_that_pad(b: GraphBuilder, parts: dict[str, Any]) -> None:
    x = b.op("Transpose", parts["x"], perm=[0, 2, 1])
    y = b.op("Conv", x, np.ones((16, 16, 3), np.float32), pads=[1, 1])
    parts["x"] = b.op("Transpose", y, perm=[0, 2, 1])


def of_the_largest(b: GraphBuilder, parts: dict[str, Any]) -> None:
    largest = b.op("ReduceMax", parts["x"], ROWS, keepdims=1)
    parts["x"] = parts["x"] + b.op("Relu", largest - 3.0)


def of_sums_behind(b: GraphBuilder, parts: dict[str, Any]) -> None:
    places = b.op("CumSum", parts["mask"], np.array(1), reverse=1)
    parts["x"] = parts["x"] + b.op("Gather", np.ones((30, 16), np.float32), places)


def of_all_ids(b: GraphBuilder, parts: dict[str, Any]) -> None:
    # Ids that pad are 0, which is not 1.
    others = b.op("Cast", b.op("Not", b.op("Equal", parts["ids"], np.array(1))), to=1)
    count = b.op("ReduceSum", others, ROWS, keepdims=1)
    parts["kept"] = parts["kept"] * b.op("Sign", count - 100.0)


def of_the_next(b: GraphBuilder, parts: dict[str, Any]) -> None:
    ends = np.array([1]), np.array([1 << 40]), np.array([1])
    rest = b.op("Slice", parts["x"], *ends)
    parts["x"] = b.op("Concat", rest, b.op("Slice", parts["x"], *(-1 * ends[0], *ends[1:])), axis=1)


@pytest.mark.parametrize(
    "change", [lambda b, parts: None, of_lengths, of_sums_before, of_conditions]
)
def test_rows_that_pad_with_zeros_are_known_to_change_nothing(change):
    session = encoder(change)
    check(session)
    mask = padded(16, 9, rows=16).astype(np.int64)
    ids = np.random.default_rng(1).integers(1, 100, mask.shape)
    assert_apart(session, {"ids": ids * mask, "mask": mask}, [16, 9])


@pytest.mark.parametrize(
    ("change", "node"),
    [
        (of_the_largest, "reducemax"),
        (of_sums_behind, "cumsum"),
        (of_all_ids, "reducesum"),
        (of_the_next, "slice"),
        (of_neighbours_that_pad, "conv"),
    ],
)
def test_node_that_may_read_rows_that_pad_is_named(change, node):
    with pytest.raises(
        ps.PenstockError, match=rf"may affect other rows: {node} in .*computes over the axis"
    ):
        check(encoder(change))


@needs_reproducible
def test_batches_that_are_to_be_reproducible_need_attention_in_one_node():
    options = {"cache": False, "dead_rows": "any"}
    feeds = feeds_of(
        session := ps.compile(model_of("DebertaV2Model_script"), **options), padded(9, 5, rows=16)
    )
    check_hidden_rows(session, feeds)
    session = ps.compile(model_of("DebertaV2Model_script"), reproducible=True, **options)
    with pytest.raises(ps.PenstockError, match="reproducible"):
        check_hidden_rows(session, feeds)


@pytest.mark.costly
@pytest.mark.parametrize("name", sorted({*NAMES} - PADDED))
def test_encoders_of_exporters_are_proven(name):
    session = ps.compile(model_of(name), cache=False, dead_rows="any")
    feeds = feeds_of(session, padded(16, 5, rows=16))
    check_hidden_rows(session, feeds)
    assert_apart(session, feeds, [16, 5])
