"""Losses: the negative log-likelihood, of log-probabilities and of scores.

Targets that name no class are an error, unless they are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.shape_rules import check_shape, choice, tensor
from penstock.ops.common.specialize import Routine, Scratch, Tensors, by_shape, static_type
from penstock.ops.registry import operator


def _infer_loss(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    """The loss, and the log-probabilities, as large as the input: samples, classes, other dims."""
    x, target, weight = (tensor(types, i) for i in range(3))
    reduction = choice(attrs, "reduction", "mean", ("none", "mean", "sum"))
    shape = target.shape
    if x.shape is not None:
        if len(x.shape) < 2:
            raise ShapeError(f"the input must be [N, C, ...], its shape is {x.shape}")
        shape = (x.shape[0], *x.shape[2:])
        check_shape("target", target.shape, shape)
        check_shape("weights", weight.shape, (x.shape[1],))
    return (TensorType(x.dtype, shape if reduction == "none" else ()), x.without_data())


def _negative_log_likelihood(
    attrs: Attrs, x: np.ndarray, target: np.ndarray, weight: np.ndarray | None, out: np.ndarray
) -> None:
    """The loss of log-probabilities ``x``."""
    reduction, ignore = attrs.get("reduction", "mean"), attrs.get("ignore_index")
    classes = x.shape[1]
    ignored = None if ignore is None else target == ignore
    # What is ignored may name no class, and reads class 0, which then counts for nothing.
    index = target if ignored is None else np.where(ignored, 0, target)
    if index.size and not (ignored is not None and ignored.all()):
        low, high = index.min(), index.max()
        if low < 0 or high >= classes:
            raise ShapeError(f"targets from {low} to {high} do not fit {classes} classes")
    if classes:
        chosen = np.negative(np.take_along_axis(x, index[:, None], 1)[:, 0])
    else:
        chosen = np.zeros(index.shape, x.dtype)
    shares: Any = None
    if weight is not None:
        shares = weight[index] if classes else chosen
        np.multiply(chosen, shares, chosen)
    if ignored is not None:
        # Also where the probability ignored is zero and its logarithm infinite.
        np.copyto(chosen, 0, where=ignored)
        shares = np.where(ignored, 0, 1 if shares is None else shares)
    if reduction == "none":
        np.copyto(out, chosen)
    elif reduction == "sum":
        out[...] = chosen.sum()
    else:
        out[...] = chosen.sum() / (chosen.size if shares is None else shares.sum())


@operator("NegativeLogLikelihoodLoss", since=12, infer=_infer_loss)
@operator("SoftmaxCrossEntropyLoss", since=12, infer=_infer_loss)
@by_shape(arity=(3, 2))
def loss(node: Node, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    type_, layout = static_type(inputs, 0), Scratch()
    exponentials = own = None
    if node.op.name == "SoftmaxCrossEntropyLoss":
        exponentials = layout.field(*type_)
        own = layout.field(*type_) if outputs[1] is None else None

    def into(x: np.ndarray, *arguments: RunValue) -> None:
        target, weight, out, log_prob, *scratch = arguments
        if exponentials is not None:
            log_prob = log_prob if own is None else own(*scratch)
            if x.shape[1]:
                # log(softmax(x)), without ever taking the logarithm of a vanishing quotient
                np.subtract(x, x.max(1, keepdims=True), log_prob)
                total = np.exp(log_prob, exponentials(*scratch)).sum(1, keepdims=True)
                np.subtract(log_prob, np.log(total, total), log_prob)
            x = log_prob
        if out is not None:
            _negative_log_likelihood(node.attrs, x, target, weight, out)

    return Routine(into, layout.size)
