"""The graph of a saved plan is checked like that of a model, fused nodes included."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

import penstock as ps
from penstock.artifact.container import HEADER
from tests.support.onnx_text import model_from_text

QUANTIZED = """g (float[64, 512] x) => (float[64, 512] y) <float s = {0.05}, uint8 z = {128}> {
    q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }"""
POOLED = """g (float[1, 3, 8, 8] x) => (float[1, 3, 4, 4] y) {
    r = Relu(x) y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r) }"""


def changed(content: bytes, change: Callable[[Any], None]) -> bytes:
    """The file of a saved session with its first plan changed, and checksums that fit."""
    magic, version, _, offset, count = HEADER.unpack_from(content)
    table = json.loads(content[offset : offset + count])
    begin, length, _ = table["documents"]["plan 0"]
    plan = json.loads(content[begin : begin + length])
    change(plan)
    out, text = bytearray(content[:offset]), json.dumps(plan).encode()
    out.extend(bytes(-len(out) % 64))
    table["documents"]["plan 0"] = [len(out), len(text), google_crc32c.value(text)]
    out.extend(text)
    out.extend(bytes(-len(out) % 64))
    end = json.dumps(table).encode()
    HEADER.pack_into(out, 0, magic, version, google_crc32c.value(end), len(out), len(end))
    return bytes(out + end)


def run_changed(path: Path, text: str, change: Callable[[Any], None], **options: Any) -> None:
    """Save the session of a model with a plan, change the plan, and run it."""
    session = ps.compile(model_from_text(text), threads=1, **options)
    feeds = {port.name: np.ones(port.type.shape, np.float32) for port in session.inputs}
    wanted = session.run(feeds)
    session.save(path)
    path.write_bytes(changed(path.read_bytes(), change))
    with ps.open(path) as opened:
        found = opened.run(feeds)
        assert opened.stats.plans_opened == 1
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


def attributes(document: Any) -> Iterator[dict[str, Any]]:
    """All objects of a document, attributes of nodes in regions among them."""
    if isinstance(document, dict):
        yield document
        for each in document.values():
            yield from attributes(each)
    elif isinstance(document, list):
        for each in document:
            yield from attributes(each)


def nodes(plan: Any, name: str) -> Iterator[list[Any]]:
    """The nodes of an operation in the main graph of a plan."""
    return (node for node in plan["graphs"]["main"]["nodes"] if plan["ops"][node[0]][1] == name)


BACKENDS = [["numpy"], ["native", "numpy"], None]


def test_unchanged_plan_runs(tmp_path):
    for text in (QUANTIZED, POOLED):
        run_changed(tmp_path / "s.penstock", text, lambda plan: None)


@pytest.mark.parametrize("backends", BACKENDS)
@pytest.mark.parametrize("code", [2, 5, 6, 7])
def test_dtype_that_an_operation_does_not_give_is_refused(tmp_path, backends, code):
    """A fused kernel wrote float32 where a plan had memory for bytes."""

    def change(plan: Any) -> None:
        places = [each for each in attributes(plan) if "output_dtype" in each]
        assert places
        for each in places:
            each["output_dtype"] = code

    with pytest.raises(ps.InvalidModel, match=r"DequantizeLinear.* gives|output_dtype"):
        run_changed(tmp_path / "s.penstock", QUANTIZED, change, backends=backends)


@pytest.mark.parametrize("backends", BACKENDS)
def test_input_that_an_operation_does_not_have_is_refused(tmp_path, backends):
    def change(plan: Any) -> None:
        (node,) = nodes(plan, "MaxPool")
        node[1].append(node[1][0])

    with pytest.raises(ps.InvalidModel, match=r"MaxPool.* has 2 inputs"):
        run_changed(tmp_path / "s.penstock", POOLED, change, backends=backends)


@pytest.mark.parametrize("backends", BACKENDS)
def test_input_that_an_operation_needs_is_missed(tmp_path, backends):
    def change(plan: Any) -> None:
        (node,) = nodes(plan, "MaxPool")
        node[1].clear()

    with pytest.raises(ps.InvalidModel, match="MaxPool"):
        run_changed(tmp_path / "s.penstock", POOLED, change, backends=backends)


@pytest.mark.parametrize("backends", BACKENDS)
def test_attribute_of_another_kind_is_refused(tmp_path, backends):
    def change(plan: Any) -> None:
        (node,) = nodes(plan, "MaxPool")
        node[3]["kernel_shape"] = "ab"

    with pytest.raises(ps.InvalidModel, match="kernel_shape"):
        run_changed(tmp_path / "s.penstock", POOLED, change, backends=backends)
