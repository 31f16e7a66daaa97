"""Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.types import ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.shape_rules import all_known, ints, same_type, tensor
from penstock.ops.registry import ArrayFunction
from penstock.ops.tensorflow.common import array_operator, integer, lengths, named_dtype, operator


def _real_transform(
    name: str, function: ArrayFunction, attr: str, default: str, size: Callable[[int], int]
) -> None:
    """Register a transform along the last axis, which is truncated or padded to a length. The
    result has ``size(length)`` elements of the dtype in attribute ``attr``.
    """
    code = np.dtype(default).kind

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        dims, length = tensor(types, 0).shape, all_known(lengths(ints(types, consts, 1)))
        dtype = named_dtype(attrs, attr, default, code)
        if not dims or length is None:
            return (TensorType(dtype),)
        return (TensorType(dtype, (*dims[:-1], size(length[0]))),)

    @operator(name, infer=infer)
    def compile(node: Node, types: Types) -> Kernel:
        dtype = named_dtype(node.attrs, attr, default, code)
        return Kernel(lambda x, length: function(x, _length(length)).astype(dtype))


def _length(length: np.ndarray) -> int:
    n = integer(length, "the length of a transform")
    if n < 1:
        raise ShapeError(f"the length of a transform must be positive, not {n}")
    return n


_real_transform("RFFT", np.fft.rfft, "Tcomplex", "complex64", lambda n: n // 2 + 1)
_real_transform("IRFFT", np.fft.irfft, "Treal", "float32", lambda n: n)
array_operator("FFT", infer=same_type)(lambda x: np.fft.fft(x).astype(x.dtype))
array_operator("IFFT", infer=same_type)(lambda x: np.fft.ifft(x).astype(x.dtype))


def _complex_type(attrs: Attrs) -> np.dtype:
    return named_dtype(attrs, "Tout", "complex64", "c")


@array_operator(
    "Complex",
    infer=lambda types, attrs, consts: (TensorType(_complex_type(attrs)),),
    prepared={"dtype": lambda node: _complex_type(node.attrs)},
)
def complex_operator(real: np.ndarray, imaginary: np.ndarray, *, dtype: np.dtype) -> np.ndarray:
    out = np.empty(np.broadcast_shapes(real.shape, imaginary.shape), dtype)
    out.real, out.imag = real, imaginary
    return out
