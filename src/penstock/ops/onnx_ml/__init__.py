"""The operations of the ai.onnx.ml domain."""
