"""Work of a node and its expected time: one formula, with rates as data.

Work is floating-point operations and bytes, computed from types. The estimate is the sum of a fixed
time and the time of each resource, like a roofline model without overlap::

    seconds = calls x call_s + items x item_s + elements x element_s
            + bytes / bytes_per_s + weights / weights_per_s + flops / flops_per_s

A backend has a table of ``Rates`` by family of operations; ``""`` is for all others. The backend
computes the ``Workload`` of a node in these units, and its family.

>>> rates = {"product": Rates(call_s=1e-6, bytes_per_s=5e9, flops_per_s=20e9)}
>>> f"{estimate(rates, Workload('product', nbytes=5_000, flops=20_000)):.1e}"
'3.0e-06'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any, TypeAlias

from penstock.core.records import NamedTuple
from penstock.core.types import STRING, TensorType, Type
from penstock.ir.graph import Node
from penstock.ops.internal.fused import FUSED

WORTH_THREADS = 500_000
"""operations of a node that are worth more than one thread: 5 us"""

WORTH_ROUNDING = 5_000_000
"""operations of a product from which on rounding its operands to bfloat16 saves time"""


def flops(node: Node) -> int:
    """Estimate the floating-point operations of one run of ``node``; 0 if its shapes are unknown. A
    multiplication and an addition count as two, as in the published figures of networks."""
    op = node.op
    if op is FUSED:
        return sum(map(flops, node.attrs["region"].nodes))
    output = node.outputs[0] if node.outputs else None
    if output is None:
        output = next(filter(None, node.outputs), None)
    # Asked for each node and each backend: loops, as Python 3.11 calls each comprehension.
    type_: Any = None if output is None else output.type
    if type_.__class__ is not TensorType or not type_.static or type_.dtype is STRING:
        return 0
    result, most, work = type_.dims, type_.elements, 0
    tensors: list[Any] = []
    for value in node.inputs:
        type_ = None if value is None else value.type
        is_known = type_.__class__ is TensorType and type_.static and type_.dtype is not STRING
        tensors.append(type_ if is_known else None)
    if op.work is not None:
        shapes: list[tuple[int, ...] | None] = []
        for type_ in tensors:
            shapes.append(None if type_ is None else type_.dims)  # noqa: PERF401
        try:
            work = op.work(node.attrs, shapes, result)
        except (IndexError, ValueError):  # inputs that the operation does not take: the run fails
            return 0
    if not work:
        for type_ in tensors:
            if type_ is not None and type_.elements > most:
                most = type_.elements
    return work or most


def worth_threads(nodes: Iterable[Node]) -> bool:
    """Whether one of ``nodes`` computes or copies enough to gain from more than one thread."""
    return any(not node.op.view and flops(node) >= WORTH_THREADS for node in nodes)


class Rates(NamedTuple):
    """The rates of one core, by kind of work."""

    call_s: float = 0.0
    """seconds of a call that does nothing"""
    bytes_per_s: float = inf
    """of inputs and results that a run computes"""
    flops_per_s: float = inf
    """floating-point operations; a multiplication and an addition count as two"""
    weights_per_s: float = inf
    """bytes of constant matrices"""
    element_s: float = 0.0
    """seconds of an element of the result"""
    item_s: float = 0.0
    """seconds of each part that a kernel computes one by one: a group, a matrix, a time step"""


class Workload(NamedTuple):
    """The work of a call, or of a part of one, in the units of ``Rates``."""

    family: str = ""
    """the key of its rates"""
    nbytes: float = 0.0
    flops: float = 0.0
    weights: float = 0.0
    elements: float = 0.0
    items: float = 0.0
    beside_s: float = 0.0
    """seconds that the rates do not know, such as of copies into another layout"""

    def part(self, count: float) -> Workload:
        """One of ``count`` equal parts."""
        family, *amounts, _ = self
        return Workload(family, *[amount / count for amount in amounts])


RateTable: TypeAlias = Mapping[str, Rates]
"""the rates of a backend, by family"""


def estimate(rates: RateTable, work: Workload | None) -> float:
    """The seconds of a call, infinite for none."""
    if work is None:
        return inf
    # Asked for each node and each backend: one function, and no attributes.
    family, nbytes, flops, weights, elements, items, beside_s = work
    call_s, bytes_per_s, flops_per_s, weights_per_s, element_s, item_s = rates[family]
    return (
        call_s
        + items * item_s
        + elements * element_s
        + nbytes / bytes_per_s
        + weights / weights_per_s
        + flops / flops_per_s
        + beside_s
    )


def part_seconds(rates: RateTable, work: Workload) -> float:
    """The seconds of a part of a call with this work."""
    return estimate(rates, work) - rates[work.family].call_s


# Of no backend in particular: a core of a server of 2020, rounded down.
HOST_RATES: RateTable = {"": Rates(1e-6, 5e9, 20e9)}
# Rates of copies to or from channels-last layout, for images of several and of few channels:
# measured with oneDNN's reorders on images of 1 KiB to 4 MiB, on an Intel Xeon of 2023.
_COPIES: RateTable = {"": Rates(0.25e-6, 16e9), "few channels": Rates(0.25e-6, 12e9)}
_FEW_CHANNELS = 16

# Operations with results in the default memory order.
_OWN_ORDER = frozenset({"Gemm", "MatMul", "Reshape", "Unsqueeze"})


def moved_bytes(node: Node) -> int:
    """The bytes of a node's inputs and outputs without constants; unknown sizes count as 0."""
    moved = 0
    for value in (*node.inputs, *node.outputs):
        if value is not None and not value.is_constant:
            type_ = value.type
            if isinstance(type_, TensorType) and type_.static:
                moved += type_.nbytes
    return moved


def host_workload(node: Node) -> Workload:
    """The bytes and operations of one run of ``node``, whatever computes it."""
    return Workload("", moved_bytes(node), flops(node))


def host_seconds(node: Node) -> float:
    """Estimate the time of one run of ``node`` on one core, whatever computes it."""
    return estimate(HOST_RATES, host_workload(node))


def layout_seconds(node: Node) -> tuple[float, float]:
    """Estimate the time to convert the images of a convolution to the layout of a kernel: channels
    last, and the default memory order.

    Inputs of the graph and results of products have the default order; images of other nodes are
    assumed to be channels last, as fast convolutions write them. The reader of the result is
    unknown, but mostly another convolution: a quarter of the copy is charged to channels last, and
    the rest to the default order.
    """
    x, y = node.inputs[0], node.outputs[0]
    of_x = 0.0 if x is None else _copy_time(x.type)
    of_y = 0.0 if y is None else _copy_time(y.type)
    source = None if x is None else x.producer
    if source is None or source.op.name in _OWN_ORDER:
        return of_x + of_y / 4, of_y * 3 / 4
    return of_y / 4, of_x + of_y * 3 / 4


def _copy_time(image: Type) -> float:
    """The seconds of a copy; 0 unless the image is a tensor of numbers with a static shape."""
    if not isinstance(image, TensorType) or not image.static or image.dtype is STRING:
        return 0.0
    few = len(image.dims) > 1 and image.dims[1] < _FEW_CHANNELS
    # The part of ``estimate`` that is not zero: this is asked several times for each image.
    rates = _COPIES["few channels" if few else ""]
    return rates.call_s + image.nbytes / rates.bytes_per_s
