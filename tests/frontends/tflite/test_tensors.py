"""Tensors: weights of all kinds, and quantization that does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.frontends.tflite.test_importer import ADD, X, doubled, run
from tests.support.tflite_models import model, subgraph


@pytest.mark.parametrize("size", [0, 4, 9, 12])
def test_buffer_of_another_size_than_the_shape_takes_is_refused(size: int) -> None:
    file = model([doubled(buffer=1)], buffers=[{}, {"data": bytes(size)}])
    with pytest.raises(ps.InvalidModel, match=r"its shape takes 8|which nothing has written"):
        ps.load(file)


def test_constant_without_elements_whose_other_dims_no_array_can_have_is_refused() -> None:
    with pytest.raises(ps.InvalidModel, match=r"has dims \[0, 2147483647, .* no array can have"):
        ps.load(model([doubled(shape=[0, *3 * [2**31 - 1]])]))


def test_weights_are_read_once_and_each_into_an_array_of_its_own(tmp_path: Path) -> None:
    """So a session can let them go one by one, and tensors that share a buffer share the array."""
    sizes = {"a": 40_000, "b": 30_000, "c": 40_000}
    operators = [("ADD", ["x", name], [f"y{name}"], ADD) for name in sizes]
    tensors = {name: {"shape": [n], "buffer": 1 + (n < 40_000)} for name, n in sizes.items()}
    graph = subgraph({"x": ("float32", [1])}, operators, [f"y{name}" for name in sizes], **tensors)
    buffers = [{}, {"data": bytes(160_000)}, {"data": bytes(120_000)}]
    path = tmp_path / "m.tflite"
    path.write_bytes(model([graph], buffers=buffers))
    a, b, c = (node.inputs[1].const for node in ps.load(path).graph.nodes)
    assert [np.shares_memory(a, other) for other in (b, c)] == [False, True]
    assert [array.base.nbytes for array in (a, b)] == [160_000, 120_000]
    assert not a.flags.writeable
    mapped, *_ = (node.inputs[1].const for node in ps.load(path, map_weights=True).graph.nodes)
    assert mapped.base is not None and not mapped.flags.writeable


def test_float16_weights_are_computed_in_float32() -> None:
    operators = [("DEQUANTIZE", ["c"], ["d"], None), ("ADD", ["x", "d"], ["y"], ADD)]
    half = {"c": np.array([0.5, 1], np.float16)}
    file = model([subgraph(X, operators, ["y"], half)])
    np.testing.assert_array_equal(run(file), [1.5, 3])


def test_sparse_weights_are_dense_in_the_graph() -> None:
    """Compressed rows of [[0, 5, 0], [0, 0, 0], [6, 0, 7]]."""
    rows = {"format": 0, "dense_size": 3}
    columns = {"format": 1, "array_segments_type": 1, "array_indices_type": 3}
    columns["array_segments"] = ("Int32Vector", {"values": [0, 1, 1, 3]})
    columns["array_indices"] = ("Uint8Vector", {"values": bytes([1, 0, 2])})
    sparsity = {"traversal_order": [0, 1], "dim_metadata": [rows, columns]}
    graph = subgraph(
        {"x": ("float32", [3, 3])},
        [("DENSIFY", ["c"], ["d"], None), ("ADD", ["x", "d"], ["y"], ADD)],
        ["y"],
        c={"shape": [3, 3], "sparsity": sparsity, "buffer": 1},
    )
    data = np.array([5, 6, 7], np.float32).tobytes()
    got = run(model([graph], buffers=[{}, {"data": data}]), np.zeros((3, 3), np.float32))
    np.testing.assert_array_equal(got, [[0, 5, 0], [0, 0, 0], [6, 0, 7]])
    columns["array_indices"] = ("Uint8Vector", {"values": bytes([1, 0, 3])})
    with pytest.raises(ps.InvalidModel, match="not in its dims"):
        ps.load(model([graph], buffers=[{}, {"data": data}]))


def test_sparse_scalar_is_refused() -> None:
    sparsity = {"traversal_order": [], "dim_metadata": []}
    graph = doubled(shape=[], sparsity=sparsity, buffer=1)
    with pytest.raises(ps.InvalidModel, match="do not fit its 0 dims"):
        ps.load(model([graph], buffers=[{}, {"data": bytes(4)}]))


def test_packed_weights_are_integers_with_a_sign() -> None:
    quantization = {"scale": [0.5], "zero_point": [0]}
    graph = subgraph(
        {"x": ("float32", [3])},
        [("DEQUANTIZE", ["c"], ["d"], None), ("ADD", ["x", "d"], ["y"], ADD)],
        ["y"],
        c={"shape": [3], "type": 17, "buffer": 1, "quantization": quantization},
    )
    file = model([graph], buffers=[{}, {"data": bytes([0x8F, 0x07])}])
    np.testing.assert_array_equal(run(file, np.zeros(3, np.float32)), [-0.5, -4, 3.5])


def blockwise(scales: int = 3, points: int = 4, size: int = 2, number: int = 2) -> bytes:
    """Weights [2, 4] of packed codes, whose tensor is number 1, with scales and zero points for
    each ``size`` of them in these tensors."""
    details = {"scales": scales, "zero_points": points, "block_size": size}
    blocks = {"details_type": number, "details": ("BlockwiseQuantization", details)}
    weights = {"type": 17, "shape": [2, 4], "buffer": 1, "quantization": blocks}
    numbers = {"type": 1, "shape": [4], "buffer": 2}
    graph = subgraph(
        {"x": ("float32", [1, 4])},
        [("FULLY_CONNECTED", ["x", "w"], ["y"], ("FullyConnectedOptions", {}))],
        ["y"],
        w=weights,
    )
    graph["names"] += ["scales", "points"]  # tensors that no operator reads
    graph["fields"] |= {"scales": numbers, "points": {"type": 9, "shape": [4], "buffer": 3}}
    data = (
        bytes([0x21, 0x43, 0x8F, 0x70]),
        np.array([1, 2, 3, 4], np.float16),
        np.int8([0, 1, 0, 1]),
    )
    contents = [data[0], data[1].tobytes(), data[2].tobytes()]
    return model([graph], buffers=[{}, *({"data": part} for part in contents)])


@pytest.mark.parametrize("points", [4, -1])
def test_weights_with_a_scale_for_each_block_are_real_numbers(points: int) -> None:
    """Codes [[1, 2, 3, 4], [-1, -8, 0, 7]] with scales 1 and 2, 3 and 4 of two each."""
    codes = np.array([[1, 2], [3, 4], [-1, -8], [0, 7]], np.float32)
    codes = codes - np.array([[0], [1], [0], [1]]) if points > 0 else codes
    wanted = (codes * np.array([[1], [2], [3], [4]])).reshape(2, 4).sum(axis=1)
    circle = b"CIR0".join(blockwise(points=points, number=3).split(b"TFL3"))
    for file in (blockwise(points=points), circle):
        np.testing.assert_array_equal(run(file, np.ones((1, 4), np.float32)), [wanted])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"scales": 1}, "without a constant scale"),  # the tensor's own number
        ({"scales": 0}, "without a constant scale"),
        ({"scales": 99}, "refers to tensor 99"),
        ({"points": 1}, "without a constant scale"),
        ({"size": 0}, "without a constant scale"),
        ({"size": -2}, "without a constant scale"),
        ({"size": 4}, "without a constant scale"),
        ({"number": 3}, "quantized in a way that no kernel computes"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(fields: dict[str, int], reason: str) -> None:
    with pytest.raises(ps.InvalidModel, match=reason):
        ps.load(blockwise(**fields))


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"scale": [1.0, 2.0, 3.0]}, "3 scales along axis 0"),
        ({"scale": [1.0, 2.0], "zero_point": [1, 2, 3]}, "2 scales, but 3 zero points"),
        ({"scale": [-1.0]}, "negative or not finite"),
        ({"scale": [1.0], "zero_point": [2**40]}, "out of range"),
    ],
)
def test_quantization_that_does_not_fit_is_refused(quantization: Any, reason: str) -> None:
    graph = subgraph(
        {"x": ("int8", [2])},
        [("DEQUANTIZE", ["x"], ["y"], None)],
        ["y"],
        x={"quantization": quantization},
    )
    with pytest.raises(ps.InvalidModel, match=reason):
        ps.load(model([graph]))
