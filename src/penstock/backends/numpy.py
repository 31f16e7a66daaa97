"""The NumPy backend: the kernels registered with the operations, which define their meaning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from penstock.backends.base import HostBackend
from penstock.core.types import Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ops.internal.fused import parts
from penstock.ops.work_estimate import flops, seconds

# Seconds that a kernel takes beyond the usual estimate: the fixed cost of a kernel that makes many
# calls. A call of one of NumPy's own functions takes a quarter of the estimate.
_OVERHEADS = {
    -0.75e-6: """
        Abs Add And Ceil Cos Div Equal Exp Floor Greater Less Log Max Min Mul Neg Not Or Pow
        Reciprocal Sin Sqrt Sub Tanh
    """,
    0.15e-6: "Gemm MatMul",
    1.5e-6: "DequantizeLinear Sigmoid",
    2e-6: "LeakyRelu Swish",
    3e-6: "HardSwish Softmax",
    4e-6: "LogSoftmax MatMulInteger",
    5e-6: "Gelu Mish",
    5.5e-6: "QuantizeLinear",
    6e-6: "BatchNormalization LayerNormalization",
    10e-6: "AveragePool InstanceNormalization MaxPool Resize",
    12e-6: "Conv QGemm QLinearMatMul",
    20e-6: "ConvInteger ConvTranspose GRU LSTM RNN",
    26e-6: "QLinearConv TopK",
    600e-6: "NonMaxSuppression",
}
_OVERHEAD = {name: time for time, names in _OVERHEADS.items() for name in names.split()}

# Seconds of each floating-point operation beyond the usual estimate: products run in a BLAS.
_PER_FLOP_S = {
    **dict.fromkeys(("Gemm", "MatMul"), -1 / 30e9),
    **dict.fromkeys(("MatMulInteger", "QGemm", "QLinearMatMul"), -1 / 25e9),
    "GridSample": 7e-9,
    "RoiAlign": 70e-9,
}

# Operations that take seconds for each group of channels.
_GROUPED, _GROUP_S = frozenset({"Conv", "ConvInteger", "ConvTranspose", "QLinearConv"}), 0.4e-6


class NumpyBackend(HostBackend):
    """Every operation of the table, on the host."""

    name = "numpy"

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        return node.op.compile(node, types)

    def seconds(self, node: Node) -> float:
        return sum([_seconds(part) for part in parts(node)])

    @property
    def threads(self) -> int:
        return max((library.num_threads for library in _blas()), default=1)

    def set_threads(self, threads: int) -> None:
        for library in _blas():
            # From threadpoolctl 3.8 on, only the first thread to set OpenBLAS's number can set it,
            # until that thread is forgotten; calls of others are ignored silently.
            forget = getattr(library, "clear_controlling_thread", lambda *, force: None)
            forget(force=True)
            library.set_num_threads(threads)
            forget(force=True)


def _seconds(node: Node) -> float:
    name = node.op.name
    more = flops(node) * _PER_FLOP_S[name] if name in _PER_FLOP_S else 0.0
    more += (node.attrs.get("group", 1) - 1) * _GROUP_S if name in _GROUPED else 0.0
    return seconds(node) + _OVERHEAD.get(name, 0.0) + more


@cache
def _blas() -> tuple[Any, ...]:
    """The libraries of matrix products that NumPy has loaded: the part of NumPy with threads."""
    from threadpoolctl import ThreadpoolController

    return tuple(ThreadpoolController().select(user_api="blas").lib_controllers)
