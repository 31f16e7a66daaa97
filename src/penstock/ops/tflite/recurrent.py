"""LSTMs with what ONNX's do not have: a projection, clipped cells, normalized gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.shape_rules import match_dims, tensor
from penstock.ops.registry import TFLITE, operator

_ACTIVATIONS: dict[int, Any] = {
    0: lambda x: x,
    1: lambda x: np.maximum(x, 0),
    2: lambda x: np.clip(x, -1, 1),
    3: lambda x: np.clip(x, 0, 6),
    4: np.tanh,
}
_EPSILON = 1e-8  # of the variance of a normalized gate


_GATES = "ifgo"
_PATTERNS: dict[str, Sequence[Any]] = {
    "x": ("steps", "batch", "features"),
    **{f"the weights of {gate} for features": ("cells", "features") for gate in _GATES},
    **{f"the weights of {gate} for outputs": ("cells", "outputs") for gate in _GATES},
    **{f"the peephole of {gate}": ("cells",) for gate in "ifo"},
    **{f"the bias of {gate}": ("cells",) for gate in _GATES},
    "the projection": ("outputs", "cells"),
    "the bias of the projection": ("outputs",),
    "the first output": ("batch", "outputs"),
    "the first cells": ("batch", "cells"),
    **{f"the scale of {gate}": ("cells",) for gate in _GATES},
}


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shapes = [tensor(types, i).shape for i in range(len(types))]
    sizes = match_dims(_PATTERNS, shapes)
    dtype, (steps, batch) = tensor(types, 0).dtype, map(sizes.get, ("steps", "batch"))
    outputs, cells = [(batch, sizes.get(name)) for name in ("outputs", "cells")]
    return (
        TensorType(dtype, (steps, *outputs)),
        TensorType(dtype, outputs),
        TensorType(dtype, cells),
    )


@operator("Lstm", domain=TFLITE, infer=_infer)
def lstm(node: Node, types: Types) -> Kernel:
    """``x`` [time, batch, features], and the other inputs of TFLite's UNIDIRECTIONAL_SEQUENCE_LSTM:
    weights of the gates i, f, g, o for the features (1 to 4) and the outputs (5 to 8), peepholes of
    i, f, o (9 to 11), biases (12 to 15), a projection and its bias (16, 17), the output and the
    cells before the first step (18, 19), scales of the gates (20 to 23). Without weights for i this
    gate is 1 - f. Gives all outputs, and the last output and cells."""
    cell_clip, proj_clip = (float(node.attrs[name]) for name in ("cell_clip", "proj_clip"))
    activate = _ACTIVATIONS.get(node.attrs["activation"])
    reverse = node.attrs["reverse"]
    if activate is None:
        raise ShapeError(f"there is no activation number {node.attrs['activation']}")

    def function(*inputs: RunValue) -> RunValue:
        match_dims(_PATTERNS, [None if x is None else x.shape for x in inputs])
        x, h, c = inputs[0], inputs[18], inputs[19]
        outputs = np.empty((*x.shape[:2], h.shape[1]), x.dtype)
        for step in range(len(x))[:: -1 if reverse else 1]:

            def gate(number: int, step: int = step, h: np.ndarray = h) -> np.ndarray:
                return x[step] @ inputs[1 + number].T + h @ inputs[5 + number].T

            def finished(number: int, sums: np.ndarray) -> np.ndarray:
                scale = inputs[20 + number]
                if scale is not None:
                    centred = sums - sums.mean(axis=1, keepdims=True)
                    variance = (centred * centred).mean(axis=1, keepdims=True)
                    sums = centred / np.sqrt(variance + np.float32(_EPSILON)) * scale
                return sums + inputs[12 + number]

            def peeped(sums: np.ndarray, number: int, cells: np.ndarray) -> np.ndarray:
                return sums if inputs[number] is None else sums + inputs[number] * cells

            f = _sigmoid(finished(1, peeped(gate(1), 10, c)))
            coupled = inputs[1] is None
            i = 1 - f if coupled else _sigmoid(finished(0, peeped(gate(0), 9, c)))
            c = f * c + i * activate(finished(2, gate(2)))
            c = np.clip(c, -cell_clip, cell_clip) if cell_clip > 0 else c
            h = _sigmoid(finished(3, peeped(gate(3), 11, c))) * activate(c)
            if inputs[16] is not None:
                h = h @ inputs[16].T
                h = h if inputs[17] is None else h + inputs[17]
                h = np.clip(h, -proj_clip, proj_clip) if proj_clip > 0 else h
            outputs[step] = h
        return outputs, np.array(h), np.array(c)

    return Kernel(function)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))
