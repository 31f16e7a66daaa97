"""Quantized TFLite models: which steps compute on 8-bit codes."""

from __future__ import annotations

import pytest

import penstock as ps
from tests.support.tflite_cases import cases

NETS = {case.name: case for case in cases("net")}


@pytest.mark.parametrize("name", ["mini_mobilenet_v2_int8", "mini_resnet_int8"])
def test_quantized_network_convolves_codes_alone(name: str) -> None:
    case = NETS[name]
    steps = ps.compile(case.path).inspect.plan.steps
    ops = ("CONV_2D", "DEPTHWISE_CONV_2D")
    expected = sum(case.data["ops"].get(op, 0) for op in ops)
    names = [step.node.op.name for step in steps]
    assert expected > 3
    assert names.count("QLinearConv") == expected
    assert names.count("IntegerMean") == case.data["ops"].get("MEAN", 0)
    assert "Conv" not in " ".join(step.node.attrs.get("ops", "") for step in steps).split()
    assert {step.backend for step in steps if step.node.op.name == "QLinearConv"} == {"native"}


@pytest.mark.parametrize("suffix", ["", "_int8"])
def test_mobilenet_is_transposed_at_its_input_alone(suffix: str) -> None:
    session = ps.compile(NETS[f"mini_mobilenet_v2{suffix}"].path)
    names = [step.node.op.name for step in session.inspect.plan.steps]
    assert names.index("Transpose") == 0
    assert names.count("Transpose") == 1
    assert session.inspect.plan.views == (suffix == "_int8")  # of a mean, which drops dims
