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
    """A property of a graph, which holds once a pass has established it."""

    STRUCTURED = "control flow is If, Loop and Scan; no TensorFlow frames are left"
    TYPED = "every value has the most precise type that its inputs imply"
    PLACED = "the context says which backend runs each node"


@dataclass(frozen=True, slots=True)
class Unraised:
    """A primitive that could not be raised, and the reason."""

    node: Node
    reason: str


class Pass(Protocol):
    """One transformation of a graph, in place. ``name``, by which users refer to it, is
    "merge_pads" for the class ``MergePads``. ``operations`` are names and roles of operations of
    which a graph must have one, or there is nothing to do; none if it concerns all graphs.
    ``requires`` are the properties that must hold before it runs, ``establishes`` those that hold
    afterwards, and ``invalidates`` those that do not hold any more if it has changed something:
    ``run_passes`` infers the types anew before the next pass that requires them. Every pass needs a
    sorted graph, and leaves one."""

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
    """Decides about fused nodes that a pass proposes. They are not in the graph yet."""

    def has_kernel(self, node: Node) -> bool:
        """Whether a backend has a kernel for a fused node. Expensive: a library may be asked."""
        ...

    def is_faster(self, node: Node, pieces: Sequence[Node] | None = None) -> bool:
        """Whether a fused node is expected to be faster than its parts one by one, or than the
        ``pieces`` in whose place it comes. Cheap: asks no library. Each further node of a chain is
        expected to add to the gain."""
        ...


AfterPass = Callable[[Pass, Graph], None]


class Placing:
    """Where nodes run, and where values are. This one knows no backends: all is in the host's
    memory. ``placement``: the place of each node but those of control flow, once it is decided;
    passes that replace or add nodes afterwards keep it complete. ``ports``: where inputs and
    outputs are; None if they are all in the host's memory."""

    plans_layouts = False
    """whether the layouts of values are planned, by the kernels that ``compiled`` returns"""
    memory: ValueMemory | None = None
    """where values are in memory, if all are the host's and the last pass has decided it"""

    def __init__(
        self, placement: dict[Node, Place] | None = None, ports: Ports | None = None
    ) -> None:
        self.placement = {} if placement is None else placement
        self.ports = ports

    def chosen(self, graph: Graph) -> Mapping[Node, Place]:
        """The place of each node of ``graph``."""
        return self.placement

    def compiled(self, node: Node) -> tuple[Place, Kernel] | None:
        """The kernel of a node, with its place, or that of the first backend with a kernel for it
        if it has none yet; None if its types are at fault."""
        return None

    def other_places(self, node: Node) -> OtherPlaces:
        """Return the inputs and outputs that a node's kernel has outside its backend's memory."""
        return NO_OTHER_PLACES

    def direct(self, source: str, target: str) -> bool:
        """Whether values can be copied from the memory of one backend straight to that of
        another."""
        return False

    def stacks(self, backend: str) -> bool:
        """Whether rows that loops collect stay in the memory of a backend."""
        return False


class FramePolicy:
    """Decides what becomes of TensorFlow's frames, and of graphs on several ``devices``. This one
    raises all frames, whatever their nodes are, and knows no devices.

    ``unraised``: the primitives of control flow that could not be raised, each with the reason.
    ``parts``: those of the graph, once it was partitioned. ``segments``: a node of each segment, by
    the node that it became.
    """

    devices: Sequence[str] = ()
    """full names of the devices that nodes are assigned to"""
    separates = False
    """whether devices have parts of their own"""

    def __init__(self) -> None:
        self.unraised: list[Unraised] = []
        self.parts: Sequence[GraphPart] = ()
        self.segments: dict[Node, Node] = {}

    def home(self, device: str) -> str:
        """The device whose part has the nodes of ``device``: it has one of its own."""
        return device

    def in_parts(self, graph: Graph) -> bool:
        """Whether the nodes of a graph are on several devices that have parts of their own, or it
        is such a part."""
        # A part names one device only; unlike a whole graph, it has ends of transfers.
        if any(node.op.role in (Role.SEND, Role.RECV) for node in graph.nodes):
            return True
        return self.separates and len({node.device for node in graph.nodes}) > 1

    def copy(self, graph: Graph) -> Graph:
        """A copy of a graph."""
        return clone(graph)

    def runs_apart(self, node: Node) -> bool:
        """Whether the nodes in the graphs of an If or a Loop run each on its own."""
        return False

    def must_stay(self, nodes: Sequence[Node], loop: bool) -> Node | None:
        """The node because of which a frame is not raised, given its nodes and whether its
        iterations may overlap."""
        return None

    def may_be_whole(self, node: Node) -> bool:
        """Whether a node may be in a loop that is not raised and becomes one node."""
        return False

    def joins(self, node: Node) -> bool:
        """Whether a node may be part of a segment."""
        return False

    def is_slow(self, node: Node) -> bool:
        """Whether nodes that need not wait for a node must not."""
        return False

    def is_long(self, node: Node) -> bool:
        """Whether a node takes so long that others had better run meanwhile."""
        return False


class Numerics(NamedTuple):
    """``strict``: whether to round each value to its type, so that float16 and bfloat16 are not
    widened; ``reproducible``: whether constants are to be the same on all processors."""

    strict: bool = False
    reproducible: bool = False


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """The context of passes: all that they read beside the graph."""

    limits: Limits = DEFAULT_LIMITS
    fusion: FusionPolicy | None = None
    """Decides which fused nodes to make; None where no backend fuses."""
    fold_quantized_weights: bool = True
    """Whether constant folding dequantizes weights that could be operands of integer kernels. The
    compiler says no as long as ``quantize`` is still to come and may want them as they are."""
    framed: bool = False
    """Whether the graph has TensorFlow's frames, so that values may be dead."""
    numerics: Numerics = Numerics()
    """Rounding of values, and the evaluation of constants."""
    weights: ConvertedWeights = field(default_factory=ConvertedWeights)
    """Converted weights, shared by all graphs of a session."""
    inferred: dict[Node, list[object]] = field(default_factory=dict)
    """Objects from which each node's types were inferred in earlier rounds."""
    placing: Placing = field(default_factory=Placing)
    """Where nodes run; passes record their decisions there."""
    frames: FramePolicy = field(default_factory=FramePolicy)
    """Treatment of frames and devices; passes record their decisions there."""
    after_pass: AfterPass | None = None
    """Called with each pass that ran, and each graph as that left it."""
