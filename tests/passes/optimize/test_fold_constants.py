"""Operations of constants become constants, where that costs no memory and no error is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

import penstock as ps
from penstock.core.limits import Limits
from penstock.core.types import ShapeError, TensorType
from penstock.ir.graph import Graph, Model, Node, Value
from penstock.ir.kernel import Kernel
from penstock.ir.op import Op
from penstock.ops import find
from penstock.ops.common.shape_rules import same_type
from penstock.passes.context import PassContext
from penstock.passes.optimize.fold_constants import FoldConstants, owned_bytes
from penstock.passes.pipeline import optimize
from tests.passes.optimize.test_optimize import node, optimized, value, waits
from tests.support.onnx_text import compile_text, graph_from_text
from tests.support.passes import count_operations as ops


def test_operations_of_constants_become_constants():
    graph = optimized(
        "g (float[2] x) => (float[2] y) <float[2] a = {1, 2}> { b = Neg(a) c = Exp(b) y = Add(x, c) }"
    )
    assert ops(graph) == {"Add": 1}
    constant = graph.nodes[0].inputs[1].const
    np.testing.assert_allclose(constant, np.exp([-1, -2]), rtol=1e-6)


def test_shape_arithmetic_folds_with_partly_known_dims():
    #  x [N, 3, 4] -> Shape -> Gather 1, 2 -> Mul -> [12] -> Reshape (0, 12)
    graph = optimized(
        """g (float[N, 3, 4] x) => (float[N, M] y) <int64 one = {1}, int64 two = {2},
            int64[1] zero = {0}, int64[1] axes = {0}> {
            s = Shape(x)
            a = Gather(s, one)
            b = Gather(s, two)
            ab = Mul(a, b)
            abv = Unsqueeze(ab, axes)
            n = Slice(s, zero, axes_end, axes)
            axes_end = Constant <value_ints = [1]> ()
            target = Concat <axis = 0> (n, abv)
            y = Reshape(x, target)
        }"""
    )
    assert graph.outputs[0].type == TensorType(np.dtype(np.float32), ("N", 12))


def test_shapes_of_concrete_inputs_leave_one_reshape():
    text = """g (float[N, 3, 4] x) => (float[N, M] y) <int64 zero = {0}, int64[1] axes = {0},
            int64[1] rest = {-1}> {
            s = Shape(x)
            n = Gather(s, zero)
            nv = Unsqueeze(n, axes)
            target = Concat <axis = 0> (nv, rest)
            y = Reshape(x, target)
        }"""
    graph = graph_from_text(text)
    graph.inputs[0].type = TensorType(np.dtype(np.float32), (5, 3, 4))
    optimize(graph)
    assert ops(graph) == {"Reshape": 1}
    assert graph.outputs[0].type == TensorType(np.dtype(np.float32), (5, 12))


def test_folding_never_makes_large_constants_out_of_small_ones():
    text = """g (float[1] x) => (float[N, M] y) <int64[2] reps = {4096, 4096}, float[1, 1] one = {1}> {
            big = Tile(one, reps)
            y = Add(big, x)
        }"""
    graph = optimized(text)
    assert ops(graph) == {"Tile": 1, "Add": 1}
    assert ops(optimized(text, Limits(max_folded_bytes=2**27))) == {"Add": 1}


def test_constant_of_shape_is_not_blown_up():
    graph = optimized(
        """g (float[1] x) => (float[N, M] y) <int64[2] dims = {30000, 30000}> {
            big = ConstantOfShape <value = float[1] {0.5}> (dims)
            y = Add(big, x)
        }"""
    )
    assert ops(graph) == {"Add": 1}
    constant = graph.nodes[0].inputs[0].const
    assert constant.shape == (30000, 30000)
    assert owned_bytes(constant) == 4


def test_rows_that_one_index_looks_up_are_kept_once():
    # Token types that the exporter knows to be 0, as in encoders of text.
    table = ", ".join(map(str, range(128)))
    graph = optimized(
        f"""g (float[8, N, 64] x) => (float[8, N, 64] y)
            <int64[2] dims = {{8, 40}}, float[2, 64] table = {{{table}}}> {{
            types = ConstantOfShape <value = int64[1] {{1}}> (dims)
            rows = Gather(table, types)
            y = Add(x, rows)
        }}"""
    )
    assert ops(graph) == {"Add": 1}
    (constant,) = [v.const for v in graph.nodes[0].inputs if v.is_constant]
    # The other operand may have one token, for all that is known.
    assert constant.shape == (1, 40, 64)
    assert owned_bytes(constant) == 64 * 4
    np.testing.assert_array_equal(constant, np.broadcast_to(np.arange(64.0, 128), (1, 40, 64)))


def test_zeros_of_unlike_sign_are_not_one():
    graph = optimized(
        """g (float[4, 2000] x) => (float[4, 2000] y)
            <int64[1] dims = {2000}, float[4, 1] zeros = {0.0, -0.0, 0.0, 0.0}> {
            ones = ConstantOfShape <value = float[1] {1.0}> (dims)
            signed = Mul(ones, zeros)
            y = Div(x, signed)
        }"""
    )
    (constant,) = [v.const for v in graph.nodes[0].inputs if v.is_constant]
    np.testing.assert_array_equal(np.signbit(constant[:, 0]), [False, True, False, False])


def test_random_numbers_are_not_folded():
    graph = optimized(
        "g () => (float[2] y) { a = RandomNormal <shape = [2]> () b = RandomNormal <shape = [2]> () "
        "y = Sub(a, b) }"
    )
    assert ops(graph) == {"RandomNormal": 2, "Sub": 1}


def test_a_node_that_can_never_run_is_an_error_with_its_origin():
    graph = graph_from_text(
        "g (float[2] x) => (float[2] y) <float[3] a = {1, 2, 3}> { [adder] y = Add(x, a) }"
    )
    with pytest.raises(ps.InvalidModel, match=r"Add \(adder in the model\).*float32\[2\]"):
        optimize(graph)


def test_in_a_branch_it_is_an_error_only_if_it_runs():
    text = """g (float[2] x, bool c) => (float[2] y) <float[3] a = {1, 2, 3}> {
        y = If (c) <then_branch = t () => (float[2] u) { u = Add(x, a) },
                    else_branch = e () => (float[2] v) { v = Neg(x) }>
    }"""
    session = compile_text(text)
    x = np.ones(2, np.float32)
    assert session.run({"x": x, "c": np.array(False)})["y"].tolist() == [-1, -1]
    with pytest.raises(ps.RunError, match="Add"):
        session.run({"x": x, "c": np.array(True)})


def test_vgg19_of_the_onnx_suite_folds_within_its_weights():
    # 548 MB of weights, made by ConstantOfShape nodes of a few bytes.
    path = onnx.__path__[0] + "/backend/test/data/light/light_vgg19.onnx"
    graph = ps.load(path).graph
    made = sum(node.op.name == "ConstantOfShape" for node in graph.nodes)
    assert made > 10
    for source in graph.inputs:
        dims = tuple(d if isinstance(d, int) else 1 for d in source.type.shape)
        source.type = TensorType(source.type.dtype, dims)
    optimize(graph)
    consts = {id(v.const): v.const for n in graph.walk() for v in n.inputs if v is not None}
    held = sum(owned_bytes(c) for c in consts.values() if c is not None)
    assert held < 1.1 * 548 * 2**20


def test_control_input_of_a_folded_node_is_dropped():
    x, y, k = value("x"), Value("y"), Value("k", const=np.ones(2, np.float32))
    folded = node("Neg", [k], [Value("n")])
    graph = Graph([x], [y], [folded, node("Exp", [x], [y], [folded])])
    optimize(graph)
    assert ops(graph) == {"Exp": 1}
    assert waits(graph, "y") == set()


def broken(error: Exception, *, infers: bool, domain: str = "") -> Graph:
    def fail(*arguments):
        raise error

    op = Op("Broken", domain, 1, 1, fail if infers else same_type, fail)
    x, y = value("x"), Value("y")
    return Graph([x], [y], [Node(op, [x], [y], origin="culprit in m")], "g")


@pytest.mark.parametrize("infers", [True, False])
@pytest.mark.parametrize(
    ("raised", "wanted"),
    [
        (ShapeError("no such shape"), ps.InvalidModel),
        (MemoryError(), ps.LimitExceeded),
        (KeyError("axis"), ps.ExtensionError),
        (IndexError("list index out of range"), ps.ExtensionError),
    ],
)
def test_whatever_an_operation_raises_names_its_node(raised, wanted, infers):
    graph = broken(raised, infers=infers)
    with pytest.raises(wanted, match="culprit in m") as caught:
        ps.compile(Model({"g": graph}, "g"), shapes={})
    assert caught.value.__cause__ is raised


@pytest.mark.parametrize("infers", [True, False])
def test_missing_attribute_of_an_operation_without_schema_is_a_fault_of_the_model(infers):
    graph = broken(KeyError("axis"), infers=infers, domain="test")
    with pytest.raises(ps.InvalidModel, match=r"culprit in m.*needs the attribute 'axis'"):
        ps.compile(Model({"g": graph}, "g"), shapes={})


def test_a_constant_that_an_operation_fails_on_fails_when_it_is_run():
    graph = broken(KeyError("axis"), infers=False)
    graph.nodes[0].op = replace(
        graph.nodes[0].op, compile=lambda node, types: Kernel(lambda x: {}["axis"])
    )
    graph.nodes[0].inputs = [Value("k", const=np.ones(2, np.float32))]
    session = ps.compile(Model({"g": graph}, "g"))
    with pytest.raises(ps.RunError, match=r"Broken \(culprit in m\)"):
        session(np.zeros(2, np.float32))


def test_a_view_that_can_never_be_is_an_error_only_if_it_runs():
    text = """g (float[2, 3] x, bool c) => (float[N] y) <int64[1] five = {5}, int64[1] flat = {-1}> {
        a = Abs(x)
        y = If (c) <then_branch = t () => (float[N] p) { p = Reshape(a, five) },
                    else_branch = e () => (float[N] q) { q = Reshape(a, flat) }> }"""
    session = compile_text(text)
    x = np.ones((2, 3), np.float32)
    assert session.run({"x": x, "c": np.array(False)})["y"].shape == (6,)
    with pytest.raises(ps.RunError, match=r"Reshape \(.*float32\[2, 3\]"):
        session.run({"x": x, "c": np.array(True)})


def test_a_large_constant_with_many_readers_is_not_folded_for_each():
    k = Value("k", const=np.ones(1000, np.float32))
    x = value("x", 1000)

    def graph(names: list[str]) -> Graph:
        nodes = []
        for name in names:
            folded = Node(find(name), [k], [Value(f"{name}0")])
            nodes += [folded, Node(find("Add"), [folded.outputs[0], x], [Value(f"{name}1")])]
        return Graph([x], [n.outputs[0] for n in nodes[1::2]], nodes, "g")

    small = Limits(max_folded_bytes=100)
    for names, left in (["Neg"], {"Add": 1}), (["Neg", "Exp"], {"Add": 2, "Neg": 1, "Exp": 1}):
        made = graph(names)
        optimize(made, PassContext(limits=small))
        assert ops(made) == left
    made = graph(["Neg", "Exp"])
    optimize(made)
    assert ops(made) == {"Add": 2}


@pytest.mark.parametrize(("readers", "left"), [(1, {"Add": 1}), (2, {"Add": 2, "Cast": 2})])
def test_weights_stored_in_fewer_bits_are_folded_however_large(readers, left):
    halves = Value("w", const=np.ones(1000, np.float16))
    x, nodes = value("x", 1000), []
    for i in range(readers):
        cast = Node(find("Cast"), [halves], [Value(f"c{i}")], {"to": 1})
        nodes += [cast, Node(find("Add"), [cast.outputs[0], x], [Value(f"y{i}")])]
    graph = Graph([x], [n.outputs[0] for n in nodes[1::2]], nodes, "g")
    # Equal nodes are one for all other passes.
    FoldConstants().run(graph, PassContext(limits=Limits(max_folded_bytes=100)))
    assert ops(graph) == left


def test_a_partly_known_split_settles():
    #  one of two outputs is a constant; the node stays for the other, and nothing changes further
    graph = graph_from_text(
        """g (float[N, 3] x) => (int64[1] y, int64[1] z) <int64 zero = {0}> {
            s = Shape(x) y, z = Split <axis = 0, num_outputs = 2> (s) }"""
    )
    optimize(graph)
    assert not FoldConstants().run(graph, PassContext())
    assert graph.outputs[1].const.tolist() == [3]
