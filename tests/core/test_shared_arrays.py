"""Large arrays with the same contents are held once, and others never are."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import penstock as ps
from penstock.build import GraphBuilder
from penstock.core import shared_arrays
from penstock.core.origins import Origin, note_origin, origin_of
from penstock.core.shared_arrays import held_once, let_pages_go
from penstock.ops.common import constant_cache

SIZE = 300


def weights(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(SIZE, SIZE)).astype(np.float32)


def test_array_with_the_same_contents_is_the_one_that_was_kept():
    first = held_once(weights())
    assert held_once(weights()) is first
    assert held_once(weights(), np.copy) is first


def test_what_is_kept_is_what_the_caller_makes_of_it():
    first, made = weights(1), []
    kept = held_once(first, lambda array: made.append(array.copy()) or made[0])
    assert kept is made[0]
    assert held_once(weights(1)) is kept


@pytest.mark.parametrize("place", [0, 1, SIZE * SIZE // 2 + 1, -1])
def test_array_that_differs_in_one_bit_is_another(place):
    first = held_once(weights(2))
    other = weights(2)
    other.reshape(-1).view(np.uint32)[place] ^= 1
    assert held_once(other) is other
    assert held_once(first) is not other


def save(path: Path, **tables: np.ndarray) -> None:
    nodes = [helper.make_node("Gather", [name, "i"], [f"of_{name}"]) for name in tables]
    inputs = [helper.make_tensor_value_info("i", TensorProto.INT64, [1])]
    outputs = [helper.make_tensor_value_info("of_w", TensorProto.FLOAT, [1, SIZE])]
    # In a file from 1 MiB on, tensors are read from their places.
    twice = {name: np.concatenate([array, array]) for name, array in tables.items()}
    constants = [numpy_helper.from_array(array, name) for name, array in twice.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)


@pytest.mark.parametrize("beside", [False, True])
def test_kept_session_reads_its_own_file_where_another_had_equal_weights(tmp_path, beside):
    path, feeds = tmp_path / "model.onnx", {"i": np.array([3])}
    first = tmp_path / "other.onnx" if beside else path
    save(first, a=weights(8), w=weights(9))
    other = ps.compile(first, cache=False)
    other.run(feeds)
    save(path, w=weights(9), b=weights(10))
    for _ in range(2):  # compiled, then opened from the cache
        with ps.compile(path, cache=tmp_path / "cache") as session:
            np.testing.assert_array_equal(session.run(feeds)["of_w"], weights(9)[3:4])
        save(first, b=weights(10), w=weights(9)) if beside else None
    assert session.stats.plans_opened == 1


def test_array_from_elsewhere_is_a_view_with_its_own_origin():
    first, second, third = weights(11), weights(11), weights(11)
    note_origin(first, Origin("/a", 64))
    note_origin(second, Origin("/b", 0))
    kept = [held_once(array) for array in (first, second, third)]
    assert [origin_of(array) for array in kept] == [Origin("/a", 64), Origin("/b", 0), None]
    assert {array.ctypes.data for array in kept} == {first.ctypes.data}
    assert held_once(weights(11)) is kept[2]


def test_sessions_share_the_tables_of_a_model_however_it_is_loaded(tmp_path):
    path = tmp_path / "model.onnx"
    save(path, w=weights(12))
    sessions = [ps.compile(x, cache=False) for x in (path, path.read_bytes(), onnx.load(path))]
    tables = [
        value.const
        for session in sessions
        for node in session._subgraphs.main.graph.nodes
        for value in node.inputs
        if value is not None and value.const is not None and value.const.size > SIZE
    ]
    assert len(tables) == len(sessions)
    assert len({table.ctypes.data for table in tables}) == 1


def test_dims_and_dtypes_count():
    first = held_once(weights(3))
    other = weights(3).reshape(-1)
    assert held_once(other) is other
    codes = first.view(np.int32).copy()
    assert held_once(codes) is codes


def test_numbers_that_are_none_are_compared_by_their_bits():
    first, other = weights(4), weights(4)
    first[0, 0] = other[0, 0] = np.nan
    assert held_once(first) is first
    assert held_once(other) is first


def test_array_that_nobody_holds_any_more_is_forgotten():
    before = len(shared_arrays._KNOWN)
    first = held_once(weights(5))
    assert len(shared_arrays._KNOWN) == before + 1
    del first
    gc.collect()
    assert len(shared_arrays._KNOWN) == before


def test_small_and_scattered_arrays_and_mapped_files_are_left_alone(tmp_path):
    small, wide = np.zeros(9), np.zeros((2 * SIZE, SIZE))[::2]
    assert held_once(small) is small
    assert held_once(wide) is wide
    file = tmp_path / "weights"
    file.write_bytes(weights(6).tobytes())
    with file.open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    mapped = np.frombuffer(mapping, np.float32).reshape(SIZE, SIZE)
    first = held_once(weights(6))
    assert held_once(mapped) is mapped
    assert held_once(weights(6)) is first


def model(scale: float = 1.0) -> bytes:
    b = GraphBuilder()
    x = b.input("x", np.float32, ["rows", SIZE])
    b.output("y", b.op("Relu", x @ (weights(7) * np.float32(scale))))
    return b.model()


def packed(session: ps.Session) -> list[int]:
    """Where the packed weights of a session lie."""
    session.run({"x": np.ones((4, SIZE), np.float32)})
    entries = [reference() for reference in constant_cache._REORDERED.valuerefs()]
    return [
        e.arrays[0].ctypes.data
        for e in entries
        if e is not None and e.arrays[0].size >= SIZE * SIZE
    ]


def test_sessions_of_one_model_share_their_packed_weights():
    first = ps.compile(model(), cache=False, backends=["native", "numpy"])
    places = packed(first)
    if not places:
        pytest.skip("no kernel packs weights here")
    second = ps.compile(model(), cache=False, backends=["native", "numpy"])
    both = packed(second)
    assert len(both) == 2 * len(places)
    assert {*both} == {*places}
    other = ps.compile(model(2.0), cache=False, backends=["native", "numpy"])
    assert len({*packed(other)}) == 2 * len({*places})
    feeds = {"x": np.ones((4, SIZE), np.float32)}
    np.testing.assert_array_equal(first.run(feeds)["y"], second.run(feeds)["y"])
    np.testing.assert_allclose(other.run(feeds)["y"], 2 * first.run(feeds)["y"], rtol=1e-6)


def resident(mapping: mmap.mmap) -> int:
    """The bytes of a mapping that are in memory."""
    at = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{at:08x}-"))
    rss = next(line for line in lines if line.startswith("Rss:"))
    return int(rss.split()[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell")
def test_pages_of_an_array_in_a_file_go_and_come_back(tmp_path):
    path, content = tmp_path / "weights", np.arange(1 << 20, dtype=np.uint8)
    content.tofile(path)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    whole = np.frombuffer(mapping, np.uint8)
    part = whole[100 : (1 << 19) + 100].view(np.float32).reshape(256, -1)
    assert whole.sum() == content.sum()
    before = resident(mapping)
    let_pages_go(part)
    # Those that have bytes of other arrays stay.
    assert before - resident(mapping) == (1 << 19) - mmap.PAGESIZE
    np.testing.assert_array_equal(whole, content)
    assert resident(mapping) == before
    for array in (part.T, part[:, ::2], content[: 1 << 18], whole[:10]):
        let_pages_go(array)
    assert resident(mapping) == before
