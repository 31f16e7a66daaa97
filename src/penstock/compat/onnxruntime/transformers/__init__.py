"""What programs import of ``onnxruntime.transformers`` to run models; the scripts that change
models are ONNX Runtime's own, found where that is installed (``penstock.compat.install``)."""
