"""All passes in their order, in tuples, and the functions that run them.

::

    STRUCTURE   once for each set of feeds and fetches; frames become If and Loop
    OPTIMIZE    after that, and again for each set of input shapes, until nothing changes
    LOWER       once for each set of input shapes, for the backends at hand

and for graphs that run by tokens, on the executor of frames or on a cluster::

    DEVICES     once for each set of input shapes: devices of nodes, types of values, primitives for
                structured nodes that span devices; then ASSIGN for what these have added
    SPLIT       after that: a part of the graph for each device, and segments in each part
    CALLED      the same for graphs that nodes call, which have one part and stay as they are
    OBSERVED    in place of SPLIT, for runs with observers, which see each node

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
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.dead_code import DeadCode
from penstock.passes.lowering.assign_backends import AssignBackends
from penstock.passes.lowering.assign_layouts import AssignLayouts
from penstock.passes.lowering.fuse import Fuse
from penstock.passes.lowering.insert_transfers import InsertTransfers
from penstock.passes.optimize.common_subexpressions import CommonSubexpressions
from penstock.passes.optimize.fold_constants import FoldConstants, InferTypes
from penstock.passes.optimize.simplify import RESHAPES, Simplify
from penstock.passes.optimize.widen_halves import WidenHalves
from penstock.passes.structure.relax_control_edges import RelaxControlEdges

CHECK_PASSES = "PENSTOCK_CHECK_PASSES"
"""the environment variable that turns on ``check_graph`` after every pass"""

# One round may enable more in the next: a folded shape makes a reshape static, and so on.
_MAX_ROUNDS = 8


class ImportedPass(Pass):
    """A pass whose module is imported when it runs: for certain ``operations``, once a graph has
    one of them. A model without them is compiled without importing it."""

    def __init__(self, module: str, *operations: str | Role) -> None:
        self.module = f"penstock.passes.{module}"
        self.name = module.rpartition(".")[2]
        self.operations = frozenset(operations)  # type: ignore[misc]

    @cached_property
    def implementation(self) -> Pass:
        name = self.name.title().replace("_", "")
        implementation: Pass = getattr(import_module(self.module), name)()
        return implementation

    @property
    def requires(self) -> frozenset[Property]:  # type: ignore[override]
        return self.implementation.requires

    @property
    def establishes(self) -> frozenset[Property]:  # type: ignore[override]
        return self.implementation.establishes

    @property
    def invalidates(self) -> frozenset[Property]:  # type: ignore[override]
        return self.implementation.invalidates

    def run(self, graph: Graph, context: PassContext) -> bool:
        return self.implementation.run(graph, context)

    def graphs(self, graph: Graph, context: PassContext) -> Sequence[Graph]:
        return self.implementation.graphs(graph, context)


class FoldQuantizedWeights(Pass):
    """Optimize once more with the weights that ``quantize`` has not used, which are folded now."""

    name = "fold_quantized_weights"
    operations = frozenset({"DequantizeLinear"})

    def run(self, graph: Graph, context: PassContext) -> bool:
        if context.fold_quantized_weights or not has_quantized_weights(graph):
            return False
        return optimize(graph, replace(context, fold_quantized_weights=True))


_RAISE_CONTROL_FLOW = ImportedPass("structure.raise_control_flow", *FRAMED)

STRUCTURE: tuple[Pass, ...] = (_RAISE_CONTROL_FLOW, RelaxControlEdges())

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

_ASSIGN_DEVICES = ImportedPass("lowering.assign_devices")
_LOWER_CONTROL_FLOW = ImportedPass("structure.lower_control_flow", Role.IF, Role.LOOP)
_PARTITION = ImportedPass("lowering.partition")
_GROUP_SEGMENTS = ImportedPass("structure.group_segments")

_INFER_TYPES = InferTypes()

ASSIGN: tuple[Pass, ...] = (_ASSIGN_DEVICES, _INFER_TYPES)

DEVICES: tuple[Pass, ...] = (*ASSIGN, _LOWER_CONTROL_FLOW)

SPLIT: tuple[Pass, ...] = (
    FoldConstants(),
    _LOWER_CONTROL_FLOW,
    _RAISE_CONTROL_FLOW,
    _PARTITION,
    _GROUP_SEGMENTS,
)

CALLED: tuple[Pass, ...] = (FoldConstants(), _GROUP_SEGMENTS)

OBSERVED: tuple[Pass, ...] = (_PARTITION,)

PASSES = {step.name: step for step in (*STRUCTURE, *OPTIMIZE, *LOWER, *DEVICES, *SPLIT)}
"""All passes by name. Some stand in several tuples."""


def optimize(graph: Graph, context: PassContext | None = None) -> bool:
    """Run the passes of OPTIMIZE in turn until none of them changes ``graph`` any more. The graph
    is simplified as far as the types of its inputs allow, whose dims may be symbolic."""
    return run_passes(OPTIMIZE * _MAX_ROUNDS, graph, context or PassContext(), len(OPTIMIZE))


def run_passes(
    passes: Sequence[Pass], graph: Graph, context: PassContext, most_idle: int | None = None
) -> bool:
    """Run each of ``passes`` once, in order, until ``most_idle`` of them in a row have changed
    nothing; return whether any of them changed ``graph``. A pass whose operations ``graph`` lacks
    does not run. Behind one that partitions ``graph``, each part goes through the passes. Types are
    inferred before a pass that requires them, if one of those before it has invalidated them."""
    changed, idle, outdated = False, 0, False
    checks = bool(os.environ.get(CHECK_PASSES))
    present: set[Any] = set()
    graphs: Sequence[Graph] = (graph,)
    for step in passes:
        if step.operations and not present:
            nodes = [node for each in graphs for node in each.walk()]
            present = {key for node in nodes for key in (node.op.name, node.op.role)}
        concerned = not step.operations or not step.operations.isdisjoint(present)
        changes = False
        if concerned or checks:
            if outdated and Property.TYPED in step.requires:
                for each in graphs:
                    _INFER_TYPES.run(each, context)
                outdated = False
            changes = True in [step.run(each, context) for each in graphs]
            graphs = [left for each in graphs for left in step.graphs(each, context)]
        if changes:
            present, outdated = set(), outdated or Property.TYPED in step.invalidates
            if not concerned:
                raise InternalError(f"pass {step.name} changed a graph without its operations")
        for each in graphs:
            _tell(step, each, context, checks)
        changed, idle = changed or changes, 0 if changes else idle + 1
        if idle == most_idle:
            break
    return changed


def _tell(step: Pass, graph: Graph, context: PassContext, checks: bool) -> None:
    """Show a graph to whom the passes are shown, and check it."""
    if context.after_pass is not None:
        context.after_pass(step, graph)
    if checks:
        from penstock.passes.check import check_graph

        check_graph(step, graph)
