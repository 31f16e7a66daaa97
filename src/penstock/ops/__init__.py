"""All operations, one file per family; importing this package registers them."""

from importlib import import_module

from penstock.ops.base import Kernel, Op, find, operator, registered

FAMILIES = (
    "arithmetic",
    "compare",
    "activation",
    "softmax",
    "reduce",
    "search",
    "shape",
    "arrange",
    "index",
    "scatter",
    "pad",
    "fill",
    "cast",
    "matmul",
    "einsum",
    "convolution",
    "deconvolution",
    "pooling",
    "regions",
    "normalization",
    "normalization_ms",
    "attention",
    "attention_ms",
    "linear_attention",
    "rotary",
    "recurrent",
    "signal",
    "image",
    "resize",
    "quantization",
    "quantized",
    "quantized_conv",
    "quantized_lstm",
    "quantized_ms",
    "quantized_weights",
    "random",
    "sequence",
    "text",
    "ml",
    "ml_models",
    "ml_trees",
    "loss",
    "control",
)
for _family in FAMILIES:
    import_module(f"penstock.ops.{_family}")

__all__ = ["Kernel", "Op", "find", "operator", "registered"]
