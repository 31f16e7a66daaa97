"""Kernels that may take long look at the run as they go, and end when it is stopped."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.host.current_run import working_for
from penstock.ir.graph import Node, Value
from penstock.ops.registry import TENSORFLOW, find
from penstock.types import type_of


class CountingRun:
    """A run that counts how often kernels look at it, and is stopped from look ``last`` on."""

    budget = None

    def __init__(self, last: float = float("inf")) -> None:
        self.looks = 0
        self.last = last

    def check(self) -> None:
        self.looks += 1
        if self.looks >= self.last:
            raise ps.Cancelled("enough")


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
    "StringSplit": ("StringSplit", {}, lambda n: [words(n)]),
    "SplitToSequence": ("SplitToSequence", {}, lambda n: [np.zeros((n, 1), np.float32)]),
    "RegexFullMatch": ("RegexFullMatch", {"pattern": "(a|b| )*c"}, lambda n: [words(n)]),
}
SCALES = np.float32([1, 1, 2.5, 2.5])


def run(name: str, n: int, control: CountingRun) -> None:
    op_name, attrs, inputs_of = CASES[name]
    inputs = inputs_of(n)
    op = find(op_name) or find(op_name, TENSORFLOW)
    assert op is not None
    values = [None if x is None else Value(f"x{i}", type_of(x)) for i, x in enumerate(inputs)]
    node = Node(op, values, [Value("y"), Value("z")][: 2 if op_name == "StringSplit" else 1], attrs)
    kernel = op.compile(node, [None if v is None else v.type for v in values])
    working_for(control, kernel.function, *inputs)


@pytest.mark.parametrize("name", CASES)
def test_kernel_ends_in_the_middle_when_its_run_is_stopped(name: str) -> None:
    whole = CountingRun()
    run(name, 5000, whole)
    assert whole.looks >= 2
    stopped = CountingRun(last=whole.looks // 2 + 1)
    with pytest.raises(ps.Cancelled):
        run(name, 5000, stopped)
    assert stopped.looks == stopped.last
