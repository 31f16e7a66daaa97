"""From a graph and the shapes of what is fed to an executor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from penstock import garbage
from penstock.backends.base import Backend
from penstock.errors import InvalidInput, InvalidModel, LimitExceeded
from penstock.executors.base import Executor
from penstock.executors.dataflow import DataflowExecutor
from penstock.executors.linear import LinearExecutor
from penstock.executors.loop import Queue
from penstock.executors.parallel import ParallelExecutor
from penstock.feeds import check_dims
from penstock.grouping import HAND_OVER_S, Clustered
from penstock.ir import Graph, clone
from penstock.limits import Limits
from penstock.ops.cost import seconds as estimated
from penstock.ops.transfer import HOST
from penstock.passes.pipeline import optimize
from penstock.passes.sizes import check_sizes
from penstock.plan import Plan, compile_plan
from penstock.tasks import arrange
from penstock.threads import pool
from penstock.types import OptionalType, TensorType, Type

EXECUTORS = ("auto", "linear", "dataflow", "parallel")


class Compiler:
    """Compiles graphs for one session: its backends, its way of running them, its limits."""

    def __init__(self, executor: str, backends: Sequence[Backend], limits: Limits) -> None:
        self.kind = executor
        self.backends = tuple(backends)
        self.limits = limits

    def compile(self, graph: Graph, values: Sequence[Any]) -> Executor:
        """The executor of ``graph`` for values of these shapes."""
        check_dims(graph.inputs, values)
        declared = [value.type for value in graph.inputs]
        types = [_concrete(kind, given) for kind, given in zip(declared, values, strict=True)]
        with compiling():
            # Where the model itself says all shapes, the graph is as simple as it can be.
            special = types != declared
            if special:
                graph = clone(graph)
                for value, kind in zip(graph.inputs, types, strict=True):
                    value.type = kind
            try:
                if special:
                    optimize(graph, self.limits)
                check_sizes(graph, self.limits)
                return self._executor(graph)
            except InvalidModel as error:
                if not special:
                    raise
                # What is valid in general is not for these shapes.
                fed = ", ".join(map(repr, graph.inputs))
                raise InvalidInput(f"the model cannot run with ({fed}): {error}") from error

    def _executor(self, graph: Graph) -> Executor:
        if self.kind == "dataflow":
            return DataflowExecutor(compile_plan(graph, self.backends, planned=False), self.limits)
        plan = compile_plan(graph, self.backends)
        if self.kind == "linear":
            return LinearExecutor(plan, self.backends[0], self.limits)
        return self._parallel(plan)

    def _parallel(self, plan: Plan) -> Executor:
        hosts = [backend for backend in self.backends if backend.memory == HOST]
        workers = min(max(backend.workers for backend in hosts), pool().size)
        grouping = Clustered(plan, lambda step: estimated(step.node), workers)
        tasks = arrange(plan, grouping)
        if len(tasks.tasks) <= 1:
            return LinearExecutor(plan, self.backends[0], self.limits)
        queues = [Queue(workers, pool())]
        return ParallelExecutor(plan, tasks, hosts, self.limits, queues, HAND_OVER_S)


@contextmanager
def compiling() -> Iterator[None]:
    """Without garbage collection; what is too much for the machine is an error of the model."""
    with garbage.paused():
        try:
            yield
        except RecursionError as error:
            raise LimitExceeded("the model's graphs nest too deep to be compiled") from error
        except MemoryError as error:
            message = f"there is not enough memory to compile the model: {error}"
            raise LimitExceeded(message) from error


def _concrete(kind: Type, value: Any) -> Type:
    if isinstance(value, np.ndarray) and not isinstance(kind, OptionalType):
        return TensorType(value.dtype, value.shape)
    return kind
