"""TensorFlow's control-flow primitives; only the frames executor runs them.

Values are tokens that may be dead: Switch kills one of its outputs, Merge fires on the live input,
and Enter, Exit and NextIteration move tokens between frames and their iterations. Attributes are
TensorFlow's: ``frame_name``, ``is_constant`` and ``parallel_iterations`` of Enter, ``T``, ``N``;
``function`` of a Call names a function of the model, which may call itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from penstock.core.errors import Unsupported
from penstock.core.types import ANY, TensorType, Type, join
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Arity, Attrs, Consts, Infer, Role, Types
from penstock.ops.common.dtypes import INT32
from penstock.ops.tensorflow.common import array_operator, of_type, operator

_value_type = of_type("T")


def _passed(types: Types, attrs: Attrs) -> Type:
    """The common type of values of which one is passed on, as far as all types are known."""
    (declared,) = _value_type((), attrs, ())
    tensors: list[Type] = [type_ for type_ in types if isinstance(type_, TensorType)]
    joined = reduce(join, tensors) if tensors and len(tensors) == len(types) else declared
    fits = declared == ANY or getattr(joined, "dtype", None) == getattr(declared, "dtype", 0)
    return joined if fits else declared


def _outputs(count: int) -> Infer:
    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        return [_passed(types[:1], attrs)] * (count or int(attrs.get("num_outs", 0)))

    return infer


def _without(node: Node, types: Types) -> Kernel:
    reason = "the frames executor runs it"
    raise Unsupported.of([(node.op.full_name, reason, node.label)])


def _register(role: Role, names: Sequence[str], infer: Infer, arity: Arity) -> None:
    for name in names:
        operator(name, infer=infer, strings=True, role=role, arity=arity)(_without)


_register(Role.SWITCH, ("Switch", "RefSwitch"), _outputs(2), (2, 2))
_register(Role.SWITCH, ("_SwitchN",), _outputs(0), (2, None))
_PLACE = TensorType(INT32, ())  # the index of the input that arrived
_register(
    Role.MERGE, ("Merge", "RefMerge"), lambda types, a, c: (_passed(types, a), _PLACE), (None, 2)
)
_register(Role.ENTER, ("Enter", "RefEnter"), _outputs(1), (1, 1))
_register(Role.EXIT, ("Exit", "RefExit"), _outputs(1), (1, 1))
_register(Role.NEXT_ITERATION, ("NextIteration", "RefNextIteration"), _outputs(1), (1, 1))
_register(Role.LOOP_COND, ("LoopCond",), _outputs(1), (1, 1))
operator("Call", pure=False, strings=True, role=Role.CALL)(_without)


@array_operator("NoOp", pure=False)
@array_operator("ControlTrigger", pure=False, role=Role.CONTROL_TRIGGER)
def no_op() -> None:
    """Do nothing; the node serves as a control input."""
