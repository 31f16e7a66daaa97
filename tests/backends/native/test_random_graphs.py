"""Random graphs of what compiled kernels takes, each node there if it can be: as on the NumPy backend."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

import penstock as ps
from penstock.host.native import library
from tests.backends.native.forced import compile_on_native, proto_of
from tests.support.sweeps import examples

pytestmark = pytest.mark.skipif(library() is None, reason="needs compiled kernels")

Shape = tuple[int, ...]
_MOST_ELEMENTS = 4000


class Builder:
    """A graph on its way: its values with their shapes, its nodes and its constants."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self.draw = draw
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        self.shapes: dict[str, Shape] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.feeds: dict[str, np.ndarray] = {}

    def array(self, *shape: int) -> np.ndarray:
        return self.rng.uniform(-1, 1, shape).astype(np.float32)

    def feed(self, shape: Shape) -> None:
        name = f"x{len(self.feeds)}"
        self.feeds[name] = self.array(*shape)
        self.shapes[name] = shape

    def constant(self, array: np.ndarray) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = array
        return name

    def add(self, op: str, inputs: list[str], shape: Shape, **attrs: Any) -> None:
        if not 0 < prod(shape) <= _MOST_ELEMENTS:
            return
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], **attrs))
        self.shapes[name] = shape

    def pick(self, rank: int | None = None) -> tuple[str, Shape] | None:
        """A value, of a rank if one is given."""
        names = [n for n, shape in self.shapes.items() if rank is None or len(shape) == rank]
        if not names:
            return None
        name = self.draw(st.sampled_from(names))
        return name, self.shapes[name]

    # What may come next. Functions keep values within bounds, so that errors do not grow.

    def unary(self) -> None:
        name, shape = self.pick()
        ops = ["Relu", "Sigmoid", "Tanh", "Abs", "Neg", "HardSwish", "Elu"]
        self.add(self.draw(st.sampled_from(ops)), [name], shape)

    def binary(self) -> None:
        name, shape = self.pick()
        repeated = [n if self.draw(st.booleans()) else 1 for n in shape]
        second = self.constant(self.array(*repeated))
        like = [other for other, own in self.shapes.items() if own == shape]
        if self.draw(st.booleans()):
            second = self.draw(st.sampled_from(like))
        op = self.draw(st.sampled_from(["Add", "Sub", "Mul", "Max", "Min", "Mean", "PRelu"]))
        pair = [name, second]
        if op != "PRelu" and self.draw(st.booleans()):
            pair.reverse()
        self.add(op, pair, shape)

    def transpose(self) -> None:
        name, shape = self.pick()
        perm = self.draw(st.permutations(range(len(shape))))
        self.add("Transpose", [name], tuple([shape[i] for i in perm]), perm=perm)

    def reshape(self) -> None:
        name, shape = self.pick()
        if len(shape) < 2:
            return
        i = self.draw(st.integers(0, len(shape) - 2))
        joined = (*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :])
        self.add("Reshape", [name, self.constant(np.array(joined))], joined)

    def softmax(self) -> None:
        name, shape = self.pick()
        axis = self.draw(st.integers(-len(shape), len(shape) - 1))
        self.add("Softmax", [name], shape, axis=axis)

    def layer_normalization(self) -> None:
        name, shape = self.pick()
        axis = self.draw(st.integers(0, len(shape) - 1))
        parameters = [self.constant(self.array(*shape[axis:])) for _ in range(2)]
        self.add("LayerNormalization", [name, *parameters], shape, axis=axis, epsilon=0.1)

    def reduce(self) -> None:
        name, shape = self.pick()
        axes = sorted(self.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
        op = self.draw(st.sampled_from(["ReduceMean", "ReduceMax", "ReduceMin"]))
        kept = tuple([1 if i in axes else n for i, n in enumerate(shape)])
        self.add(op, [name, self.constant(np.array(axes))], kept)

    def convolution(self) -> None:
        found = self.pick(4)
        if found is None:
            return
        name, (n, c, h, w) = found
        filters = self.draw(st.integers(1, 6))
        if self.draw(st.booleans()):
            weights = self.constant(self.array(filters, c, 3, 3) / (9 * c))
            self.add("Conv", [name, weights], (n, filters, h, w), pads=[1] * 4)
        else:
            weights = self.constant(self.array(c, filters, 2, 2) / c)
            made = n, filters, 2 * h, 2 * w
            self.add("ConvTranspose", [name, weights], made, strides=[2, 2])

    def per_channel(self) -> None:
        found = self.pick(4)
        if found is None:
            return
        name, shape = found
        names = [self.constant(self.array(shape[1])) for _ in range(3)]
        names.append(self.constant(np.abs(self.array(shape[1])) + 1))
        self.add("BatchNormalization", [name, *names], shape)

    def resize(self) -> None:
        found = self.pick(4)
        if found is None:
            return
        name, (n, c, h, w) = found
        scales = self.constant(np.array([1, 1, 2, 2], np.float32))
        mode = self.draw(st.sampled_from(["nearest", "linear"]))
        self.add("Resize", [name, "", scales], (n, c, 2 * h, 2 * w), mode=mode)

    def product(self) -> None:
        name, shape = self.pick()
        columns = self.draw(st.integers(1, 8))
        if len(shape) == 2 and self.draw(st.booleans()):
            weights = self.constant(self.array(columns, shape[1]) / shape[1])
            term = self.constant(self.array(columns))
            self.add("Gemm", [name, weights, term], (shape[0], columns), transB=1)
        elif len(shape) >= 2:
            weights = self.constant(self.array(shape[-1], columns) / shape[-1])
            self.add("MatMul", [name, weights], (*shape[:-1], columns))

    def build(self) -> onnx.ModelProto:
        for _ in range(self.draw(st.integers(1, 3))):
            rank = self.draw(st.integers(1, 4))
            self.feed(tuple(self.draw(st.lists(st.integers(1, 6), min_size=rank, max_size=rank))))
        steps = [
            self.unary, self.binary, self.transpose, self.reshape, self.softmax, self.reduce,
            self.layer_normalization, self.convolution, self.per_channel, self.resize,
            self.product,
        ]  # fmt: skip
        for step in self.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=12)):
            step()
        read = {name for node in self.nodes for name in node.input}
        ends = [node.output[0] for node in self.nodes if node.output[0] not in read]
        self.nodes += [helper.make_node("Identity", [f"x{i}"], [f"i{i}"]) for i in range(1)]
        return proto_of(self.nodes, self.feeds, [*ends, "i0"], self.constants)


@st.composite
def models(draw: Callable[..., Any]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    builder = Builder(draw)
    return builder.build(), builder.feeds


@examples(1)
@given(models(), st.sampled_from(["linear", "dataflow"]))
def test_random_graphs_equal_numpy(drawn, executor):
    proto, feeds = drawn
    want = ps.compile(proto, backends=["numpy"]).run(feeds)
    session = compile_on_native(proto, executor=executor)
    for _ in range(2):
        got = session.run(feeds)
        for name, each in want.items():
            np.testing.assert_allclose(got[name], each, rtol=1e-4, atol=1e-4)
