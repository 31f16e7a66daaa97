"""Types inferred as a pass, and by ``run_passes`` before what requires them."""

from __future__ import annotations

import pytest

from penstock.core.errors import InvalidModel
from penstock.core.types import ANY
from penstock.ir.graph import Graph
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.optimize.fold_constants import InferTypes
from penstock.passes.pipeline import run_passes
from tests.support.onnx_text import graph_from_text

WRONG = "g (float[2] x, float[3] z) => (float[K] y) { y = Add(x, z) }"


class Forget(Pass):
    """Leaves values without types."""

    requires = frozenset()
    invalidates = frozenset({Property.TYPED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        for node in graph.nodes:
            for value in node.outputs:
                if value is not None:
                    value.type = ANY
        return True


class Look(Pass):
    """Remembers the type of the first output."""

    requires = frozenset()

    def run(self, graph: Graph, context: PassContext) -> bool:
        self.seen = str(graph.outputs[0].type)
        return False


class LookAtTypes(Look):
    """As ``Look``, of a typed graph."""

    requires = frozenset({Property.TYPED})


@pytest.mark.parametrize(("look", "seen"), [(Look(), str(ANY)), (LookAtTypes(), "float32[2]")])
def test_run_passes_infers_types_before_a_pass_that_requires_them(look: Look, seen: str) -> None:
    graph = graph_from_text("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    run_passes((Forget(), look), graph, PassContext())
    assert look.seen == seen


def test_infer_types_node_that_cannot_run_is_an_error_unless_it_may_be_dead() -> None:
    with pytest.raises(InvalidModel):
        InferTypes().run(graph_from_text(WRONG), PassContext())
    assert not InferTypes().run(graph_from_text(WRONG), PassContext(framed=True))
