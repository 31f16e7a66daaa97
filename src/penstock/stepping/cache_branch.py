"""Decoders with a first and a further step in one graph, selected by an input.

optimum writes this form: ``use_cache_branch`` is the condition of an If around the whole model. A
step always has caches, perhaps of no positions, so the graph of further steps is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.records import replace
from penstock.frontends.load import check_and_sort
from penstock.ir.graph import Graph, Model, Value, clone
from penstock.passes.dead_code import prune
from penstock.passes.lowering.step_probes import is_of_encoder
from penstock.passes.output_names import name_outputs
from penstock.passes.pipeline import optimize

_BRANCH = "use_cache_branch"


def has_branches(model: Model) -> bool:
    """Whether the model has an input that selects one of two graphs."""
    return any(value.name == _BRANCH for value in model.graph.inputs)


def with_branch(model: Model, cached: bool) -> Model:
    """Return one of a merged model's two models: further steps if ``cached``, or the first one."""
    graph = clone(model.graph)
    for value in [v for v in graph.inputs if v.name == _BRANCH]:
        graph.inputs.remove(value)
        value.set_constant(np.array([cached]))
    names = [value.name for value in graph.outputs]
    # With a constant condition, the If becomes the nodes of one of its graphs.
    optimize(graph)
    name_outputs(graph, names)
    # Outputs of the encoder are returned unchanged, or empty.
    kept = [value for value in graph.outputs if not (cached and is_of_encoder(value.name))]
    return with_outputs(model, graph, kept)


def with_outputs(model: Model, graph: Graph, outputs: Sequence[Value]) -> Model:
    """Return the model with these outputs, and the inputs that they need."""
    graph.outputs = [*outputs]
    prune(graph)
    # Inputs that nothing reads would have to be fed: a first step's caches, its encoder states.
    read = {value for node in graph.walk() for value in node.inputs}
    graph.inputs = [value for value in graph.inputs if value in read]
    part = replace(model, graphs={**model.graphs, model.entry: graph})
    check_and_sort(part)
    return part
