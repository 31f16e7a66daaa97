"""All operations, one file per family; importing this package registers them."""

from importlib import import_module

from penstock.ir.op import Kernel, Op, asynchronous
from penstock.ops.registry import find, operator, registered

FAMILIES = {
    "onnx": (
        # Element by element, and along axes.
        *("arithmetic", "compare", "activation", "softmax", "reduce", "search", "loss"),
        # Where elements are, how many, and of which type.
        *("shape", "arrange", "index", "scatter", "pad", "fill", "cast"),
        # Matrix products.
        *("matmul", "einsum"),
        # Over windows, regions and positions.
        *("convolution", "deconvolution", "pooling", "regions", "image", "resize"),
        # Normalisation and attention.
        *("normalization", "attention", "linear_attention", "rotary"),
        # Sequences in time.
        *("recurrent", "signal"),
        # Integers for real numbers.
        *("quantization", "quantized", "quantized_conv"),
        # Random numbers; sequences, optionals and strings; control flow.
        *("random", "sequence", "text", "control_flow"),
    ),
    "onnx_ml": ("features", "models", "trees"),
    "microsoft": (
        *("arrays", "attention", "cached_attention", "experts", "quantized_lstm"),
        *("quantized_weights", "text"),
    ),
    "tensorflow": (
        *("control_flow", "math", "arrays", "state", "tensor_arrays", "lists"),
        *("matrices", "images", "blocks", "windows", "signal"),
    ),
    "tflite": ("arrays", "detection", "recurrent", "tables", "windows"),
}
for _domain, _families in FAMILIES.items():
    for _family in _families:
        import_module(f"penstock.ops.{_domain}.{_family}")

__all__ = ["Kernel", "Op", "asynchronous", "find", "operator", "registered"]
