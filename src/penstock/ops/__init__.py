"""All operations, one file per family; importing this package registers them."""

from importlib import import_module

from penstock.ops.base import Kernel, Op, asynchronous, find, operator, registered

FAMILIES = (
    # Element by element, and along axes.
    *("arithmetic", "compare", "activation", "softmax", "reduce", "search", "loss"),
    # Where elements are, how many, and of which type.
    *("shape", "arrange", "index", "scatter", "pad", "fill", "cast"),
    # Matrix products.
    *("matmul", "einsum"),
    # Over windows, regions and positions.
    *("convolution", "deconvolution", "pooling", "regions", "image", "resize"),
    # Normalisation and attention.
    *("normalization", "normalization_ms"),
    *("attention", "attention_ms", "linear_attention", "rotary"),
    # Sequences in time.
    *("recurrent", "signal"),
    # Integers for real numbers.
    *("quantization", "quantized", "quantized_conv", "quantized_lstm", "quantized_ms"),
    "quantized_weights",
    # Random numbers; sequences, optionals and strings; classical machine learning.
    *("random", "sequence", "text", "ml", "ml_models", "ml_trees"),
    "control",
    # What TensorFlow has beside ONNX.
    *("tf_control", "tf_math", "tf_arrays", "tf_state", "tf_tensor_arrays", "tf_lists"),
    *("tf_matrices", "tf_images", "tf_blocks", "tf_windows", "tf_signal"),
)
for _family in FAMILIES:
    import_module(f"penstock.ops.{_family}")

__all__ = ["Kernel", "Op", "asynchronous", "find", "operator", "registered"]
