"""TFLite's operations that neither ONNX nor TensorFlow has."""
