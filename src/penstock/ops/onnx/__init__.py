"""The operations of the ai.onnx domain, one file per family."""
