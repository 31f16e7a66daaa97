"""Batch, instance, group, layer and RMS normalization, LRN, and normalization by mean or Lp norm.

Most of them use ``Statistics``, which normalizes rows to mean 0 and variance 1. Row sums are
products with a vector of ones or with the row itself, several times as fast as NumPy's reductions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import numpy as np

from penstock.core.types import FLOAT32, RunValue, RunValues, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.dtypes import is_float
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape
from penstock.ops.registry import operator

Columns: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


class Statistics:
    """Means and inverse standard deviations of the rows of a matrix.

    The arrays of a call are fields of a workspace. Unless ``centred``, no mean is subtracted, and
    rows are divided by their root mean square.
    """

    def __init__(
        self,
        layout: Scratch,
        rows: int,
        columns: int,
        dtype: np.dtype | None,
        epsilon: float,
        centred: bool = True,
    ) -> None:
        self.centred = centred
        self.mean = layout.field((rows, 1), dtype)
        self.inverse = layout.field((rows, 1), dtype)
        self.ones = np.ones((columns, 1), dtype)
        self.columns = max(columns, 1)
        # 1 / sqrt(sum / columns + epsilon) with one operation less
        self.root = self.columns**0.5
        self.epsilon = epsilon * self.columns

    def centre(self, x: np.ndarray, out: np.ndarray, workspace: np.ndarray) -> Columns:
        """Subtract the row means of ``x`` into ``out``, if ``centred``.

        Both are contiguous, and may be the same array. Returns the rows, and the means and inverse
        standard deviations as columns in the workspace.
        """
        mean, inverse = self.mean(workspace), self.inverse(workspace)
        if self.centred:
            np.dot(x, self.ones, mean)
            np.divide(mean, self.columns, mean)
            np.subtract(x, mean, out)
            x = out
        np.vecdot(x, x, inverse[:, 0])
        np.add(inverse, self.epsilon, inverse)
        np.sqrt(inverse, inverse)
        np.divide(self.root, inverse, inverse)
        return x, mean, inverse

    def __call__(
        self, x: np.ndarray, out: np.ndarray, workspace: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Normalize the rows of ``x`` into ``out``; return means and inverse standard
        deviations.
        """
        rows, mean, inverse = self.centre(x, out, workspace)
        np.multiply(rows, inverse, out)
        return mean, inverse


def _infer_batch(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    if x.shape == ():
        raise ShapeError("BatchNormalization needs an input of rank 1 or more")
    channels = None
    if x.shape is not None:
        channels = x.shape[1] if len(x.shape) > 1 else 1
    for i, name in enumerate(("scale", "bias", "mean", "variance"), 1):
        rules.check_shape(name, rules.tensor(types, i).shape, (channels,))
    running = [rules.tensor(types, i).without_data() for i in (3, 4)]
    return (x.without_data(), *running)


@operator("BatchNormalization", since=14, infer=_infer_batch, traits={"begins"})
@by_shape(inplace=lambda node: () if node.attrs.get("training_mode") else (0,))
def batch_normalization(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    attrs, x = node.attrs, rules.tensor(inputs, 0)
    epsilon = attrs.get("epsilon", 1e-5)
    if attrs.get("training_mode"):
        return _batch_training(x.dims, len(outputs), epsilon, attrs.get("momentum", 0.9))
    shape = (-1, *(1,) * (len(x.dims) - 2))

    def fold(parameters: RunValues) -> tuple[np.ndarray, np.ndarray]:
        """``a`` and ``b`` of ``x * a + b``."""
        scale, bias, mean, variance = parameters
        a = scale / np.sqrt(variance + epsilon)
        b = bias - mean * a
        return a.astype(x.dtype).reshape(shape), b.astype(x.dtype).reshape(shape)

    # If the parameters are constants, they are folded once for all runs.
    ready = None if any(p is None for p in consts[1:5]) else fold(consts[1:5])

    def into(x: np.ndarray, *rest: np.ndarray) -> None:
        a, b = ready if ready is not None else fold(rest[:4])
        np.multiply(x, a, rest[4])
        np.add(rest[4], b, rest[4])

    return Routine(into, prepared=() if ready is None else (1, 2, 3, 4))


def _batch_training(dims: tuple[int, ...], count: int, epsilon: float, momentum: float) -> Routine:
    """Normalize by the batch's own statistics, and update the running ones."""
    axes = (0, *range(2, len(dims)))
    shape = (-1, *(1,) * (len(dims) - 2))
    if any(dims[axis] == 0 for axis in axes):
        raise ShapeError(f"the input of shape {dims} has no elements to average")

    def into(x: np.ndarray, *arguments: RunValue) -> None:
        scale, bias, mean, variance, *rest = arguments
        out, *others = rest[:count]
        own_mean = x.mean(axes)
        centred = x - own_mean.reshape(shape)
        # ONNX defines the population variance, divided by N.
        own_variance = np.square(centred).mean(axes)
        factor = scale / np.sqrt(own_variance + epsilon)
        np.multiply(centred, factor.reshape(shape), out)
        np.add(out, bias.reshape(shape), out)
        statistics = (mean, own_mean), (variance, own_variance)
        for result, (running, own) in zip(others, statistics, strict=False):
            if result is not None:
                # ONNX's momentum is the weight of the old statistics.
                np.copyto(result, running * momentum + own * (1 - momentum), casting="unsafe")

    return Routine(into)


def _infer_group(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x, groups = rules.tensor(types, 0), attrs.get("num_groups", 1)
    if groups < 1:
        raise ShapeError(f"num_groups must be positive, not {groups}")
    rank = 2 if "num_groups" in attrs else 3
    if x.shape is not None and len(x.shape) < rank:
        raise ShapeError(f"the input must have rank {rank} or more, but has shape {x.shape}")
    channels = None if x.shape is None else x.shape[1]
    if isinstance(channels, int) and channels % groups:
        raise ShapeError(f"the {channels} channels must be divisible by num_groups={groups}")
    rules.check_shape("scale", rules.tensor(types, 1).shape, (channels,))
    rules.check_shape("bias", rules.tensor(types, 2).shape, (channels,))
    return (x.without_data(),)


@operator("InstanceNormalization", infer=_infer_group)
@operator("GroupNormalization", since=21, infer=_infer_group)
@by_shape(inplace=(0,), contiguous=True)
def group_normalization(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    """Normalize groups of channels of each sample, then scale and shift. In InstanceNormalization,
    each channel is a group."""
    epsilon = node.attrs.get("epsilon", 1e-5)
    x = rules.tensor(inputs, 0)
    (n, c), positions = x.dims[:2], prod(x.dims[2:])
    count = node.attrs.get("num_groups", c)
    parts = count, c // max(count, 1)
    rows, columns = n * count, parts[1] * positions
    layout = Scratch()
    statistics = Statistics(layout, rows, columns, x.dtype, epsilon)
    factors = layout.field((n, *parts), x.dtype)

    def into(x: np.ndarray, *arrays: np.ndarray) -> None:
        scale, bias, out, workspace = arrays
        matrix = np.ascontiguousarray(x).reshape(rows, columns)
        _, _, inverse = statistics.centre(matrix, out.reshape(rows, columns), workspace)
        factor = factors(workspace)
        # Combine inverse deviation and scale into one factor, which saves a pass over the data.
        np.multiply(inverse.reshape(n, count, 1), scale.reshape(parts), factor)
        image = out.reshape(n, c, positions)
        np.multiply(image, factor.reshape(n, c, 1), image)
        np.add(image, bias[:, None], image)

    return Routine(into, layout.size)


def _stash(attrs: Attrs) -> np.dtype:
    """The dtype of saved statistics."""
    dtype = rules.dtype_attribute(attrs, "stash_type") or FLOAT32
    if not is_float(dtype):
        raise ShapeError(f"stash_type {attrs['stash_type']} must be a floating-point type")
    return dtype


def _infer_layer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    """The output and two statistics; RMSNormalization has one."""
    x, dtype = rules.tensor(types, 0), rules.tensor(types, 1).dtype or rules.tensor(types, 0).dtype
    stash = TensorType(_stash(attrs))
    if x.shape is not None:
        axis = rules.normalize_axis(attrs.get("axis", -1), len(x.shape))
        for i in (1, 2):
            rules.check_broadcasts(f"input {i}", rules.tensor(types, i).shape, x.shape)
        stash = TensorType(stash.dtype, (*x.shape[:axis], *(1,) * (len(x.shape) - axis)))
    return TensorType(dtype, x.shape), stash, stash


@operator("LayerNormalization", infer=_infer_layer)
@operator("RMSNormalization", since=23, infer=_infer_layer)
@operator("SimplifiedLayerNormalization", infer=_infer_layer)
@by_shape(inplace=(0,), contiguous=True)
def layer_normalization(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    """Normalize the trailing axes, then scale and shift; output means (if centred) and inverse
    standard deviations. Computed in float32, or float64 for float64 inputs, and rounded once."""
    attrs, centred = node.attrs, node.op.name == "LayerNormalization"
    epsilon = attrs.get("epsilon", 1e-5)
    _stash(attrs)
    count = len(node.inputs)
    x, type_ = rules.tensor(inputs, 0), rules.tensor(outputs, 0)
    axis = rules.normalize_axis(attrs.get("axis", -1), len(x.dims))
    rows, columns = prod(x.dims[:axis]), prod(x.dims[axis:])
    layout = Scratch()
    statistics = Statistics(layout, rows, columns, x.dtype, epsilon, centred)
    # The dtypes of output and input differ only in mixed precision.
    mixed = layout.field((rows, columns), x.dtype) if type_.dtype != x.dtype else None
    has_bias = rules.given(inputs, 2)
    shape = x.dims

    def into(x: np.ndarray, scale: np.ndarray, *rest: np.ndarray) -> None:
        out, *saved, workspace = rest[count - 2 :]
        matrix = out.reshape(rows, columns) if mixed is None else mixed(workspace)
        x = np.ascontiguousarray(x).reshape(rows, columns)
        moments = statistics(x, matrix, workspace)
        y = matrix.reshape(shape)
        np.multiply(y, scale, y)
        if has_bias:
            np.add(y, rest[0], y)
        if mixed is not None:
            np.copyto(out, y, casting="unsafe")
        for result, column in zip(saved, moments if centred else moments[1:], strict=False):
            if result is not None:
                np.copyto(result, column.reshape(result.shape), casting="unsafe")

    return Routine(into, layout.size)


def _infer_lrn(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    if x.shape is not None and len(x.shape) < 2:
        raise ShapeError(f"the input of LRN must have shape [N, C, ...], not {x.shape}")
    if attrs["size"] < 1:
        raise ShapeError(f"size must be positive, not {attrs['size']}")
    return (x.without_data(),)


@operator("LRN", infer=_infer_lrn)
@by_shape(inplace=(0,))
def lrn(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    attrs = node.attrs
    size, alpha = attrs["size"], attrs.get("alpha", 1e-4)
    beta, bias = attrs.get("beta", 0.75), attrs.get("bias", 1.0)
    x, layout = rules.tensor(inputs, 0), Scratch()
    squares, sums = layout.field(x.dims, x.dtype), layout.field(x.dims, x.dtype)
    c = x.dims[1]
    # An even window has one channel more after the centre than before it.
    before, after = (size - 1) // 2, size // 2
    # Offsets of neighbours, and the channels that have a neighbour at this offset.
    shifts = [d for d in range(-min(before, c - 1), min(after, c - 1) + 1) if d]
    pairs = [(slice(max(-d, 0), c - max(d, 0)), slice(max(d, 0), c + min(d, 0))) for d in shifts]

    def into(x: np.ndarray, out: np.ndarray, workspace: np.ndarray) -> None:
        square, total = squares(workspace), sums(workspace)
        np.multiply(x, x, square)
        np.copyto(total, square)
        for own, neighbours in pairs:
            part = total[:, own]
            np.add(part, square[:, neighbours], part)
        np.multiply(total, alpha / size, total)
        np.add(total, bias, total)
        if beta == 0.75:
            # np.sqrt is several times as fast as np.power.
            np.sqrt(total, total)
            np.sqrt(total, square)
            np.multiply(total, square, total)
        else:
            np.power(total, beta, total)
        np.divide(x, total, out)

    return Routine(into, layout.size)
