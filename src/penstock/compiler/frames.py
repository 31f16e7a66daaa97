"""The stages of graphs with frames, and of all graphs for ``executor="frames"``.

::

    Feeds -> specialize -> structure_frames -> build_frames

    Feeds           a graph, copied, and the values of its inputs
    FramedGraph     the graph with devices and types, and what compiles its nodes
    SplitGraph      one form of the graph: its parts, by device, with segments
    Executor        the steps of all parts, each with its kernel

``build_frames`` compiles a ``SplitGraph`` of the graph into an executor. If a segment cannot be
compiled, perhaps since it would never run, both steps are repeated without it. A loop that is not
raised becomes one node (``Frame``) if none of its tokens can be observed. The graph of a segment
passes through the same stages as other graphs; a node outside segments runs on the backend that is
expected to be fastest for it. Runs with observers use a second form, which contains each node of
the model and is compiled when the first such run begins.
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

# How often segments are formed anew, without the nodes of one that cannot be compiled.
_MOST_ATTEMPTS = 4


@dataclass(frozen=True)
class FramedGraph:
    """A graph whose nodes have devices and whose values have types, with the compiler of its nodes
    and the nodes that are slow."""

    graph: Graph
    kernels: FrameKernels
    slow: SlowNodes


@dataclass(frozen=True)
class SplitGraph:
    """One form of a graph, and its ``parts`` by device. ``passes``: the context of the passes that
    produced it, for graphs that its nodes call."""

    source: FramedGraph
    graph: Graph
    parts: tuple[GraphPart, ...]
    passes: PassContext
    observed: bool


class SegmentError(Exception):
    """A segment or a frame as one node cannot be compiled, perhaps since it would never run."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.name)
        self.names = {node.name for node in graph.nodes}


def structure_frames(feeds: Feeds, context: CompileContext) -> FramedGraph:
    """Give nodes their devices and values their types. Raises ``Unsupported`` if an executor other
    than "frames" and "auto" was requested."""
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
    """Return the record of a graph whose types are known."""
    kernels = FrameKernels(graph, context)
    kernels.measure()
    return FramedGraph(graph, kernels, SlowNodes(graph, kernels))


def build_part(graph: Graph, context: CompileContext) -> FramesExecutor:
    """Return the executor of one worker's part of a graph on a cluster."""
    # Other parts may send dead tokens.
    run_passes((InferTypes(),), graph, replace(pass_context(context), framed=True))
    check_sizes(graph, context.limits)
    return build_frames(framed_graph(graph, context), context)


def build_frames(framed: FramedGraph, context: CompileContext) -> FramesExecutor:
    """Return the executor of a graph with frames."""
    for node, frame in Frames(framed.graph).of.items():
        if node.op.role is Role.NEXT_ITERATION and frame.parent is None:
            # Even constants are tokens of the first iteration.
            return build_frame_graph(split_observed(framed, context), context)
    # A segment compiles nodes that a run may never reach, with types that would be wrong there:
    # if that fails, its nodes run one by one.
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
    """Return the form of a graph for runs without observers: loops and conditions are raised and
    nodes grouped into segments, except for the ``refused`` nodes."""
    policy = SegmentPolicy(framed.kernels, framed.slow, refused)
    return _split(framed, context, policy, observed=False)


def split_observed(framed: FramedGraph, context: CompileContext) -> SplitGraph:
    """Return the form of a graph for runs with observers: each node as the model has it."""
    return _split(framed, context, ObservedPolicy(context), observed=True)


def _split(
    framed: FramedGraph, context: CompileContext, policy: FramePolicy, observed: bool
) -> SplitGraph:
    # The form for observers is derived from the same graph later.
    graph = framed.kernels.copy(framed.graph)
    passes = replace(pass_context(context, frames=policy), framed=_has_tokens(graph))
    run_passes(OBSERVED if observed else SPLIT, graph, passes)
    for part in policy.parts:
        framed.kernels.copied(part.originals)
    parts = tuple([replace(part, paths=_paths(part, policy)) for part in policy.parts])
    return SplitGraph(framed, graph, parts, passes, observed)


def _has_tokens(graph: Graph) -> bool:
    """Whether values of a graph may be dead: it has frames, or is a part of such a graph."""
    return is_framed(graph) or any(n.op.role in (Role.SEND, Role.RECV) for n in graph.nodes)


def _paths(part: GraphPart, policy: FramePolicy) -> dict[Node, tuple[str, ...]]:
    """Return the frames around the nodes of a part, its segments included."""
    segments = {new: node for new, node in policy.segments.items() if node in part.paths}
    return {**part.paths, **{new: part.paths[node] for new, node in segments.items()}}


def build_frame_graph(split: SplitGraph, context: CompileContext) -> FramesExecutor:
    """Return the executor of one form of a graph. Raises ``SegmentError`` for a segment that
    cannot be compiled."""
    kernels, devices = split.source.kernels, len(context.devices)
    compilers = NodeCompilers(
        kernels.kernel,
        kernels.executor if split.observed else partial(_segment_executor, kernels),
        partial(_function, split, context),
        partial(_called, split),
        _frame_form,
    )
    builder = FrameGraphBuilder(compilers, context.limits, context.workers)
    if split.observed:  # the form for observers needs no further form
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
    """Return a copy of a function's graph, without dead code."""
    graph = split.source.kernels.copy(context.functions[name])
    # A call in a frame propagates dead tokens, so its nodes may not run.
    passes = replace(split.passes, framed=True)
    run_passes((DeadCode(),), graph, passes)
    check_sizes(graph, context.limits)
    run_passes((InferTypes(),), graph, passes)
    return _called(split, graph)


def _called(split: SplitGraph, graph: Graph, inputs: list[Value] | None = None) -> Graph:
    """Return a copy of a graph that a node calls, with these inputs."""
    graph = split.source.kernels.copy(graph, inputs)
    if not split.observed and not split.passes.frames.in_parts(graph):
        run_passes(CALLED, graph, replace(split.passes, framed=_has_tokens(graph)))
    return graph


def _frame_form(node: Node) -> FrameForm:
    """Return the compiled form of a frame that is one node."""
    body = node.attrs["body"]
    frames = Frames(body)
    (frame,) = frames.by_name.values()
    try:
        loop = FrameLoop(frame, [node for node in body.nodes if frames.of[node] is frame])
    except UnraisedError as error:
        # A loop that cannot be written as one function runs by tokens, as in the model.
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
