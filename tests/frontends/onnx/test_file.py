"""Files of ONNX models: large tensors are read apart, small fields by protobuf."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import penstock as ps
from penstock.frontends.onnx import file


def model_with_weights(sizes: list[int], names: int) -> onnx.ModelProto:
    """Weights of ``sizes`` bytes, with names of ``names`` characters between them."""
    rng = np.random.default_rng(7)
    weights = [
        numpy_helper.from_array(rng.integers(0, 255, size, np.uint8), f"w{i}" + "n" * names)
        for i, size in enumerate(sizes)
    ]
    nodes = [helper.make_node("Identity", [w.name], [f"y{i}"]) for i, w in enumerate(weights)]
    outputs = [
        helper.make_tensor_value_info(f"y{i}", TensorProto.UINT8, [size])
        for i, size in enumerate(sizes)
    ]
    return helper.make_model(helper.make_graph(nodes, "g", [], outputs, weights))


@pytest.mark.parametrize("names", [1, 40_000])
def test_large_tensors_of_a_file_are_read_apart_as_they_are(tmp_path: Path, names: int) -> None:
    sizes = [70_000, 3, 2**20, 65_535, 65_536, 0, 65_537, 200_000]
    model = model_with_weights(sizes, names)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    with file.opened(path) as (rest, weights):
        assert rest.ByteSize() < 10 * 70_000 + 16 * names
        assert len([w for w in weights if isinstance(w, file.Apart)]) == 6
    outputs = ps.compile(path).run()
    for weight, output in zip(model.graph.initializer, outputs.values(), strict=True):
        np.testing.assert_array_equal(output, numpy_helper.to_array(weight))


# A number, and an unknown field; an empty graph; a graph of empty nodes.
@pytest.mark.parametrize(
    "fields",
    [b"\x08\x0a" + b"\xf8\x01\x01" * 2**20, b"\x3a\x00" * 2**20, b"\x3a\x80\x80\x80\x01" + b"\x0a\x00" * 2**20],
    ids=["unknown", "graphs", "nodes"],
)  # fmt: skip
def test_many_small_fields_of_a_file_are_left_to_protobuf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: bytes
) -> None:
    numbers = 0
    read = file.read_varint

    def counting(data: bytes, position: int) -> tuple[int, int]:
        nonlocal numbers
        numbers += 1
        return read(data, position)

    monkeypatch.setattr(file, "read_varint", counting)
    path = tmp_path / "m.onnx"
    path.write_bytes(fields)
    with file.opened(path) as (_, weights):
        assert list(weights) == []
    assert numbers <= 3 * (10_000 + len(fields) // file.FIELD_BYTES)


def test_nodes_too_small_for_any_model_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"\x3a\x80\x80\x80\x01" + b"\x0a\x00" * 2**20)
    with pytest.raises(ps.InvalidModel) as caught:
        ps.load(path)
    assert len(caught.value.problems) == 1
    assert "Limits.max_nodes_per_byte" in str(caught.value)
