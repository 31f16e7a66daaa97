"""Elimination of input Transposes whose readers can use the input's strides.

Models with channels-last images begin with a Transpose whose result is a view of the input. A
kernel that is bound to the strides of that view needs only the address, so it is given the input
itself::

    v1 = transpose_0(v0)
    sequence_0(v1)                  sequence_0(v0)
    del v1
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core.checkpoints import with_checkpoints
from penstock.core.types import TensorType
from penstock.ir.layout import is_plannable, packed_strides
from penstock.plan.plan import Plan, SlotKind, Step

if TYPE_CHECKING:
    from penstock.codegen.names import TurnedInputs


def turned_inputs(plan: Plan) -> TurnedInputs:
    """Return the slots of transposed inputs that only such kernels read, with the input of each and
    the axes by which it is transposed.
    The program must be a single function without observers, which would see each value."""
    turned = {
        step.outputs[0]: (step.inputs[0], tuple(step.node.attrs["perm"]))
        for step in plan.steps
        if _turns_input(plan, step)
    }
    if not turned:
        return turned
    kept = {*plan.outputs, *[slot.base for slot in plan.slots]}
    for step in with_checkpoints(plan.walk()):
        binder = None if step.kernel is None else step.kernel.binder
        is_bound = step.into and step.contract is None and not step.copied
        if binder is None or not binder.reads_turned or not is_bound:
            kept.update(step.inputs)
        kept.update(*[block.outputs for block in step.blocks])
    return {i: source for i, source in turned.items() if i not in kept}


def _turns_input(plan: Plan, step: Step) -> bool:
    """Whether a step is a Transpose whose result is a view of an input."""
    if step.node.op.name != "Transpose" or step.kernel is None or step.contract is not None:
        return False
    source, target = step.inputs[0], step.outputs[0]
    if source not in plan.inputs or plan.slots[target].kind is not SlotKind.DYNAMIC:
        return False
    type_, axes = plan.slots[source].type, step.node.attrs.get("perm")
    if not is_plannable(type_) or not axes or plan.slots[source].strides:
        return False
    assert isinstance(type_, TensorType) and type_.dtype is not None
    strides = packed_strides(type_.dims, type_.dtype.itemsize)
    return plan.slots[target].strides == tuple([strides[axis] for axis in axes])
