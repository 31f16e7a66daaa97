"""All passes in their order, in three tuples, and the functions that run them.

::

    STRUCTURE   once for each set of feeds and fetches; frames become If and Loop
    OPTIMIZE    after that, and again for each set of input shapes, until nothing changes
    LOWER       once for each set of input shapes, for the backends at hand

All of them transform a graph in place. The caller copies it once before, where it is needed as it
was: for each set of feeds and fetches (``dead_code.cut``), and for each set of input shapes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from penstock.ir.graph import Graph
from penstock.passes.check import check_graph
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import DeadCode
from penstock.passes.lowering.assign_backends import AssignBackends
from penstock.passes.lowering.assign_layouts import AssignLayouts
from penstock.passes.lowering.bind_variables import BindVariables
from penstock.passes.lowering.fuse import Fuse
from penstock.passes.lowering.hoist_scales import HoistScales
from penstock.passes.lowering.insert_transfers import InsertTransfers
from penstock.passes.lowering.quantize import Quantize
from penstock.passes.lowering.split_codes import SplitCodes
from penstock.passes.optimize.common_subexpressions import CommonSubexpressions
from penstock.passes.optimize.count_loops import CountLoops
from penstock.passes.optimize.fold_affine import FoldAffine
from penstock.passes.optimize.fold_constants import FoldConstants
from penstock.passes.optimize.fold_padding import FoldPadding
from penstock.passes.optimize.recompose import Recompose
from penstock.passes.optimize.simplify import Simplify
from penstock.passes.optimize.sink_transposes import SinkTransposes
from penstock.passes.optimize.widen_halves import WidenHalves
from penstock.passes.quantized_weights import has_quantized_weights
from penstock.passes.structure.raise_control_flow import RaiseControlFlow
from penstock.passes.structure.relax_control_edges import RelaxControlEdges

CHECK_PASSES = "PENSTOCK_CHECK_PASSES"
"""the environment variable that turns on ``check_graph`` after every pass"""

# One round may enable more in the next: a folded shape makes a reshape static, and so on.
_MAX_ROUNDS = 8


class FoldQuantizedWeights(Pass):
    """Optimise once more with the weights that ``quantize`` has not used, which are folded now."""

    name = "fold_quantized_weights"

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.fold_quantized_weights or not has_quantized_weights(graph):
            return False
        return optimize(graph, replace(context, fold_quantized_weights=True))


STRUCTURE: tuple[Pass, ...] = (RaiseControlFlow(), RelaxControlEdges())

OPTIMIZE: tuple[Pass, ...] = (
    DeadCode(),
    FoldConstants(),
    WidenHalves(),
    Simplify(),
    SinkTransposes(),
    Recompose(),
    FoldPadding(),
    FoldAffine(),
    CommonSubexpressions(),
    CountLoops(),
)

LOWER: tuple[Pass, ...] = (
    SplitCodes(),
    Quantize(),
    FoldQuantizedWeights(),
    HoistScales(),
    BindVariables(),
    Fuse(),
    AssignBackends(),
    InsertTransfers(),
    AssignLayouts(),
)

PASSES = {step.name: step for step in (*STRUCTURE, *OPTIMIZE, *LOWER)}


def optimize(graph: Graph, context: PassContext | None = None) -> bool:
    """Run the passes of OPTIMIZE in turn until none of them changes ``graph`` any more. The graph
    is simplified as far as the types of its inputs allow, whose dims may be symbolic."""
    return run_passes(OPTIMIZE * _MAX_ROUNDS, graph, context or PassContext(), len(OPTIMIZE))


def run_passes(
    passes: Sequence[Pass], graph: Graph, context: PassContext, most_idle: int | None = None
) -> bool:
    """Run each of ``passes`` once, in order, until ``most_idle`` of them in a row have changed
    nothing; return whether any of them changed ``graph``."""
    changed, idle = False, 0
    checks = bool(os.environ.get(CHECK_PASSES))
    for step in passes:
        changes = step.run(graph, context)
        if context.after_pass is not None:
            context.after_pass(step, graph)
        if checks:
            check_graph(step, graph)
        changed, idle = changed or changes, 0 if changes else idle + 1
        if idle == most_idle:
            break
    return changed
