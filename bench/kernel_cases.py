"""Single operations of real models, as the sweep of kernels times them (``bench.kernels``).

A case is a graph of one node in ONNX's text syntax. What has a type and neither a value nor a node
that computes it is a constant whose elements do not matter, as are weights:

    g (float[1,64,56,56] X) => (float[1,64,56,56] Y)
    <float[64,64,3,3] W, float[64] B> { Y = Conv <pads = [1, 1, 1, 1]> (X, W, B) }

Codes of 8 bits may come from and go to float32 in the same graph, as exporters write it
(DequantizeLinear, Conv, QuantizeLinear), and a product may read what a Transpose writes. Names are
those of the operations' specifications: they tell what a tensor may hold.

``kernels.json`` has the cases that were drawn from models (``bench.kernel_collect``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import helper, numpy_helper

FILE = Path(__file__).with_name("kernels.json")
TOTAL = 500
FEW_CHANNELS, FEW_ROWS = 4, 8
HELPERS = {"DequantizeLinear", "QuantizeLinear", "Transpose"}
# Shares of a draw. Families of fewer cases than their share leave the rest to others.
SHARES = {
    "conv 1x1": 45,
    "conv square": 35,
    "conv strided": 30,
    "conv long": 20,
    "conv dilated": 15,
    "conv grouped": 15,
    "conv depthwise": 40,
    "conv few input channels": 20,
    "conv few output channels": 10,
    "conv 1-D": 25,
    "conv 3-D": 20,
    "conv transposed": 25,
    "conv 8-bit": 30,
    "product few rows": 25,
    "product many rows": 35,
    "product batched": 20,
    "product transposed": 15,
    "product 8-bit": 20,
    "attention": 9,
    "recurrent": 25,
    "pooling": 25,
    "normalization": 20,
    "LRN": 6,
    "PRelu": 5,
    "softmax": 15,
    "reduction": 15,
    "resampling": 12,
    "elementwise": 20,
}
_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceProd")
_PLAIN = (
    "Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Relu", "LeakyRelu", "Elu", "Clip", "Sigmoid",
    "HardSigmoid", "HardSwish", "Tanh", "Erf", "Exp", "Log", "Sqrt", "Abs", "Neg", "Softplus",
    "Gelu", "Mish", "Reciprocal",
)  # fmt: skip
# Families of operations whose shapes do not matter; those of convolutions and products do.
_FAMILIES = {
    **dict.fromkeys(["LSTM", "GRU", "RNN"], "recurrent"),
    **dict.fromkeys(["MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"], "pooling"),
    **dict.fromkeys(
        ["BatchNormalization", "InstanceNormalization", "LayerNormalization"], "normalization"
    ),
    **dict.fromkeys(["Softmax", "LogSoftmax"], "softmax"),
    **dict.fromkeys(_REDUCTIONS, "reduction"),
    **dict.fromkeys(["Resize", "Upsample"], "resampling"),
    **dict.fromkeys(_PLAIN, "elementwise"),
    "LRN": "LRN",
    "PRelu": "PRelu",
}
CONVOLUTIONS = {"Conv", "ConvTranspose", "QLinearConv", "ConvInteger"}
PRODUCTS = {"MatMul", "Gemm", "QLinearMatMul", "MatMulInteger"}
_POOLING = {"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"}
_OF_IMAGES = {*_POOLING, "BatchNormalization", "LRN", "Resize", "Upsample"}
OPERATIONS = {*_FAMILIES, *CONVOLUTIONS, *PRODUCTS}
# Sizes of what a constant of this name holds; others are weights, about 0.1.
_CODE_SCALE, _RESULT_SCALE, _ZERO = 0.02, 0.5, 128


@dataclass(frozen=True)
class Case:
    """A graph in text, for this version of ONNX's operations, that occurs ``count`` times."""

    opset: int
    text: str
    count: int = 1

    @cached_property
    def parsed(self) -> onnx.ModelProto:
        """The model without its constants."""
        opsets = f'["" : {self.opset}, "com.microsoft" : 1]'
        return onnx.parser.parse_model(f"<ir_version: 9, opset_import: {opsets}> {self.text}")

    @cached_property
    def types(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """The dtype and the dims of each tensor, by name."""
        graph = self.parsed.graph
        typed = {
            value.name: (
                helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
                tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim),
            )
            for value in (*graph.input, *graph.output, *graph.value_info)
        }
        held = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
        return typed | {name: (array.dtype, array.shape) for name, array in held.items()}

    @property
    def main(self) -> onnx.NodeProto:
        """The node that the case is about."""
        nodes = list(self.parsed.graph.node)
        return next((n for n in nodes if n.op_type not in HELPERS), nodes[0])

    @property
    def family(self) -> str:
        return family(self)

    @property
    def constants(self) -> list[str]:
        """The names of those constants whose elements do not matter."""
        return [value.name for value in self.parsed.graph.value_info]

    @property
    def elements(self) -> int:
        """Those of all tensors."""
        return sum(math.prod(dims) for _, dims in self.types.values())

    def model(self) -> onnx.ModelProto:
        """The model with constants of random elements, the same each time."""
        model, rng = onnx.ModelProto(), np.random.default_rng(1)
        model.CopyFrom(self.parsed)
        del model.graph.value_info[:]
        for name in self.constants:
            array = drawn(name, *self.types[name], 0.1, rng)
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        return model

    def within(self) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        """The model as part of a network, and its inputs: images of it come and go with their
        channels innermost, and transposing them is a matter of strides. Images of few channels
        enter a network in the order of dims that they have outside of it."""
        model, feeds = self.model(), self.feeds()
        graph = model.graph
        for port in [*graph.input, *graph.output]:
            dtype, dims = self.types[port.name]
            if len(dims) <= 2 or (port.name in feeds and dims[1] <= FEW_CHANNELS):
                continue
            inner, last = f"inner_{port.name}", len(dims) - 1
            for node in graph.node:
                node.input[:] = [inner if name == port.name else name for name in node.input]
                node.output[:] = [inner if name == port.name else name for name in node.output]
            if port.name in feeds:
                back = [0, last, *range(1, last)]
                graph.node.insert(0, helper.make_node("Transpose", [port.name], [inner], perm=back))
                feeds[port.name] = np.ascontiguousarray(np.moveaxis(feeds[port.name], 1, -1))
            else:
                there = [0, *range(2, last + 1), 1]
                graph.node.append(helper.make_node("Transpose", [inner], [port.name], perm=there))
            elem = helper.np_dtype_to_tensor_dtype(dtype)
            shape = [dims[0], *dims[2:], dims[1]]
            port.CopyFrom(helper.make_tensor_value_info(port.name, elem, shape))
        return model, feeds

    @property
    def has_layout(self) -> bool:
        """Whether the operation is one whose kernels have layouts of their own."""
        return self.main.op_type in CONVOLUTIONS | _OF_IMAGES and len(_dims(self, 0)) > 2

    def feeds(self) -> dict[str, np.ndarray]:
        """Inputs by name, the same each time."""
        rng = np.random.default_rng(2)
        names = [value.name for value in self.parsed.graph.input]
        return {name: drawn(name, *self.types[name], 1.0, rng) for name in names}

    def described(self) -> str:
        """The operation, the dims of its inputs, and its attributes."""
        node = self.main
        inputs = [_dims(self, i) for i, name in enumerate(node.input) if name]
        shapes = ["x".join(map(str, dims)) or "1" for dims in inputs]
        attrs = [f"{a.name}={_shown(helper.get_attribute_value(a))}" for a in node.attribute]
        others = [n.op_type for n in self.parsed.graph.node if n is not node]
        codes = sorted({dtype.name for dtype, _ in self.types.values() if dtype.itemsize == 1})
        return " ".join([f"{node.op_type} {', '.join(shapes)}", *attrs, *codes, *sorted({*others})])


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(str, value)) + "]"
    return value.decode() if isinstance(value, bytes) else f"{value:.4g}"


def drawn(
    name: str, dtype: np.dtype, dims: Sequence[int], size: float, rng: np.random.Generator
) -> np.ndarray:
    """An array for a tensor of this name: floats of a normal distribution of this ``size``; where
    the name says so, variances, and scales and zero points of codes."""
    role = name.rstrip("0123456789").lower()
    if role.endswith("zero_point"):
        return np.full(dims, _ZERO if dtype == np.uint8 else 0, dtype)
    if role.endswith("_scale"):
        return np.full(dims, _RESULT_SCALE if role.startswith("y_") else _CODE_SCALE, dtype)
    if dtype.kind != "f":
        low, high = (0, 256) if dtype == np.uint8 else (-127, 128)
        return rng.integers(low, high, dims).astype(dtype)
    if role.endswith("var"):
        return rng.uniform(0.5, 1.5, dims).astype(dtype)
    return (rng.standard_normal(dims, np.float32) * np.float32(size)).astype(dtype)


def family(case: Case) -> str:
    op = case.main.op_type
    if op in CONVOLUTIONS:
        return _family_of_convolution(case)
    if op in PRODUCTS:
        return _family_of_product(case)
    return _FAMILIES[op]


def _in_8_bits(case: Case) -> bool:
    return any(dtype.itemsize == 1 for dtype, _ in case.types.values())


def _dims(case: Case, place: int) -> tuple[int, ...]:
    """The dims of that input of the main node or, if another node computes it, of what that
    reads."""
    name = case.main.input[place]
    if name not in case.types:
        name = next(node.input[0] for node in case.parsed.graph.node if name in node.output)
    return case.types[name][1]


def _family_of_convolution(case: Case) -> str:
    attrs = {a.name: helper.get_attribute_value(a) for a in case.main.attribute}
    x, w = _dims(case, 0), _dims(case, 3 if case.main.op_type == "QLinearConv" else 1)
    channels, group, kernel = x[1], attrs.get("group", 1), w[2:]
    if _in_8_bits(case):
        return "conv 8-bit"
    if case.main.op_type == "ConvTranspose":
        return "conv transposed"
    of_group = {True: "conv depthwise", False: "conv grouped"}
    tests = {
        "conv 1-D": len(kernel) == 1,
        "conv 3-D": len(kernel) == 3,
        of_group[channels == group]: group > 1,
        "conv dilated": any(step > 1 for step in attrs.get("dilations", ())),
        "conv few input channels": channels <= FEW_CHANNELS,
        "conv few output channels": w[0] <= FEW_CHANNELS,
        "conv long": len({*kernel}) > 1,
        "conv strided": any(step > 1 for step in attrs.get("strides", ())),
        "conv 1x1": math.prod(kernel) == 1,
    }
    return next((name for name, is_so in tests.items() if is_so), "conv square")


def _family_of_product(case: Case) -> str:
    if _in_8_bits(case):
        return "product 8-bit"
    nodes = [node.op_type for node in case.parsed.graph.node]
    if "Softmax" in nodes:
        return "attention"
    right = case.main.input[1]
    attrs = {a.name: helper.get_attribute_value(a) for a in case.main.attribute}
    is_constant = right in case.constants
    if "Transpose" in nodes or attrs.get("transA") or (attrs.get("transB") and not is_constant):
        return "product transposed"
    if not is_constant:
        return "product batched"
    few = math.prod(_dims(case, 0)[:-1]) <= FEW_ROWS
    return "product few rows" if few else "product many rows"


def read(file: Path = FILE) -> list[Case]:
    """The cases that were drawn."""
    return [Case(*fields) for fields in json.loads(file.read_text())["cases"]]


def write(cases: Iterable[Case], models: Iterable[str], file: Path = FILE) -> None:
    """Write the cases, one a line, and the names of the models that they were drawn from."""
    lines = ",\n".join(json.dumps([case.opset, case.text, case.count]) for case in cases)
    file.write_text(f'{{"models": {json.dumps([*models])},\n"cases": [\n{lines}\n]}}\n')


def draw(cases: Iterable[Case], total: int = TOTAL) -> list[Case]:
    """``total`` cases, or all if there are fewer: of each family its share, evenly spread from the
    smallest to the largest. The same cases are drawn in whatever order they come."""
    strata: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda c: (c.elements, c.opset, c.text)):
        strata.setdefault(case.family, []).append(case)
    chosen: list[Case] = []
    shares, left = sum(SHARES[name] for name in strata), total
    # Families of the fewest cases for their share come first: what they leave goes to the others.
    for name in sorted(strata, key=lambda n: (len(strata[n]) / SHARES[n], n)):
        there = strata[name]
        count = min(len(there), round(left * SHARES[name] / shares))
        chosen += [there[place * len(there) // count] for place in range(count)]
        shares, left = shares - SHARES[name], left - count
    order = {name: place for place, name in enumerate(SHARES)}
    return sorted(chosen, key=lambda c: (order[c.family], c.elements, c.opset, c.text))


def compact(text: str) -> str:
    """ONNX's text in one line, without what its parser infers."""
    text = re.sub(r": (ints|int|string) =", "=", " ".join(text.split()))
    return re.sub(r" ?([,={}<>()\[\]]) ?", r"\1", text)
