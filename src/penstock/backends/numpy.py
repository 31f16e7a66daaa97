"""The NumPy backend: the kernels registered with the operations, which define their meaning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

from penstock.backends.base import HostBackend
from penstock.core.types import RunValue, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ops.internal.fused import FUSED, parts
from penstock.ops.work_estimate import Rates, RateTable, Workload, estimate, flops, moved_bytes

# Calls were timed with tensors of 8 elements, rates with those that fit into the cache of a core,
# on an Intel Xeon of the generation of 2023 with OpenBLAS. An item is a group of channels.
# Bytes and floating-point operations a second, unless a row says otherwise.
_BYTES, _FLOPS = 5e9, 20e9

_ROWS = (
    # One call of a function of NumPy.
    (
        Rates(0.25e-6, _BYTES, _FLOPS),
        "Abs Add And Ceil Cos Div Equal Exp Floor Greater Less Log Max Min Mul Neg Not Or Pow "
        "Reciprocal Sin Sqrt Sub Tanh",
    ),
    # Several of them, in Python.
    (Rates(1e-6, _BYTES, _FLOPS), ""),
    (Rates(2.5e-6, _BYTES, _FLOPS), "DequantizeLinear Sigmoid"),
    (Rates(3e-6, _BYTES, _FLOPS), "LeakyRelu Swish"),
    (Rates(4e-6, _BYTES, _FLOPS), "HardSwish Softmax"),
    (Rates(5e-6, _BYTES, _FLOPS), "LogSoftmax"),
    (Rates(6e-6, _BYTES, _FLOPS), "Gelu Mish"),
    (Rates(6.5e-6, _BYTES, _FLOPS), "QuantizeLinear"),
    (Rates(7e-6, _BYTES, _FLOPS), "BatchNormalization LayerNormalization"),
    (Rates(11e-6, _BYTES, _FLOPS), "AveragePool InstanceNormalization MaxPool Resize"),
    (Rates(21e-6, _BYTES, _FLOPS, item_s=8e-6), "GRU LSTM Lstm RNN"),
    (Rates(27e-6, _BYTES, _FLOPS), "TopK"),
    (Rates(30e-6, _BYTES, _FLOPS, item_s=300e-6), "IntegerLstm"),
    (Rates(601e-6, _BYTES, _FLOPS), "NonMaxSuppression"),
    # Products of a BLAS; before those of integers, all of their matrices become floats.
    (Rates(1.15e-6, _BYTES, 60e9), "Gemm MatMul"),
    (Rates(5e-6, _BYTES, 60e9), "MatMulInteger"),
    (Rates(60e-6, _BYTES, 20e9), "DynamicRangeDense IntegerSvdf"),
    (Rates(13e-6, _BYTES, 60e9), "QGemm QLinearMatMul"),
    (Rates(13e-6, _BYTES, _FLOPS, item_s=0.4e-6), "Conv"),
    (Rates(21e-6, _BYTES, _FLOPS, item_s=0.4e-6), "ConvInteger ConvTranspose"),
    (Rates(27e-6, _BYTES, _FLOPS, item_s=0.4e-6), "QLinearConv"),
    # Elements that are gathered one by one.
    (Rates(1e-6, _BYTES, 142e6), "GridSample"),
    (Rates(1e-6, _BYTES, 14.3e6), "RoiAlign"),
)

RATES: RateTable = {name: rates for rates, names in _ROWS for name in names.split() or [""]}
"""by operation"""

# Of a call of several functions of NumPy, to look at shapes that were not known ahead.
_LOOK = Rates(8e-6)


class NumpyBackend(HostBackend):
    """Every operation of the table, on the host."""

    name = "numpy"
    rates = RATES

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        return node.op.compile(node, types)

    def seconds(self, node: Node) -> float:
        if node.op is not FUSED:
            return estimate(self.rates, self.work(node))
        return sum([estimate(self.rates, self.work(part)) for part in parts(node)])

    def work(self, node: Node) -> Workload:
        """The work of a node that is not fused."""
        name, rates = node.op.name, self.rates
        if name not in rates:
            name = ""
        items = node.attrs.get("group", 1) - 1  # groups behind the first, or recurrent steps
        if "hidden_size" in node.attrs and (x := node.inputs[0]) is not None and x.shape:
            steps = x.shape[node.attrs.get("layout", 0)]
            items = steps if isinstance(steps, int) else 1
        return Workload(name, moved_bytes(node), flops(node), items=items)

    def unbound_cost(self, node: Node) -> float:
        looks = [p for p in parts(node) if not p.op.elementwise and p.op.name != "MatMul"]
        return _LOOK.call_s * len(looks)

    @property
    def threads(self) -> int:
        return max((library.num_threads for library in _blas()), default=1)

    def set_threads(self, threads: int) -> None:
        for set_number in _setters():
            set_number(threads)


class _Library(Protocol):
    def set_num_threads(self, num_threads: int) -> object: ...


@cache
def _setters() -> tuple[Callable[[int], object], ...]:
    """The functions that set the numbers of threads of ``_blas()``."""
    setters: list[Callable[[int], object]] = []
    for library in _blas():
        # From threadpoolctl 3.8 on, only the first thread to set OpenBLAS's number can set it,
        # until that thread is forgotten; calls of others are ignored silently. The library's own
        # function has no such rule, and takes a hundredth of the time, which each run with products
        # of NumPy pays twice.
        own = None
        if library.internal_api == "openblas" and hasattr(library, "_get_symbol"):
            has_pool = getattr(library, "threading_layer", None) == "pthreads"
            own = library._get_symbol("openblas_set_num_threads") if has_pool else None
        setters.append(own or partial(_set_number, library))
    return tuple(setters)


def _set_number(library: _Library, threads: int) -> None:
    forget = getattr(library, "clear_controlling_thread", lambda *, force: None)
    forget(force=True)
    library.set_num_threads(threads)
    forget(force=True)


@cache
def _blas() -> tuple[Any, ...]:
    """The libraries of matrix products that NumPy has loaded: the part of NumPy with threads."""
    from threadpoolctl import ThreadpoolController

    return tuple(ThreadpoolController().select(user_api="blas").lib_controllers)


def run_node(node: Node, types: Sequence[Type | None], *inputs: RunValue) -> RunValue:
    """Compute a node of these types by NumPy's kernel, with constants for inputs that have one."""
    given = zip(node.inputs, inputs, strict=True)
    read = [v.const if v is not None and v.is_constant else x for v, x in given]
    return node.op.compile(node, types).function(*read)
