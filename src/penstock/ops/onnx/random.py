"""Random number generators, and Dropout.

With a seed, the sequence of numbers that a kernel draws over its calls is reproducible. Without
one, each kernel seeds itself. The numbers differ from those of other runtimes, except in Dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.types import BOOL, FLOAT32, RunValue, Shape, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel, returning
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.dtypes import FLOAT64, INT32
from penstock.ops.common.shape_rules import check_shape, dtype_attribute, one_element, tensor
from penstock.ops.common.specialize import Routine, specialized
from penstock.ops.onnx.shape import view_kernel
from penstock.ops.registry import ArrayFunction, operator

_NATIVE = (FLOAT32, FLOAT64)
"""The dtypes that NumPy's generators draw directly, also into a given array."""


def generator_of(attrs: Attrs) -> np.random.Generator:
    """Return the generator of a kernel's random numbers."""
    seed = attrs.get("seed")
    if seed is None or math.isnan(seed):
        return np.random.default_rng()
    # Seeds are floats, so that their bits are used as the integer seed.
    return np.random.default_rng(int(np.float32(seed).view(np.uint32)))


def _infer_random(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    like = tensor(types, 0) if types else TensorType(FLOAT32, _given_shape(attrs))
    return (TensorType(dtype_attribute(attrs, "dtype") or like.dtype, like.shape),)


def _given_shape(attrs: Attrs) -> tuple[int, ...]:
    shape = tuple(attrs["shape"])
    if any(d < 0 for d in shape):
        raise ShapeError(f"attribute shape {list(shape)} must not have negative dims")
    return shape


def _draw(method: ArrayFunction, scale: float, offset: float, out: np.ndarray) -> np.ndarray:
    """Fill ``out`` with ``scale * draws + offset``."""
    native = out.dtype in _NATIVE
    # NumPy's generators only write into contiguous arrays.
    direct = native and out.flags.c_contiguous
    dtype = out.dtype if native else FLOAT32
    draws = method(out.shape, dtype, out if direct else None)
    draws *= scale
    draws += offset
    if not direct:
        out[...] = draws
    return out


def _random(node: Node, method: str, scale: float, offset: float) -> Kernel:
    draw: Callable[..., RunValue] = getattr(generator_of(node.attrs), method)
    dtype, inputs = dtype_attribute(node.attrs, "dtype"), len(node.inputs)
    shape = () if inputs else _given_shape(node.attrs)

    def run(*arrays: np.ndarray) -> np.ndarray:
        if len(arrays) > inputs:
            out = arrays[inputs]
        elif inputs:
            out = np.empty(arrays[0].shape, dtype or arrays[0].dtype)
        else:
            out = np.empty(shape, dtype or FLOAT32)
        return _draw(draw, scale, offset, out)

    return Kernel(run, run)


@operator("RandomNormal", infer=_infer_random, pure=False, traits={"any order"})
@operator("RandomNormalLike", infer=_infer_random, pure=False, strings=True, traits={"any order"})
def random_normal(node: Node, types: Types) -> Kernel:
    scale, mean = node.attrs.get("scale", 1.0), node.attrs.get("mean", 0.0)
    return _random(node, "standard_normal", scale, mean)


@operator("RandomUniform", infer=_infer_random, pure=False, traits={"any order"})
@operator("RandomUniformLike", infer=_infer_random, pure=False, strings=True, traits={"any order"})
def random_uniform(node: Node, types: Types) -> Kernel:
    low, high = node.attrs.get("low", 0.0), node.attrs.get("high", 1.0)
    return _random(node, "random", high - low, low)


@operator("Bernoulli", since=15, infer=_infer_random, pure=False, traits={"any order"})
def bernoulli(node: Node, types: Types) -> Kernel:
    generator, dtype = generator_of(node.attrs), dtype_attribute(node.attrs, "dtype")

    def run(x: np.ndarray) -> np.ndarray:
        draws = generator.random(x.shape, np.float64 if x.dtype == np.float64 else np.float32)
        return np.asarray(draws < x).astype(dtype or x.dtype)

    return returning(run)


def _infer_multinomial(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0)
    check_shape("the input", x.shape, (None, None))
    shape: Shape = (None if x.shape is None else x.shape[0], attrs.get("sample_size", 1))
    return (TensorType(dtype_attribute(attrs, "dtype") or INT32, shape),)


@operator("Multinomial", since=7, infer=_infer_multinomial, pure=False, traits={"any order"})
def multinomial(node: Node, types: Types) -> Kernel:
    generator, size = generator_of(node.attrs), node.attrs.get("sample_size", 1)
    dtype = dtype_attribute(node.attrs, "dtype") or INT32

    def run(x: np.ndarray) -> np.ndarray:
        if x.ndim != 2 or not x.shape[1]:
            raise ShapeError(f"the input must have shape [batch, classes], not {list(x.shape)}")
        rows, classes = x.shape
        logits = x.astype(np.float64)
        # Subtracting the maximum keeps exp from overflowing.
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        upper = weights.cumsum(axis=1)
        upper /= upper[:, -1:]
        # The distribution of row i is mapped to [i, i + 1), so that one search serves all rows.
        row = np.arange(rows)[:, None]
        draws = generator.random((rows, size)) + row
        places = np.searchsorted((upper + row).reshape(-1), draws.reshape(-1), side="right")
        picked = places.reshape(rows, size) - row * classes
        # A draw just below 1 may round up into the next row.
        return picked.clip(0, classes - 1).astype(dtype)

    return returning(run)


def _infer_dropout(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = tensor(types, 0).without_data()
    return (x, TensorType(BOOL, x.shape))


def _truth(x: np.ndarray | None) -> bool:
    return x is not None and bool(one_element(x, "training_mode"))


@operator("Dropout", since=12, infer=_infer_dropout, pure=False, traits={"any order", "exact"})
def dropout(node: Node, types: Types) -> Kernel:
    mode = node.input(2)
    inactive = mode is None or (mode.const is not None and not _truth(mode.const))
    if inactive and len(node.outputs) == 1:
        return view_kernel(lambda x, *_: x)
    seed = node.attrs.get("seed")
    # The generator of ONNX's reference implementation, whose seeds have 32 bits.
    state = np.random.RandomState(None if seed is None else seed % 2**32)

    def drop(x: np.ndarray, *arguments: RunValue) -> None:
        ratio, training, out, mask = arguments
        dropped = 0.5 if ratio is None else float(one_element(ratio, "ratio"))
        if not _truth(training) or dropped == 0:
            if out is not x:
                out[...] = x
            if mask is not None:
                mask[...] = True
            return
        if not 0 <= dropped < 1:
            raise ShapeError(f"ratio {dropped} must be in [0, 1)")
        kept = state.uniform(0, 1.0, x.shape) >= dropped
        # In the order of the reference implementation, for the same rounding.
        product = x * kept
        out[...] = product * x.dtype.type(1 / (1 - dropped))
        if mask is not None:
            mask[...] = kept

    routine = Routine(drop)
    return specialized(node, types, lambda *_: routine, arity=(3, 2), widen=False, inplace=(0,))
