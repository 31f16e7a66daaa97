"""Operations are as their traits say, on the values where that is hardest."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.ops.families import MODULES
from penstock.ops.registry import standard
from tests.ops.harness import node_model

EXTREMES = {
    "tensor(float)": np.float32([0, -0.0, 1, -1, 0.5, -2.5, 3e38, -3e38, np.inf, -np.inf, np.nan]),
    "tensor(int32)": np.int32([0, 1, -1, 2, -7, 31, 32, 2**31 - 1, -(2**31)]),
    "tensor(uint8)": np.uint8([0, 1, 2, 7, 8, 255]),
    "tensor(bool)": np.array([True, False]),
}
OPERATIONS = sorted({s.name for s in onnx.defs.get_all_schemas() if ("", s.name) in MODULES})
ELEMENTWISE = [name for name in OPERATIONS if standard(name).elementwise]
ATTRIBUTES = {"Cast": {"to": onnx.TensorProto.DOUBLE}, "BitShift": {"direction": "LEFT"}}
PARAMETERS = {"Reshape": [[-1]], "Squeeze": [[0]], "Unsqueeze": [[0, 2]]}


def kinds(name: str) -> list[str]:
    """Those of ``EXTREMES`` that the first input of an operation may have."""
    schema = onnx.defs.get_schema(name)
    return [kind for kind in EXTREMES if kind in schema.inputs[0].types]


def results(name: str, kind: str) -> np.ndarray:
    """What an elementwise operation makes of all pairs of extremes."""
    schema, x = onnx.defs.get_schema(name), EXTREMES[kind]
    count = max(schema.min_input, 2 if schema.inputs[0].option.name == "Variadic" else 1)
    feeds = [x, x[:, None], x[:, None]][:count]
    if name == "Where":
        feeds[0] = np.resize([True, False], x.size)
    session = ps.compile(node_model(name, feeds, ATTRIBUTES.get(name)))
    (result,) = session.run({f"x{i}": feed for i, feed in enumerate(feeds)}).values()
    return result


@pytest.mark.parametrize("name", [n for n in ELEMENTWISE if "may fail" not in standard(n).traits])
def test_elementwise_operation_fails_on_no_numbers_unless_it_says_so(name: str):
    traits = standard(name).traits
    tried = [kind for kind in kinds(name) if "int" not in kind or "fails on integers" not in traits]
    assert tried
    for kind in ["tensor(float)"] if name == "Where" else tried:
        assert results(name, kind).size >= EXTREMES[kind].size


@pytest.mark.parametrize("name", [n for n in ELEMENTWISE if "nonnegative" in standard(n).traits])
def test_nonnegative_operation_has_no_result_below_zero(name: str):
    for kind in kinds(name):
        if kind != "tensor(int32)":  # the least integer has no absolute value
            assert not (results(name, kind) < 0).any()


@pytest.mark.parametrize("name", [n for n in ELEMENTWISE if "finite" in standard(n).traits])
def test_finite_operation_has_finite_results_of_finite_numbers(name: str, monkeypatch):
    numbers = np.array([0, -0.0, 1, -1, 1e-38, -1e-38, 0.5, -87, 1e4, -1e4], np.float32)
    monkeypatch.setitem(EXTREMES, "tensor(float)", numbers)
    assert np.isfinite(results(name, "tensor(float)")).all()


@pytest.mark.parametrize("name", [n for n in OPERATIONS if "reshapes" in standard(n).traits])
def test_operation_that_reshapes_keeps_elements_in_their_order(name: str):
    x = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    feeds = [x, *[np.int64(each) for each in PARAMETERS.get(name, [])]]
    session = ps.compile(node_model(name, feeds))
    (result,) = session.run({f"x{i}": feed for i, feed in enumerate(feeds)}).values()
    assert result.ravel().tolist() == x.ravel().tolist()
    assert standard(name).view
    assert standard(name).moves


def test_operations_that_jump_are_those_of_steps():
    stepped = {"Ceil", "Floor", "Hardmax", "Mod", "Round", "Sign", "TopK"}
    assert {name for name in OPERATIONS if "jumps" in standard(name).traits} == stepped
