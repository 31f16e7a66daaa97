"""The modules of ``onnxruntime.transformers`` that programs import to run models. Scripts that
change models are ONNX Runtime's own, if that is installed (``penstock.compat.install``)."""
