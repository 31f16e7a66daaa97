"""The pass pipelines, as tuples of passes in order, and the functions that run them.

::

    STRUCTURE   once for each set of feeds and fetches; frames become If and Loop, but with the
                executor "frames", for which ORDER runs alone
    OPTIMIZE    after that, and again for each set of input shapes, until nothing changes
    LOWER       once for each set of input shapes, for the available backends

and for graphs that run by tokens, on the executor "frames" or on a cluster::

    DEVICES     once for each set of input shapes: devices of nodes, types of values, primitives for
                structured nodes that span devices; then ASSIGN for nodes that these added
    SPLIT       after that: a part of the graph for each device, and segments in each part
    CALLED      the same for graphs that nodes call, which have one part and stay as they are
    OBSERVED    in place of SPLIT, for runs with observers, which see each node

All passes transform a graph in place. A caller that still needs the original copies it before: for
each set of feeds and fetches (``dead_code.cut``), and for each set of input shapes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from penstock.analysis.quantized_weights import has_quantized_weights
from penstock.core.errors import InternalError
from penstock.core.records import cached_property, replace
from penstock.core.types import TensorType
from penstock.ir.graph import Graph
from penstock.ir.op import FRAMED, Role
from penstock.ops.common.dtypes import is_half
from penstock.ops.common.shape_rules import element_number
from penstock.ops.internal.transfer import HOST
from penstock.ops.registry import TENSORFLOW
from penstock.passes.context import Pass, PassContext, Property
from penstock.passes.dead_code import DeadCode
from penstock.passes.lowering.assign_backends import AssignBackends
from penstock.passes.lowering.assign_layouts import AssignLayouts
from penstock.passes.lowering.fuse import Fuse
from penstock.passes.optimize.common_subexpressions import CommonSubexpressions
from penstock.passes.optimize.fold_constants import FoldConstants, InferTypes
from penstock.passes.optimize.simplify import RESHAPES, Simplify

CHECK_PASSES = "PENSTOCK_CHECK_PASSES"
"""the environment variable that turns on ``check_graph`` after every pass"""

# A round may enable further changes: a folded shape makes a Reshape static, and so on.
_MAX_ROUNDS = 8
_BFLOAT16 = element_number("bfloat16")


Where = Callable[[Graph, PassContext], bool]


class LazyPass(Pass):
    """A pass that ``load`` imports on its first run: when a graph has one of its ``operations`` and
    the predicate ``where`` holds."""

    def __init__(
        self, load: Callable[[], type[Pass]], operations: frozenset[str | Role], where: Where | None
    ) -> None:
        self.load = load
        self.name = load.__name__  # type: ignore[misc]
        self.operations = operations  # type: ignore[misc]
        self.where = where

    @cached_property
    def implementation(self) -> Pass:
        return self.load()()

    requires = property(lambda step: step.implementation.requires)
    establishes = property(lambda step: step.implementation.establishes)
    invalidates = property(lambda step: step.implementation.invalidates)

    def run(self, graph: Graph, context: PassContext) -> bool:
        if self.where is not None and not self.where(graph, context):
            return False
        return self.implementation.run(graph, context)


def lazy_pass(
    *operations: str | Role, where: Where | None = None
) -> Callable[[Callable[[], type[Pass]]], LazyPass]:
    """Decorate a function that imports a pass class, making it a ``LazyPass`` for graphs with one
    of ``operations`` for which the predicate ``where`` holds."""
    return lambda load: LazyPass(load, frozenset(operations), where)


class FoldQuantizedWeights(Pass):
    """Repeat optimization, folding the quantized weights that ``quantize`` has not used."""

    operations = frozenset({"DequantizeLinear"})

    def run(self, graph: Graph, context: PassContext) -> bool:
        # Weights are already folded, or there are none: further rounds would change nothing.
        if context.fold_quantized_weights or not has_quantized_weights(graph):
            return False
        return optimize(graph, replace(context, fold_quantized_weights=True))


# Lazily imported passes, in the order of their first use below.

_REDUCED = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_REDUCTIONS = [f"Reduce{name}" for name in _REDUCED]


@lazy_pass(*FRAMED)
def raise_control_flow() -> type[Pass]:
    from penstock.passes.structure.raise_control_flow import RaiseControlFlow

    return RaiseControlFlow


def _has_control_edges(graph: Graph, context: PassContext) -> bool:
    # Values of TensorFlow's stateful operations may order other operations.
    if True in [op.domain == TENSORFLOW and not op.pure for op in graph.ops]:
        return True
    return True in [bool(node.control_inputs) for node in graph.walk()]


@lazy_pass(where=_has_control_edges)
def relax_control_edges() -> type[Pass]:
    from penstock.passes.structure.relax_control_edges import RelaxControlEdges

    return RelaxControlEdges


def _has_effects(graph: Graph, context: PassContext) -> bool:
    return False in [op.pure for op in graph.ops]


@lazy_pass(where=_has_effects)
def order_effects() -> type[Pass]:
    from penstock.passes.structure.order_effects import OrderEffects

    return OrderEffects


def _has_halves(graph: Graph, context: PassContext) -> bool:
    values = [v for node in graph.walk() for v in (*node.inputs, *node.outputs) if v is not None]
    dtypes = {value.type.dtype for value in values if isinstance(value.type, TensorType)}
    return not context.numerics.strict and any(map(is_half, dtypes))


@lazy_pass(where=_has_halves)
def widen_halves() -> type[Pass]:
    from penstock.passes.optimize.widen_halves import WidenHalves

    return WidenHalves


@lazy_pass("DequantizeLinear")
def pack_weights() -> type[Pass]:
    from penstock.passes.optimize.pack_weights import PackWeights

    return PackWeights


@lazy_pass(Role.LOOP, Role.SCAN)
def hoist_invariants() -> type[Pass]:
    from penstock.passes.loops.hoist_invariants import HoistInvariants

    return HoistInvariants


def _has_loops(graph: Graph, context: PassContext) -> bool:
    return True in [op.role is Role.LOOP for op in graph.ops]


@lazy_pass("SequenceInsert", "Slice", where=_has_loops)
def collect_rows() -> type[Pass]:
    from penstock.passes.loops.collect_rows import CollectRows

    return CollectRows


@lazy_pass(Role.LOOP, Role.SCAN)
def hoist_products() -> type[Pass]:
    from penstock.passes.loops.hoist_products import HoistProducts

    return HoistProducts


@lazy_pass("Transpose")
def sink_transposes() -> type[Pass]:
    from penstock.passes.optimize.sink_transposes import SinkTransposes

    return SinkTransposes


@lazy_pass(*RESHAPES)
def cancel_reshapes() -> type[Pass]:
    from penstock.passes.optimize.cancel_reshapes import CancelReshapes

    return CancelReshapes


@lazy_pass("Einsum")
def decompose_einsum() -> type[Pass]:
    from penstock.passes.optimize.decompose_einsum import DecomposeEinsum

    return DecomposeEinsum


@lazy_pass(
    *("All", "Any", "BatchToSpaceND", "Conv2DBackpropInput", "Conv3DBackpropInputV2"),
    *("DepthToSpace", "FakeQuantWithMinMaxArgs", "Fill"),
    *("MatrixDiag", "MatrixDiagV3", "MatrixSetDiagV3", "Pack", "Select"),
    *("SpaceToBatchND", "SpaceToDepth"),
)
def decompose_moves() -> type[Pass]:
    from penstock.passes.optimize.decompose_moves import DecomposeMoves

    return DecomposeMoves


@lazy_pass("AttnLSTM")
def decompose_attention_lstm() -> type[Pass]:
    from penstock.passes.optimize.decompose_attention_lstm import DecomposeAttentionLstm

    return DecomposeAttentionLstm


@lazy_pass(*_REDUCTIONS)
def split_reductions() -> type[Pass]:
    from penstock.passes.optimize.split_reductions import SplitReductions

    return SplitReductions


@lazy_pass(  # each pattern has one of these
    *("Clip", "Erf", "HardSigmoid", "IsNaN", "LayerNormalization", "RMSNormalization"),
    *("Sigmoid", "Sqrt", "Tanh"),
)
def recompose() -> type[Pass]:
    from penstock.passes.optimize.recompose import Recompose

    return Recompose


@lazy_pass("Tanh")
def recompose_cells() -> type[Pass]:
    from penstock.passes.loops.recompose_cells import RecomposeCells

    return RecomposeCells


@lazy_pass(Role.LOOP, Role.SCAN)
def hoist_recurrences() -> type[Pass]:
    from penstock.passes.loops.hoist_recurrences import HoistRecurrences

    return HoistRecurrences


@lazy_pass("Gather", "GatherND")
def recompose_experts() -> type[Pass]:
    from penstock.passes.optimize.recompose_experts import RecomposeExperts

    return RecomposeExperts


@lazy_pass("Pad")
def fold_padding() -> type[Pass]:
    from penstock.passes.optimize.fold_padding import FoldPadding

    return FoldPadding


@lazy_pass("Conv", "ConvTranspose", "Gemm", "MatMul")
def fold_affine() -> type[Pass]:
    from penstock.passes.optimize.fold_affine import FoldAffine

    return FoldAffine


@lazy_pass(Role.LOOP)
def count_loops() -> type[Pass]:
    from penstock.passes.loops.count_loops import CountLoops

    return CountLoops


@lazy_pass("DequantizeLinear")
def quantize() -> type[Pass]:
    from penstock.passes.lowering.quantize import Quantize

    return Quantize


def _has_factors(graph: Graph, context: PassContext) -> bool:
    return not {"Div", "Mul"}.isdisjoint([op.name for op in graph.ops])


@lazy_pass("MatMul", where=_has_factors)
def hoist_scales() -> type[Pass]:
    from penstock.passes.lowering.hoist_scales import HoistScales

    return HoistScales


@lazy_pass("Unsqueeze")
def join_caches() -> type[Pass]:
    from penstock.passes.lowering.join_caches import JoinCaches

    return JoinCaches


@lazy_pass("Attention", "Softmax")
def recognize_attention() -> type[Pass]:
    from penstock.passes.lowering.recognize_attention import RecognizeAttention

    return RecognizeAttention


@lazy_pass("VarHandleOp")
def bind_variables() -> type[Pass]:
    from penstock.passes.lowering.bind_variables import BindVariables

    return BindVariables


@lazy_pass("Concat")
def grow_caches() -> type[Pass]:
    from penstock.passes.lowering.grow_caches import GrowCaches

    return GrowCaches


def _rounds_to_bfloat16(graph: Graph, context: PassContext) -> bool:
    return any(n.op.full_name == "Cast" and n.attrs.get("to") == _BFLOAT16 for n in graph.walk())


@lazy_pass("Cast", where=_rounds_to_bfloat16)
def round_operands() -> type[Pass]:
    from penstock.passes.lowering.round_operands import RoundOperands

    return RoundOperands


def _leaves_host(_: Graph, context: PassContext) -> bool:
    places = context.placing.placement.values()
    return context.placing.ports is not None or not {place.memory for place in places} <= {HOST}


@lazy_pass(where=_leaves_host)
def insert_transfers() -> type[Pass]:
    from penstock.passes.lowering.insert_transfers import InsertTransfers

    return InsertTransfers


@lazy_pass()
def assign_devices() -> type[Pass]:
    from penstock.passes.lowering.assign_devices import AssignDevices

    return AssignDevices


@lazy_pass(Role.IF, Role.LOOP)
def lower_control_flow() -> type[Pass]:
    from penstock.passes.structure.lower_control_flow import LowerControlFlow

    return LowerControlFlow


@lazy_pass()
def partition() -> type[Pass]:
    from penstock.passes.lowering.partition import Partition

    return Partition


@lazy_pass()
def group_segments() -> type[Pass]:
    from penstock.passes.structure.group_segments import GroupSegments

    return GroupSegments


# The pipelines.


ORDER: tuple[Pass, ...] = (order_effects,)

STRUCTURE: tuple[Pass, ...] = (raise_control_flow, relax_control_edges, *ORDER)

OPTIMIZE: tuple[Pass, ...] = (
    # Constant folding would expand the weights.
    pack_weights,
    DeadCode(),
    # All later passes need types, which this one infers.
    FoldConstants(),
    widen_halves,
    Simplify(),
    hoist_invariants,
    collect_rows,
    hoist_products,
    sink_transposes,
    cancel_reshapes,
    decompose_einsum,
    decompose_moves,
    decompose_attention_lstm,
    split_reductions,
    recompose,
    recompose_cells,
    # A GRU is recognized by the nodes that recompose_cells writes.
    hoist_recurrences,
    recompose_experts,
    fold_padding,
    fold_affine,
    CommonSubexpressions(),
    count_loops,
)

LOWER: tuple[Pass, ...] = (
    quantize,
    # Up to here weights stay quantized, so that quantize can match them.
    FoldQuantizedWeights(),
    hoist_scales,
    join_caches,
    recognize_attention,
    bind_variables,
    grow_caches,
    # Casts are fused with the product that reads them rather than with the preceding chain.
    round_operands,
    Fuse(),
    # A fused node has one backend, so fusion precedes placement.
    AssignBackends(),
    # Transfers depend on the memory space of each value.
    insert_transfers,
    AssignLayouts(),
)


def packing(which: str) -> tuple[Pass, ...]:
    """Return LOWER, with ``PackRows(which)`` instead of RecognizeAttention."""
    from penstock.passes.lowering.pack_rows import PackRows

    return tuple([PackRows(which) if step is recognize_attention else step for step in LOWER])


def before_attention() -> tuple[Pass, ...]:
    """Return the passes of LOWER before RecognizeAttention."""
    return LOWER[: LOWER.index(recognize_attention)]


_INFER_TYPES = InferTypes()

ASSIGN: tuple[Pass, ...] = (assign_devices, _INFER_TYPES)

DEVICES: tuple[Pass, ...] = (*ASSIGN, lower_control_flow)

SPLIT: tuple[Pass, ...] = (
    FoldConstants(),
    lower_control_flow,
    raise_control_flow,
    partition,
    group_segments,
)

CALLED: tuple[Pass, ...] = (FoldConstants(), group_segments)

OBSERVED: tuple[Pass, ...] = (partition,)

PASSES = {step.name: step for step in (*STRUCTURE, *OPTIMIZE, *LOWER, *DEVICES, *SPLIT)}
"""All passes by name. Some are in several tuples."""


def optimize(graph: Graph, context: PassContext | None = None) -> bool:
    """Run the passes of OPTIMIZE repeatedly until none of them changes ``graph``, at most
    ``_MAX_ROUNDS`` times. The input types of the graph may have symbolic dims."""
    # Stop after a full cycle of idle passes, wherever it began: none would change anything.
    return run_passes(OPTIMIZE * _MAX_ROUNDS, graph, context or PassContext(), len(OPTIMIZE))


def run_passes(
    passes: Sequence[Pass], graph: Graph, context: PassContext, most_idle: int | None = None
) -> bool:
    """Run each of ``passes`` once, in order, until ``most_idle`` in a row have changed nothing;
    return whether any changed ``graph``. A pass is skipped if ``graph`` has none of its operations.
    After a pass that partitions ``graph``, the passes run on each part. Types are inferred before a
    pass that requires them, if an earlier pass has invalidated them."""
    changed, idle, outdated = False, 0, False
    checks = bool(os.environ.get(CHECK_PASSES))
    shown = list(filter(None, [context.after_pass]))
    if checks:
        from penstock.passes.check import GraphChecks

        shown.append(GraphChecks())
    present: set[Any] = set()
    graphs: Sequence[Graph] = (graph,)
    for step in passes:
        # The operations of a graph are collected again only after a pass that changed it.
        if step.operations and not present:
            for each in graphs:
                present.update([key for op in each.ops for key in (op.name, op.role)])
        concerned = not step.operations or not step.operations.isdisjoint(present)
        changes = False
        if concerned or checks:
            if outdated and Property.TYPED in step.requires:
                for each in graphs:
                    _INFER_TYPES.run(each, context)
                outdated = False
            for each in graphs:
                changes |= step.run(each, context)
            if step is partition:
                graphs = [part.graph for part in context.frames.parts]
        if changes:
            present, outdated = set(), outdated or Property.TYPED in step.invalidates
            # Under checks every pass runs, which reveals operations missing from its
            # ``operations``, for which it would wrongly be skipped.
            if not concerned:
                raise InternalError(f"pass {step.name} changed a graph without its operations")
        for show in shown:
            for each in graphs:
                show(step, each)
        changed, idle = changed or changes, 0 if changes else idle + 1
        if idle == most_idle:
            break
    return changed
