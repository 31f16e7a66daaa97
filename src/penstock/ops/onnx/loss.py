"""Losses: the negative log-likelihood, of log-probabilities and of scores.

Targets that name no class are an error, unless they are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Consts, Kernel, Types
from penstock.ops.common.shape_rules import check_shape, choice, given, tensor
from penstock.ops.common.specialize import Routine, ScratchLayout, Tensors, specialized
from penstock.ops.registry import operator
from penstock.types import Dim, ShapeError, TensorType, Type


def _infer_cross_entropy(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    """The loss, and what is as large as the input: of samples, classes, and any more dims."""
    x, target, weight = (tensor(types, i) for i in range(3))
    reduction = choice(attrs, "reduction", "mean", ("none", "mean", "sum"))
    if x.shape is not None:
        if len(x.shape) < 2:
            raise ShapeError(f"the input must be [N, C, ...], its shape is {x.shape}")
        check_shape("target", target.shape, (x.shape[0], *x.shape[2:]))
        check_shape("weights", weight.shape, (x.shape[1],))
    if reduction != "none":
        shape: tuple[Dim, ...] | None = ()
    elif x.shape is None:
        shape = target.shape
    else:
        shape = (x.shape[0], *x.shape[2:])
    return (TensorType(x.dtype, shape), x.without_data())


def _infer_likelihood(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return _infer_cross_entropy(types, attrs, consts)[:1]


Loss = Callable[[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray], None]


def _negative_log_likelihood(node: Node) -> Loss:
    """``loss(log_probabilities, targets, weights, out)``."""
    reduction = node.attrs.get("reduction", "mean")
    ignore = node.attrs.get("ignore_index")

    def loss(x: np.ndarray, target: np.ndarray, weight: Any, out: np.ndarray) -> None:
        classes = x.shape[1]
        ignored = None if ignore is None else target == ignore
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

    return loss


@operator("NegativeLogLikelihoodLoss", since=12, infer=_infer_likelihood)
def negative_log_likelihood_loss(node: Node, types: Types) -> Kernel:
    loss = _negative_log_likelihood(node)

    def make(inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
        weighted = len(inputs) > 2

        def into(x: np.ndarray, target: np.ndarray, *arguments: Any) -> None:
            loss(x, target, arguments[0] if weighted else None, arguments[-1])

        return Routine(into)

    return specialized(node, types, make)


@operator("SoftmaxCrossEntropyLoss", since=12, infer=_infer_cross_entropy)
def softmax_cross_entropy_loss(node: Node, types: Types) -> Kernel:
    loss = _negative_log_likelihood(node)

    def make(inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
        scores = inputs[0]
        assert scores is not None and scores.dtype is not None
        weighted, first = len(inputs) > 2, len(inputs)
        layout = ScratchLayout()
        exponentials = layout.field(scores.dims, scores.dtype)
        own = layout.field(scores.dims, scores.dtype)
        asked = given(outputs, 1)

        def into(x: np.ndarray, target: np.ndarray, *arguments: Any) -> None:
            out, workspace = arguments[first - 2], arguments[-1]
            log_prob = arguments[first - 1] if asked else own(workspace)
            if x.shape[1]:
                # log(softmax(x)), without ever taking the logarithm of a vanishing quotient
                np.subtract(x, x.max(1, keepdims=True), log_prob)
                total = np.exp(log_prob, exponentials(workspace)).sum(1, keepdims=True)
                np.subtract(log_prob, np.log(total, total), log_prob)
            if out is not None:
                loss(log_prob, target, arguments[0] if weighted else None, out)

        return Routine(into, layout.size)

    return specialized(node, types, make)
