"""Concat: oneDNN against the NumPy backend."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.backends.onednn.backend import OneDnnBackend
from penstock.backends.onednn.library import library
from tests.backends.onednn.forced import check, one_node, refused

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")

rng = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("perm", [(), (0, 2, 3, 1), (0, 3, 1, 2), (3, 2, 1, 0)])
@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1, -3])
def test_concat_of_two_tensors_along_any_axis(axis, perm):
    feeds = {"x": draw(2, 3, 4, 5)}
    other = list(np.transpose(feeds["x"], perm or range(4)).shape)
    other[axis] += 2
    feeds["z"] = draw(*other)
    check(one_node("Concat", feeds, axis=axis, perm=perm), feeds, "Concat")


@pytest.mark.parametrize("count", [2, 3, 7, 16, 40])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4, 5, 2)])
def test_concat_of_several_tensors_of_any_rank(shape, count):
    feeds = {f"x{i}": draw(*shape) for i in range(count)}
    check(one_node("Concat", feeds, axis=len(shape) - 1), feeds, "Concat")


def test_concat_of_constants_runs_on_numpy():
    feeds = {"x": draw(3, 4)}
    refused(one_node("Concat", feeds, {"k": draw(3, 2)}, axis=1), feeds, "Concat")


def test_concat_of_one_tensor_twice():
    feeds = {"x": draw(3, 4)}
    model = one_node("Concat", feeds, inputs=["x", "x"], axis=1)
    check(model, feeds, "Concat")


@pytest.mark.parametrize(
    ("threads", "size", "chosen"), [(1, 64, "numpy"), (2, 64, "onednn"), (2, 4, "numpy")]
)
def test_concat_of_large_tensors_is_placed_on_onednn_with_two_threads(
    monkeypatch, threads, size, chosen
):
    monkeypatch.setattr(OneDnnBackend, "threads", property(lambda self: threads))
    feeds = {"x": draw(1, 16, size, size), "z": draw(1, 16, size, size)}
    session = ps.compile(one_node("Concat", feeds, axis=1), threads=threads)
    session.run(feeds)
    (step,) = [step for step in session.plan.steps if step.node.op.name == "Concat"]
    assert step.backend == chosen
