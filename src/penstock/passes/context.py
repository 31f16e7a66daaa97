"""The protocol of a pass, and the context in which it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Protocol

from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.records import NamedTuple, dataclass, field
from penstock.ir.graph import ConvertedWeights, Graph, Node, clone
from penstock.ir.kernel import Kernel
from penstock.ir.op import Role
from penstock.ops.internal.transfer import NO_OTHER_PLACES, OtherPlaces, Place, Ports

if TYPE_CHECKING:
    from penstock.analysis.value_memory import ValueMemory
    from penstock.ir.graph import GraphPart


class Property(Enum):
    """A graph property that passes require, establish or invalidate."""

    STRUCTURED = "control flow is If, Loop and Scan; no TensorFlow frames are left"
    TYPED = "every value has the most precise type that its inputs imply"
    PLACED = "the context says which backend runs each node"


@dataclass(frozen=True, slots=True)
class Unraised:
    """A control-flow primitive that could not be raised, and the reason."""

    node: Node
    reason: str


class Pass(Protocol):
    """An in-place transformation of a graph. ``name``, by which users refer to it, is "merge_pads"
    for the class ``MergePads``. ``operations`` are names and roles of operations: the pass is
    skipped for graphs with none of them; if empty, it runs on all graphs. ``requires`` are the
    properties that must hold before it runs, ``establishes`` those that hold afterwards, and
    ``invalidates`` those that no longer hold if it changed anything: ``run_passes`` repeats type
    inference before the next pass that requires it. Every pass takes and leaves a sorted graph."""

    name: ClassVar[str] = ""
    operations: ClassVar[frozenset[str | Role]] = frozenset()
    requires: ClassVar[frozenset[Property]] = frozenset({Property.TYPED})
    establishes: ClassVar[frozenset[Property]] = frozenset()
    invalidates: ClassVar[frozenset[Property]] = frozenset()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        parts = [f"_{c.lower()}" if c.isupper() else c for c in cls.__name__]
        cls.name = "".join(parts).removeprefix("_")

    def run(self, graph: Graph, context: PassContext) -> bool:
        """Transform ``graph``, nested graphs included; return whether anything changed."""
        ...


class FusionPolicy(Protocol):
    """Accepts or rejects fused nodes that a pass proposes, before they are in the graph."""

    def has_kernel(self, node: Node) -> bool:
        """Whether a backend has a kernel for a fused node. Expensive: it may query a library."""
        ...

    def is_faster(self, node: Node, pieces: Sequence[Node] | None = None) -> bool:
        """Whether a fused node is expected to be faster than its parts run separately, or than the
        ``pieces`` that it replaces. Cheap: queries no library. The gain is expected to grow with
        each node added to a chain."""
        ...


AfterPass = Callable[[Pass, Graph], None]


class Placing:
    """Placement of nodes and of values. This base class knows no backends: all values are in host
    memory. ``placement``: the place of each node except control flow, once decided; later passes
    that replace or add nodes keep it complete. ``ports``: the places of graph inputs and outputs;
    None if all are in host memory."""

    plans_layouts = False
    """whether value layouts are planned, from the kernels that ``compiled`` returns"""
    memory: ValueMemory | None = None
    """memory assignment of values, if all are on the host and the last pass has decided it"""

    def __init__(
        self, placement: dict[Node, Place] | None = None, ports: Ports | None = None
    ) -> None:
        self.placement = {} if placement is None else placement
        self.ports = ports

    def chosen(self, graph: Graph) -> Mapping[Node, Place]:
        """The place of each node of ``graph``."""
        return self.placement

    def compiled(self, node: Node) -> tuple[Place, Kernel] | None:
        """The kernel of a node and its place; if the node is not placed yet, those of the first
        backend that has a kernel for it. None if the types are invalid."""
        return None

    def other_places(self, node: Node) -> OtherPlaces:
        """Return the inputs and outputs of a node's kernel outside its backend's memory."""
        return NO_OTHER_PLACES

    def direct(self, source: str, target: str) -> bool:
        """Whether values can be copied directly from one backend's memory to another's."""
        return False

    def stacks(self, backend: str) -> bool:
        """Whether rows that loops collect (scan outputs) stay in a backend's memory."""
        return False


class FramePolicy:
    """Policy for TensorFlow's frames and for graphs on several ``devices``. This base class raises
    all frames and knows no devices.

    ``unraised``: the control-flow primitives that could not be raised, with reasons. ``parts``: the
    graph's parts, once partitioned. ``segments``: for each segment node, one of the nodes that it
    replaced.
    """

    devices: Sequence[str] = ()
    """full names of the devices that nodes are assigned to"""
    separates = False
    """whether the graph is partitioned by device"""

    def __init__(self) -> None:
        self.unraised: list[Unraised] = []
        self.parts: Sequence[GraphPart] = ()
        self.segments: dict[Node, Node] = {}

    def home(self, device: str) -> str:
        """The device whose part contains the nodes of ``device``; here ``device`` itself."""
        return device

    def in_parts(self, graph: Graph) -> bool:
        """Whether a graph's nodes are on devices with separate parts, or it is such a part."""
        # A part names a single device; unlike a whole graph, it contains Sends or Recvs.
        if any(node.op.role in (Role.SEND, Role.RECV) for node in graph.nodes):
            return True
        return self.separates and len({node.device for node in graph.nodes}) > 1

    def copy(self, graph: Graph) -> Graph:
        """A copy of a graph."""
        return clone(graph)

    def runs_apart(self, node: Node) -> bool:
        """Whether the nodes in the nested graphs of an If or a Loop are scheduled individually."""
        return False

    def must_stay(self, nodes: Sequence[Node], loop: bool) -> Node | None:
        """The node that prevents raising a frame, or None, given the frame's nodes and whether its
        iterations may overlap."""
        return None

    def may_be_whole(self, node: Node) -> bool:
        """Whether a node may be in an unraised loop that becomes one node."""
        return False

    def joins(self, node: Node) -> bool:
        """Whether a node may be part of a segment."""
        return False

    def is_slow(self, node: Node) -> bool:
        """Whether a node is slow enough that only its dependents may wait for it."""
        return False

    def is_long(self, node: Node) -> bool:
        """Whether a node runs long enough that other nodes should run concurrently."""
        return False


class Numerics(NamedTuple):
    """``strict``: whether to round each value to its type, so that float16 and bfloat16 are not
    widened; ``reproducible``: whether constants must be bitwise equal on all processors."""

    strict: bool = False
    reproducible: bool = False


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """The context of passes: everything that they read besides the graph."""

    limits: Limits = DEFAULT_LIMITS
    fusion: FusionPolicy | None = None
    """Policy that accepts fused nodes; None if no backend fuses."""
    fold_quantized_weights: bool = True
    """Whether constant folding dequantizes weights that could be operands of integer kernels. The
    compiler sets it to False until ``quantize``, which may use the quantized weights, has run."""
    framed: bool = False
    """Whether the graph has TensorFlow's frames, so that values may be dead."""
    numerics: Numerics = Numerics()
    """Rounding of values, and the evaluation of constants."""
    weights: ConvertedWeights = field(default_factory=ConvertedWeights)
    """Converted weights, shared by all graphs of a session."""
    inferred: dict[Node, list[object]] = field(default_factory=dict)
    """Inputs of each node's type inference in earlier rounds, by identity."""
    placing: Placing = field(default_factory=Placing)
    """Placement of nodes; passes record their decisions there."""
    frames: FramePolicy = field(default_factory=FramePolicy)
    """Treatment of frames and devices; passes record their decisions there."""
    after_pass: AfterPass | None = None
    """Called after each pass, with the pass and the resulting graph."""
