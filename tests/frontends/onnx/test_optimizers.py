"""Adagrad, Adam and Momentum, against the reference of the onnx package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.ops.harness import node_model, run_reference

DOMAIN = "ai.onnx.preview.training"
CASES: list[tuple[str, Mapping[str, Any]]] = [
    ("Adagrad", {"norm_coefficient": 0.01, "epsilon": 1e-3, "decay_factor": 0.1}),
    ("Adam", {"alpha": 0.8, "beta": 0.9, "epsilon": 1e-3, "norm_coefficient": 0.01}),
    ("Adam", {"alpha": 0.5, "beta": 0.7, "norm_coefficient_post": 0.25}),
    ("Adam", {}),
    ("Momentum", {"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.01, "mode": "standard"}),
    ("Momentum", {"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.01, "mode": "nesterov"}),
]
STATES = {"Adagrad": 1, "Adam": 2, "Momentum": 1}


def inputs_of(name: str, tensors: int, number: int, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(tensors)
    shapes = [(3, 2), (4,), ()][:tensors]
    arrays = [rng.uniform(0.1, 1, shape) for _ in range(STATES[name] + 2) for shape in shapes]
    rate = np.array(0.1, dtype)
    return [rate, np.array(number), *(np.asarray(x, dtype) for x in arrays)]


@pytest.mark.parametrize(("name", "attrs"), CASES)
@pytest.mark.parametrize("tensors", [1, 2, 3])
@pytest.mark.parametrize("number", [0, 1, 7])
def test_optimizer_matches_the_reference(
    name: str, attrs: Mapping[str, Any], tensors: int, number: int
) -> None:
    inputs = inputs_of(name, tensors, number, "f4")
    outputs = tensors * (STATES[name] + 1)
    model = node_model(name, inputs, attrs, outputs=outputs, domain=DOMAIN, opset=1)
    results = ps.compile(model).run({f"x{i}": x for i, x in enumerate(inputs)})
    for y, wanted in zip(results.values(), run_reference(model, inputs), strict=True):
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, wanted, rtol=2e-6)


@pytest.mark.parametrize(("name", "attrs"), CASES)
def test_optimizer_of_float64_computes_in_float64(name: str, attrs: Mapping[str, Any]) -> None:
    inputs = inputs_of(name, 1, 3, "f8")
    model = node_model(name, inputs, attrs, outputs=STATES[name] + 1, domain=DOMAIN, opset=1)
    results = ps.compile(model).run({f"x{i}": x for i, x in enumerate(inputs)})
    for y, wanted in zip(results.values(), run_reference(model, inputs), strict=True):
        assert y.dtype == np.float64
        np.testing.assert_allclose(y, wanted, rtol=1e-14)


@pytest.mark.parametrize(("arrays", "outputs"), [(3, 3), (3, 1), (4, 2)])
def test_optimizer_with_other_numbers_of_arrays_is_refused(arrays: int, outputs: int) -> None:
    one = np.ones(1, np.float32)
    inputs = [np.array(0.1, np.float32), np.array(0), *[one] * arrays]
    model = node_model("Adagrad", inputs, {}, outputs=outputs, domain=DOMAIN, opset=1)
    message = rf"has {arrays} arrays and {outputs} outputs; it takes 3 arrays for each tensor"
    with pytest.raises(ps.InvalidModel, match=message):
        ps.compile(model)


def test_momentum_of_an_unknown_mode_is_refused() -> None:
    inputs = inputs_of("Momentum", 1, 0, "f4")
    attrs = {**CASES[-1][1], "mode": "heavy"}
    model = node_model("Momentum", inputs, attrs, outputs=2, domain=DOMAIN, opset=1)
    with pytest.raises(ps.InvalidModel, match="has mode 'heavy'; it is standard or nesterov"):
        ps.compile(model)
