"""Kernels that may take long look at the run as they go, and end when it is stopped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.types import type_of
from penstock.host.current_run import working_for
from penstock.host.native import library
from penstock.ir.graph import Node, Value
from penstock.ops.common import distinct, products
from penstock.ops.onnx import arrange, index, scatter, sequence, text
from penstock.ops.onnx import image as image_ops
from penstock.ops.registry import MICROSOFT, TENSORFLOW, find
from tests.support.counting_run import CountingRun


def words(n: int) -> np.ndarray:
    return np.array(["a b c"] * n, object)


def image(n: int) -> np.ndarray:
    return np.zeros((1, 1, 8, n), np.float32)


def zeros(*dims: int) -> np.ndarray:
    return np.zeros(dims, np.float32)


def boxes(n: int) -> np.ndarray:
    return np.float32([[[[i, 0, i + 1, 1]] for i in range(100)]])


def regions(n: int) -> list[np.ndarray]:
    return [np.float32([[0, 0, 4, 4]] * n), np.zeros(n, np.int64)]


def layer(n: int, *more: np.ndarray | None) -> list[np.ndarray | None]:
    return [zeros(n, 1, 2), zeros(1, 8, 2), zeros(1, 8, 2), *more]


CASES = {
    "Conv": ("Conv", {}, lambda n: [zeros(2, 4, 8, n), zeros(8, 4, 3, 3)]),
    "Conv depthwise": ("Conv", {"group": 4}, lambda n: [zeros(2, 4, 8, n), zeros(4, 1, 3, 3)]),
    "ConvTranspose": ("ConvTranspose", {}, lambda n: [zeros(2, 4, 8, n), zeros(4, 8, 3, 3)]),
    "LSTM": ("LSTM", {"hidden_size": 2}, layer),
    "LSTM of lengths": (
        "LSTM",
        {"hidden_size": 2},
        lambda n: layer(n, None, np.array([n // 2], np.int32)),
    ),
    "Resize nearest": ("Resize", {"mode": "nearest"}, lambda n: [image(n), None, SCALES]),
    "Resize linear": ("Resize", {"mode": "linear"}, lambda n: [image(n), None, SCALES]),
    "Resize cubic": ("Resize", {"mode": "cubic"}, lambda n: [image(n), None, SCALES]),
    "RoiAlign": ("RoiAlign", {}, lambda n: [image(8), *regions(n)]),
    "RoiAlign max": ("RoiAlign", {"mode": "max"}, lambda n: [image(8), *regions(n)]),
    "NonMaxSuppression": (
        "NonMaxSuppression",
        {},
        lambda n: [zeros(1, n, 4), zeros(1, 1, n), np.array([n])],
    ),
    "CombinedNonMaxSuppression": (
        "CombinedNonMaxSuppression",
        {"pad_per_class": False, "clip_boxes": True},
        lambda n: [boxes(n), np.ones((1, 100, 1), np.float32), *map(np.array, (99, 99, 0.5, 0.0))],
    ),
    "Attention": ("Attention", {}, lambda n: [zeros(1, 1, n, 4)] * 3),
    "DeformConv": (
        "DeformConv",
        {},
        lambda n: [zeros(n // 500, 2, 1, 4), zeros(2, 2, 1, 1), zeros(n // 500, 2, 1, 4)],
    ),
    "StringSplit": ("StringSplit", {}, lambda n: [words(n)]),
    "SplitToSequence": ("SplitToSequence", {}, lambda n: [np.zeros((n, 1), np.float32)]),
    "RegexFullMatch": ("RegexFullMatch", {"pattern": "(a|b| )*c"}, lambda n: [words(n)]),
}
SCALES = np.float32([1, 1, 2.5, 2.5])


def integers(*dims: int) -> np.ndarray:
    return np.zeros(dims, np.int64)


def codes(*dims: int) -> np.ndarray:
    return np.zeros(dims, np.uint8)


def experts(n: int, *layers: np.ndarray | None) -> list[np.ndarray | None]:
    """All tokens choose the first of four experts."""
    return [zeros(n, 8), np.float32([[1, 0, 0, 0]] * n), *layers]


PRODUCTS = {
    "MatMul": ("MatMul", {}, lambda n: [zeros(n, 8), zeros(8, 8)]),
    "MatMul of integers": ("MatMul", {}, lambda n: [integers(n // 32, 8), integers(8, 8)]),
    "MatMul of many": ("MatMul", {}, lambda n: [integers(n // 64, 4, 8), integers(n // 64, 8, 8)]),
    "Gemm": ("Gemm", {"transA": 1}, lambda n: [zeros(8, n), zeros(8, 8)]),
    "Gemm of integers": ("Gemm", {"alpha": 0.5}, lambda n: [integers(n // 32, 8), integers(8, 8)]),
    "Einsum": ("Einsum", {"equation": "ij,kj->ki"}, lambda n: [zeros(n, 8), zeros(8, 8)]),
    "MatMulInteger": ("MatMulInteger", {}, lambda n: [codes(n, 8), codes(8, 8)]),
    "Conv": ("Conv", {}, lambda n: [zeros(1, 8, n), zeros(8, 8, 1)]),
    "Conv of many": ("Conv", {"group": 2}, lambda n: [zeros(2, 8, n), zeros(8, 4, 1)]),
    "LSTM": ("LSTM", {"hidden_size": 2}, lambda n: layer(n // 200)),
    "MatMulNBits": (
        "MatMulNBits",
        {"K": 16, "N": 8, "bits": 4, "block_size": 16},
        lambda n: [zeros(n, 16), codes(8, 1, 8), zeros(8)],
    ),
    "Attention of projections": (
        "com.microsoft.Attention",
        {"num_heads": 1},
        lambda n: [zeros(n // 500, 8, 8), zeros(8, 24)],
    ),
    "MoE": ("MoE", {"k": 1}, lambda n: experts(n, zeros(4, 8, 8), None, zeros(4, 8, 8))),
    "QMoE": (
        "QMoE",
        {"k": 1, "expert_weight_bits": 8},
        lambda n: experts(n, codes(4, 8, 8), zeros(4, 8), None, codes(4, 8, 8), zeros(4, 8)),
    ),
}


def run(case: Any, n: int, control: CountingRun) -> Any:
    op_name, attrs, inputs_of = case
    inputs = inputs_of(n)
    domain, _, op_name = op_name.rpartition(".")
    domains = [domain] if domain else ["", MICROSOFT, TENSORFLOW]
    op = next(op for domain in domains if (op := find(op_name, domain)) is not None)
    assert op is not None
    values = [None if x is None else Value(f"x{i}", type_of(x)) for i, x in enumerate(inputs)]
    node = Node(op, values, [Value("y"), Value("z")][: 2 if op_name == "StringSplit" else 1], attrs)
    kernel = op.compile(node, [None if v is None else v.type for v in values])
    return working_for(control, kernel.function, *inputs)


def check(case: Any) -> None:
    """Check that a kernel that is stopped half way ends there."""
    whole = CountingRun()
    run(case, 5000, whole)
    assert whole.looks >= 2
    stopped = CountingRun(last=whole.looks // 2 + 1)
    with pytest.raises(ps.Cancelled):
        run(case, 5000, stopped)
    assert stopped.looks == stopped.last


@pytest.mark.parametrize("name", CASES)
def test_kernel_ends_in_the_middle_when_its_run_is_stopped(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("name", PRODUCTS)
def test_large_product_ends_in_the_middle_when_its_run_is_stopped(name: str, monkeypatch) -> None:
    monkeypatch.setattr(products, "MOST_FLOPS", 160_000)
    monkeypatch.setattr(products, "_SLOWER", 16)
    check(PRODUCTS[name])


def places(n: int, *dims: int) -> np.ndarray:
    return np.arange(n * int(np.prod(dims))).reshape(n, *dims) * 7 % 12 - 6


def floats(*dims: int) -> np.ndarray:
    return np.arange(np.prod(dims), dtype=np.float32).reshape(dims) % 1013


POOL = {"min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 1, "mode": "TF"}
POOL |= {"ngram_counts": [0, 2], "ngram_indexes": [0, 1, 2], "pool_int64s": [1, 2, 1, 2]}
WINDOW = {"kernel_shape": [3, 3], "pads": [1] * 4}

PARTS = {
    "Unique": (("Unique", {}, lambda n: [floats(n)]), (distinct, "_UNCHECKED")),
    "Unique of rows": (("Unique", {"axis": 0}, lambda n: [places(n, 2)]), (distinct, "_UNCHECKED")),
    "GatherElements": (
        ("GatherElements", {"axis": 0}, lambda n: [floats(12, 2), places(n, 2)]),
        (index, "_MOST_PICKED"),
    ),
    "GatherElements of rows": (
        ("GatherElements", {"axis": -1}, lambda n: [floats(n + 3, 12), places(n, 2)]),
        (index, "_MOST_PICKED"),
    ),
    "GatherND": (
        ("GatherND", {}, lambda n: [floats(12, 12, 3), places(n, 2)]),
        (index, "_MOST_PICKED"),
    ),
    "GatherND of batches": (
        ("GatherND", {"batch_dims": 1}, lambda n: [floats(n, 12, 3), places(n, 2, 1)]),
        (index, "_MOST_PICKED"),
    ),
    "ScatterND": (
        ("ScatterND", {"reduction": "max"}, lambda n: [floats(12, 3), places(n, 1), floats(n, 3)]),
        (scatter, "_MOST_WRITTEN"),
    ),
    "ScatterElements": (
        ("ScatterElements", {}, lambda n: [floats(12, 3), places(n, 2), floats(n, 2)]),
        (scatter, "_MOST_WRITTEN"),
    ),
    "ScatterElements of rows": (
        (
            "ScatterElements",
            {"axis": 1, "reduction": "add"},
            lambda n: [floats(n + 3, 12), places(n, 2), floats(n, 2)],
        ),
        (scatter, "_MOST_WRITTEN"),
    ),
    "GridSample": (
        (
            "GridSample",
            {"padding_mode": "border"},
            lambda n: [floats(2, 3, 5, 6), floats(2, n // 5, 5, 2) / 500 - 1],
        ),
        (image_ops, "_BLOCK"),
    ),
    "TfIdfVectorizer": (
        ("TfIdfVectorizer", POOL, lambda n: [np.abs(places(n, 4))]),
        (text, "_MOST_TOKENS"),
    ),
    "ConcatFromSequence": (
        ("ConcatFromSequence", {"axis": 1}, lambda n: [[floats(2, i % 3) for i in range(n)]]),
        (sequence, "_MANY"),
    ),
    "ConcatFromSequence on a new axis": (
        ("ConcatFromSequence", {"axis": 1, "new_axis": 1}, lambda n: [[floats(2, 3)] * n]),
        (sequence, "_MANY"),
    ),
    "MaxRoiPool": (
        (
            "MaxRoiPool",
            {"pooled_shape": [2, 2]},
            lambda n: [floats(1, 2, 9, 9), np.float32([[0, 0, 0, i % 9, i % 7] for i in range(n)])],
        ),
        (index, "_MOST_PICKED"),
    ),
}


if library() is None:  # NumPy finds what is distinct in one call
    del PARTS["Unique"], PARTS["Unique of rows"]


@pytest.mark.parametrize("name", PARTS)
def test_large_kernel_in_parts_ends_in_the_middle_and_gives_the_same(name, monkeypatch) -> None:
    case, (module, most) = PARTS[name]
    whole = run(case, 5000, CountingRun())
    monkeypatch.setattr(module, most, 1000)
    np.testing.assert_array_equal(run(case, 5000, CountingRun()), whole)
    check(case)


def test_max_pool_with_places_looks_at_the_run_for_each_element_of_its_windows() -> None:
    x = Value("x", type_of(zeros(1, 2, 8, 8)))
    outputs = [Value("y"), Value("places")]
    op = find("MaxPool")
    assert op is not None
    kernel = op.compile(Node(op, [x], outputs, WINDOW), [x.type])
    control = CountingRun()
    working_for(control, kernel.function, zeros(1, 2, 8, 8))
    assert control.looks == 9


def test_places_of_parts_are_made_with_looks_at_the_run() -> None:
    control = CountingRun()
    assert len(working_for(control, arrange.cuts, 0, [1] * 1000)) == 1000
    assert control.looks == 8
