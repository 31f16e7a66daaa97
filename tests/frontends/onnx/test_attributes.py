"""Attributes of nodes: defaults, kinds, references."""

from __future__ import annotations

import pytest
from onnx import AttributeProto, helper

from penstock.frontends.onnx.importer import load_onnx
from tests.support.onnx_models import model_of, node, problems


def test_attribute_defaults_are_those_of_the_node_version() -> None:
    (selu,) = load_onnx(model_of(node("Selu", "x", "y"), opset=5)).graph.nodes
    assert selu.attrs["alpha"] == pytest.approx(1.6732, abs=1e-9) or selu.attrs["alpha"] < 1.67321
    (shape,) = load_onnx(model_of(node("Shape", "x", "y"), opset=13)).graph.nodes
    assert shape.attrs == {"start": 0}  # which only later versions have


def test_legacy_attributes_are_dropped() -> None:
    proto = model_of(node("Relu", "x", "y", consumed_inputs=[0]), opset=5)
    assert load_onnx(proto).graph.nodes[0].attrs == {}


def test_duplicate_attribute_is_refused() -> None:
    proto = model_of(node("Flatten", "x", "y", "f", axis=1))
    proto.graph.node[0].attribute.append(helper.make_attribute("axis", 1))
    assert problems(proto) == ("f in the model has attribute 'axis' twice; remove one",)


def test_attribute_without_type_is_read_by_its_field() -> None:
    proto = model_of(node("Flatten", "x", "y", axis=1), node("Transpose", "x", "z", perm=[0]))
    for untyped in proto.graph.node:
        untyped.attribute[0].ClearField("type")
    flatten, transpose = load_onnx(proto).graph.nodes
    assert (flatten.attrs["axis"], transpose.attrs["perm"]) == (1, [0])


def test_attribute_reference_outside_a_function_is_refused() -> None:
    proto = model_of(node("Flatten", "x", "y", "f"))
    proto.graph.node[0].attribute.append(
        AttributeProto(name="axis", ref_attr_name="a", type=AttributeProto.INT)
    )
    assert "'axis' of f in the model refers to attribute 'a' of a function" in problems(proto)[0]
