"""Models of a few nodes between conversions, and their results: native, NumPy's, onnx.reference's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import penstock as ps
from tests.backends.native.forced import compile_on_native

rng = np.random.default_rng()
U8, I8, I32, F32 = np.uint8, np.int8, np.int32, np.float32
MICROSOFT = "com.microsoft"


def restart_rng() -> None:
    """Let each test draw the same numbers, whatever ran before it."""
    rng.bit_generator.state = np.random.default_rng(0).bit_generator.state


class Net:
    """A model of a few nodes. Constants are named by the builder; what is fed comes with a value of
    its type and shape."""

    def __init__(self, opset: int = 20) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.feeds: dict[str, np.ndarray] = {}
        self.constants: dict[str, np.ndarray] = {}

    def feed(self, x: np.ndarray) -> str:
        name = f"x{len(self.feeds)}"
        self.feeds[name] = x
        return name

    def constant(self, x: Any, dtype: Any = None) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = np.asarray(x, dtype)
        return name

    def add(self, op: str, inputs: Sequence[str], **attrs: Any) -> str:
        output = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attrs))
        return output

    def dequantize(self, x: str, scale: Any, zero: Any = None, **attrs: Any) -> str:
        return self._converted("DequantizeLinear", x, scale, zero, attrs)

    def quantize(self, x: str, scale: Any, zero: Any = None, **attrs: Any) -> str:
        return self._converted("QuantizeLinear", x, scale, zero, attrs)

    def _converted(self, op: str, x: str, scale: Any, zero: Any, attrs: dict[str, Any]) -> str:
        given = [x, self.constant(scale, F32)]
        return self.add(op, given if zero is None else [*given, self.constant(zero)], **attrs)

    def proto(self, *outputs: str, dims: Mapping[str, Sequence[Any]] | None = None) -> Any:
        made = helper.np_dtype_to_tensor_dtype
        inputs = [
            helper.make_tensor_value_info(n, made(x.dtype), (dims or {}).get(n, x.shape))
            for n, x in self.feeds.items()
        ]
        known = [numpy_helper.from_array(k, name) for name, k in self.constants.items()]
        results = [onnx.ValueInfoProto(name=name) for name in outputs]
        graph = helper.make_graph(self.nodes, "g", inputs, results, known)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def codes(dtype: Any, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


def steps(session: ps.Session) -> list[tuple[str, str]]:
    """What runs on which backend: nodes by their operations, fused ones without those of what they
    read, and without copies of what is fed into other layouts."""
    found = [
        (s.node.attrs.get("ops", s.node.op.name), s.backend) for s in session.inspect.plan.walk()
    ]
    named = [(ops.replace("DequantizeLinear ", ""), backend) for ops, backend in found]
    return [each for each in named if each[0] != "Reorder"]


def close(got: np.ndarray, want: np.ndarray, often: float = 0.005) -> None:
    """Codes differ by one step at most, and few of them do; real numbers differ in last bits."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.dtype == F32:
        most = np.abs(want).max(initial=1e-3)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * most)
        return
    apart = np.abs(got.astype(int) - want.astype(int))
    assert apart.max(initial=0) <= 1
    assert (apart > 0).mean() <= often


def agree(
    proto: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    expected: Sequence[tuple[str, str]] | None,
    *,
    reference: bool = True,
    executor: str = "linear",
) -> ps.Session:
    """Those of the steps ``expected`` that are native run so, and all is as on NumPy."""
    session = compile_on_native(proto, executor=executor)
    want = ps.compile(proto, backends=["numpy"]).run(feeds)
    for _ in range(2):
        got = session.run(feeds)
        for name, each in want.items():
            close(got[name], each)
    if reference:
        names = [output.name for output in proto.graph.output]
        for name, each in zip(names, ReferenceEvaluator(proto).run(None, feeds), strict=True):
            close(got[name], each)
    assert {step for step in expected or () if step[1] == "native"} <= {*steps(session)}
    return session


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((1, 16, 7, 7), (32, 16, 3, 3), {}),
    "of a point": ((1, 32, 6, 5), (16, 32, 1, 1), {}),
    "strided": ((2, 16, 9, 8), (24, 16, 3, 3), {"strides": [2, 2]}),
    "padded": ((1, 16, 6, 6), (16, 16, 3, 3), {"pads": [1, 1, 1, 1]}),
    "padded more before": ((1, 8, 6, 6), (16, 8, 4, 4), {"pads": [3, 2, 0, 1]}),
    "same": ((1, 8, 7, 7), (16, 8, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "dilated": ((1, 16, 9, 9), (16, 16, 3, 3), {"dilations": [2, 2]}),
    "grouped": ((1, 32, 6, 6), (32, 16, 3, 3), {"group": 2}),
    "depthwise": ((1, 32, 8, 8), (32, 1, 3, 3), {"group": 32, "pads": [1, 1, 1, 1]}),
    "depthwise, strided": ((2, 32, 9, 9), (32, 1, 3, 3), {"group": 32, "strides": [2, 2]}),
    "of an image": ((1, 3, 20, 20), (16, 3, 7, 7), {"strides": [2, 2], "pads": [3, 3, 3, 3]}),
    "of odd channels": ((1, 5, 6, 6), (7, 5, 3, 3), {}),
    "of one row": ((1, 16, 1, 9), (16, 16, 1, 3), {"pads": [0, 1, 0, 1]}),
    "one axis": ((2, 16, 12), (16, 16, 3), {"pads": [1, 1]}),
    "three axes": ((1, 16, 4, 5, 6), (16, 16, 2, 3, 3), {}),
}


def convolution(
    name: str,
    x: tuple[Any, int] = (U8, 113),
    y: tuple[Any, int] = (U8, 131),
    *,
    bias: bool = True,
    per_channel: bool = True,
    tail: str = "",
) -> tuple[Net, str]:
    shape, w, attrs = CONVOLUTIONS[name]
    net = Net()
    filters = w[0]
    scales = rng.uniform(0.001, 0.01, filters) if per_channel else 0.004
    axis = {"axis": 0} if per_channel else {}
    weights = net.dequantize(net.constant(codes(I8, *w)), scales, np.zeros_like(scales, I8), **axis)
    given = [net.dequantize(net.feed(codes(x[0], *shape)), 0.03, x[0](x[1])), weights]
    if bias:
        term = net.constant(rng.integers(-9000, 9000, filters), I32)
        given.append(net.dequantize(term, scales * 0.03, np.zeros_like(scales, I32), **axis))
    made = net.add("Conv", given, **attrs)
    if tail:
        made = net.add(tail, [made])
    return net, net.quantize(made, 0.11, y[0](y[1]))
