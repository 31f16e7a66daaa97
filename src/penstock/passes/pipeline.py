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
from functools import cached_property
from importlib import import_module
from typing import Any

from penstock.analysis.quantized_weights import has_quantized_weights
from penstock.core.errors import InternalError
from penstock.core.records import replace
from penstock.ir.graph import Graph
from penstock.ir.op import FRAMED, Role
from penstock.passes.context import Pass, PassContext
from penstock.passes.dead_code import DeadCode
from penstock.passes.lowering.assign_backends import AssignBackends
from penstock.passes.lowering.assign_layouts import AssignLayouts
from penstock.passes.lowering.fuse import Fuse
from penstock.passes.lowering.insert_transfers import InsertTransfers
from penstock.passes.optimize.common_subexpressions import CommonSubexpressions
from penstock.passes.optimize.fold_constants import FoldConstants
from penstock.passes.optimize.simplify import RESHAPES, Simplify
from penstock.passes.optimize.widen_halves import WidenHalves
from penstock.passes.structure.relax_control_edges import RelaxControlEdges

CHECK_PASSES = "PENSTOCK_CHECK_PASSES"
"""the environment variable that turns on ``check_graph`` after every pass"""

# One round may enable more in the next: a folded shape makes a reshape static, and so on.
_MAX_ROUNDS = 8


class ImportedPass(Pass):
    """A pass for certain ``operations``, whose module is imported once a graph has one of them."""

    def __init__(self, module: str, *operations: str | Role) -> None:
        self.module = f"penstock.passes.{module}"
        self.name = module.rpartition(".")[2]
        self.operations = frozenset(operations)  # type: ignore[misc]

    @cached_property
    def implementation(self) -> Pass:
        name = self.name.title().replace("_", "")
        implementation: Pass = getattr(import_module(self.module), name)()
        return implementation

    def run(self, graph: Graph, context: PassContext) -> bool:
        return self.implementation.run(graph, context)


class FoldQuantizedWeights(Pass):
    """Optimize once more with the weights that ``quantize`` has not used, which are folded now."""

    name = "fold_quantized_weights"
    operations = frozenset({"DequantizeLinear"})

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.fold_quantized_weights or not has_quantized_weights(graph):
            return False
        return optimize(graph, replace(context, fold_quantized_weights=True))


STRUCTURE: tuple[Pass, ...] = (
    ImportedPass("structure.raise_control_flow", *FRAMED),
    RelaxControlEdges(),
)

_REDUCED = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_REDUCTIONS = [f"Reduce{name}" for name in _REDUCED]

OPTIMIZE: tuple[Pass, ...] = (
    DeadCode(),
    FoldConstants(),
    WidenHalves(),
    Simplify(),
    ImportedPass("loops.hoist_invariants", Role.LOOP, Role.SCAN),
    ImportedPass("loops.collect_rows", "SequenceInsert"),
    ImportedPass("loops.hoist_products", Role.LOOP, Role.SCAN),
    ImportedPass("optimize.sink_transposes", "Transpose"),
    ImportedPass("optimize.cancel_reshapes", *RESHAPES),
    ImportedPass("optimize.decompose_einsum", "Einsum"),
    ImportedPass("optimize.split_reductions", *_REDUCTIONS),
    ImportedPass("optimize.recompose", "Add", "Div", "Mul", "Where"),
    ImportedPass("loops.recompose_cells", "Tanh"),
    ImportedPass("loops.hoist_recurrences", Role.LOOP, Role.SCAN),
    ImportedPass("optimize.recompose_experts", "Gather", "GatherND"),
    ImportedPass("optimize.fold_padding", "Pad"),
    ImportedPass("optimize.fold_affine", "Conv", "ConvTranspose", "Gemm", "MatMul"),
    CommonSubexpressions(),
    ImportedPass("loops.count_loops", Role.LOOP),
)

LOWER: tuple[Pass, ...] = (
    ImportedPass(
        "lowering.split_quantized_weights", "ConvInteger", "DequantizeLinear", "QLinearConv"
    ),
    ImportedPass("lowering.quantize", "DequantizeLinear"),
    FoldQuantizedWeights(),
    ImportedPass("lowering.hoist_scales", "MatMul"),
    ImportedPass("lowering.recognize_attention", "Attention", "Softmax"),
    ImportedPass("lowering.bind_variables", "VarHandleOp"),
    ImportedPass("lowering.grow_caches", "Concat"),
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
    nothing; return whether any of them changed ``graph``. A pass whose operations ``graph`` lacks
    does not run."""
    changed, idle = False, 0
    checks = bool(os.environ.get(CHECK_PASSES))
    present: set[Any] = set()
    for step in passes:
        if step.operations and not present:
            present = {key for node in graph.walk() for key in (node.op.name, node.op.role)}
        concerned = not step.operations or not step.operations.isdisjoint(present)
        changes = (concerned or checks) and step.run(graph, context)
        if changes:
            present = set()
            if not concerned:
                raise InternalError(f"pass {step.name} changed a graph without its operations")
        if context.after_pass is not None:
            context.after_pass(step, graph)
        if checks:
            from penstock.passes.check import check_graph

            check_graph(step, graph)
        changed, idle = changed or changes, 0 if changes else idle + 1
        if idle == most_idle:
            break
    return changed
