"""Measured costs: looked up, estimated, and kept in a file that anybody may have written."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.graph import Graph, Node, Value
from penstock.tuning import cost_table
from penstock.tuning.cost_table import CostTable, Signature, nbytes, signature
from penstock.types import BOOL, FLOAT32, INT64, STRING, SequenceType, TensorType
from tests.support.graphs import any_op

untimed = settings(deadline=None)


def sized(nbytes: int, exact: str | None = None, operation: str = "Add") -> Signature:
    return Signature(operation, "float32 -> float32", exact or str(nbytes), nbytes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "costs.json"


@pytest.fixture
def table(path: Path) -> CostTable:
    return CostTable(path, "here")


def no_table(**sizes: float) -> CostTable:
    """A table without a file, in which Add takes so many seconds for ``b<bytes>``."""
    made = CostTable(Path("there/is/no/such/file"), "here")
    for name, seconds in sizes.items():
        made.record("numpy", sized(int(name[1:])), 1, seconds)
    return made


def estimate(table: CostTable, nbytes: int) -> float:
    found = table.estimate("numpy", sized(nbytes, "new"), 1)
    assert found is not None
    return found


# Signatures.


def tensor(
    name: str, *dims: int | str | None, dtype: np.dtype = FLOAT32, const: Any = None
) -> Value:
    return Value(name, TensorType(dtype, dims), const=const)


def add(*dims: int, **attrs: Any) -> Node:
    return Node(
        any_op("Add"), [tensor("a", *dims), tensor("b", *dims)], [tensor("c", *dims)], attrs
    )


def test_a_signature_has_operation_types_shapes_and_bytes():
    assert signature(add(2, 3)) == Signature(
        "Add", "float32, float32 -> float32", "2x3, 2x3 -> 2x3", 3 * 24
    )


def test_a_signature_tells_left_out_inputs_constants_and_attributes():
    inputs = [tensor("x", 8), None, tensor("w", 2, dtype=INT64, const=np.zeros(2, np.int64))]
    attrs = {"mode": "edge", "pads": [1, 2], "eps": 0.5, "value": np.ones(9), "exact": True}
    node = Node(any_op("Op", "com.example"), inputs, [tensor("y", 0), None], attrs)
    assert signature(node) == Signature(
        "com.example.Op",
        "float32, _, int64 -> float32, _",
        "8, _, 2= -> 0, _; eps=0.5 exact=True mode='edge' pads=[1, 2]",
        32 + 16,
    )


def test_versions_of_an_operation_have_the_same_signature():
    nodes = [
        Node(any_op("Relu", "", version), [tensor("x", 4)], [tensor("y", 4)]) for version in (6, 14)
    ]
    assert signature(nodes[0]) == signature(nodes[1])


def test_inputs_and_outputs_that_are_left_out_stand_where_they_are():
    x, y = tensor("x", 4), tensor("y", 4)
    forms = [([x, None, x], [y]), ([x, x, None], [y]), ([x, x], [y]), ([x], [x, y])]
    found = {signature(Node(any_op("Clip"), *form)) for form in forms}
    assert len(found) == len(forms)


@pytest.mark.parametrize(
    "kind",
    [
        TensorType(FLOAT32, ("N", 3)),
        TensorType(FLOAT32, (None,)),
        TensorType(FLOAT32, None),
        TensorType(None, (2,)),
        TensorType(STRING, (2,)),
        SequenceType(TensorType(FLOAT32, (2,))),
    ],
    ids=str,
)
def test_without_known_shapes_of_numbers_there_is_no_signature(kind):
    x, y = tensor("x", 4), Value("y", kind)
    assert nbytes(y) is None
    assert signature(Node(any_op("Op"), [x, y], [x])) is None
    assert signature(Node(any_op("Op"), [x], [y])) is None
    assert (nbytes(x), nbytes(None)) == (16, 0)


def test_a_node_that_carries_graphs_has_no_signature():
    attrs = {"then_branch": Graph([], [], [])}
    node = Node(any_op("If"), [tensor("c", dtype=BOOL)], [tensor("y", 2)], attrs)
    assert signature(node) is None


def test_long_signatures_are_cut_short_and_still_differ():
    many = [add(2, 3, pads=[*range(1000), last]) for last in (1, 2)]
    wide = [Node(any_op("Sum"), [tensor("x", 4)] * n, [tensor("y", 4)]) for n in (1000, 1001)]
    found = [signature(node) for node in (*many, *wide)]
    assert len({each.exact for each in found}) == 4
    assert len({each.dtypes for each in found}) == 3
    assert all(len(each.exact) < 500 and len(each.dtypes) < 500 for each in found)
    assert found == [signature(node) for node in (*many, *wide)]


# Looking up.


def test_what_was_measured_is_found_again(table):
    table.record("numpy", sized(8), 2, 0.5)
    assert table.lookup("numpy", sized(8), 2) == table.estimate("numpy", sized(8), 2) == 0.5


def test_what_differs_in_anything_is_not_found(table):
    table.record("numpy", sized(8), 2, 0.5)
    other = Signature("Add", "float64 -> float64", "8", 8)
    assert table.lookup("numpy", sized(8), 1) is None
    assert table.lookup("other", sized(8), 2) is None
    assert table.lookup("numpy", sized(8, "new"), 2) is None
    for backend, where, threads in [
        ("numpy", sized(8), 1),
        ("other", sized(8), 2),
        ("numpy", sized(8, operation="Sub"), 2),
        ("numpy", other, 2),
    ]:
        assert table.estimate(backend, where, threads) is None


def test_repeats_have_their_mean(table):
    for seconds in (1.0, 2.0, 6.0):
        table.record("numpy", sized(8), 1, seconds)
    assert table.lookup("numpy", sized(8), 1) == pytest.approx(3)


def test_in_the_end_new_conditions_win(table):
    for seconds in [5.0] * 1000 + [1.0] * 100:
        table.record("numpy", sized(8), 1, seconds)
    assert table.lookup("numpy", sized(8), 1) == pytest.approx(1, rel=0.05)
    table.record("numpy", sized(8), 1, 5.0)
    assert table.lookup("numpy", sized(8), 1) < 1.4, "a single measurement has little weight"


@pytest.mark.parametrize("seconds", [-1.0, -1e-9, math.nan, math.inf, -math.inf])
def test_senseless_seconds_are_refused(table, seconds):
    with pytest.raises(ValueError, match="nothing takes"):
        table.record("numpy", sized(8), 1, seconds)
    with pytest.raises(ValueError, match="nothing takes"):
        table.record_transfer("a", "b", 8, seconds)


def test_numbers_of_numpy_are_numbers(table, path):
    table.record("numpy", sized(np.int64(8)), 1, np.float32(0.5))
    table.record_transfer("a", "b", np.int64(8), np.float64(0.25))
    table.save()
    again = CostTable(path, "here")
    assert again.lookup("numpy", sized(8), 1) == 0.5
    assert again.transfer("a", "b", 8) == 0.25


# Estimates.


def test_between_two_sizes_it_is_a_line():
    assert estimate(no_table(b100=1, b200=3), 150) == pytest.approx(2)
    assert estimate(no_table(b100=1, b200=3, b300=10), 225) == pytest.approx(4.75)


def test_nodes_of_the_same_size_count_with_their_mean(table):
    for exact, seconds in (("a", 1.0), ("b", 5.0)):
        table.record("numpy", sized(100, exact), 1, seconds)
    table.record("numpy", sized(200), 1, 5.0)
    assert estimate(table, 100) == 3
    assert estimate(table, 150) == 4


def test_one_size_says_seconds_per_byte():
    assert estimate(no_table(b100=2), 300) == pytest.approx(6)
    assert estimate(no_table(b100=2), 50) == pytest.approx(1)
    assert estimate(no_table(b100=2), 100) == 2


def test_beyond_all_sizes_the_line_goes_on():
    table = no_table(b100=2, b200=3)
    assert estimate(table, 300) == pytest.approx(4)
    assert estimate(table, 50) == pytest.approx(1.5)
    assert estimate(table, 0) == pytest.approx(1)


def test_sizes_that_are_close_to_each_other_do_not_say_where_it_goes():
    rising, falling = no_table(b100=1, b101=2), no_table(b100=2, b101=1)
    assert estimate(rising, 202) == pytest.approx(6)  # by 2 in 101, and at most twice as steep
    assert estimate(rising, 50) == pytest.approx(0.5)
    assert estimate(falling, 202) == 1
    assert estimate(falling, 50) == 2


def test_nothing_takes_no_time():
    assert estimate(no_table(b100=0), 100) == 1e-7
    assert estimate(no_table(b1000=1e-6), 0) == 1e-7
    assert estimate(no_table(b0=1e-3), 10**9) == 1e-3
    table = no_table(b100=0)
    assert table.lookup("numpy", sized(100), 1) == 0
    assert table.estimate("numpy", sized(100), 1) == 1e-7


def test_an_estimate_knows_what_was_measured_since():
    table = no_table(b100=1)
    assert estimate(table, 200) == 2
    table.record("numpy", sized(300), 1, 1.0)
    assert estimate(table, 200) == 1


POINTS = st.dictionaries(st.integers(0, 10**9), st.floats(0, 1e3), min_size=1, max_size=8)


def filled(points: dict[int, float]) -> CostTable:
    return no_table(**{f"b{size}": seconds for size, seconds in points.items()})


@given(POINTS, st.data())
@untimed
def test_an_estimate_lies_between_its_neighbours(points, data):
    size = data.draw(st.integers(min(points), max(points)))
    below = points[max(s for s in points if s <= size)]
    above = points[min(s for s in points if s >= size)]
    found = estimate(filled(points), size)
    assert min(below, above) * (1 - 1e-9) <= found <= max(below, above, 1e-7) * (1 + 1e-9)


def test_an_estimate_between_very_different_neighbours_is_exact_at_their_sizes():
    points = {0: 17.0, 1: 4.345760885426803e-07}
    assert estimate(filled(points), 1) == points[1]


@given(POINTS, st.lists(st.integers(0, 10**12), min_size=2, max_size=2))
@untimed
def test_beyond_all_sizes_more_takes_no_less(points, sizes):
    table, (few, many) = filled(points), sorted(sizes)
    if few >= max(points) or many <= min(points):
        found = [estimate(table, few), estimate(table, many)]
        assert 1e-7 <= found[0] <= found[1] * (1 + 1e-9) < math.inf


@given(POINTS, st.randoms())
@untimed
def test_the_order_of_different_sizes_does_not_matter(points, random):
    shuffled = list(points.items())
    random.shuffle(shuffled)
    a, b = filled(points), filled(dict(shuffled))
    for size in (*points, 0, 77, 10**10):
        assert a.lookup("numpy", sized(size), 1) == b.lookup("numpy", sized(size), 1)
        assert estimate(a, size) == estimate(b, size)


# Transfers.


def test_transfers_go_by_bytes_and_direction(table):
    table.record_transfer("host", "device", 100, 1.0)
    table.record_transfer("host", "device", 200, 2.0)
    table.record_transfer("host", "device", 200, 4.0)
    assert table.transfer("host", "device", 150) == pytest.approx(2)
    assert table.transfer("host", "device", 200) == pytest.approx(3)
    assert table.transfer("device", "host", 150) is None
    assert table.transfer("host", "other", 150) is None


def test_a_transfer_is_not_mistaken_for_an_operation(table):
    table.record_transfer("host", "device", 100, 1.0)
    for name in ("device", "to device"):
        assert table.estimate("host", sized(100, operation=name), 1) is None


# The file.


def content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_a_file_has_the_form_that_the_module_describes(table, path):
    table.record("numpy", sized(8, "2 -> 2"), 2, 0.5)
    table.record_transfer("numpy", "device", 64, 0.25)
    table.save()
    assert content(path) == {
        "version": 1,
        "machines": {
            "here": {
                "numpy": {
                    "Add": {"2 threads, float32 -> float32": {"2 -> 2": [8, 0.5, 1]}},
                    "to device": {"": {"64": [64, 0.25, 1]}},
                }
            }
        },
    }
    assert os.listdir(path.parent) == ["costs.json"]


NAMES = st.text(max_size=8)


@given(
    st.dictionaries(
        st.tuples(NAMES, NAMES, NAMES, st.integers(1, 64)),
        st.tuples(st.integers(0, 2**40), st.lists(st.floats(0, 1e6), min_size=1, max_size=20)),
        max_size=6,
    ),
    st.dictionaries(st.tuples(NAMES, NAMES, st.integers(0, 2**40)), st.floats(0, 1e6), max_size=4),
)
@untimed
def test_what_is_saved_is_read_again(tmp_path_factory, nodes, transfers):
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    table = CostTable(path, "here")
    for (backend, operation, exact, threads), (size, measured) in nodes.items():
        for seconds in measured:
            table.record(backend, Signature(operation, "d", exact, size), threads, seconds)
    for (source, target, size), seconds in transfers.items():
        table.record_transfer(source, target, size, seconds)
    table.save()
    again = CostTable(path, "here")
    for (backend, operation, exact, threads), (size, _) in nodes.items():
        where = Signature(operation, "d", exact, size)
        known = table.lookup(backend, where, threads)
        assert known is not None
        assert again.lookup(backend, where, threads) == known
    for source, target, size in transfers:
        known = table.transfer(source, target, size)
        assert known is not None
        assert again.transfer(source, target, size) == known


def test_nothing_is_written_where_nothing_is_new(table, path):
    table.save()
    assert not path.exists()
    table.record("numpy", sized(8), 1, 1.0)
    table.save()
    before = path.stat().st_mtime_ns, path.stat().st_ino
    table.save()
    CostTable(path, "here").save()
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before


def test_tables_of_two_processes_are_joined(path):
    ours, theirs = CostTable(path, "here"), CostTable(path, "here")
    ours.record("numpy", sized(8), 1, 1.0)
    ours.record("numpy", sized(16), 1, 2.0)
    theirs.record("numpy", sized(16), 1, 4.0)
    theirs.record("numpy", sized(32), 1, 8.0)
    ours.save()
    theirs.save()
    for table in (theirs, CostTable(path, "here")):
        found = [table.lookup("numpy", sized(n), 1) for n in (8, 16, 32)]
        assert found == [1.0, pytest.approx(3.0), 8.0]
    assert ours.lookup("numpy", sized(32), 1) is None
    ours.record("numpy", sized(8), 1, 1.0)
    ours.save()
    assert ours.lookup("numpy", sized(32), 1) == 8.0


def test_what_is_saved_once_is_not_counted_twice(table, path):
    table.record("numpy", sized(8), 1, 1.0)
    for seconds in (2.0, 6.0):
        table.save()
        table.record("numpy", sized(8), 1, seconds)
    table.save()
    assert CostTable(path, "here").lookup("numpy", sized(8), 1) == pytest.approx(3.0)
    assert content(path)["machines"]["here"]["numpy"]["Add"].popitem()[1] == {
        "8": [8, pytest.approx(3.0), 3]
    }


def test_processes_that_save_at_once_leave_a_whole_file(path):
    program = """
import sys
from pathlib import Path
from penstock.costs import CostTable, Signature
path, name = Path(sys.argv[1]), sys.argv[2]
for i in range(30):
    table = CostTable(path, "here")
    table.record(name, Signature("Add", "d", str(i), i), 1, 1.0)
    table.save()
"""
    command = [sys.executable, "-W", "error", "-c", program, str(path)]
    running = [subprocess.Popen([*command, name]) for name in "ab"]
    assert [each.wait(120) for each in running] == [0, 0]
    assert set(content(path)["machines"]["here"]) <= {"a", "b"}
    table = CostTable(path, "here")
    assert any(table.lookup(name, Signature("Add", "d", "29", 29), 1) for name in "ab")
    assert os.listdir(path.parent) == ["costs.json"]


def test_other_machines_are_kept_but_not_used(path):
    for machine, seconds in (("here", 1.0), ("there", 2.0)):
        table = CostTable(path, machine)
        assert table.estimate("numpy", sized(8), 1) is None
        table.record("numpy", sized(8), 1, seconds)
        table.save()
    assert CostTable(path, "here").lookup("numpy", sized(8), 1) == 1.0
    assert CostTable(path, "there").lookup("numpy", sized(8), 1) == 2.0


def test_of_too_many_machines_those_not_written_for_longest_go(path):
    def write(machine: str) -> None:
        table = CostTable(path, machine)
        table.record("numpy", sized(8), 1, 1.0)
        table.save()

    for i in range(cost_table._MOST_MACHINES):
        write(str(i))
    write("0")
    write("new")
    kept = [*map(str, range(2, cost_table._MOST_MACHINES)), "0", "new"]
    assert list(content(path)["machines"]) == kept


def test_of_too_many_sizes_those_not_measured_for_longest_go(path, monkeypatch):
    monkeypatch.setattr(cost_table, "_MOST_RECORDS", 3)
    table = CostTable(path, "here")
    for size in (1, 2, 3, 1, 4):
        table.record("numpy", sized(size), 1, 1.0)
    for _ in range(2):
        found = [table.lookup("numpy", sized(size), 1) for size in (1, 2, 3, 4)]
        assert found == [1.0, None, 1.0, 1.0]
        table.save()
        table = CostTable(path, "here")


def test_a_file_never_grows_beyond_what_is_read(path, monkeypatch):
    monkeypatch.setattr(cost_table, "_MOST_BYTES", 2000)
    for machine in ("there", "here"):
        table = CostTable(path, machine)
        for size in range(200):
            table.record("numpy", sized(size), 1, 1.0)
        table.save()
        assert path.stat().st_size <= 2000
    again = CostTable(path, "here")
    assert again.lookup("numpy", sized(199), 1) == 1.0
    assert again.lookup("numpy", sized(0), 1) is None
    assert list(content(path)["machines"]) == ["here"]


def test_many_operations_of_one_size_fit_too(path, monkeypatch):
    monkeypatch.setattr(cost_table, "_MOST_BYTES", 500)
    table = CostTable(path, "here")
    for i in range(100):
        table.record("numpy", sized(8, operation=f"Op{i}"), 1, 1.0)
    table.save()
    assert path.stat().st_size <= 500
    table.record("numpy", sized(8), 1, 1.0)
    table.save()
    assert CostTable(path, "here").lookup("numpy", sized(8), 1) == 1.0


# Where it cannot be read or written.


def test_a_folder_that_cannot_be_written_is_no_fault(tmp_path, caplog):
    blocked = tmp_path / "blocked"
    blocked.write_text("")  # a file, where a folder should be
    table = CostTable(blocked / "costs.json", "here")
    table.record("numpy", sized(8), 1, 1.0)
    with caplog.at_level("DEBUG", "penstock.tuning.cost_table"):
        table.save()
    assert "costs are not kept" in caplog.text
    assert table.lookup("numpy", sized(8), 1) == 1.0
    table.record("numpy", sized(8), 1, 3.0)
    blocked.unlink()
    table.save()
    assert CostTable(table.path, "here").lookup("numpy", sized(8), 1) == 2.0


def test_a_write_that_fails_leaves_the_file_as_it_was(table, path, monkeypatch):
    table.record("numpy", sized(8), 1, 1.0)
    table.save()
    before = path.read_text()

    def fail(*arguments: Any) -> None:
        raise OSError("no space left")

    table.record("numpy", sized(16), 1, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        table.save()
    assert path.read_text() == before
    assert os.listdir(path.parent) == ["costs.json"]
    table.save()
    assert CostTable(path, "here").lookup("numpy", sized(16), 1) == 1.0


def test_a_folder_in_its_place_is_no_fault(path):
    path.mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="no regular file"):
        table = CostTable(path, "here")
    table.record("numpy", sized(8), 1, 1.0)
    table.save()


RECORD = [8, 0.5, 1]


def section(*records: Any, machine: str = "here") -> dict[str, Any]:
    numbered = {str(i): record for i, record in enumerate(records)}
    return {machine: {"numpy": {"Add": {"1 threads, float32 -> float32": numbered}}}}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\x00\xff\xfe",
        b"[1, 2]",
        b"null",
        b"{}",
        b'{"version": 2, "machines": {}}',
        b'{"version": 1}',
        b'{"version": 1, "machines": [1]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"version": 1, "machines": ' + b"9" * 10_000 + b"}",
        b" " * 3000,
    ],
    ids=lambda text: repr(text[:30]),
)
def test_a_broken_file_is_replaced_with_a_warning(path, text, monkeypatch):
    monkeypatch.setattr(cost_table, "_MOST_BYTES", 10**6 if text.strip() else 2000)
    path.parent.mkdir()
    path.write_bytes(text)
    with pytest.warns(RuntimeWarning, match=r"costs\.json cannot be read and will be replaced"):
        table = CostTable(path, "here")
    assert table.estimate("numpy", sized(8), 1) is None
    table.record("numpy", sized(8), 1, 1.0)
    table.save()  # and no second warning, which would be an error
    assert CostTable(path, "here").lookup("numpy", sized(8), 1) == 1.0


def test_a_file_of_100_megabytes_is_not_read(path):
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(100_000_000)
    with pytest.warns(RuntimeWarning, match="more than 16777216 bytes"):
        CostTable(path, "here")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_is_not_waited_for(path):
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.warns(RuntimeWarning, match="no regular file"):
        CostTable(path, "here")


HOSTILE = [
    [-1, 0.5, 1],
    [8, -0.5, 1],
    [8, math.nan, 1],
    [8, math.inf, 1],
    [8, 1e300, 1],
    [10**4000, 0.5, 1],
    [8, 10**4000, 1],
    [8, 0.5, 0],
    [8, 0.5, 10**9],
    [8.0, 0.5, 1],
    [8, 0.5, 1.0],
    [True, 0.5, 1],
    [8, True, 1],
    ["8", 0.5, 1],
    [8, "0.5", 1],
    [8, 0.5],
    [8, 0.5, 1, 1],
    [],
    [[8], 0.5, 1],
    {},
    None,
    "8",
    8,
]


def write(path: Path, machines: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"version": 1, "machines": machines}))


@pytest.mark.parametrize("record", HOSTILE, ids=lambda record: repr(record)[:30])
def test_a_senseless_record_is_left_out(path, record):
    good = [16, 0.25, 1]
    write(path, section(record, good) | section(record, machine="there"))
    table = CostTable(path, "here")
    assert table.lookup("numpy", sized(8, "0"), 1) is None
    assert table.lookup("numpy", sized(16, "1"), 1) == 0.25
    assert estimate(table, 32) == 0.5
    table.record("numpy", sized(8), 1, 1.0)
    table.save()
    found = content(path)["machines"]
    assert found == {"there": {}} | section(good) | {"here": found["here"]}


@pytest.mark.parametrize("depth", range(5))
@pytest.mark.parametrize("junk", [1, "x", None, [1], {"x": [1]}, {"": {"": {"": {"": {"": 1}}}}}])
def test_junk_at_any_depth_is_left_out(path, depth, junk):
    machines: dict[str, Any] = section(RECORD)
    inner = machines
    for _ in range(depth):
        inner = next(iter(inner.values()))
    inner["junk"] = junk
    write(path, machines)
    table = CostTable(path, "here")
    assert table.lookup("numpy", sized(8, "0"), 1) == 0.5
    table.record("numpy", sized(8), 1, 1.0)
    table.save()
    assert CostTable(path, "here").lookup("numpy", sized(8, "0"), 1) == 0.5


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | NAMES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=20,
)


@given(
    JSON | st.fixed_dictionaries({"version": st.just(1), "machines": JSON}), st.binary(max_size=9)
)
@untimed
def test_whatever_is_in_the_file_it_can_be_used(tmp_path_factory, value, end):
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    path.write_bytes(json.dumps(value).encode() + end)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        table = CostTable(path, "here")
    table.record("numpy", sized(8), 1, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        table.save()
    assert CostTable(path, "here").lookup("numpy", sized(8), 1) == 1.0


# Threads.


def test_threads_may_do_everything_at_once(path):
    table = CostTable(path, "here")

    def work(k: int) -> Sequence[float | None]:
        for i in range(100):
            table.record("numpy", sized(i), 1, 1.0)
            table.record(f"own{k}", sized(i), 1, float(k + 1))
            if i % 25 == 0:
                table.save()
        return [table.estimate("numpy", sized(50, "new"), 1), table.lookup(f"own{k}", sized(7), 1)]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(work, range(4)))
    assert found == [[1.0, k + 1.0] for k in range(4)]
    table.save()
    again = CostTable(path, "here")
    assert all(again.lookup(f"own{k}", sized(i), 1) == k + 1 for k in range(4) for i in range(100))


def test_looking_up_does_not_wait_for_the_file(table, monkeypatch):
    writing, go_on = threading.Event(), threading.Event()
    write_file = cost_table._write

    def write_slowly(path: Path, text: str) -> None:
        writing.set()
        assert go_on.wait(60)
        write_file(path, text)

    monkeypatch.setattr(cost_table, "_write", write_slowly)
    table.record("numpy", sized(8), 1, 1.0)
    saver = threading.Thread(target=table.save)
    saver.start()
    assert writing.wait(60)
    assert table.lookup("numpy", sized(8), 1) == 1.0
    table.record("numpy", sized(8), 1, 3.0)
    table.record("numpy", sized(16), 1, 4.0)
    go_on.set()
    saver.join(60)
    for each in (8, 16):
        assert table.lookup("numpy", sized(each), 1) == mean([1.0, 3.0] if each == 8 else [4.0])
    monkeypatch.undo()
    table.save()
    again = CostTable(table.path, "here")
    assert [again.lookup("numpy", sized(each), 1) for each in (8, 16)] == [2.0, 4.0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_does_not_wait_for_what_its_parent_writes(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    table = cost_table.table()
    with table._saving, table._lock, cost_table._LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks where there are threads
        child = os.fork()
        if not child:
            done = 1
            try:
                cost_table.table().record("numpy", sized(8), 1, 1.0)
                table.save()
                done = 0
            finally:
                os._exit(done)
    assert os.waitpid(child, 0)[1] == 0
    assert CostTable(table.path, cost_table.machine()).lookup("numpy", sized(8), 1) == 1.0


# The table of the process.


def test_the_environment_names_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    assert cost_table.folder() == tmp_path
    table = cost_table.table()
    assert table is cost_table.table()
    assert (table.path, table.machine) == (tmp_path / "costs.json", cost_table.machine())
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "other"))
    assert cost_table.table() is not table


def test_without_it_the_folder_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cost_table.folder()
    assert "penstock" in folder.parts
    if sys.platform == "linux":
        assert folder == tmp_path / "penstock"


def test_the_machine_names_what_costs_depend_on():
    machine = cost_table.machine()
    for part in (np.__version__, f"Python {sys.version_info.major}.", "Penstock ", " cores"):
        assert part in machine
    assert len(machine) < 300


def test_importing_it_imports_nothing_that_is_not_needed():
    program = (
        "import penstock, sys; assert 'penstock.tuning.cost_table' not in sys.modules; import penstock.tuning.cost_table; "
        "sys.exit(bool({'platformdirs', 'json', 'hashlib', 'importlib.metadata'} & {*sys.modules}))"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
