"""TensorFlow's primitives of control flow: meaning without kernels, but for what only waits.

Values are tokens that may be dead: Switch kills one of its outputs, Merge fires on what lives, and
Enter, Exit and NextIteration move tokens between frames and their iterations. Only an executor that
knows of frames runs them. Attributes are TensorFlow's: ``frame_name``, ``is_constant`` and
``parallel_iterations`` of Enter, ``T``, ``N``; ``function`` of a Call names one of the model's
functions, which may call itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import Unsupported, UnsupportedOperation
from penstock.ir.graph import MERGES, NEXT_ITERATIONS, Graph, Node
from penstock.ir.op import Attrs, Consts, Infer, Kernel, Types
from penstock.ops.common.dtypes import INT32
from penstock.ops.registry import TENSORFLOW, operator
from penstock.types import ANY, TensorType, Type, dtypes

SWITCHES = frozenset({"Switch", "RefSwitch", "_SwitchN"})
ENTERS = frozenset({"Enter", "RefEnter"})
EXITS = frozenset({"Exit", "RefExit"})
PRIMITIVES = frozenset(
    {*SWITCHES, *MERGES, *ENTERS, *EXITS, *NEXT_ITERATIONS, "LoopCond", "ControlTrigger"}
)


def is_primitive(node: Node) -> bool:
    """Whether ``node`` needs an executor that knows of frames and dead values."""
    return node.op.domain == TENSORFLOW and (node.op.name in PRIMITIVES or node.op.name == "Call")


def is_framed(graph: Graph) -> bool:
    """Whether some node, of nested graphs too, needs such an executor."""
    return any(map(is_primitive, graph.walk()))


def _kind(attrs: Attrs) -> Type:
    name = attrs.get("T")
    dtype = dtypes().get(name) if isinstance(name, str) else None
    return ANY if dtype is None else TensorType(dtype)


def _outputs(count: int) -> Infer:
    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        return [_kind(attrs)] * (count or int(attrs.get("num_outs", 0)))

    return infer


def infer_merge(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return _kind(attrs), TensorType(INT32, ())


def _without(node: Node, types: Types) -> Kernel:
    reason = "no executor but those that know of frames runs it"
    raise Unsupported([UnsupportedOperation(node.op.full_name, reason, (node.label,))])


for _name in ("Switch", "RefSwitch"):
    operator(_name, domain=TENSORFLOW, infer=_outputs(2), strings=True)(_without)
operator("_SwitchN", domain=TENSORFLOW, infer=_outputs(0), strings=True)(_without)
for _name in MERGES:
    operator(_name, domain=TENSORFLOW, infer=infer_merge, strings=True)(_without)
for _name in (*ENTERS, *EXITS, *NEXT_ITERATIONS, "LoopCond"):
    operator(_name, domain=TENSORFLOW, infer=_outputs(1), strings=True)(_without)
operator("Call", domain=TENSORFLOW, pure=False, strings=True)(_without)


@operator("NoOp", domain=TENSORFLOW, pure=False)
@operator("ControlTrigger", domain=TENSORFLOW, pure=False)
def no_op(node: Node, types: Types) -> Kernel:
    """Does nothing, after what it waits for."""
    return Kernel(lambda: None)
