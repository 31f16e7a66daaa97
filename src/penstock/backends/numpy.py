"""The NumPy backend: the kernels registered with the operations, which define their meaning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from penstock.backends.base import HostBackend
from penstock.ir.graph import Node
from penstock.ir.op import Kernel
from penstock.ops.internal.fused import parts
from penstock.ops.work_estimate import seconds
from penstock.types import Type

# Fixed costs of kernels that consist of many calls, in seconds.
_CALLS_S = {
    "AveragePool": 10e-6,
    "BatchNormalization": 6e-6,
    "Conv": 12e-6,
    "ConvInteger": 20e-6,
    "ConvTranspose": 20e-6,
    "DequantizeLinear": 1.5e-6,
    "Gelu": 5e-6,
    "GRU": 20e-6,
    "HardSwish": 3e-6,
    "InstanceNormalization": 10e-6,
    "LSTM": 20e-6,
    "LayerNormalization": 6e-6,
    "LeakyRelu": 2e-6,
    "LogSoftmax": 4e-6,
    "MatMulInteger": 4e-6,
    "MaxPool": 10e-6,
    "Mish": 5e-6,
    "QGemm": 12e-6,
    "QLinearAdd": 14e-6,
    "QLinearConv": 26e-6,
    "QLinearMatMul": 12e-6,
    "QuantizeLinear": 5.5e-6,
    "RNN": 20e-6,
    "Resize": 10e-6,
    "Sigmoid": 1.5e-6,
    "Softmax": 3e-6,
    "Swish": 2e-6,
}


# A call of one of NumPy's own functions takes a quarter of the usual estimate.
_CALLS_S |= dict.fromkeys(
    """
    Abs Add And Ceil Cos Div Equal Exp Floor Greater Less Log Max Min Mul Neg Not Or Pow Reciprocal
    Sin Sqrt Sub Tanh
    """.split(),  # noqa: SIM905 - names are easier to read without quotes
    -0.75e-6,
)


class NumpyBackend(HostBackend):
    """Every operation of the table, on the host."""

    name = "numpy"

    def kernel(self, node: Node, types: Sequence[Type | None]) -> Kernel | None:
        return node.op.compile(node, types)

    def seconds(self, node: Node) -> float:
        return sum(seconds(part) + _CALLS_S.get(part.op.name, 0.0) for part in parts(node))

    @property
    def threads(self) -> int:
        return max((library.num_threads for library in _blas()), default=1)

    def set_threads(self, threads: int) -> None:
        for library in _blas():
            # From threadpoolctl 3.8 on, the first thread to set OpenBLAS's number is the only one
            # that can, until it is forgotten; all others are ignored without a word.
            forget = getattr(library, "clear_controlling_thread", None)
            if forget is None:
                library.set_num_threads(threads)
            else:
                forget(force=True)
                library.set_num_threads(threads)
                forget(force=True)


@cache
def _blas() -> tuple[Any, ...]:
    """The libraries of matrix products that NumPy has loaded: what in NumPy has threads."""
    from threadpoolctl import ThreadpoolController

    controllers = ThreadpoolController().select(user_api="blas").lib_controllers
    return tuple(controllers)
