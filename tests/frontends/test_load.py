"""Models in text form that are verified like files."""

from __future__ import annotations

import pytest

from penstock.core.errors import InvalidModel
from penstock.core.limits import Limits
from penstock.frontends.load import load_text

TEXT = "model g { graph g(x: float32[2]) -> (y) { %s } }"


def test_text_of_a_valid_model_is_loaded_and_sorted() -> None:
    model = load_text(TEXT % "y = Neg(a)\n a = Abs(x)")
    assert [node.op.name for node in model.graph.nodes] == ["Abs", "Neg"]


@pytest.mark.parametrize(
    ("node", "fault"),
    [
        ("y = Identity()", "has 0 inputs, but Identity-"),
        ("y = Gather(x, _)", "leaves out input 1 (indices), which Gather-13 requires"),
        ("y = Cast(x)", "lacks attribute 'to', which Cast-"),
    ],
)
def test_text_of_a_node_against_its_schema_is_refused(node: str, fault: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        load_text(TEXT % node)
    assert fault in str(caught.value)


def test_text_is_checked_against_limits() -> None:
    with pytest.raises(InvalidModel, match="max_nodes"):
        load_text(TEXT % "a = Abs(x)\n y = Neg(a)", Limits(max_nodes=1))
