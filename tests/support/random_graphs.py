"""Random graphs of small operations with control flow, for Hypothesis.

Every graph is valid and runs without error on any feeds of its inputs' types (``feeds_for``). It
uses views and views of views, in-place candidates, kernels with workspaces and with outputs that
that no node reads, values that are read far away, shape arithmetic, shapes known only during the run,
integers, conditions, strings, sequences, optionals, and nested If, Loop, Scan and SequenceMap with
swapped, delayed, growing and unchanged carried values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, permutations
from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.core.types import BOOL, FLOAT32, INT64, STRING, TensorType
from penstock.ir.graph import Graph, Node, Value
from penstock.ops import find

# A dim that is known only during the run is a token: values with equal tokens have equal dims.
Shape = tuple[int | str, ...]

SHAPES = [(2, 3), (3, 2), (3, 3), (6,), (1, 6), (2, 1), (3,), (), (0, 3), (1,)]
_MOST_ELEMENTS = 64


@dataclass(frozen=True)
class SlotKind:
    """What a value is: a tensor; a sequence of at least ``least`` such tensors; an optional one."""

    dtype: np.dtype
    shape: Shape
    form: str = "tensor"
    least: int = 0

    @property
    def static(self) -> bool:
        return all(isinstance(dim, int) for dim in self.shape)

    @property
    def size(self) -> int:
        return int(np.prod([dim if isinstance(dim, int) else 1 for dim in self.shape]))

    def of(self, shape: Sequence[int | str]) -> SlotKind:
        return SlotKind(self.dtype, tuple(shape))


Entry = tuple[Value, SlotKind]
Test = Callable[[SlotKind], Any]


def tensor(dtype: np.dtype, *shape: int | str) -> SlotKind:
    return SlotKind(dtype, shape)


INPUTS = {
    "a": tensor(FLOAT32, 2, 3),
    "b": tensor(FLOAT32, 2, 3),
    "m": tensor(FLOAT32, 3, 3),
    "i": tensor(INT64, 3),
    "n": tensor(INT64),
    "c": tensor(BOOL),
    "t": tensor(STRING, 3),
}


def feeds_for(seed: int) -> dict[str, np.ndarray]:
    """A value for every possible input."""
    rng = np.random.default_rng(seed)
    normal = {
        name: rng.standard_normal(kind.shape).astype(np.float32)
        for name, kind in INPUTS.items()
        if kind.dtype == FLOAT32
    }
    if seed % 2:  # what arithmetic treats apart
        normal["b"].flat[:4] = [-0.0, np.nan, np.inf, -np.inf]
    return normal | {
        "i": rng.integers(-4, 5, 3),
        "n": np.array(rng.integers(-1, 4)),
        "c": np.array(bool(rng.integers(2))),
        "t": np.array(["x", "", "yz"], object)[rng.permutation(3)],
    }


class Source:
    """Where choices come from: Hypothesis, which can make a failing graph smaller, or, for graphs
    that are larger and of more kinds, a random number generator."""

    def __init__(self, choose: Callable[[Sequence[Any]], Any]) -> None:
        self.choose = choose
        self.numbers = count()
        # Values that some node reads.
        self.read: set[Value] = set()


class Builder:
    """Adds nodes to a graph under construction; ``pool`` has the values that may be read."""

    def __init__(self, source: Source, pool: Sequence[tuple[Value, SlotKind]], depth: int):
        self.source = source
        self.pool = list(pool)
        self.depth = depth
        self.nodes: list[Node] = []

    # Drawing.

    def choose(self, options: Sequence[Any]) -> Any:
        return self.source.choose(options)

    def flip(self) -> bool:
        return self.choose([False, True])

    def find(self, test: Test = bool, form: str = "tensor") -> Entry | None:
        """A value whose kind passes the test, and its kind; half of the time one not yet read."""
        fitting = [entry for entry in self.pool if entry[1].form == form and test(entry[1])]
        new = [entry for entry in fitting if entry[0] not in self.source.read]
        options = new if new and self.flip() else fitting
        return self.choose(options) if options else None

    def pick(self, test: Test = bool, form: str = "tensor") -> Entry:
        """As ``find``, where there is one: there are inputs of each dtype."""
        found = self.find(test, form)
        assert found is not None
        return found

    def any(self) -> Entry:
        return self.pick(form=self.choose([kind.form for _, kind in self.pool]))

    def like(self, kind: SlotKind) -> Value:
        """A value of this very kind; a sequence may be longer."""

        def fits(k: SlotKind) -> bool:
            return (k.dtype, k.shape) == (kind.dtype, kind.shape) and k.least >= kind.least

        return self.pick(fits, kind.form)[0]

    # Building.

    def name(self, hint: str) -> str:
        return f"{hint}_{next(self.source.numbers)}"

    def add(self, op: str, inputs, kinds: Sequence[SlotKind | None], attrs=None) -> list[Value]:
        """A node; an output of kind ``None`` is left out."""
        self.source.read.update(v for v in inputs if v is not None)
        made = [Value(self.name(op)) if kind is not None else None for kind in kinds]
        self.nodes.append(Node(find(op), inputs, made, attrs, name=self.name(op)))
        new = [(v, kind) for v, kind in zip(made, kinds, strict=True) if v is not None]
        self.pool += new
        return [value for value, _ in new]

    def constant(self, array) -> Value:
        return Value(self.name("const"), const=np.asarray(array))

    def dim(self) -> str:
        return self.name("dim")

    def step(self) -> None:
        kinds = [
            *("binary", "binary", "unary", "unary", "convert", "choice", "reshape", "transpose"),
            *("slice", "concat", "split", "reduce", "shape", "element", "dynamic", "several"),
            *("sequence", "sequence_use", "optional", "axis"),
        ]
        if self.depth < 3:
            kinds += ["branches", "loop", "scan", "sequence_map"] * (2 - self.depth // 2)
        getattr(self, self.choose(kinds))()

    def steps(self, most: int) -> None:
        for _ in range(self.choose(range(most + 1))):
            self.step()

    # Elementwise.

    def binary(self) -> None:
        a, kind = self.pick()
        b = self.like(kind)
        ops = {
            FLOAT32: ["Add", "Sub", "Mul", "Max", "Min"],
            INT64: ["Add", "Sub", "Mul", "Max"],
            BOOL: ["And", "Or", "Xor"],
            STRING: ["StringConcat"],
        }
        self.add(self.choose(ops[kind.dtype]), [a, b], [kind])

    def unary(self) -> None:
        a, kind = self.pick()
        ops = {
            FLOAT32: ["Neg", "Relu", "Abs", "Identity", "Sin", "Mish", "Softplus", "Floor"],
            INT64: ["Neg", "Abs", "Identity"],
            BOOL: ["Not", "Identity"],
            STRING: ["Identity"],
        }
        self.add(self.choose(ops[kind.dtype]), [a], [kind])

    def convert(self) -> None:
        a, kind = self.pick(lambda k: k.dtype in (FLOAT32, INT64))
        zero = self.constant(np.zeros((), kind.dtype))
        if self.flip():
            self.add(
                self.choose(["Greater", "Less", "Equal"]), [a, zero], [SlotKind(BOOL, kind.shape)]
            )
        elif kind.dtype == INT64:
            self.add("Cast", [a], [SlotKind(FLOAT32, kind.shape)], {"to": 1})

    def choice(self) -> None:
        c, where = self.pick(lambda k: k.dtype == BOOL)
        found = self.find(lambda k: where.shape and k.shape in (where.shape, ()))
        if found is not None:
            a, kind = found
            self.add("Where", [c, a, self.like(kind)], [kind.of(where.shape)])

    # Views.

    def reshape(self) -> None:
        a, kind = self.pick()
        unknown = [dim for dim in kind.shape if isinstance(dim, str)]
        shapes = [(kind.size,), *(s for s in SHAPES if np.prod(s) == kind.size)]
        target = self.choose(shapes)
        made = kind.of(target)
        if unknown:
            if len(unknown) > 1 or kind.size > 1:
                return
            target, made = (1, -1), kind.of((1, self.dim()))
        shape = self.constant(np.array(target, np.int64))
        self.add("Reshape", [a, shape], [made], {"allowzero": int(not unknown)})

    def transpose(self) -> None:
        a, kind = self.pick()
        perm = list(self.choose(list(permutations(range(len(kind.shape))))))
        self.add("Transpose", [a], [kind.of([kind.shape[p] for p in perm])], {"perm": perm})

    def axis(self) -> None:
        a, kind = self.pick()
        if 1 in kind.shape and self.flip():
            axis = kind.shape.index(1)
            shape = kind.shape[:axis] + kind.shape[axis + 1 :]
            self.add("Squeeze", [a, self.constant(np.array([axis]))], [kind.of(shape)])
        elif len(kind.shape) < 3:
            axis = self.choose(range(len(kind.shape) + 1))
            shape = (*kind.shape[:axis], 1, *kind.shape[axis:])
            self.add("Unsqueeze", [a, self.constant(np.array([axis]))], [kind.of(shape)])

    def slice(self) -> None:
        a, kind = self.pick(lambda k: k.shape)
        axis = self.choose(range(len(kind.shape)))
        step = self.choose([1, 2, -1])
        start, end = self.choose([(0, 10), (1, 10), (0, 2), (1, 2)])
        if step < 0:
            start, end = 10, -100
        dim = kind.shape[axis]
        dim = len(range(dim)[start:end:step]) if isinstance(dim, int) else self.dim()
        shape = (*kind.shape[:axis], dim, *kind.shape[axis + 1 :])
        bounds = [self.constant(np.array([x])) for x in (start, end, axis, step)]
        self.add("Slice", [a, *bounds], [kind.of(shape)])

    def split(self) -> None:
        a, kind = self.pick(lambda k: {2, 6} & {*k.shape})
        axis = next(i for i, dim in enumerate(kind.shape) if dim in (2, 6))
        half = kind.of((*kind.shape[:axis], kind.shape[axis] // 2, *kind.shape[axis + 1 :]))
        self.add("Split", [a, None], [half, half], {"axis": axis, "num_outputs": 2})

    def element(self) -> None:
        """One row: a view at a fixed position."""
        a, kind = self.pick()
        if kind.shape and isinstance(kind.shape[0], int) and kind.shape[0]:
            index = self.constant(np.array(self.choose([0, -1])))
            self.add("Gather", [a, index], [kind.of(kind.shape[1:])], {"axis": 0})

    # Shapes.

    def concat(self) -> None:
        a, kind = self.pick(lambda k: k.shape and k.size <= _MOST_ELEMENTS // 2)
        axis = self.choose(range(len(kind.shape)))
        dim = kind.shape[axis]
        dim = 2 * dim if isinstance(dim, int) else self.dim()
        shape = (*kind.shape[:axis], dim, *kind.shape[axis + 1 :])
        self.add("Concat", [a, self.like(kind)], [kind.of(shape)], {"axis": axis})

    def reduce(self) -> None:
        """Sums of integers and largest floats: neither depends on the order of the elements."""
        a, kind = self.pick(lambda k: k.dtype in (FLOAT32, INT64))
        if kind.dtype == FLOAT32 and not (kind.static and 0 not in kind.shape):
            return
        keep = self.choose([0, 1])
        attrs = {"keepdims": keep, "noop_with_empty_axes": 0}
        op = "ReduceMax" if kind.dtype == FLOAT32 else "ReduceSum"
        if kind.shape and self.flip():
            axes = self.constant(np.array([len(kind.shape) - 1]))
            self.add(op, [a, axes], [kind.of((*kind.shape[:-1], *[1] * keep))], attrs)
        else:
            self.add(op, [a, None], [kind.of([1] * (len(kind.shape) * keep))], attrs)

    def shape(self) -> None:
        a, kind = self.pick()
        (dims,) = self.add("Shape", [a], [tensor(INT64, len(kind.shape))], {"start": 0})
        if kind.static:
            b, other = self.pick(lambda k: k.static and k.size == kind.size)
            self.add("Reshape", [b, dims], [other.of(kind.shape)], {"allowzero": 1})

    def dynamic(self) -> None:
        """Values whose shapes depend on contents."""
        a, kind = self.pick(lambda k: k.dtype != STRING)
        what = self.choose(["nonzero", "compress", "prefix"])
        if what == "nonzero":
            self.add("NonZero", [a], [tensor(INT64, len(kind.shape), self.dim())])
        elif what == "compress" and kind.shape:
            where = self.flags(kind.shape[-1])
            shape = (*kind.shape[:-1], self.dim())
            self.add("Compress", [a, where], [kind.of(shape)], {"axis": len(kind.shape) - 1})
        elif kind.shape:
            end = self.count()
            (end,) = self.add("Unsqueeze", [end, self.constant(np.array([0]))], [tensor(INT64, 1)])
            shape = (self.dim(), *kind.shape[1:])
            zero = self.constant(np.array([0]))
            self.add("Slice", [a, zero, end, zero, None], [kind.of(shape)])

    def flags(self, length: int | str) -> Value:
        """Conditions, one for each place along a dim."""
        found = self.find(lambda k: k == tensor(BOOL, length))
        if found is not None:
            return found[0]
        return self.constant(np.arange(length if isinstance(length, int) else 0) % 2 == 0)

    def count(self) -> Value:
        """A small number that is known only during the run, perhaps."""
        found = self.find(lambda k: k == tensor(INT64))
        if found is None or self.flip():
            return self.constant(np.array(self.choose(range(4))))
        low, high = (self.constant(np.array(x)) for x in (0, 3))
        (bounded,) = self.add("Clip", [found[0], low, high], [tensor(INT64)])
        return bounded

    # Several outputs.

    def several(self) -> None:
        a, kind = self.pick(
            lambda k: k.dtype == FLOAT32 and k.static and len(k.shape) == 2 and 0 not in k.shape
        )
        rows, size = kind.shape
        if self.flip():
            one = self.constant(np.array([1]))
            kinds = [kind.of((rows, 1)), tensor(INT64, rows, 1)]
            attrs = {"axis": -1, "largest": 1, "sorted": 1}
            self.add("TopK", [a, one], self.some(kinds), attrs)
            return
        # One layer of two hidden values over a sequence.
        (x,) = self.add("Unsqueeze", [a, self.constant(np.array([1]))], [kind.of((rows, 1, size))])
        rng = np.random.default_rng(rows)
        w, r = (self.constant(rng.standard_normal((1, 8, n)).astype(np.float32)) for n in (size, 2))
        kinds = [tensor(FLOAT32, rows, 1, 1, 2), *[tensor(FLOAT32, 1, 1, 2)] * 2]
        self.add("LSTM", [x, w, r], self.some(kinds), {"hidden_size": 2})

    def some(self, kinds: Sequence[SlotKind]) -> Sequence[SlotKind | None]:
        """Outputs of which some may be left out, but not all."""
        chosen = [kind if self.flip() else None for kind in kinds]
        return chosen if any(chosen) else kinds

    # Sequences and optionals.

    def sequence(self) -> None:
        what = self.choose(["construct", "empty", "split", "insert", "erase"])
        if what == "construct":
            a, kind = self.pick()
            members = [a, *[self.like(kind) for _ in range(self.choose([0, 1, 2]))]]
            made = SlotKind(kind.dtype, kind.shape, "sequence", len(members))
            self.add("SequenceConstruct", members, [made])
        elif what == "empty":
            made = SlotKind(FLOAT32, self.choose(SHAPES), "sequence", 0)
            self.add("SequenceEmpty", [], [made], {"dtype": 1})
        elif what == "split":
            a, kind = self.pick()
            if kind.shape and isinstance(kind.shape[0], int):
                made = SlotKind(kind.dtype, kind.shape[1:], "sequence", kind.shape[0])
                self.add("SplitToSequence", [a], [made], {"axis": 0, "keepdims": 0})
        else:
            found = self.find(form="sequence")
            if found is None:
                return
            s, kind = found
            member = self.find(lambda k: k == SlotKind(kind.dtype, kind.shape))
            if what == "insert" and member is not None:
                where = self.constant(np.array(0)) if self.flip() else None
                made = SlotKind(kind.dtype, kind.shape, "sequence", kind.least + 1)
                self.add("SequenceInsert", [s, member[0], where], [made])
            elif what == "erase" and kind.least:
                made = SlotKind(kind.dtype, kind.shape, "sequence", kind.least - 1)
                self.add("SequenceErase", [s, self.constant(np.array(0))], [made])

    def sequence_use(self) -> None:
        found = self.find(form="sequence")
        if found is None:
            return
        s, kind = found
        what = self.choose(["at", "length", "concat", "identity"])
        if what == "at" and kind.least:
            index = self.constant(np.array(self.choose([0, -1])))
            self.add("SequenceAt", [s, index], [kind.of(kind.shape)])
        elif what == "length":
            self.add("SequenceLength", [s], [tensor(INT64)])
        elif what == "concat" and kind.least and kind.shape and kind.dtype != STRING:
            made = kind.of((self.dim(), *kind.shape[1:]))
            self.add("ConcatFromSequence", [s], [made], {"axis": 0, "new_axis": 0})
        elif what == "identity":
            self.add("Identity", [s], [kind])

    def optional(self) -> None:
        found = self.find(form="optional")
        if found is None or self.flip():
            a, kind = self.pick()
            self.add("Optional", [a], [SlotKind(kind.dtype, kind.shape, "optional", 1)])
        elif self.flip():
            self.add("OptionalHasElement", [found[0]], [tensor(BOOL)])
        else:
            o, kind = found
            self.add("OptionalGetElement", [o], [kind.of(kind.shape)])

    # Control flow.

    def condition(self) -> Value:
        found = self.find(lambda k: k.dtype == BOOL and k.static and k.size == 1)
        if found is not None and self.flip():
            return found[0]
        a, kind = self.pick(lambda k: k.dtype == FLOAT32)
        zero, some = (self.constant(x) for x in (np.float32(0), np.array(self.choose([0, 1, 3]))))
        (above,) = self.add("Greater", [a, zero], [SlotKind(BOOL, kind.shape)])
        (numbers,) = self.add("Cast", [above], [SlotKind(INT64, kind.shape)], {"to": 7})
        attrs = {"keepdims": 0, "noop_with_empty_axes": 0}
        (total,) = self.add("ReduceSum", [numbers, None], [tensor(INT64)], attrs)
        return self.add("Greater", [total, some], [tensor(BOOL)])[0]

    def branches(self) -> None:
        condition = self.condition() if self.depth or self.flip() else self.like(INPUTS["c"])
        kinds = [self.any()[1] for _ in range(self.choose([1, 1, 2, 3]))]
        # Branches may disagree about a dim, which is then known only during the run.
        loose = [self.flip() and self.choose(range(4)) == 3 for _ in kinds]
        graphs = []
        shapes: list[set[Shape]] = [set() for _ in kinds]
        for name in ("then", "else"):
            inner = Builder(self.source, self.pool, self.depth + 1)
            inner.steps(3)
            outputs = []
            for i, kind in enumerate(kinds):
                found = inner.find(
                    lambda k, kind=kind: (k.dtype, len(k.shape)) == (kind.dtype, len(kind.shape))
                )
                if loose[i] and kind.form == "tensor" and found is not None:
                    value, own = found
                else:
                    value, own = inner.like(kind), kind
                shapes[i].add(own.shape)
                outputs.append(value)
            graphs.append(Graph([], outputs, inner.nodes, name))
        for i, kind in enumerate(kinds):
            if kind.form == "tensor":
                one = shapes[i].pop()
                kinds[i] = kind.of([self.dim() for _ in one] if shapes[i] else one)
        attrs = {"then_branch": graphs[0], "else_branch": graphs[1]}
        self.add("If", [condition], kinds, attrs)

    def carried(self) -> list[tuple[Value, SlotKind]]:
        return [self.any() for _ in range(self.choose([1, 1, 2, 2, 3]))]

    def growing(self, kind: SlotKind) -> SlotKind:
        """What a carried value is inside the loop: some may grow."""
        if kind.form == "sequence":
            return SlotKind(kind.dtype, kind.shape, "sequence", 0)
        if kind.form == "tensor" and kind.shape and self.choose(range(5)) == 4:
            return kind.of((self.dim(), *kind.shape[1:]))
        return kind

    def update(self, kind: SlotKind, initial: SlotKind) -> Value:
        """What a carried value becomes; the builder is that of the body."""
        if kind.form != "tensor" or kind == initial:
            return self.like(kind)
        more = self.find(
            lambda k: (
                k.dtype == kind.dtype and k.shape and k.shape[1:] == kind.shape[1:] and k.size <= 8
            )
        )
        inputs = [self.like(kind), *([] if more is None else more[:1])]
        return self.add("Concat", inputs, [kind.of((self.dim(), *kind.shape[1:]))], {"axis": 0})[0]

    def loop(self) -> None:
        carried = self.carried()
        body = Builder(self.source, self.pool, self.depth + 1)
        iteration = Value(self.name("iteration"), TensorType(INT64, ()))
        proceed = Value(self.name("proceed"), TensorType(BOOL, ()))
        kinds = [self.growing(kind) for _, kind in carried]
        inside = [Value(self.name("inside")) for _ in kinds]
        body.pool += [(iteration, tensor(INT64)), (proceed, tensor(BOOL))]
        body.pool += list(zip(inside, kinds, strict=True))
        body.steps(4)
        condition = self.choose([proceed, proceed, "some", self.constant(np.array(self.flip()))])
        if condition == "some":
            condition = body.condition()
        updated = [
            body.update(kind, initial) for kind, (_, initial) in zip(kinds, carried, strict=True)
        ]
        rows = [body.pick(lambda k: k.static) for _ in range(self.choose([0, 1, 2]))]
        outputs = [condition, *updated, *(value for value, _ in rows)]
        graph = Graph([iteration, proceed, *inside], outputs, body.nodes, "body")
        limit = self.count()
        start = self.choose([None, None, self.constant(np.array(self.flip())), "some"])
        if start == "some":
            start = self.condition()
        after = [
            kind
            if kind == initial or kind.form == "sequence"
            else kind.of((self.dim(), *kind.shape[1:]))
            for kind, (_, initial) in zip(kinds, carried, strict=True)
        ]
        # How many rows there are is known only during the run, as far as these tests know.
        after += [kind.of((self.dim(), *kind.shape)) for _, kind in rows]
        inputs = [limit, start, *(value for value, _ in carried)]
        self.add("Loop", inputs, after, {"body": graph})

    def scan(self) -> None:
        first, whole = self.pick(lambda k: k.shape)
        axis = self.choose(range(len(whole.shape)))
        length = whole.shape[axis]
        sources = [(first, whole, axis)]
        if self.flip():
            other, kind = self.pick(lambda k: length in k.shape)
            sources.append((other, kind, kind.shape.index(length)))
        states = [self.pick() for _ in range(self.choose([0, 1, 1, 2]))]
        body = Builder(self.source, self.pool, self.depth + 1)
        inside = [(Value(self.name("state")), kind) for _, kind in states]
        slices = [
            (Value(self.name("slice")), kind.of(kind.shape[:axis] + kind.shape[axis + 1 :]))
            for _, kind, axis in sources
        ]
        body.pool += [*inside, *slices]
        body.steps(4)
        updated = [body.like(kind) for _, kind in states]
        rows = [body.pick() for _ in range(self.choose([1, 1, 2]))]
        axes = [self.choose(range(-1, len(kind.shape) + 1)) for _, kind in rows]
        graph = Graph(
            [v for v, _ in (*inside, *slices)],
            [*updated, *(v for v, _ in rows)],
            body.nodes,
            "body",
        )
        attrs = {
            "body": graph,
            "num_scan_inputs": len(sources),
            "scan_input_axes": [axis for _, _, axis in sources],
            "scan_input_directions": [self.choose([0, 1]) for _ in sources],
            "scan_output_axes": axes,
            "scan_output_directions": [self.choose([0, 1]) for _ in rows],
        }
        stacked = []
        for (_, kind), axis in zip(rows, axes, strict=True):
            axis %= len(kind.shape) + 1
            stacked.append(kind.of((*kind.shape[:axis], length, *kind.shape[axis:])))
        inputs = [*(v for v, _ in states), *(v for v, _, _ in sources)]
        if length != 0 and all(k.static for _, k in rows):
            self.add("Scan", inputs, [*(k for _, k in states), *stacked], attrs)

    def sequence_map(self) -> None:
        found = self.find(form="sequence")
        if found is None:
            return
        sources = [found]
        body = Builder(self.source, self.pool, self.depth + 1)
        if self.flip():
            sources.append(sources[0] if self.flip() else self.pick())
        inner = [(Value(self.name("element")), kind.of(kind.shape)) for _, kind in sources]
        body.pool += inner
        body.steps(3)
        outputs = [body.pick() for _ in range(self.choose([1, 2]))]
        graph = Graph([v for v, _ in inner], [v for v, _ in outputs], body.nodes, "body")
        kinds = [SlotKind(k.dtype, k.shape, "sequence", sources[0][1].least) for _, k in outputs]
        self.add("SequenceMap", [v for v, _ in sources], kinds, {"body": graph})


def build(source: Source, most: int) -> Graph:
    """A random graph, whose inputs are those of ``INPUTS``."""
    inputs = [Value(name, TensorType(kind.dtype, kind.shape)) for name, kind in INPUTS.items()]
    builder = Builder(source, list(zip(inputs, INPUTS.values(), strict=True)), 0)
    for _ in range(source.choose(range(1, most + 1))):
        builder.step()
    picked = [builder.any()[0] for _ in range(source.choose(range(1, 5)))]
    # The same value may leave twice, under two names.
    outputs = [
        v if picked.index(v) == i else builder.add("Identity", [v], [INPUTS["a"]])[0]
        for i, v in enumerate(picked)
    ]
    return Graph(inputs, outputs, builder.nodes, "random")


@cache
def _indices(size: int) -> st.SearchStrategy[int]:
    """Indices of a sequence. To make a strategy takes longer than to draw from it, and a graph is
    made of a hundred choices."""
    return st.integers(0, size - 1)


@st.composite
def graphs(draw, most: int = 12) -> Graph:
    """Random graphs that Hypothesis can make smaller."""
    return build(Source(lambda options: options[draw(_indices(len(options)))]), most)


def seeded(seed: int, most: int = 20) -> Graph:
    """The random graph of a seed."""
    return build(Source(random.Random(seed).choice), most)
