"""Measure the rates of all backends on this machine: ``python -m tools.calibrate rates.json``.

For some families of each backend it times a small node and a large one, on one thread. The seconds
of the small one beyond its work scale the call, those of the large one scale the rates. Families
without a node here are scaled as the median of the others. Backends are compared by these numbers,
so all of them are measured together. ``penstock.tuning.calibrated`` reads the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from penstock.analysis.type_inference import infer_types
from penstock.backends.base import HostBackend
from penstock.backends.registry import available, backend_of
from penstock.build import GraphBuilder
from penstock.core.records import NamedTuple
from penstock.core.types import TensorType
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ops.internal.transfer import HOST
from penstock.ops.work_estimate import Rates, RateTable, part_seconds
from penstock.tuning.calibrated import CalibratedCosts

SMALL, LARGE = 8, 128
LEAST, MOST = 0.05, 20.0
"""Factors beyond these are taken for disturbances."""
_BATCH_MS, _BATCHES = 0.5, 7

Case = Callable[[GraphBuilder, int], object]
Clock = Callable[[], float]


class Scale(NamedTuple):
    """How many times as long a call, and its work, take as a table says."""

    call: float
    work: float


class Times(NamedTuple):
    """The seconds of a node as measured, and those of its call and its work as a table says."""

    measured: float
    call: float
    work: float


def _halves(*dims: int) -> np.ndarray:
    return np.full(dims, 0.5, np.float32)


def _elementwise(op: str, inputs: int = 1) -> Case:
    def case(b: GraphBuilder, n: int) -> object:
        return b.op(op, *[b.input(f"x{i}", np.float32, [n, n]) for i in range(inputs)])

    return case


def _product(b: GraphBuilder, n: int) -> object:
    return b.op("MatMul", b.input("x", np.float32, [n, n]), _halves(n, n))


def _small_product(b: GraphBuilder, n: int) -> object:
    x, w = b.input("x", np.float32, [n, 32]), b.input("w", np.float32, [32, 32])
    return b.op("MatMul", x, w)


def _running_sum(b: GraphBuilder, n: int) -> object:
    return b.op("CumSum", b.input("x", np.float32, [n, n]), np.int64(1))


def _convolution(group: int) -> Case:
    def case(b: GraphBuilder, n: int) -> object:
        x, w = b.input("x", np.float32, [1, 32, n, n]), _halves(32, 32 // group, 3, 3)
        return b.op("Conv", x, w, pads=[1, 1, 1, 1], group=group)

    return case


def _transposed_convolution(b: GraphBuilder, n: int) -> object:
    return b.op("ConvTranspose", b.input("x", np.float32, [1, 32, n, n]), _halves(32, 2, 3, 3))


def _pooling(b: GraphBuilder, n: int) -> object:
    x = b.input("x", np.float32, [1, 16, n, n])
    return b.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])


CASES: Mapping[str, Mapping[str, Case]] = {
    "numpy": {
        **{op: _elementwise(op) for op in ("Exp", "Neg", "Sigmoid", "Softmax", "Sqrt", "Tanh")},
        **{op: _elementwise(op, 2) for op in ("Add", "Div", "Mul")},
        "AveragePool": _pooling,
        "Conv": _convolution(1),
        "MatMul": _product,
    },
    "native": {
        "": _elementwise("Add", 2),
        "dense": _product,
        "other": _running_sum,
        "planes": _transposed_convolution,
        "product float32": _small_product,
    },
    "torch": {"": _elementwise("Exp")},
}
"""by backend and family, the graph of one node of some size"""


def node_of(case: Case, size: int) -> Node:
    """The node of a case, with its types."""
    b = GraphBuilder()
    b.output("y", case(b, size))
    graph = b.model().graph
    infer_types(graph)
    node, _ = graph.nodes  # and the Identity that names the output
    return node


def call_of(backend: HostBackend, node: Node) -> Callable[[], object] | None:
    """A call of a node's kernel on arrays of its own; None if there is no kernel."""
    kernel = backend.kernel(node, [None if v is None else v.type for v in node.inputs])
    if kernel is None:
        return None
    arrays = [_array(value.type, value.const) for value in node.inputs if value is not None]
    if kernel.binder is None or backend.memory != HOST:
        values = [backend.from_host(x) for x in arrays]
        return lambda: kernel.function(*values)
    inputs = [_in_order(kernel, x) for x in arrays]
    outputs = [_in_order(kernel, _array(v.type)) for v in node.outputs if v is not None]
    workspace = backend.allocate(kernel.workspace) if kernel.workspace else None
    run, arguments = kernel.bind(inputs, outputs, workspace)
    return lambda: run(*arguments)


def _array(type_: Any, constant: np.ndarray | None = None) -> np.ndarray:
    assert isinstance(type_, TensorType)
    return np.full(type_.dims, 0.5, type_.dtype) if constant is None else constant


def _in_order(kernel: Kernel, x: np.ndarray) -> np.ndarray:
    """An array with its dims in memory in the order that a kernel prefers."""
    order = kernel.layout.dims_order
    if not order or len(order) != x.ndim:
        return x
    return np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))


def fastest(call: Callable[[], object], clock: Clock = perf_counter) -> float:
    """The seconds of a call, in the fastest of some batches of calls."""
    call()
    count, times = 1, list[float]()
    while len(times) < _BATCHES:
        start = clock()
        for _ in range(count):
            call()
        seconds = clock() - start
        if seconds < _BATCH_MS * 1e-3:
            count *= 2
        else:
            times.append(seconds / count)
    return min(times)


def timed(backend: HostBackend, case: Case, size: int, clock: Clock = perf_counter) -> Times | None:
    """The times of a node of some size; None if the backend has no kernel for it."""
    node = node_of(case, size)
    call, work = call_of(backend, node), backend.work(node)
    if call is None or work is None:
        return None
    call_s = backend.rates[work.family].call_s
    return Times(fastest(call, clock), call_s, part_seconds(backend.rates, work) - work.beside_s)


def scale_of(small: Times, large: Times) -> Scale:
    """The factors that make two estimates what was measured."""
    work = large.measured / (large.call + large.work)
    call = (small.measured - work * small.work) / small.call if small.call else 1.0
    call = min(max(call, LEAST), MOST)
    work = (large.measured - call * large.call) / large.work if large.work else 1.0
    return Scale(call, min(max(work, LEAST), MOST))


def scaled(table: RateTable, scales: Mapping[str, Scale]) -> dict[str, Rates]:
    """A table of this machine; families without a scale of their own have the median one."""
    usual = Scale(*[median(factors) for factors in zip(*scales.values(), strict=True)])
    return {family: _scaled(rates, scales.get(family, usual)) for family, rates in table.items()}


def _scaled(rates: Rates, scale: Scale) -> Rates:
    return Rates(
        rates.call_s * scale.call,
        rates.bytes_per_s / scale.work,
        rates.flops_per_s / scale.work,
        rates.weights_per_s / scale.work,
        rates.element_s * scale.work,
        rates.item_s * scale.work,
    )


def calibrate(names: Sequence[str], clock: Clock = perf_counter) -> CalibratedCosts:
    """The rates of this machine, of the backends of these names."""
    tables: dict[str, RateTable] = {}
    for name in names:
        backend, scales = backend_of(name), dict[str, Scale]()
        if not isinstance(backend, HostBackend) or backend.device is not None:
            continue
        backend.set_threads(1)
        for family, case in CASES.get(name, {}).items():
            small, large = (timed(backend, case, size, clock) for size in (SMALL, LARGE))
            if small is not None and large is not None:
                scales[family] = scale_of(small, large)
                call, work = scales[family]
                print(f"{name} {family or 'others'}: call x {call:.2f}, work x {work:.2f}")
        if scales:
            tables[name] = scaled(backend.rates, scales)
    return CalibratedCosts(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("file", help="the file to write")
    arguments = parser.parse_args()
    calibrate(available()).write(arguments.file)


if __name__ == "__main__":
    main()
