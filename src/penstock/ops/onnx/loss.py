"""The negative log-likelihood of log-probabilities, a loss.

Targets that are not class indices raise an error, unless they equal ``ignore_index``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.shape_rules import check_shape, choice, tensor
from penstock.ops.common.specialize import Routine, Tensors, by_shape, static_type
from penstock.ops.registry import operator


def _infer_loss(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    """The type of the loss for an input [N, C, ...]."""
    x, target, weight = (tensor(types, i) for i in range(3))
    reduction = choice(attrs, "reduction", "mean", ("none", "mean", "sum"))
    shape = target.shape
    if x.shape is not None:
        if len(x.shape) < 2:
            raise ShapeError(f"the input must have shape [N, C, ...], not {x.shape}")
        shape = (x.shape[0], *x.shape[2:])
        check_shape("target", target.shape, shape)
        check_shape("weights", weight.shape, (x.shape[1],))
    return (TensorType(x.dtype, shape if reduction == "none" else ()),)


@operator("NegativeLogLikelihoodLoss", since=12, infer=_infer_loss)
@by_shape(arity=(3, 1))
def negative_log_likelihood(
    node: Node, inputs: Tensors, outputs: Tensors, consts: Consts
) -> Routine:
    (dims, _), attrs = static_type(inputs, 0), node.attrs
    reduction, ignore, classes = attrs.get("reduction", "mean"), attrs.get("ignore_index"), dims[1]
    samples, *others = np.ogrid[tuple([slice(n) for n in (dims[0], *dims[2:])])]

    def into(x: np.ndarray, target: np.ndarray, weight: np.ndarray | None, out: np.ndarray) -> None:
        ignored = None if ignore is None else target == ignore
        # An ignored target may be no class index: it reads class 0, with weight 0.
        index = target if ignored is None else np.where(ignored, 0, target)
        if index.size and not (ignored is not None and ignored.all()):
            low, high = index.min(), index.max()
            if low < 0 or high >= classes:
                raise ShapeError(
                    f"targets range from {low} to {high}: they must be in [0, {classes}) or "
                    "equal ignore_index"
                )
        chosen = x[(samples, index, *others)] if classes else np.zeros(index.shape, x.dtype)
        np.negative(chosen, chosen)
        shares: Any = None
        if weight is not None:
            shares = weight[index] if classes else chosen
            np.multiply(chosen, shares, chosen)
        if ignored is not None:
            # Also where an ignored log-probability is infinite.
            np.copyto(chosen, 0, where=ignored)
            shares = np.where(ignored, 0, 1 if shares is None else shares)
        if reduction == "none":
            np.copyto(out, chosen)
        elif reduction == "sum":
            out[...] = chosen.sum()
        else:
            out[...] = chosen.sum() / (chosen.size if shares is None else shares.sum())

    return Routine(into)
