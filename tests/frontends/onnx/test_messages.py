"""ONNX's messages, read from the onnx package without importing it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import pickle
import sys
from penstock.frontends.onnx import messages
assert "onnx" not in sys.modules
import onnx
names = [name for name in vars(messages) if name.endswith("Proto")]
assert len(names) > 10
for name in names:
    assert getattr(messages, name) is getattr(onnx, name), name
assert messages.TensorShapeProto.Dimension is onnx.TensorShapeProto.Dimension
assert messages.TensorProto.__module__ == "onnx.onnx_ml_pb2"
model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []))
assert pickle.loads(pickle.dumps(model)) == model
onnx.checker.check_model(model)
"""


def test_messages_are_those_of_the_onnx_package_that_is_imported_later() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], timeout=60, check=True)


def test_messages_are_those_of_the_onnx_package_that_was_imported_before() -> None:
    import onnx

    from penstock.frontends.onnx import messages

    assert messages.ModelProto is onnx.ModelProto
