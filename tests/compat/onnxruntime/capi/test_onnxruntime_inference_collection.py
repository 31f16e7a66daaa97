"""Sessions are where ONNX Runtime defines them."""

from __future__ import annotations

import penstock.compat.onnxruntime as ours
from penstock.compat.onnxruntime.capi import onnxruntime_inference_collection as collection


def test_names_are_those_of_the_package_and_of_onnxruntime():
    theirs = __import__("onnxruntime").capi.onnxruntime_inference_collection
    assert collection.__all__
    for name in collection.__all__:
        assert getattr(collection, name) is getattr(ours, name)
        assert hasattr(theirs, name)
