"""One small network in the 8-bit forms that ONNX Runtime's tools write: convolutions of all kinds
(with one channel, dense, depthwise, in groups, strided, dilated), a sum, means, and products."""

from __future__ import annotations

import tempfile
from functools import cache, partial
from pathlib import Path

import numpy as np
import onnx
from onnxruntime import quantization
from onnxruntime.quantization import QuantFormat, QuantType

from tests.support.onnx_text import model_from_text

TEXT = """g (float[2, 3, 20, 20] x) => (float[2, 10] y) {
    a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (x, w0, b0)
    ra = Relu (a)
    d = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], group = 16> (ra, w1, b1)
    rd = Clip (d, least, most)
    p = Conv <kernel_shape = [1, 1]> (rd, w2, b2)
    s = Add (p, ra)
    g = Conv <kernel_shape = [3, 3], pads = [2, 2, 2, 2], dilations = [2, 2], group = 4> (s, w3, b3)
    rg = LeakyRelu (g)
    m = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (rg)
    t = Concat <axis = 1> (m, m)
    v = GlobalAveragePool (t)
    f = Flatten (v)
    h = Gemm <transB = 1> (f, w4, b4)
    i = Sigmoid (h)
    y = MatMul (i, w5)
}"""
_WEIGHTS = {
    "w0": (16, 3, 3, 3),
    "w1": (16, 1, 3, 3),
    "w2": (16, 16, 1, 1),
    "w3": (16, 4, 3, 3),
    "w4": (24, 32),
    "w5": (24, 10),
    **dict.fromkeys(("b0", "b1", "b2", "b3"), (16,)),
    "b4": (24,),
}
FEEDS = {"x": np.random.default_rng(0).standard_normal((2, 3, 20, 20)).astype(np.float32)}


def _static(source: Path, target: Path, form: QuantFormat, types: str, **options: bool) -> None:
    """``types``: of activations and of weights."""
    batch = [FEEDS]

    class Reader(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            return batch.pop() if batch else None

    activations, weights = types.split()
    quantization.quantize_static(
        source,
        target,
        Reader(),
        quant_format=form,
        activation_type=QuantType[activations],
        weight_type=QuantType[weights],
        **options,
    )


def _dynamic(source: Path, target: Path, weights: str, **options: bool) -> None:
    quantization.quantize_dynamic(source, target, weight_type=QuantType[weights], **options)


_QDQ, _OPERATORS = QuantFormat.QDQ, QuantFormat.QOperator
_FORMS = {
    "pairs, u8 by s8": partial(_static, form=_QDQ, types="QUInt8 QInt8"),
    "pairs, s8 by s8, channels": partial(_static, form=_QDQ, types="QInt8 QInt8", per_channel=True),
    "pairs, u8 by u8": partial(_static, form=_QDQ, types="QUInt8 QUInt8"),
    "operators, u8 by s8, channels": partial(
        _static, form=_OPERATORS, types="QUInt8 QInt8", per_channel=True
    ),
    "operators, s8 by s8": partial(_static, form=_OPERATORS, types="QInt8 QInt8"),
    "operators, u8 by u8": partial(_static, form=_OPERATORS, types="QUInt8 QUInt8"),
    "dynamic, s8": partial(_dynamic, weights="QInt8"),
    "dynamic, u8, channels": partial(_dynamic, weights="QUInt8", per_channel=True),
}
FORMS = tuple(_FORMS)


@cache
def quantized(form: str) -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    model = model_from_text(TEXT)
    for name, shape in _WEIGHTS.items():
        fan = np.prod(shape[1:]) if len(shape) > 1 else 4
        array = (rng.standard_normal(shape) / np.sqrt(fan)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for name, bound in (("least", 0), ("most", 6)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(bound), name))
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "real.onnx"), Path(folder, "quantized.onnx")
        onnx.save(model, source)
        _FORMS[form](source, target)
        return onnx.load(target)
