"""The session of a model to which an axis of samples is added."""

from __future__ import annotations

from penstock.compiler.options import CompileOptions
from penstock.core.errors import RowsStay
from penstock.core.records import replace
from penstock.ir.graph import Model
from penstock.passes.structure.add_samples import add_samples
from penstock.session.session import Session


def session_of_samples(model: Model, options: CompileOptions) -> Session:
    """Return a session whose inputs and outputs have an additional leading axis of samples. Raises
    ``RowsStay`` if some nodes would be computed for one sample at a time."""
    graph = add_samples(model.graph)
    alone = [node.label for node in graph.nodes if node.op.name == "Scan"]
    if alone:
        raise RowsStay(f"{alone[0]} is computed for one sample at a time")
    return Session(replace(model, graphs={**model.graphs, model.entry: graph}), options)
