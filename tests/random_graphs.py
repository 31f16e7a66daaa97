"""Random graphs of small operations with control flow, for Hypothesis.

Every graph is valid, takes two float32 inputs of shape (2, 3), and uses views, in-place candidates,
values that are read far away, shape arithmetic, If and Loop.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from penstock.ir import Graph, Node, Value
from penstock.ops import find
from penstock.types import BOOL, FLOAT32, INT64, TensorType

SHAPES = [(2, 3), (3, 2), (6,), (1, 6), (2, 1), (3,)]


class Builder:
    """Adds nodes to a graph under construction; ``pool`` has the values that may be read."""

    def __init__(self, draw: Callable, pool: list[tuple[Value, tuple[int, ...]]], depth: int):
        self.draw = draw
        self.pool = list(pool)
        self.depth = depth
        self.nodes: list[Node] = []

    def pick(self, shape: tuple[int, ...] | None = None) -> tuple[Value, tuple[int, ...]]:
        fitting = [x for x in self.pool if shape is None or x[1] == shape]
        return self.draw(st.sampled_from(fitting))

    def add(self, op: str, inputs, shape=None, outputs: int = 1, attrs=None):
        made = [
            Value(f"{op}_{len(self.nodes)}_{self.depth}_{i}_{id(self)}") for i in range(outputs)
        ]
        node = Node(find(op), inputs, made, attrs, name=f"{op}_{len(self.nodes)}")
        self.nodes.append(node)
        if shape is not None:
            self.pool.extend((v, shape) for v in made)
        return made

    def constant(self, array) -> Value:
        return Value(f"c{len(self.nodes)}_{id(array)}", const=np.asarray(array))

    def step(self) -> None:
        kinds = ["binary", "binary", "unary", "unary", "reshape", "transpose", "slice", "concat"]
        kinds += ["split", "reduce", "shape"]
        if self.depth < 2:
            kinds += ["if", "loop"]
        getattr(self, self.draw(st.sampled_from(kinds)))()

    def binary(self) -> None:
        a, shape = self.pick()
        b, _ = self.pick(shape)
        self.add(self.draw(st.sampled_from(["Add", "Sub", "Mul", "Max"])), [a, b], shape)

    def unary(self) -> None:
        a, shape = self.pick()
        self.add(self.draw(st.sampled_from(["Neg", "Relu", "Abs", "Identity", "Sin"])), [a], shape)

    def reshape(self) -> None:
        a, shape = self.pick()
        size = int(np.prod(shape))
        targets = [(size,), *(s for s in SHAPES if np.prod(s) == size)]
        target = self.draw(st.sampled_from(targets))
        self.add("Reshape", [a, self.constant(np.array(target))], target, attrs={"allowzero": 0})

    def transpose(self) -> None:
        a, shape = self.pick()
        if len(shape) == 2:
            self.add("Transpose", [a], shape[::-1], attrs={"perm": [1, 0]})

    def slice(self) -> None:
        a, shape = self.pick()
        step = self.draw(st.sampled_from([1, 2, -1]))
        ends = [np.array([0]), np.array([10]), np.array([0]), np.array([step])]
        if step < 0:
            ends[0], ends[1] = np.array([10]), np.array([-100])
        rows = len(range(shape[0])[::step])
        self.add("Slice", [a, *map(self.constant, ends)], (rows, *shape[1:]))

    def concat(self) -> None:
        a, shape = self.pick()
        b, _ = self.pick(shape)
        if np.prod(shape) <= 48:
            self.add("Concat", [a, b], (2 * shape[0], *shape[1:]), attrs={"axis": 0})

    def split(self) -> None:
        a, shape = self.pick()
        if shape[0] % 2 == 0:
            half = (shape[0] // 2, *shape[1:])
            self.add("Split", [a], half, 2, {"axis": 0, "num_outputs": 2})

    def reduce(self) -> None:
        a, shape = self.pick()
        attrs = {"keepdims": 1, "noop_with_empty_axes": 0}
        axes = self.constant(np.array([len(shape) - 1]))
        self.add("ReduceMax", [a, axes], (*shape[:-1], 1), attrs=attrs)

    def shape(self) -> None:
        a, shape = self.pick()
        (dims,) = self.add("Shape", [a], attrs={"start": 0})
        b, other = self.pick()
        if np.prod(other) == np.prod(shape):
            self.add("Reshape", [b, dims], shape, attrs={"allowzero": 0})

    def condition(self) -> Value:
        a, _ = self.pick()
        attrs = {"keepdims": 0, "noop_with_empty_axes": 0}
        (total,) = self.add("ReduceMax", [a, None], attrs=attrs)
        (found,) = self.add("Greater", [total, self.constant(np.float32(0.5))])
        return found

    def branch(self, shape: tuple[int, ...]) -> Graph:
        inner = Builder(self.draw, self.pool, self.depth + 1)
        for _ in range(self.draw(st.integers(0, 3))):
            inner.step()
        return Graph([], [inner.pick(shape)[0]], inner.nodes, "branch")

    def if_(self) -> None:
        condition = self.condition()
        _, shape = self.pick()
        attrs = {"then_branch": self.branch(shape), "else_branch": self.branch(shape)}
        self.add("If", [condition], shape, attrs=attrs)

    def loop(self) -> None:
        carried = [self.pick() for _ in range(self.draw(st.integers(1, 3)))]
        body = Builder(self.draw, self.pool, self.depth + 1)
        iteration = Value("iteration", TensorType(INT64, ()))
        proceed = Value("proceed", TensorType(BOOL, ()))
        inside = [Value(f"inside{i}", TensorType(FLOAT32, s)) for i, (_, s) in enumerate(carried)]
        body.pool += [(v, s) for v, (_, s) in zip(inside, carried, strict=True)]
        for _ in range(self.draw(st.integers(0, 4))):
            body.step()
        condition = proceed
        if self.draw(st.booleans()):
            condition = body.condition()
        updated = [body.pick(s)[0] for _, s in carried]
        scanned, row = body.pick()
        graph = Graph(
            [iteration, proceed, *inside], [condition, *updated, scanned], body.nodes, "b"
        )
        trips = self.draw(st.integers(0, 4))
        inputs = [self.constant(np.array(trips)), None, *(v for v, _ in carried)]
        outputs = self.add("Loop", inputs, None, len(carried) + 1, {"body": graph})
        self.pool += [(v, s) for v, (_, s) in zip(outputs, carried, strict=False)]
        if trips and condition is proceed:
            self.pool.append((outputs[-1], (trips, *row)))


setattr(Builder, "if", Builder.if_)


@st.composite
def graphs(draw, most: int = 12) -> Graph:
    """A random graph with inputs ``a`` and ``b``."""
    inputs = [Value(name, TensorType(FLOAT32, (2, 3))) for name in ("a", "b")]
    builder = Builder(draw, [(v, (2, 3)) for v in inputs], 0)
    for _ in range(draw(st.integers(1, most))):
        builder.step()
    picked = [builder.pick()[0] for _ in range(draw(st.integers(1, 3)))]
    # The same value may leave twice, under two names.
    outputs = [
        v if picked.index(v) == i else builder.add("Identity", [v])[0] for i, v in enumerate(picked)
    ]
    return Graph(inputs, outputs, builder.nodes, "random")
