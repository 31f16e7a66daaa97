"""Steps in words and figures, for profiles, traces, texts and reports of plans."""

from __future__ import annotations

from penstock.core.records import dataclass
from penstock.core.types import TensorType, dtype_name
from penstock.ir.graph import Node
from penstock.ops.internal.fused import operation_name, parts
from penstock.ops.work_estimate import flops
from penstock.plan.plan import Step


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One step: its ``name``; the names of the ``nodes`` of the model that it computes, several if
    it is fused; their operations, as in "Conv+HardSwish"; the origin of the first node; the
    ``backend`` of its kernel; the dtype of its first output ("" unless it is a tensor), and the
    ``precision`` of the operands of its products, if it differs; the floating-point operations of
    one execution, and the bytes of its inputs and outputs, each 0 if shapes are unknown."""

    name: str
    nodes: tuple[str, ...]
    operation: str
    origin: str
    backend: str
    dtype: str
    precision: str
    flops: int
    bytes: int


def step_facts(step: Step) -> StepFacts:
    """The facts of a step."""
    node = step.node
    first = next((v.type for v in node.outputs if v is not None), None)
    of_tensor = first.dtype if isinstance(first, TensorType) else None
    dtype = "" if of_tensor is None else dtype_name(of_tensor)
    rounded = "" if step.kernel is None else step.kernel.operand_dtype
    return StepFacts(
        node.name or node.label,
        tuple([part.name or part.label for part in parts(node)]),
        operation_name(node),
        node.label,
        step.backend,
        dtype,
        rounded or dtype,
        0 if step.control or node.op.view else flops(node),
        _moved_bytes(node),
    )


def _moved_bytes(node: Node) -> int:
    """The bytes that a node reads and writes; each value counts once."""
    values = dict.fromkeys([v for v in (*node.inputs, *node.outputs) if v is not None])
    types = [value.type for value in values]
    return sum([t.nbytes for t in types if isinstance(t, TensorType) and t.static])
