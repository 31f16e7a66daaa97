"""Rates of NumPy's kernels on one core.

Calls were timed with tensors of 8 elements, rates with those that fit into the cache of a core: on
an Intel Xeon of the generation of 2023 with NumPy 2 and OpenBLAS. An item is a group of channels.
"""

from __future__ import annotations

from penstock.backends.costs import Rates, RatesByFamily

# Bytes and floating-point operations a second, unless a row says otherwise.
_BYTES, _FLOPS = 5e9, 20e9

_ROWS = (
    # One call of a function of NumPy.
    (
        Rates(0.25e-6, _BYTES, _FLOPS),
        "Abs Add And Ceil Cos Div Equal Exp Floor Greater Less Log Max Min Mul Neg Not Or Pow "
        "Reciprocal Sin Sqrt Sub Tanh",
    ),
    # Several of them, in Python.
    (Rates(1e-6, _BYTES, _FLOPS), ""),
    (Rates(2.5e-6, _BYTES, _FLOPS), "DequantizeLinear Sigmoid"),
    (Rates(3e-6, _BYTES, _FLOPS), "LeakyRelu Swish"),
    (Rates(4e-6, _BYTES, _FLOPS), "HardSwish Softmax"),
    (Rates(5e-6, _BYTES, _FLOPS), "LogSoftmax"),
    (Rates(6e-6, _BYTES, _FLOPS), "Gelu Mish"),
    (Rates(6.5e-6, _BYTES, _FLOPS), "QuantizeLinear"),
    (Rates(7e-6, _BYTES, _FLOPS), "BatchNormalization LayerNormalization"),
    (Rates(11e-6, _BYTES, _FLOPS), "AveragePool InstanceNormalization MaxPool Resize"),
    (Rates(21e-6, _BYTES, _FLOPS), "GRU LSTM RNN"),
    (Rates(27e-6, _BYTES, _FLOPS), "TopK"),
    (Rates(601e-6, _BYTES, _FLOPS), "NonMaxSuppression"),
    # Products of a BLAS; those of integers as float64.
    (Rates(1.15e-6, _BYTES, 60e9), "Gemm MatMul"),
    (Rates(5e-6, _BYTES, 100e9), "MatMulInteger"),
    (Rates(13e-6, _BYTES, 100e9), "QGemm QLinearMatMul"),
    (Rates(13e-6, _BYTES, _FLOPS, item_s=0.4e-6), "Conv"),
    (Rates(21e-6, _BYTES, _FLOPS, item_s=0.4e-6), "ConvInteger ConvTranspose"),
    (Rates(27e-6, _BYTES, _FLOPS, item_s=0.4e-6), "QLinearConv"),
    # Elements that are gathered one by one.
    (Rates(1e-6, _BYTES, 142e6), "GridSample"),
    (Rates(1e-6, _BYTES, 14.3e6), "RoiAlign"),
)

RATES: RatesByFamily = {name: rates for rates, names in _ROWS for name in names.split() or [""]}
"""by operation"""
