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
from penstock.ops.tensorflow.common import array_operator, lengths, named_dtype, operator


def _real_transform(
    name: str,
    function: ArrayFunction,
    attr: str,
    default: str,
    size: Callable[[int], int],
    rank: int,
) -> None:
    """Register a transform along the last ``rank`` axes, which are truncated or padded to lengths.
    The result has ``size(length)`` elements of the dtype in attribute ``attr`` along the last one.
    """
    code = np.dtype(default).kind

    def infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        dims, length = tensor(types, 0).shape, all_known(lengths(ints(types, consts, 1)))
        dtype = named_dtype(attrs, attr, default, code)
        if not dims or length is None:
            return (TensorType(dtype),)
        return (TensorType(dtype, (*dims[:-rank], *length[:-1], size(length[-1]))),)

    @operator(name, infer=infer)
    def compile(node: Node, types: Types) -> Kernel:
        dtype, axes = named_dtype(node.attrs, attr, default, code), range(-rank, 0)

        def run(x: np.ndarray, length: np.ndarray) -> np.ndarray:
            sizes = length.reshape(-1).tolist()
            if len(sizes) != rank or min(sizes) < 1 or x.ndim < rank:
                raise ShapeError(
                    f"a transform along {rank} axes needs as many positive lengths, not {sizes}, "
                    f"and an input of that rank, not {x.shape}"
                )
            return function(x, sizes, axes).astype(dtype)

        return Kernel(run)


def _transform(name: str, function: ArrayFunction, rank: int) -> None:
    @array_operator(name, infer=same_type)
    def run(x: np.ndarray) -> np.ndarray:
        if x.ndim < rank:
            raise ShapeError(f"a transform along {rank} axes of {x.shape}")
        return function(x, axes=range(-rank, 0)).astype(x.dtype)


for _rank, _end in ((1, ""), (2, "2D"), (3, "3D")):
    _halved = "Tcomplex", "complex64", lambda n: n // 2 + 1
    _real_transform(f"RFFT{_end}", np.fft.rfftn, *_halved, _rank)
    _real_transform(f"IRFFT{_end}", np.fft.irfftn, "Treal", "float32", lambda n: n, _rank)
    _transform(f"FFT{_end}", np.fft.fftn, _rank)
    _transform(f"IFFT{_end}", np.fft.ifftn, _rank)


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
