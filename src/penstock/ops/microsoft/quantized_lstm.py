"""DynamicQuantizeLSTM of com.microsoft: an LSTM whose weights are 8-bit codes.

It is the LSTM of ``recurrent`` with dynamically quantized products: X as a whole, and the state at
each step, are quantized to uint8 over their own ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.core.types import FLOAT32, RunValues, Shape, TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.common.products import recurrent_work
from penstock.ops.common.specialize import Routine, Tensors, specialized, static_type
from penstock.ops.onnx import recurrent
from penstock.ops.onnx.quantization import quantize_to_float, subtract_zero_point, zero_of
from penstock.ops.registry import MICROSOFT, operator

_W, _R, _B, _P = 1, 2, 3, 7
_PARAMETERS = (8, 9, 10, 11)  # scale and zero point of W, then of R


class _Quantized:
    """A quantized matrix [input, gates * hidden] minus its zero points, with its scales."""

    def __init__(self, codes: np.ndarray, scale: np.ndarray) -> None:
        self.codes, self.scale = codes, scale

    def gatewise(self, out: np.ndarray, batch: int) -> tuple[Any, ...]:
        """The product of rows with this matrix, with the interface of ``recurrent.gatewise``."""
        gates, rows, hidden = out.shape
        matrix, scale, target = self.codes, self.scale, out
        if batch == 1:
            target = out.reshape(rows, gates * hidden)
        else:
            matrix = matrix.reshape(len(matrix), gates, hidden).transpose(1, 0, 2)
            scale = scale.reshape(gates, 1, hidden)

        def multiply(x: np.ndarray, matrix: np.ndarray, target: np.ndarray) -> None:
            codes = np.empty(x.shape, np.float32)
            step = quantize_to_float(x, codes)
            np.matmul(codes, matrix, target)
            np.multiply(target, scale * step, target)

        return multiply, matrix, target


def _swapped(shape: Shape | None) -> Shape | None:
    """Convert the shape of W or R, [directions, input, gates * hidden], to that of LSTM's."""
    return None if shape is None or len(shape) != 3 else (shape[0], shape[2], shape[1])


def _sizes(layer: recurrent.Layer, shapes: Sequence[Shape | None]) -> dict[str, Any]:
    """Check the shapes of all inputs for consistency, and return the sizes."""
    as_lstm = [_swapped(s) if i in (_W, _R) else s for i, s in enumerate(shapes[:8])]
    sizes = recurrent.sizes_of(layer, as_lstm)
    hidden, n = sizes["H"], len(layer.reverse)
    columns = layer.gates * hidden if isinstance(hidden, int) else None
    for shape in shapes[_PARAMETERS[0] :]:
        rules.check_shape("a scale or zero point", shape, (n,), (n, columns))
    return sizes


def _infer_quantized_lstm(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    layer = recurrent.parse_layer("LSTM", attrs)
    sizes = _sizes(layer, [rules.tensor(types, i).shape for i in range(len(types))])
    shapes = recurrent.output_shapes(layer, sizes.get("T"), sizes.get("B"), sizes.get("H"))
    return [TensorType(FLOAT32, shape) for shape in shapes]


def _weights(
    layer: recurrent.Layer, inputs: RunValues, single: bool
) -> list[recurrent.CellWeights]:
    """The weights of each direction."""
    directions = []
    for d in range(len(layer.reverse)):
        matrices = []
        for i, at in ((_W, 8), (_R, 10)):
            codes, scale, zero = inputs[i][d], inputs[at][d], inputs[at + 1]
            real = np.empty(codes.shape, np.float32)
            subtract_zero_point(codes, None if zero is None else zero_of(zero[d]), real)
            # A copy, as part of it is halved below.
            scales = np.array(np.broadcast_to(scale, codes.shape[1:]), np.float32)
            matrices.append(_Quantized(real, scales))
        n, hidden = len(matrices[0].scale), inputs[_R].shape[1]
        bias = None if inputs[_B] is None else inputs[_B][d][:n] + inputs[_B][d][n:]
        # ``recurrent`` expects halved weights of the gates with a sigmoid.
        half = slice(0, layer.halved * hidden)
        for part in (matrices[0].scale, matrices[1].scale, bias):
            if part is not None:
                part[half] *= 0.5
        peepholes = None if inputs[_P] is None else inputs[_P][d]
        w, r = matrices
        directions.append(recurrent.CellWeights(w, r, bias, None, peepholes))
    return directions


@operator("DynamicQuantizeLSTM", domain=MICROSOFT, infer=_infer_quantized_lstm, work=recurrent_work)
def dynamic_quantize_lstm(node: Node, types: Types) -> Kernel:
    layer = recurrent.parse_layer("LSTM", node.attrs, peepholes=rules.given(node.inputs, _P))
    name, read = ("DynamicQuantizeLSTM", layer.halved), (_W, _R, _B, _P, *_PARAMETERS)
    weights, fixed = recurrent.prepared_weights(node, read, name, partial(_weights, layer))

    def weigh(inputs: RunValues, single: bool) -> list[recurrent.CellWeights]:
        return weights(inputs, False)  # they are the same for all batches

    def make(inputs: Tensors, outputs: Tensors, _: Consts) -> Routine:
        as_lstm = list(inputs)
        for i in (_W, _R):
            dims, dtype = static_type(inputs, i)
            as_lstm[i] = TensorType(dtype, _swapped(dims))
        return recurrent.layer_routine(layer, as_lstm, outputs, weigh, fixed)

    return specialized(node, types, make, arity=(12, 3))
