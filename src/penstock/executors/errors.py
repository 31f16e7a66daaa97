"""Explanations of run errors: the step at fault, its node's origin, and its inputs' types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from penstock.codegen.writer import Program
from penstock.core.errors import InternalError, LimitExceeded, PenstockError, RunError
from penstock.core.types import RunValues, TensorType, type_of
from penstock.host.current_run import BudgetError
from penstock.ir.contract import is_own
from penstock.ir.describe import describe_node
from penstock.ir.graph import Node
from penstock.ops.internal.fused import operation_name
from penstock.plan.plan import Step


def throw(error: PenstockError | None) -> NoReturn:
    """Raise an error that a function of this module has returned."""
    assert error is not None
    try:
        raise error
    finally:
        # The error refers to this frame. Not deleted, since debuggers show a frame's arguments.
        error = None


def explained(error: Exception, program: Program) -> PenstockError:
    """Return an error that names the step at fault: its operation, its origin and its inputs'
    types. Its cause is ``error``, unless it is that error itself."""
    step, types = _step_at_fault(error, program)
    if step is None:
        if isinstance(error, PenstockError):
            return error
        if isinstance(error, MemoryError):
            return run_error("the outputs", error)
        return InternalError(f"the run failed outside of any node: {error!r}")
    slots = program.plan.slots
    inputs = [
        "none" if i < 0 else f"{slots[i].name}: {types.get(i, slots[i].type)}" for i in step.inputs
    ]
    return _explanation(step.node, inputs, error, own=step.contract is None)


def explained_at(node: Node, inputs: RunValues, error: BaseException) -> PenstockError:
    """Return an error that names ``node`` and the types of its ``inputs``, as ``explained``."""
    types = [
        "none" if value is None else f"{value.name}: {type_of(x)}"
        for value, x in zip(node.inputs, inputs, strict=False)  # captures come last
    ]
    return _explanation(node, types, error, own=is_own(node.op.compile))


def run_error(place: str, error: BaseException) -> RunError:
    """Return the error of a run for an exception that an operation raised at ``place``."""
    text = repr(error)
    if isinstance(error, MemoryError):
        text = str(error) or "there is not enough memory"
    # NumPy's message names shapes and indices; ``place`` adds the types of the inputs.
    elif isinstance(error, IndexError | ValueError):
        text = str(error)
    error_type = LimitExceeded if isinstance(error, BudgetError) else RunError
    explanation = error_type(f"{place}: {text}")
    explanation.__cause__ = error
    return explanation


def _explanation(
    node: Node, inputs: Sequence[str], error: BaseException, *, own: bool
) -> PenstockError:
    """Return the error to raise. ``own``: whether the kernel is one of Penstock's."""
    if isinstance(error, PenstockError):
        error.add_note(f"The run had reached {operation_name(node)} ({node.label}).")
        _set_place(error, node, inputs)
        return error
    explanation: PenstockError = run_error(describe_node(node, inputs), error)
    # No input makes correct code use an undefined name or fail an assertion.
    if own and isinstance(error, AssertionError | NameError):
        explanation = InternalError(f"{explanation}. This is a bug in Penstock: please report it")
        explanation.__cause__ = error
    _set_place(explanation, node, inputs)
    if type(explanation) is RunError:
        # NumPy and kernels raise these types for invalid indices, shapes and values. If all inputs
        # are constants, the model is at fault.
        is_given = any(value is not None and not value.is_constant for value in node.inputs)
        explanation.by_feeds = own and is_given and isinstance(error, IndexError | ValueError)
    return explanation


def _set_place(error: PenstockError, node: Node, inputs: Sequence[str]) -> None:
    """Set the attributes of a run error that name the node at fault, unless they are set."""
    if isinstance(error, RunError) and error.operation is None:
        error.operation, error.node = operation_name(node), node.label
        error.inputs = tuple(inputs)


def _step_at_fault(error: Exception, program: Program) -> tuple[Step | None, dict[int, str]]:
    """Return the step that raised ``error``, and its inputs' types, as far as known, by slot."""
    trace = error.__traceback__
    # The traceback has frames of the executor, followed by those of the program and of kernels.
    while trace is not None and trace.tb_frame.f_code.co_filename != program.filename:
        trace = trace.tb_next
    step = None if trace is None else program.steps[trace.tb_lineno - 1]
    if step is None or trace is None:
        return None, {}
    inner = trace.tb_next
    while inner is not None and not isinstance(step, Step):  # the body of a captured graph
        if inner.tb_frame.f_code.co_filename == program.filename:
            trace, step = inner, program.steps[inner.tb_lineno - 1] or step
        inner = inner.tb_next
    if not isinstance(step, Step):
        # One line runs all steps of a sequence; the C code stores the failed step in the error.
        step = step[getattr(error, "place_in_sequence", 0)]
    variables = trace.tb_frame.f_locals
    shared = variables.get("V", ())
    types = {}
    for i in step.inputs:
        value = variables.get(f"v{i}")
        if value is None and 0 <= i < len(shared):
            value = shared[i]
        if isinstance(value, np.ndarray):
            types[i] = str(TensorType(value.dtype, value.shape))
    return step, types
