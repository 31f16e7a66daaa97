"""Models of random weights, and what ONNX Runtime saves of them after its optimizations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Net:
    """A convolutional network of random weights, written down node by node."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def constant(self, array: Any) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def add(self, op: str, *inputs: str, **attrs: Any) -> str:
        output = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"{op}_{output}", **attrs))
        return output

    def conv(
        self, x: str, channels: int, filters: int, kernel: int = 3, bias: bool = True, **attrs: Any
    ) -> str:
        shape = (filters, channels // attrs.get("group", 1), kernel, kernel)
        operands = [self.constant(self.rng.standard_normal(shape).astype(np.float32) / 5)]
        if bias:
            operands.append(self.constant(self.rng.standard_normal(filters).astype(np.float32)))
        return self.add(
            "Conv", x, *operands, pads=[kernel // 2] * 4, kernel_shape=[kernel] * 2, **attrs
        )

    def model(self, channels: int, *outputs: str) -> onnx.ModelProto:
        """The network of images [batch, channels, 16, 16]."""
        return self.model_of(["batch", channels, 16, 16], *outputs)

    def model_of(self, shape: Sequence[int | str], *outputs: str) -> onnx.ModelProto:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
        infos = [helper.make_tensor_value_info(y, TensorProto.FLOAT, None) for y in outputs]
        graph = helper.make_graph(self.nodes, "net", [x], infos, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def saved(model: onnx.ModelProto, folder: Path, level: str) -> onnx.ModelProto:
    """What ONNX Runtime makes of a model at a level of ``GraphOptimizationLevel``."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.optimized_model_filepath = str(folder / "saved.onnx")
    onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return onnx.load(folder / "saved.onnx")
