"""Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Kernel, Types
from penstock.ops.common.shape_rules import all_known, ints, same_type, tensor
from penstock.ops.registry import TENSORFLOW, operator
from penstock.ops.tensorflow.arrays import lengths, named_dtype
from penstock.types import ShapeError, TensorType, Type


def _length(given: np.ndarray) -> int:
    if given.size != 1 or given.reshape(-1)[0] < 1:
        raise ShapeError(f"a transform has one length, 1 or more, not {given.tolist()}")
    return int(given.reshape(-1)[0])


def _infer_rfft(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dims, length = tensor(types, 0).shape, all_known(lengths(ints(types, consts, 1)))
    dtype = named_dtype(attrs, "Tcomplex", "complex64", "c")
    if not dims or length is None:
        return (TensorType(dtype),)
    return (TensorType(dtype, (*dims[:-1], length[0] // 2 + 1)),)


@operator("RFFT", domain=TENSORFLOW, infer=_infer_rfft)
def rfft(node: Node, types: Types) -> Kernel:
    """Along the last dim, which is cut or padded to the length of the transform."""
    dtype = named_dtype(node.attrs, "Tcomplex", "complex64", "c")
    return Kernel(lambda x, length: np.fft.rfft(x, _length(length)).astype(dtype))


def _infer_irfft(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dims, length = tensor(types, 0).shape, all_known(lengths(ints(types, consts, 1)))
    dtype = named_dtype(attrs, "Treal", "float32", "f")
    if not dims or length is None:
        return (TensorType(dtype),)
    return (TensorType(dtype, (*dims[:-1], length[0])),)


@operator("IRFFT", domain=TENSORFLOW, infer=_infer_irfft)
def irfft(node: Node, types: Types) -> Kernel:
    dtype = named_dtype(node.attrs, "Treal", "float32", "f")
    return Kernel(lambda x, length: np.fft.irfft(x, _length(length)).astype(dtype))


def _whole(function: Callable[..., Any]) -> Callable[[Node, Types], Kernel]:
    def compile(node: Node, types: Types) -> Kernel:
        return Kernel(lambda x: function(x).astype(x.dtype))

    return compile


operator("FFT", domain=TENSORFLOW, infer=same_type)(_whole(np.fft.fft))
operator("IFFT", domain=TENSORFLOW, infer=same_type)(_whole(np.fft.ifft))


def _infer_complex(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return (TensorType(named_dtype(attrs, "Tout", "complex64", "c")),)


@operator("Complex", domain=TENSORFLOW, infer=_infer_complex)
def complex_operator(node: Node, types: Types) -> Kernel:
    dtype = named_dtype(node.attrs, "Tout", "complex64", "c")

    def function(real: np.ndarray, imaginary: np.ndarray) -> np.ndarray:
        out = np.empty(np.broadcast_shapes(real.shape, imaginary.shape), dtype)
        out.real, out.imag = real, imaginary
        return out

    return Kernel(function)
