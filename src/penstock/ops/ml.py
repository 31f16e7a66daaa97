"""Classical machine learning (domain ai.onnx.ml)."""
