"""Names in programs, none of which a file chooses."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import penstock as ps
from penstock.codegen.steps import printable

EVIL = ["\n    import os\n#", "\r    import os\r#", "\x00", "\x0c", "\u2028x", "\ud800", "'''\"\\"]


@pytest.mark.parametrize("name", EVIL)
def test_names_of_a_file_are_never_code(name):
    x = ps.ir.graph.Value(
        f"x{name}", ps.core.types.SequenceType(ps.core.types.TensorType(None, (name,)))
    )
    y = ps.ir.graph.Value(f"y{name}")
    node = ps.ir.graph.Node(
        ps.ops.find("SequenceLength"), [x], [y], name=name, origin=f"{name} in m"
    )
    graph = ps.ir.graph.Graph([x], [y], [node], name)
    session = ps.compile(ps.ir.graph.Model({"g": graph}, "g"))
    assert session.run({x.name: [np.zeros(1)]})[y.name] == 1
    assert len(session.source.splitlines()) == 4
    assert session.source.isascii()


def test_dims_of_a_file_are_never_code():
    dims = ["N]\n    never = undefined\n#"]
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, dims))
    graph = helper.make_graph(
        [helper.make_node("SequenceLength", ["s"], ["n"], name="a\r    never = undefined#")],
        "g",
        [helper.make_value_info("s", kind)],
        [helper.make_tensor_value_info("n", onnx.TensorProto.INT64, [])],
    )
    session = ps.compile(helper.make_model(graph))
    assert session.run({"s": [np.zeros(2, np.float32)]})["n"] == 1


def test_program_names_two_ufuncs_of_one_name_apart():
    def shout(x):
        return x

    first, second = np.frompyfunc(shout, 1, 1), np.frompyfunc(lambda x: x + "!", 1, 1)
    assert not first.__name__.isidentifier()
    nodes, values = [], [ps.ir.graph.Value("x", ps.core.types.TensorType(np.dtype(object), (2,)))]
    for i, function in enumerate((first, second)):
        op = ps.ops.Op(
            f"F{i}",
            "",
            1,
            1,
            ps.ops.common.shape_rules.same_type,
            lambda node, types, f=function: ps.ops.Kernel(f),
        )
        values.append(ps.ir.graph.Value(f"y{i}"))
        nodes.append(ps.ir.graph.Node(op, [values[-2]], [values[-1]]))
    session = ps.compile(
        ps.ir.graph.Model({"g": ps.ir.graph.Graph(values[:1], values[-1:], nodes)}, "g")
    )
    assert session(np.array(["a", "b"], object)).tolist() == ["a!", "b!"]
    assert printable("a\nb") == "a\\nb"
