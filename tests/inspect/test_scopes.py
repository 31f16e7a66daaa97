"""Scopes of steps, from the names that exporters write and from torch's metadata."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import penstock as ps
from penstock.inspect.report_document import common, scope_in
from tests.support.tflite_models import model as tflite_model
from tests.support.tflite_models import subgraph


def chain(names: list[str], outputs: list[str] | None = None) -> onnx.ModelProto:
    """A model of one node after the other, of these names."""
    values = ["x", *(outputs or [f"v{i}" for i in range(len(names) - 1)] + ["y"])]
    operations = ["Sin", "Cos", "Tanh", "Exp"]
    nodes = [
        helper.make_node(operations[i % 4], [values[i]], [values[i + 1]], name=name)
        for i, name in enumerate(names)
    ]
    ends = [helper.make_tensor_value_info(v, TensorProto.FLOAT, [4]) for v in ("x", values[-1])]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def scopes(model: onnx.ModelProto | bytes, shape: tuple[int, ...] = (4,)) -> dict[str, str]:
    """The scope of each step by its name, as a report has them."""
    session = ps.compile(model, backends=["numpy"], executor="linear")
    report = session.inspect.report({"x": np.ones(shape, np.float32)}, runs=1).document
    paths = [""]
    for parent, name in report["scopes"]:
        paths.append(f"{paths[parent + 1]}/{name}".lstrip("/"))
    steps = report["steps"]
    return {n: paths[s + 1] for n, s in zip(steps["name"], steps["scope"], strict=True)}


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("/encoder/layer.0/MatMul", ("encoder", "layer.0")),
        ("model/dense/MatMul;model/dense/BiasAdd", ("model", "dense")),
        ("model/a/Relu;model/b/Conv;", ("model",)),
        ("MatMul_3", ()),
        ("", ()),
        ("//", ()),
    ],
)
def test_scope_is_what_stands_before_the_last_slash(name, scope):
    assert scope_in(name) == scope


def test_common_scope_of_nothing_is_empty():
    assert common([]) == ()


def test_steps_have_the_scopes_in_the_names_of_their_nodes():
    assert scopes(chain(["/a/b/Sin", "/a/b/Cos", "/a/Tanh", "Exp"])) == {
        "/a/b/Sin": "a/b",
        "/a/b/Cos": "a/b",
        "/a/Tanh": "a",
        "Exp": "a",  # of the step beside it
    }


def test_step_between_scopes_has_what_they_share():
    found = scopes(chain(["/a/b/Sin", "Cos_1", "/a/c/Tanh"]))
    assert found["Cos_1"] == "a"


def test_model_without_scopes_has_none():
    assert set(scopes(chain(["one", "two"])).values()) == {""}


def test_nodes_are_in_the_scopes_of_their_values_where_they_have_none():
    """As in TFLite, whose operators have no names."""
    operators = [
        ("EXP", ["x"], ["net/first/Exp"], None),
        ("COS", ["net/first/Exp"], ["net/last/Cos"], None),
    ]
    content = tflite_model([subgraph({"x": ("float32", [4])}, operators, ["net/last/Cos"])])
    assert scopes(content) == {"EXP_0": "net/first", "COS_1": "net/last"}


def test_scopes_of_torch_are_read_from_metadata():
    model = chain(["node_sin", "node_cos", "node_tanh", "node_exp"])
    texts = [
        "['', 'layers.0', 'layers.0.norm', 'sin']",
        "['', 'layers.0', 'layers.0.norm', 'sin']",
        "['', 'layers.0', 'cos']",
        "['', 'layers.1', __import__('os')]",  # not a list of names
    ]
    for node, text in zip(model.graph.node, texts, strict=True):
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=text)
    loaded = ps.load(model)
    assert loaded.scopes == {
        "node_sin": "layers.0/norm/sin",
        "node_cos": "layers.0/norm/sin",
        "node_tanh": "layers.0/cos",
    }
    assert scopes(model)["node_tanh"] == "layers.0/cos"


def test_fused_step_is_in_the_scope_of_all_its_nodes():
    session = ps.compile(chain(["/a/b/Sin", "/a/c/Cos"]))
    document = session.inspect.report({"x": np.ones(4, np.float32)}, runs=1).document
    if len(document["steps"]["name"]) != 1:
        pytest.skip("no backend here fuses these nodes")
    assert document["scopes"] == [(-1, "a")]
