"""Strings are references to Python's objects, which no compiled kernel may copy uncounted."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from tests.support.cost_models import PreferredBackendCosts
from tests.support.onnx_text import compile_text

OPERATIONS = {
    "Pad": "<int64[2] p = {1, 2}> { y = Pad(x, p) }",
    "Gather": "<int64[3] i = {0, 2, 0}> { y = Gather<axis=0>(x, i) }",
    "GatherElements": "<int64[3] i = {0, 2, 0}> { y = GatherElements<axis=0>(x, i) }",
    "GatherND": "<int64[3, 1] i = {0, 2, 0}> { y = GatherND(x, i) }",
    "ScatterElements": "<int64[1] i = {1}, int64[1] k = {0}> {"
    " u = Gather(x, k) y = ScatterElements<axis=0>(x, i, u) }",
    "ScatterND": "<int64[1, 1] i = {1}, int64[1] k = {0}> { u = Gather(x, k) y = ScatterND(x, i, u) }",
    "Concat": "{ y = Concat<axis=0>(x, x) }",
    "Tile": "<int64[1] n = {3}> { y = Tile(x, n) }",
    "Expand": "<int64[2] n = {3, 4}> { y = Expand(x, n) }",
    "Where": "<bool[4] c = {1, 0, 1, 0}> { r = Identity(x) y = Where(c, x, r) }",
    "Compress": "<bool[4] c = {1, 0, 1, 1}> { y = Compress(x, c) }",
    "Slice": "<int64[1] s = {3}, int64[1] e = {-9}, int64[1] a = {0}, int64[1] t = {-1}> {"
    " y = Slice(x, s, e, a, t) }",
    "Reshape": "<int64[2] n = {2, 2}> { r = Reshape(x, n) y = Transpose<perm=[1, 0]>(r) }",
    "Unique": "{ y = Unique(x) }",
    "ReverseSequence": "<int64[2] n = {2, 2}, int64[2] l = {2, 1}> {"
    " r = Reshape(x, n) y = ReverseSequence<batch_axis=1, time_axis=0>(r, l) }",
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_references_to_strings_are_counted(name: str) -> None:
    text = f"g (string[4] x) => (string[A] y) {OPERATIONS[name]}"
    if name in ("Expand", "Reshape", "ReverseSequence"):
        text = text.replace("string[A] y", "string[A, B] y")
    session = compile_text(text, cost_model=PreferredBackendCosts("native"))
    texts = [f"text {i} of {name}" for i in range(4)]
    x = np.array(texts, object)
    session.run({"x": x})

    def counted(outputs: dict[str, Any]) -> list[int]:
        used = [*x.ravel(), *(element for y in outputs.values() for element in y.ravel())]
        return [sum(element is text for element in used) for text in texts]

    before = [sys.getrefcount(text) for text in texts]
    outputs = session.run({"x": x})
    expected = [b + n - 1 for b, n in zip(before, counted(outputs), strict=True)]
    assert [sys.getrefcount(text) for text in texts] == expected
    del outputs
    assert [sys.getrefcount(text) for text in texts] == before
