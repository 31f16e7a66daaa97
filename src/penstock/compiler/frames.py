"""The stages of graphs with frames, and of all graphs for ``executor="frames"``.

::

    Feeds -> specialize -> structure_frames -> build_frames

    Feeds           a graph, copied, and the values of its inputs
    FramedGraph     the graph with devices and types, and what compiles its nodes
    SplitGraph      one form of it: its parts, by device, with segments
    Executor        the steps of all parts, each with its kernel

``build_frames`` makes a ``SplitGraph`` of the graph and an executor of that; where a segment cannot
be compiled, since it might never run, both once more without it. A loop that is not raised becomes
one node (``Frame``) where no token of it can be observed. The graph of a segment goes through the
same stages as other graphs; a node in no segment runs on the backend that is expected to be fastest
for it. Runs with observers use a second form, which is compiled when the first of them begins and
has each node of the model.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from penstock.analysis.frames import Frames
from penstock.analysis.sizes import check_sizes
from penstock.compiler.frame_kernels import FrameKernels
from penstock.compiler.lowering import pass_context
from penstock.compiler.segment_policy import DevicePolicy, ObservedPolicy, SegmentPolicy, SlowNodes
from penstock.compiler.stages import CompileContext, Feeds
from penstock.core.errors import InvalidModel, LimitExceeded, Unsupported
from penstock.core.records import dataclass, replace
from penstock.executors.base import Executor
from penstock.executors.frames.builder import FrameGraphBuilder, NodeCompilers
from penstock.executors.frames.executor import FramesExecutor
from penstock.executors.frames.frame_writer import FrameForm
from penstock.ir.graph import Graph, GraphPart, Node, Value, is_framed
from penstock.ir.op import Role
from penstock.passes.context import FramePolicy, PassContext
from penstock.passes.dead_code import DeadCode
from penstock.passes.optimize.fold_constants import InferTypes
from penstock.passes.pipeline import ASSIGN, CALLED, DEVICES, OBSERVED, SPLIT, run_passes
from penstock.passes.structure.branches import UnraisedError
from penstock.passes.structure.conditions import LIVES
from penstock.passes.structure.loops import FrameLoop

# Times that segments are formed anew, without the nodes of one that cannot be compiled.
_MOST_ATTEMPTS = 4


@dataclass(frozen=True)
class FramedGraph:
    """A graph whose nodes have devices and whose values have types; what compiles its nodes, and
    which of them are slow."""

    graph: Graph
    kernels: FrameKernels
    slow: SlowNodes


@dataclass(frozen=True)
class SplitGraph:
    """One form of a graph, and its ``parts`` by device. ``passes``: the context of the passes that
    made it, for graphs that its nodes call."""

    source: FramedGraph
    graph: Graph
    parts: tuple[GraphPart, ...]
    passes: PassContext
    observed: bool


class SegmentError(Exception):
    """A segment, or a frame as one node, cannot be compiled, perhaps since it would never run."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.name)
        self.names = {node.name for node in graph.nodes}


def structure_frames(feeds: Feeds, context: CompileContext) -> FramedGraph:
    """Give nodes their devices and values their types. Raises ``Unsupported`` if another executor
    was asked for than that of frames."""
    graph = feeds.graph
    passes = pass_context(context, frames=DevicePolicy(graph, context))
    if context.devices or not is_framed(graph):
        run_passes(DEVICES if context.devices else ASSIGN, graph, passes)
    check_sizes(graph, context.limits)
    Frames(graph)  # first, since an invalid graph is not unsupported but invalid
    if context.executor not in ("auto", "frames"):
        reason = 'so that only executor="frames" or "auto" runs it'
        raise Unsupported.of(
            (p.node.op.full_name, f"{p.reason}, {reason}", p.node.label) for p in feeds.unraised
        )
    if context.devices or is_framed(graph):
        run_passes(ASSIGN, graph, passes)
    return framed_graph(graph, context)


def framed_graph(graph: Graph, context: CompileContext) -> FramedGraph:
    """The record of a graph whose types are known."""
    kernels = FrameKernels(graph, context)
    kernels.measure()
    return FramedGraph(graph, kernels, SlowNodes(graph, kernels))


def build_part(graph: Graph, context: CompileContext) -> FramesExecutor:
    """The executor of a part of a graph, whose other parts are on other workers of a cluster."""
    # Other parts may send dead tokens.
    run_passes((InferTypes(),), graph, replace(pass_context(context), framed=True))
    check_sizes(graph, context.limits)
    return build_frames(framed_graph(graph, context), context)


def build_frames(framed: FramedGraph, context: CompileContext) -> FramesExecutor:
    """The executor of a graph with frames."""
    for node, frame in Frames(framed.graph).of.items():
        if node.op.role is Role.NEXT_ITERATION and frame.parent is None:
            # Even constants are tokens of the first iteration.
            return build_frame_graph(split_observed(framed, context), context)
    # A segment compiles nodes that a run may never reach, with types that only then would be wrong:
    # where that fails, its nodes run one by one.
    refused: set[str] = set()
    for _ in range(_MOST_ATTEMPTS):
        try:
            return build_frame_graph(split_frames(framed, context, refused), context)
        except SegmentError as error:
            refused |= error.names
    return build_frame_graph(split_observed(framed, context), context)


def split_frames(
    framed: FramedGraph, context: CompileContext, refused: Collection[str] = ()
) -> SplitGraph:
    """The form of a graph for runs without observers: loops and conditions are raised, nodes
    grouped into segments, but for the ``refused`` ones."""
    policy = SegmentPolicy(framed.kernels, framed.slow, refused)
    return _split(framed, context, policy, observed=False)


def split_observed(framed: FramedGraph, context: CompileContext) -> SplitGraph:
    """The form of a graph for runs with observers, each node as the model has it."""
    return _split(framed, context, ObservedPolicy(context), observed=True)


def _split(
    framed: FramedGraph, context: CompileContext, policy: FramePolicy, observed: bool
) -> SplitGraph:
    # The other form, for observers, is made of the same graph later.
    graph = framed.kernels.copy(framed.graph)
    passes = replace(pass_context(context, frames=policy), framed=_has_tokens(graph))
    run_passes(OBSERVED if observed else SPLIT, graph, passes)
    for part in policy.parts:
        framed.kernels.copied(part.originals)
    parts = tuple([replace(part, paths=_paths(part, policy)) for part in policy.parts])
    return SplitGraph(framed, graph, parts, passes, observed)


def _has_tokens(graph: Graph) -> bool:
    """Whether values of a graph may be dead: it has frames, or is a part of one that may have."""
    return is_framed(graph) or any(n.op.role in (Role.SEND, Role.RECV) for n in graph.nodes)


def _paths(part: GraphPart, policy: FramePolicy) -> dict[Node, tuple[str, ...]]:
    """The frames around the nodes of a part, its segments included."""
    segments = {new: node for new, node in policy.segments.items() if node in part.paths}
    return {**part.paths, **{new: part.paths[node] for new, node in segments.items()}}


def build_frame_graph(split: SplitGraph, context: CompileContext) -> FramesExecutor:
    """The executor of one form of a graph. Raises ``SegmentError`` for a segment that cannot be
    compiled."""
    kernels, devices = split.source.kernels, len(context.devices)
    compilers = NodeCompilers(
        kernels.kernel,
        kernels.executor if split.observed else partial(_segment_executor, kernels),
        partial(_function, split, context),
        partial(_called, split),
        _frame_form,
    )
    builder = FrameGraphBuilder(compilers, context.limits, context.workers)
    if split.observed:  # the second form, which needs no third one
        return builder.build(split.graph, split.parts, devices)
    framed = split.source

    def observed() -> FramesExecutor:
        return build_frame_graph(split_observed(framed, context), context)

    return builder.build(split.graph, split.parts, devices, observed)


def _segment_executor(kernels: FrameKernels, graph: Graph) -> Executor:
    try:
        return kernels.executor(graph)
    except (InvalidModel, LimitExceeded) as error:
        raise SegmentError(graph) from error


def _function(split: SplitGraph, context: CompileContext, name: str) -> Graph:
    """A copy of a function's graph, without dead code."""
    graph = split.source.kernels.copy(context.functions[name])
    # A call in a frame passes dead tokens on, so that its nodes may not run.
    passes = replace(split.passes, framed=True)
    run_passes((DeadCode(),), graph, passes)
    check_sizes(graph, context.limits)
    run_passes((InferTypes(),), graph, passes)
    return _called(split, graph)


def _called(split: SplitGraph, graph: Graph, inputs: list[Value] | None = None) -> Graph:
    """A copy of a graph that a node calls, with these inputs."""
    graph = split.source.kernels.copy(graph, inputs)
    if not split.observed and not split.passes.frames.in_parts(graph):
        run_passes(CALLED, graph, replace(split.passes, framed=_has_tokens(graph)))
    return graph


def _frame_form(node: Node) -> FrameForm:
    """The form of a frame that is one node."""
    body = node.attrs["body"]
    frames = Frames(body)
    (frame,) = frames.by_name.values()
    try:
        loop = FrameLoop(frame, [node for node in body.nodes if frames.of[node] is frame])
    except UnraisedError as error:
        # A loop that cannot be written as one function runs by tokens, as the model has it.
        raise SegmentError(body) from error
    conditions = loop.deadness.conditions
    edge = {*loop.variables, *loop.next_iterations, *loop.exits}
    return FrameForm(
        body,
        frame.enters,
        [(merge, v.enter, v.next) for merge, v in loop.variables.items()],
        [node for node in loop.nodes if node not in edge],
        conditions,
        loop.deadness.of,
        [node for node, condition in conditions.items() if (node, LIVES) in condition],
        loop.deadness.predicate,
        frozenset({(loop.predicate, 1 - loop.side)}),
    )
