"""Graphs are verified after each pass where the environment asks for it."""

from __future__ import annotations

import pytest

from penstock.core.errors import InternalError
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Graph
from penstock.passes.context import Pass, PassContext
from penstock.passes.optimize.fold_constants import InferTypes
from penstock.passes.pipeline import CHECK_PASSES, run_passes
from tests.passes.test_pipeline import add_chain


class Corruption(Pass):
    """A pass with a bug."""

    def __init__(self, corrupt, tells: bool = True) -> None:
        self.corrupt, self.tells = corrupt, tells

    def run(self, graph: Graph, context: PassContext) -> bool:
        self.corrupt(graph)
        return self.tells


def drop_first(graph: Graph) -> None:
    del graph.nodes[0]


def reverse(graph: Graph) -> None:
    graph.nodes.reverse()


def mistype(graph: Graph) -> None:
    graph.nodes[0].outputs[0].type = TensorType(FLOAT32, (3,))


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [(drop_first, "v0"), (reverse, "n2 before n1"), (mistype, r"float32\[3\]")],
)
@pytest.mark.parametrize("tells", [True, False])
def test_check_after_a_pass_with_a_bug_names_the_pass(corrupt, message, tells):
    idle = InferTypes()  # behind which the graph is known to be right
    with pytest.raises(InternalError, match=f"pass corruption left .*{message}"):
        run_passes([idle, Corruption(corrupt, tells), idle], add_chain(3), PassContext())


def test_check_is_off_without_the_environment_variable(monkeypatch):
    monkeypatch.delenv(CHECK_PASSES)
    graph = add_chain(3)
    names = [node.name for node in graph.nodes]
    run_passes([Corruption(reverse)], graph, PassContext())
    assert [node.name for node in graph.nodes] == names[::-1]
