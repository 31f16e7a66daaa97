"""What passes have in common: the protocol of a pass, and the context in which it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import ClassVar, Protocol

from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.records import dataclass, field
from penstock.core.types import Type
from penstock.ir.graph import Graph, Node, Value
from penstock.ir.kernel import Kernel
from penstock.ir.op import Role
from penstock.ops.internal.transfer import NO_OTHER_PLACES, OtherPlaces, Place, Ports

Basis = tuple[list[object], list[Type | None]]
"""What the types of a node were inferred from: objects, which must be the very same, and types of
inputs and outputs, which must be equal."""


class Property(Enum):
    """What holds for a graph, and stays true once a pass has established it."""

    SORTED = "each node stands after the nodes that it depends on"
    STRUCTURED = "control flow is If, Loop and Scan; no TensorFlow frames are left"
    TYPED = "every value has the most precise type that its inputs imply"
    PLACED = "the context says which backend runs each node"


@dataclass(frozen=True, slots=True)
class Unraised:
    """A primitive that could not be raised, and the reason."""

    node: Node
    reason: str


class Pass(Protocol):
    """One transformation of a graph, in place. ``name`` is the name of its module, by which users
    refer to it. ``operations`` are names and roles of operations of which a graph must have one, or
    there is nothing to do; none if it concerns all graphs. ``requires`` are the properties that
    must hold before it runs, ``establishes`` those that hold afterwards. Every pass needs a sorted
    graph, and leaves one."""

    name: ClassVar[str]
    operations: ClassVar[frozenset[str | Role]] = frozenset()
    requires: ClassVar[frozenset[Property]] = frozenset()
    establishes: ClassVar[frozenset[Property]] = frozenset()

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


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """What passes need to know beside the graph."""

    limits: Limits = DEFAULT_LIMITS
    fusion: FusionPolicy | None = None
    """Decides which fused nodes to make; None where no backend fuses."""
    fold_quantized_weights: bool = True
    """Whether constant folding dequantizes weights that could be operands of integer kernels. The
    compiler says no as long as ``quantize`` is still to come and may want them as they are."""
    framed: bool = False
    """Whether the graph has TensorFlow's frames, so that values may be dead."""
    strict: bool = False
    """Whether to round each value to its type: float16 and bfloat16 are not widened then."""
    widened: dict[Value, Value] = field(default_factory=dict)
    """Constants in float32, by those in float16 and bfloat16."""
    inferred: dict[Node, Basis] = field(default_factory=dict)
    """What the types of nodes were inferred from, in the rounds before."""
    halves: dict[tuple[Value, Value | None], Value | None] = field(default_factory=dict)
    """Weights of codes in two parts, by the codes and their zero point."""
    choose_places: Callable[[Graph], Mapping[Node, Place]] | None = None
    placement: dict[Node, Place] = field(default_factory=dict)
    """The place of each node but those of control flow, once it is decided. Passes that replace or
    add nodes afterwards keep it complete."""
    ports: Ports | None = None
    """Where inputs and outputs are; None if they are all in the host's memory."""
    unraised: list[Unraised] = field(default_factory=list)
    """The primitives of control flow that could not be raised, each with the reason."""
    compiled: Callable[[Node], tuple[Place, Kernel] | None] | None = None
    """The kernel of a node, with its place, or that of the first backend with a kernel for it if it
    has none yet; None if its types are at fault. None where no memory is planned, and passes that
    depend on kernels have nothing to do."""
    other_places: Callable[[Node], OtherPlaces] = lambda node: NO_OTHER_PLACES
    """Which inputs and outputs of a node its kernel has elsewhere than in its backend's memory."""
    must_stay: Callable[[Sequence[Node], bool], Node | None] | None = None
    """The node because of which a frame is not raised, given its nodes and whether its iterations
    may overlap. None where frames are raised whatever their nodes are."""
    direct: Callable[[str, str], bool] = lambda source, target: False
    """Whether values can be copied from the memory of one backend straight to that of another."""
    stacks: Callable[[str], bool] = lambda backend: False
    """Whether rows that loops collect stay in the memory of a backend."""
    after_pass: AfterPass | None = None
    """Called with each pass that ran, and the graph as that left it."""
