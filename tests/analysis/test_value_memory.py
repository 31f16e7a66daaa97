"""Where values are in memory: in the arena, fixed views of that, or allocated during the run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from penstock.analysis.type_inference import infer_types
from penstock.analysis.value_memory import ValueMemory, value_memory
from penstock.backends.numpy import NumpyBackend
from penstock.core.errors import LimitExceeded
from penstock.core.types import ShapeError
from penstock.ir.graph import Graph, Value
from penstock.ir.kernel import Kernel, LayoutHints
from penstock.ops.onnx.control_flow import is_control
from penstock.textual.parser import parse_graph
from tests.support.graphs import node_named, value_named


def decided(
    text: str,
    replaced: Mapping[str, Kernel] | None = None,
    *,
    planned: bool = True,
    waits: Mapping[str, str] | None = None,
) -> tuple[Graph, ValueMemory]:
    """A graph, and the memory of its values with NumPy's kernels but for the ``replaced`` ones; a
    node in ``waits`` has another one as its control input."""
    graph = parse_graph(text)
    for name, before in (waits or {}).items():
        node_named(graph, name).control_inputs.append(node_named(graph, before))
    infer_types(graph)
    backend = NumpyBackend()
    kernels = {
        node: (replaced or {}).get(node.name)
        or backend.kernel(node, [None if v is None else v.type for v in node.inputs])
        for node in graph.walk()
        if not is_control(node)
    }
    return graph, value_memory(graph, kernels, planned=planned)


CHAIN = "graph main(x: float32[2, 3]) -> (y) { a = Exp(x) as exp  y = Neg(a) }"


def test_value_memory_of_a_chain_plans_all_but_the_output() -> None:
    graph, memory = decided(CHAIN)
    assert memory.strides == {value_named(graph, "a"): ()}
    assert memory.escapes == {value_named(graph, "y")}


def test_value_memory_without_an_arena_plans_nothing() -> None:
    _, memory = decided(CHAIN, planned=False)
    assert (memory.strides, memory.views, memory.orders) == ({}, {}, {})


def test_value_memory_of_unknown_shapes_plans_nothing() -> None:
    _, memory = decided("graph main(x: float32[N, 3]) -> (y) { a = Exp(x)  y = Neg(a) }")
    assert memory.strides == {}


def test_transpose_of_a_planned_value_is_a_view_with_swapped_strides() -> None:
    graph, memory = decided(
        "graph main(x: float32[2, 3]) -> (y) { a = Exp(x)  t = Transpose(a)  y = Neg(t) }"
    )
    view = memory.views[value_named(graph, "t")]
    assert (view.base, view.offset, view.strides) == (value_named(graph, "a"), 0, (4, 12))


def test_slice_of_a_view_has_its_offset_in_the_planned_value() -> None:
    graph, memory = decided(
        """graph main(x: float32[2, 3]) -> (y) {
          start: int64[1] = const [1]  end: int64[1] = const [3]
          a = Exp(x)  t = Transpose(a)  s = Slice(t, start, end)  y = Neg(s)
        }"""
    )
    view = memory.views[value_named(graph, "s")]
    assert (view.base, view.offset, view.strides) == (value_named(graph, "a"), 4, (4, 12))


def test_view_of_a_graph_input_is_dynamic() -> None:
    _, memory = decided("graph main(x: float32[2, 3]) -> (y) { t = Transpose(x)  y = Neg(t) }")
    assert memory.views == {}


@pytest.mark.parametrize(
    ("read", "is_view"), [("", True), ("z = Neg(y)", False), ("z = Exp(x)", True)]
)
def test_output_that_waits_is_a_view_of_the_arena_unless_a_node_reads_it(read, is_view) -> None:
    outputs = "y, z" if read else "y"
    text = f"graph main(x: float32[2, 3]) -> ({outputs}) {{ a = Exp(x) as exp  b = Neg(x) as last "
    text += f"y = Identity(a) as end {read} }}"
    bound = Kernel(np.exp, np.exp, layout=LayoutHints(prefer_bound=True))
    graph, memory = decided(text, {"exp": bound}, waits={"end": "last"})
    assert (value_named(graph, "y") in memory.views) is is_view


def test_source_of_a_view_that_leaves_the_run_escapes_with_it() -> None:
    graph, memory = decided("graph main(x: float32[2, 3]) -> (t) { a = Exp(x)  t = Transpose(a) }")
    assert memory.escapes == {value_named(graph, "a"), value_named(graph, "t")}
    assert memory.strides == {}


def test_view_that_its_kernel_rejects_is_invalid() -> None:
    graph, memory = decided(
        "graph main(x: float32[2, 3]) -> (y) { a = Exp(x)  t = Transpose(a) as view  y = Neg(t) }",
        {"view": Kernel(lambda x: x.reshape(4), view=True)},
    )
    assert isinstance(memory.invalid[node_named(graph, "view")], ShapeError)
    assert value_named(graph, "t") not in memory.views


def test_value_beyond_the_address_space_raises_limit_exceeded() -> None:
    with pytest.raises(LimitExceeded, match=r"'a' of type .* does not fit into memory"):
        decided(
            f"graph main(x: float32[{2**31}, {2**31}]) -> (y) "
            "{ a = Exp(x)  t = Transpose(a)  y = Neg(t) }"
        )


# Orders of dims.


def kernel(**fields: object) -> Kernel:
    def into(x: np.ndarray, y: np.ndarray) -> None:
        np.exp(x, y)

    return Kernel(np.exp, into, layout=LayoutHints(**fields))  # type: ignore[arg-type]


def ordered(text: str, **fields: object) -> tuple[Graph, ValueMemory, Value]:
    graph, memory = decided(text, {"exp": kernel(**fields)})
    return graph, memory, value_named(graph, "a")


def test_kernel_of_any_layout_writes_in_the_order_that_a_transpose_wants() -> None:
    text = (
        "graph main(x: float32[2, 3, 5]) -> (y) "
        "{ a = Exp(x) as exp  t = Transpose{perm=[1, 2, 0]}(a)  y = Neg(t) }"
    )
    graph, memory, a = ordered(text, any_layout=True)
    assert memory.orders[node_named(graph, "exp")] == (1, 2, 0)
    assert memory.strides[a] == (4, 40, 8)
    assert memory.has_order(a, (1, 2, 0))
    assert memory.has_order(value_named(graph, "t"), (0, 1, 2))


def test_kernel_of_any_layout_writes_a_result_that_leaves_the_run_in_its_own_order() -> None:
    text = "graph main(x: float32[16384, 2]) -> (a) { a = Exp(x) as exp }"
    graph, memory, a = ordered(text, any_layout=True, dims_order=(1, 0))
    assert memory.orders[node_named(graph, "exp")] == ()
    assert a in memory.results


def test_kernel_of_any_layout_keeps_its_order_where_a_transpose_of_it_leaves_the_run() -> None:
    text = (
        "graph main(x: float32[16384, 2]) -> (t) "
        "{ a = Exp(x) as exp  t = Transpose{perm=[1, 0]}(a) }"
    )
    graph, memory, a = ordered(text, any_layout=True, dims_order=(1, 0))
    assert memory.orders.get(node_named(graph, "exp"), (1, 0)) == (1, 0)
    assert a not in memory.results


def test_elementwise_kernel_keeps_the_order_of_its_input() -> None:
    text = "graph main(x: float32[2, 3, 5]) -> (y) { a = Exp(x) as exp  b = Neg(a)  y = Neg(b) }"
    graph, memory, a = ordered(text, dims_order=(0, 2, 1))
    assert memory.strides[value_named(graph, "b")] == memory.strides[a] == (60, 4, 12)


@pytest.mark.parametrize(
    ("rows", "dims_order", "is_result"),
    [(16384, (), True), (16383, (), False), (16384, (1, 0), False)],
)
def test_large_result_in_c_order_is_written_where_it_leaves_the_run(rows, dims_order, is_result):
    text = f"graph main(x: float32[{rows}, 1]) -> (a) {{ a = Exp(x) as exp }}"
    graph, memory, a = ordered(text, dims_order=dims_order)
    assert (a in memory.results) is is_result
    assert (node_named(graph, "exp") in memory.orders) is is_result
    assert a not in memory.strides


def test_view_that_the_order_of_its_source_does_not_allow_is_copied() -> None:
    text = """graph main(x: float32[2, 3, 5]) -> (y) {
      shape: int64[1] = const [30]  a = Exp(x) as exp  r = Reshape(a, shape) as r  y = Neg(r)
    }"""
    graph, memory, _ = ordered(text, dims_order=(0, 2, 1))
    assert memory.copied == {node_named(graph, "r")}
    assert memory.strides[value_named(graph, "r")] == ()


# Loops and branches.

LOOP = """graph main(n: int64[], x: float32[3]) -> (y, all) {
  last, all = Loop(n, _, x) as loop {
    body: graph(i, c, s) -> (c, t, u) { t = Exp(s)  u = Neg(t) }
  }
  y = Neg(last)
}"""


def test_update_of_a_loop_alternates_and_what_it_collects_escapes() -> None:
    graph, memory = decided(LOOP)
    inside, updated, collected = (value_named(graph, name) for name in ("s", "t", "u"))
    assert memory.alternating == {updated: inside}
    assert updated not in memory.escapes
    assert collected in memory.escapes


def test_update_of_a_loop_without_an_arena_escapes() -> None:
    graph, memory = decided(LOOP, planned=False)
    assert memory.alternating == {}
    assert value_named(graph, "t") in memory.escapes


def test_result_of_a_branch_escapes_if_the_result_of_its_if_does() -> None:
    text = """graph main(b: bool[], x: float32[3]) -> (%s) {
      z = If(b) {
        then_branch: graph() -> (p) { p = Neg(x) }
        else_branch: graph() -> (q) { q = Exp(x) }
      }
      y = Neg(z)
    }"""
    for output, escape in (("z", True), ("y", False)):
        graph, memory = decided(text % output)
        assert (value_named(graph, "p") in memory.escapes) is escape
