"""ArgMax and ArgMin with results of int32; ONNX's return int64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import TensorType, Type
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common.dtypes import INT32
from penstock.ops.onnx.search import arg_extreme, infer_arg
from penstock.ops.registry import TFLITE, operator


def _infer(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    return [TensorType(INT32, type_.shape) for type_ in infer_arg(types, attrs, consts)]


@operator("ArgMax", domain=TFLITE, infer=_infer)
@operator("ArgMin", domain=TFLITE, infer=_infer)
def narrow_arg_extreme(node: Node, types: Types) -> Kernel:
    place_of = arg_extreme(node, types).function

    def run(x: np.ndarray) -> np.ndarray:
        return place_of(x).astype(INT32)

    return Kernel(run)
