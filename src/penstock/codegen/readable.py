"""Readable source of a program: the operands and results of each call, and result types.

Kernels that prepare their arguments are called with these (``*a4``) instead of arrays. The readable
text shows the memory of each value::

    # conv_relu_1(v0, c2 -> b3)                       # conv in model.onnx: float32[1, 8, 56, 56]
    softmax_4(*a4)                   # (b3 -> b5) softmax in model.onnx: float32[1, 64]

The text is made on request: it is longer than the text that Python compiles.
"""

from __future__ import annotations

from penstock.codegen.names import ProgramNames, bound_slots
from penstock.codegen.steps import COMMENT_COLUMN, comment, printable
from penstock.codegen.writer import Program
from penstock.plan.plan import Plan, Step


def readable_source(program: Program) -> str:
    """Return the source of a program with equal line numbers and complete comments."""
    lines = program.source.splitlines()
    for i, step in enumerate(program.steps):
        if isinstance(step, Step) and step.kernel is not None:
            lines[i] = _line(program.plan, program.names, lines[i], step)
    return "\n".join(lines) + "\n"


def _line(plan: Plan, names: ProgramNames, line: str, step: Step) -> str:
    origin = comment(step)
    if not line.endswith(f"  # {origin}"):
        return line  # no call
    code = line.removesuffix(f"  # {origin}").rstrip()
    types = ", ".join([str(plan.slots[i].type) for i in step.outputs if i >= 0])
    about = f"{origin}: {printable(types)}" if types else origin
    if step.prepares:
        arguments = _arguments(plan, names, step)
        if code.lstrip().startswith("# "):  # a step of a sequence, which is called as one
            indent = code[: len(code) - len(code.lstrip())]
            code = f"{indent}# {names.calls[step].function}({arguments})"
        else:
            about = f"({arguments}) {about}"
    return f"{code:<{COMMENT_COLUMN}}  # {about}"


def _arguments(plan: Plan, names: ProgramNames, step: Step) -> str:
    """Return the operands and results of a destination-passing kernel."""
    slots = bound_slots(step)
    read, written = slots[: len(step.inputs)], slots[len(step.inputs) :]
    texts = [", ".join([_value(plan, names, i) for i in group]) for group in (read, written)]
    return " -> ".join(texts)


def _value(plan: Plan, names: ProgramNames, index: int) -> str:
    """Return the name of a slot; for a view, also the name of its base."""
    name = names.slots[index]
    base = plan.slots[index].base if index >= 0 else -1
    viewed = base >= 0 and names.slots[base] != name
    return f"{name} of {names.slots[base]}" if viewed else name
