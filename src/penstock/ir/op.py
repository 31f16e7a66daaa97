"""Operations.

An ``Op`` is the meaning of nodes: how their types follow from those of their inputs, how NumPy
computes them (``ir.kernel``), and the properties that passes, planner and executors query.
Operations are registered in ``penstock.ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum, auto
from typing import Any, Literal, TypeAlias

import numpy as np

from penstock.core.records import dataclass, field
from penstock.core.types import Type
from penstock.ir.kernel import Kernel

Types = Sequence[Type | None]
Attrs = Mapping[str, Any]
"""the attributes of a node by name: numbers, texts, arrays, types, graphs, and lists of these"""
AttrDict = dict[str, Any]
"""attributes that may be changed"""
Consts = Sequence[np.ndarray | None]
Infer = Callable[[Types, Attrs, Consts], Sequence[Type]]
Arity = tuple[int | None, int | None]
Dims = Sequence[tuple[int, ...] | None]
Work = Callable[[Attrs, Dims, tuple[int, ...]], int]

Trait: TypeAlias = Literal[
    "begins",
    "heavy",
    "links",
    "may fail",
    "fails on integers",
    "total",
    "total once static",
    "total by parameters",
    "jumps",
    "nonnegative",
    "finite",
    "selects",
    "reshapes",
    "makes handle",
    "forwards handle",
    "any order",
    "exact",
]
"""Further properties of an operation that passes query. Properties of only a few operations are not
fields of ``Op``, so that a new trait is a word here and where those operations are registered.

``begins``: a chain of elementwise operations may begin with it and be one kernel; ``begins heavy``:
it also does most of the work of that kernel. ``links``: it may follow in a chain, as elementwise
operations may without this trait.

An elementwise operation cannot fail on tensors of numbers that broadcast, unless it ``may fail`` or
``fails on integers``. Others are ``total``; or ``once static``: if all shapes are known; or
``by parameters``: if all shapes are known and all inputs but the first are constants. The last
also holds for operations that select or reshape.

``jumps``: rounding the inputs may change floating-point results by more than a rounding.
``nonnegative``: no result is below 0, though one may be NaN. ``finite``: results of finite numbers
are finite, except for overflow.

``selects``: the result consists of elements of the first input, for a Concat of all inputs.
``reshapes``: it has all of them in their order; such an operation is registered as a ``view`` that
``moves``, too.

``makes handle``: output 0 is a new handle of a resource; ``forwards handle``: it is input 0.

``exact``: NumPy computes it to the same bits on all processors, which ``ops.exactness`` cannot tell
by its function: it moves elements, or rounds each sum and product of two numbers in one order.

``any order``: it is not pure, but its nodes may run in any order and at the same time, such as
those of random numbers.
"""


class Role(Enum):
    """The effect of an operation on the order in which nodes run.

    Tokens travel through graphs with frames: a ``SWITCH`` kills one of its outputs, a ``MERGE``
    fires on the first live input, an ``ENTER`` and an ``EXIT`` move a token into and out of a
    frame, a ``NEXT_ITERATION`` moves it to the frame's next iteration, which a ``LOOP_COND``
    decides on, and a ``CONTROL_TRIGGER`` fires on dead tokens too. ``SEND`` and ``RECV`` move a
    token from one part of a graph to another, a ``CALL`` runs a function of the model. ``IF``,
    ``LOOP``, ``SCAN`` and ``SEQUENCE_MAP`` run the graphs that they have as attributes, and so does
    a ``FRAME``, whose graph is one frame.
    """

    SWITCH = auto()
    MERGE = auto()
    ENTER = auto()
    EXIT = auto()
    NEXT_ITERATION = auto()
    LOOP_COND = auto()
    CONTROL_TRIGGER = auto()
    SEND = auto()
    RECV = auto()
    CALL = auto()
    FRAME = auto()
    IF = auto()
    LOOP = auto()
    SCAN = auto()
    SEQUENCE_MAP = auto()

    __hash__ = object.__hash__  # Enum's own is a function in Python


PRIMITIVES = frozenset(
    {
        *(Role.SWITCH, Role.MERGE, Role.ENTER, Role.EXIT, Role.NEXT_ITERATION),
        *(Role.LOOP_COND, Role.CONTROL_TRIGGER),
    }
)
"""the roles of TensorFlow's control-flow primitives"""
FRAMED = PRIMITIVES | {Role.CALL}
"""the roles of nodes that only the frames executor runs"""


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An operation; all nodes of one operation share the object.

    ``since`` to ``version`` are the versions of the domain's schema that mean exactly this.
    ``compile(node, types)`` returns the NumPy kernel of a node for inputs of these types.
    ``pure`` operations give equal outputs for equal inputs and have no effects; others are not
    folded, merged, or replaced by one another.

    ``role``: the operation's effect on the order in which nodes run; None for most. ``arity``: the
    number of inputs and of outputs of a node, None for any number, for operations without a schema
    that is checked elsewhere.

    ``elementwise``: an element of output 0 depends on the elements at its place in the inputs,
    which broadcast, so that the operation commutes with a transposition of all of them. ``moves``:
    only moves elements, and computes nothing. ``view``: output 0 has all elements of input 0, each
    once and unchanged, in another shape or order.

    ``work(attrs, inputs, output)``: the floating-point operations for inputs of these dims (None
    if unknown) and output 0; by default one for each element.

    ``traits``: further properties that passes query, see ``Trait``.
    """

    name: str
    domain: str
    since: int
    version: int
    infer: Infer
    compile: Callable[..., Kernel]
    pure: bool = True
    role: Role | None = None
    arity: Arity | None = None
    elementwise: bool = False
    moves: bool = False
    view: bool = False
    work: Work | None = None
    traits: AbstractSet[Trait] = frozenset()

    full_name: str = field(init=False)

    def __post_init__(self) -> None:
        full_name = f"{self.domain}.{self.name}" if self.domain else self.name
        object.__setattr__(self, "full_name", full_name)

    def __repr__(self) -> str:
        return f"{self.full_name}-{self.version}"


# Attributes with more elements are compared by identity.
_MOST_ELEMENTS = 64
SMALL = 4096
"""bytes up to which constants are compared by content rather than identity"""


def frozen(value: Any) -> Hashable:
    """Return a key that equal attributes and constants share. Large arrays, and lists of many
    elements such as tree nodes, which are rarely equal, count by identity."""
    if isinstance(value, np.ndarray):
        small = value.nbytes <= SMALL and value.dtype != object
        return (value.dtype, value.shape, value.tobytes()) if small else id(value)
    if isinstance(value, list | tuple):
        if len(value) > _MOST_ELEMENTS:
            return id(value)
        kinds = {*map(type, value)}
        if kinds == {float}:
            return len(value), np.array(value).tobytes()  # for 10 floats, a fifth of what follows
        if kinds <= {int, str}:
            return tuple(value)
        return tuple([frozen(x) for x in value])
    # As attributes, -0.0 differs from 0.0 and 1 from 1.0, though they compare equal.
    return (type(value), repr(value)) if isinstance(value, float) else value
