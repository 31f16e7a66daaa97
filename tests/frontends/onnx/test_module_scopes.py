"""Modules around nodes, as the exporter of torch writes them."""

from __future__ import annotations

import pytest
from onnx import helper

from penstock.frontends.onnx.messages import NodeProto
from penstock.frontends.onnx.module_scopes import NAME_SCOPES, module_scopes


def node(name: str, scopes: str, key: str = NAME_SCOPES) -> NodeProto:
    proto = helper.make_node("Add", ["x", "x"], ["y"], name=name)
    proto.metadata_props.add(key=key, value=scopes)
    return NodeProto.FromString(proto.SerializeToString())


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("['', 'layers.0', 'layers.0.norm', 'layer_norm']", "layers.0/norm/layer_norm"),
        ("['a']", "a"),
        ("['', 'a.b', 'c/d']", "a.b/c.d"),
    ],
)
def test_scopes_are_relative_to_the_one_around(text, path):
    assert module_scopes([node("n", text)]) == {"n": path}


@pytest.mark.parametrize(
    "text", ["", "[]", "['a'", '["a"]', "['a', b]", "['']", "__import__('os')"]
)
def test_text_that_torch_does_not_write_is_left_out(text):
    assert module_scopes([node("n", text)]) == {}


def test_nodes_without_name_or_scopes_are_left_out():
    nodes = [node("", "['a']"), node("m", "['a']", "other"), node("n", "['b']")]
    assert module_scopes(nodes) == {"n": "b"}
