"""TensorFlow's operations that ONNX lacks."""
