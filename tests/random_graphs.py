"""Random graphs of small operations with control flow, for Hypothesis.

Every graph is valid and runs without error on any feeds of its inputs' types (``feeds_for``). It
uses views and views of views, in-place candidates, kernels with workspaces and with outputs that
nobody reads, values that are read far away, shape arithmetic, shapes known only during the run,
integers, conditions, strings, sequences, optionals, and nested If, Loop, Scan and SequenceMap with
swapped, delayed, growing and unchanged carried values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, permutations
from typing import Any

import numpy as np
from hypothesis import strategies as st

from penstock.ir import Graph, Node, Value
from penstock.ops import find
from penstock.types import BOOL, FLOAT32, INT64, STRING, TensorType

# A dim that is known only during the run is a token: values with equal tokens have equal dims.
Shape = tuple[int | str, ...]

SHAPES = [(2, 3), (3, 2), (3, 3), (6,), (1, 6), (2, 1), (3,), (), (0, 3), (1,)]
_MOST_ELEMENTS = 64


@dataclass(frozen=True)
class Kind:
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

    def of(self, shape: Sequence[int | str]) -> Kind:
        return Kind(self.dtype, tuple(shape))


def tensor(dtype: np.dtype, *shape: int | str) -> Kind:
    return Kind(dtype, shape)


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

    def __init__(self, source: Source, pool: Sequence[tuple[Value, Kind]], depth: int):
        self.source = source
        self.pool = list(pool)
        self.depth = depth
        self.nodes: list[Node] = []

    # Drawing.

    def choose(self, options: Sequence[Any]) -> Any:
        return self.source.choose(options)

    def flip(self) -> bool:
        return self.choose([False, True])

    def pick(self, test: Callable[[Kind], Any] = lambda kind: kind.form == "tensor"):
        """A value whose kind passes the test, and its kind; half of the time one not yet read."""
        fitting = [entry for entry in self.pool if test(entry[1])]
        new = [entry for entry in fitting if entry[0] not in self.source.read]
        return self.choose(new if new and self.flip() else fitting)

    def has(self, test: Callable[[Kind], Any]) -> bool:
        return any(test(kind) for _, kind in self.pool)

    def like(self, kind: Kind) -> Value:
        """A value of this very kind; a sequence may be longer."""
        return self.pick(
            lambda k: (
                (k.dtype, k.shape, k.form) == (kind.dtype, kind.shape, kind.form)
                and k.least >= kind.least
            )
        )[0]

    # Building.

    def name(self, hint: str) -> str:
        return f"{hint}_{next(self.source.numbers)}"

    def add(self, op: str, inputs, kinds: Sequence[Kind | None], attrs=None) -> list[Value]:
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
        a, kind = self.pick(lambda k: k.form == "tensor" and k.dtype in (FLOAT32, INT64))
        zero = self.constant(np.zeros((), kind.dtype))
        if self.flip():
            self.add(self.choose(["Greater", "Less", "Equal"]), [a, zero], [Kind(BOOL, kind.shape)])
        elif kind.dtype == INT64:
            self.add("Cast", [a], [Kind(FLOAT32, kind.shape)], {"to": 1})

    def choice(self) -> None:
        if self.has(lambda k: k.form == "tensor" and k.dtype == BOOL and k.shape != ()):
            c, where = self.pick(lambda k: k.form == "tensor" and k.dtype == BOOL)
            a, kind = self.pick(lambda k: k.form == "tensor" and k.shape in (where.shape, ()))
            b = self.like(kind)
            self.add("Where", [c, a, b], [kind.of(where.shape)])

    # Views.

    def static(self) -> tuple[Value, Kind]:
        return self.pick(lambda k: k.form == "tensor" and k.static)

    def reshape(self) -> None:
        a, kind = self.pick()
        if not kind.static:
            target = (kind.size, -1) if kind.shape.count(kind.shape[0]) == 1 else (-1,)
            if sum(isinstance(dim, str) for dim in kind.shape) == 1 and target == (1, -1):
                self.add(
                    "Reshape",
                    [a, self.constant(np.array([1, -1]))],
                    [kind.of((1, self.dim()))],
                    {"allowzero": 0},
                )
            return
        shapes = [(kind.size,), *(s for s in SHAPES if np.prod(s) == kind.size)]
        target = self.choose(shapes)
        shape = self.constant(np.array(target, np.int64))
        self.add("Reshape", [a, shape], [kind.of(target)], {"allowzero": 1})

    def transpose(self) -> None:
        a, kind = self.pick(lambda k: k.form == "tensor")
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
        a, kind = self.pick(lambda k: k.form == "tensor" and k.shape)
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
        a, kind = (
            self.pick(lambda k: k.form == "tensor" and any(d in (2, 6) for d in k.shape))
            if self.has(lambda k: k.form == "tensor" and any(d in (2, 6) for d in k.shape))
            else (None, None)
        )
        if kind is None:
            return
        axis = next(i for i, dim in enumerate(kind.shape) if dim in (2, 6))
        half = kind.of((*kind.shape[:axis], kind.shape[axis] // 2, *kind.shape[axis + 1 :]))
        attrs = {"axis": axis, "num_outputs": 2}
        self.add("Split", [a, None], [half, half], attrs)

    def element(self) -> None:
        """One row: a view at a fixed position."""
        a, kind = self.pick(lambda k: k.form == "tensor")
        if kind.shape and isinstance(kind.shape[0], int) and kind.shape[0]:
            index = self.constant(np.array(self.choose([0, -1])))
            self.add("Gather", [a, index], [kind.of(kind.shape[1:])], {"axis": 0})

    # Shapes.

    def concat(self) -> None:
        a, kind = (
            self.pick(lambda k: k.form == "tensor" and k.shape)
            if self.has(lambda k: k.form == "tensor" and k.shape)
            else (None, None)
        )
        if kind is None or kind.size > _MOST_ELEMENTS // 2:
            return
        b = self.like(kind)
        axis = self.choose(range(len(kind.shape)))
        dim = kind.shape[axis]
        dim = 2 * dim if isinstance(dim, int) else self.dim()
        shape = (*kind.shape[:axis], dim, *kind.shape[axis + 1 :])
        self.add("Concat", [a, b], [kind.of(shape)], {"axis": axis})

    def reduce(self) -> None:
        """Sums of integers and largest floats: neither depends on the order of the elements."""
        a, kind = self.pick(lambda k: k.form == "tensor" and k.dtype in (FLOAT32, INT64))
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
            fitting = [
                e
                for e in self.pool
                if e[1].form == "tensor" and e[1].static and e[1].size == kind.size
            ]
            b, other = self.choose(fitting)
            self.add("Reshape", [b, dims], [other.of(kind.shape)], {"allowzero": 1})

    def dynamic(self) -> None:
        """Values whose shapes depend on contents."""
        a, kind = self.pick(lambda k: k.form == "tensor" and k.dtype != STRING)
        what = self.choose(["nonzero", "compress", "prefix"])
        if what == "nonzero":
            self.add("NonZero", [a], [tensor(INT64, len(kind.shape), self.dim())])
        elif what == "compress" and kind.shape:
            where, _ = self.flag(kind.shape[-1])
            shape = (*kind.shape[:-1], self.dim())
            self.add("Compress", [a, where], [kind.of(shape)], {"axis": len(kind.shape) - 1})
        elif kind.shape:
            end = self.count()
            (end,) = self.add("Unsqueeze", [end, self.constant(np.array([0]))], [tensor(INT64, 1)])
            shape = (self.dim(), *kind.shape[1:])
            zero = self.constant(np.array([0]))
            self.add("Slice", [a, zero, end, zero, None], [kind.of(shape)])

    def flag(self, length: int | str) -> tuple[Value, Kind]:
        """Conditions, one for each place along a dim."""
        fitting = [e for e in self.pool if e[1] == tensor(BOOL, length)]
        if fitting:
            return self.choose(fitting)
        flags = np.arange(length) % 2 == 0 if isinstance(length, int) else np.zeros(0, bool)
        return self.constant(flags), tensor(BOOL, length)

    def count(self) -> Value:
        """A small number that is known only during the run, perhaps."""
        fitting = [e for e in self.pool if e[1] == tensor(INT64)]
        if not fitting or self.flip():
            return self.constant(np.array(self.choose(range(4))))
        low, high = (self.constant(np.array(x)) for x in (0, 3))
        (bounded,) = self.add("Clip", [self.choose(fitting)[0], low, high], [tensor(INT64)])
        return bounded

    # Several outputs.

    def several(self) -> None:
        fitting = [
            e
            for e in self.pool
            if e[1].form == "tensor"
            and e[1].dtype == FLOAT32
            and e[1].static
            and len(e[1].shape) == 2
            and 0 not in e[1].shape
        ]
        if not fitting:
            return
        a, kind = self.choose(fitting)
        if self.flip():
            k = self.constant(np.array([1]))
            taken = [kind.of((kind.shape[0], 1)), tensor(INT64, kind.shape[0], 1)]
            kinds = [k if self.flip() else None for k in taken]
            kinds = kinds if any(kinds) else taken
            self.add("TopK", [a, k], kinds, {"axis": -1, "largest": 1, "sorted": 1})
            return
        # One layer of two hidden values over a sequence.
        steps, size = kind.shape
        axes = self.constant(np.array([1]))
        (x,) = self.add("Unsqueeze", [a, axes], [kind.of((steps, 1, size))])
        rng = np.random.default_rng(steps)
        w, r = (self.constant(rng.standard_normal((1, 8, n)).astype(np.float32)) for n in (size, 2))
        all_kinds = [
            tensor(FLOAT32, steps, 1, 1, 2),
            tensor(FLOAT32, 1, 1, 2),
            tensor(FLOAT32, 1, 1, 2),
        ]
        kinds = [k if self.flip() else None for k in all_kinds]
        self.add("LSTM", [x, w, r], kinds if any(kinds) else all_kinds, {"hidden_size": 2})

    # Sequences and optionals.

    def sequence(self) -> None:
        what = self.choose(["construct", "empty", "split", "insert", "erase"])
        if what == "construct":
            a, kind = self.pick()
            members = [a, *[self.like(kind) for _ in range(self.choose([0, 1, 2]))]]
            made = Kind(kind.dtype, kind.shape, "sequence", len(members))
            self.add("SequenceConstruct", members, [made])
        elif what == "empty":
            made = Kind(FLOAT32, self.choose(SHAPES), "sequence", 0)
            self.add("SequenceEmpty", [], [made], {"dtype": 1})
        elif what == "split":
            a, kind = self.pick(lambda k: k.form == "tensor")
            if kind.shape and isinstance(kind.shape[0], int):
                made = Kind(kind.dtype, kind.shape[1:], "sequence", kind.shape[0])
                self.add("SplitToSequence", [a], [made], {"axis": 0, "keepdims": 0})
        elif self.has(lambda k: k.form == "sequence"):
            s, kind = self.pick(lambda k: k.form == "sequence")
            member = Kind(kind.dtype, kind.shape)
            if what == "insert" and self.has(lambda k: k == member):
                where = self.constant(np.array(0)) if self.flip() else None
                made = Kind(kind.dtype, kind.shape, "sequence", kind.least + 1)
                self.add("SequenceInsert", [s, self.like(member), where], [made])
            elif what == "erase" and kind.least:
                made = Kind(kind.dtype, kind.shape, "sequence", kind.least - 1)
                self.add("SequenceErase", [s, self.constant(np.array(0))], [made])

    def sequence_use(self) -> None:
        if not self.has(lambda k: k.form == "sequence"):
            return
        s, kind = self.pick(lambda k: k.form == "sequence")
        what = self.choose(["at", "length", "concat", "identity"])
        if what == "at" and kind.least:
            index = self.constant(np.array(self.choose([0, -1])))
            self.add("SequenceAt", [s, index], [kind.of(kind.shape)])
        elif what == "length":
            self.add("SequenceLength", [s], [tensor(INT64)])
        elif what == "concat" and kind.least and kind.shape and kind.dtype != STRING:
            shape = (self.dim(), *kind.shape[1:])
            self.add("ConcatFromSequence", [s], [kind.of(shape)], {"axis": 0, "new_axis": 0})
        elif what == "identity":
            self.add("Identity", [s], [kind])

    def optional(self) -> None:
        if self.has(lambda k: k.form == "optional") and self.flip():
            o, kind = self.pick(lambda k: k.form == "optional")
            if self.flip():
                self.add("OptionalHasElement", [o], [tensor(BOOL)])
            elif kind.least:
                self.add("OptionalGetElement", [o], [kind.of(kind.shape)])
        else:
            a, kind = self.pick()
            self.add("Optional", [a], [Kind(kind.dtype, kind.shape, "optional", 1)])

    # Control flow.

    def condition(self) -> Value:
        fitting = [
            e[0]
            for e in self.pool
            if e[1].form == "tensor" and e[1].dtype == BOOL and e[1].size == 1 and e[1].static
        ]
        if fitting and self.flip():
            return self.choose(fitting)
        a, kind = self.pick(lambda k: k.form == "tensor" and k.dtype == FLOAT32)
        zero, some = (self.constant(x) for x in (np.float32(0), np.array(self.choose([0, 1, 3]))))
        (above,) = self.add("Greater", [a, zero], [Kind(BOOL, kind.shape)])
        (numbers,) = self.add("Cast", [above], [Kind(INT64, kind.shape)], {"to": 7})
        attrs = {"keepdims": 0, "noop_with_empty_axes": 0}
        (total,) = self.add("ReduceSum", [numbers, None], [tensor(INT64)], attrs)
        return self.add("Greater", [total, some], [tensor(BOOL)])[0]

    def branches(self) -> None:
        condition = self.condition() if self.depth or self.flip() else self.like(INPUTS["c"])
        kinds = [self.pick(lambda k: True)[1] for _ in range(self.choose([1, 1, 2, 3]))]
        # Branches may disagree about a dim, which is then known only during the run.
        loose = [self.flip() and self.choose(range(4)) == 3 for _ in kinds]
        graphs = []
        shapes: list[set[Shape]] = [set() for _ in kinds]
        for name in ("then", "else"):
            inner = Builder(self.source, self.pool, self.depth + 1)
            inner.steps(3)
            outputs = []
            for i, kind in enumerate(kinds):
                same_rank = [
                    e
                    for e in inner.pool
                    if (e[1].dtype, e[1].form, len(e[1].shape))
                    == (kind.dtype, "tensor", len(kind.shape))
                ]
                if loose[i] and kind.form == "tensor" and same_rank:
                    value, own = self.choose(same_rank)
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

    def carried(self) -> list[tuple[Value, Kind]]:
        return [self.pick(lambda k: True) for _ in range(self.choose([1, 1, 2, 2, 3]))]

    def growing(self, kind: Kind) -> Kind:
        """What a carried value is inside the loop: some may grow."""
        if kind.form == "sequence":
            return Kind(kind.dtype, kind.shape, "sequence", 0)
        if kind.form == "tensor" and kind.shape and self.choose(range(5)) == 4:
            return kind.of((self.dim(), *kind.shape[1:]))
        return kind

    def update(self, kind: Kind, initial: Kind) -> Value:
        """What a carried value becomes; the builder is that of the body."""
        if kind.form == "tensor" and kind != initial:
            own = self.like(kind)
            rows = [
                e
                for e in self.pool
                if e[1].form == "tensor"
                and e[1].dtype == kind.dtype
                and e[1].shape
                and e[1].shape[1:] == kind.shape[1:]
                and e[1].size <= 8
            ]
            inputs = [own, self.choose(rows)[0]] if rows else [own]
            made = kind.of((self.dim(), *kind.shape[1:]))
            return self.add("Concat", inputs, [made], {"axis": 0})[0]
        return self.like(kind)

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
        rows = [
            body.pick(lambda k: k.form == "tensor" and k.static)
            for _ in range(self.choose([0, 1, 2]))
        ]
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
        fitting = [e for e in self.pool if e[1].form == "tensor" and e[1].shape]
        if not fitting:
            return
        first, whole = self.choose(fitting)
        axis = self.choose(range(len(whole.shape)))
        length = whole.shape[axis]
        sources = [(first, whole, axis)]
        others = [(v, k, k.shape.index(length)) for v, k in fitting if length in k.shape]
        if self.flip():
            sources.append(self.choose(others))
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
        fitting = [e for e in self.pool if e[1].form == "sequence"]
        if not fitting:
            return
        sources = [self.choose(fitting)]
        body = Builder(self.source, self.pool, self.depth + 1)
        if self.flip():
            sources.append(sources[0] if self.flip() else self.pick())
        inner = [(Value(self.name("element")), kind.of(kind.shape)) for _, kind in sources]
        body.pool += inner
        body.steps(3)
        outputs = [body.pick() for _ in range(self.choose([1, 2]))]
        graph = Graph([v for v, _ in inner], [v for v, _ in outputs], body.nodes, "body")
        kinds = [Kind(k.dtype, k.shape, "sequence", sources[0][1].least) for _, k in outputs]
        self.add("SequenceMap", [v for v, _ in sources], kinds, {"body": graph})


def build(source: Source, most: int) -> Graph:
    """A random graph, whose inputs are those of ``INPUTS``."""
    inputs = [Value(name, TensorType(kind.dtype, kind.shape)) for name, kind in INPUTS.items()]
    builder = Builder(source, list(zip(inputs, INPUTS.values(), strict=True)), 0)
    for _ in range(source.choose(range(1, most + 1))):
        builder.step()
    picked = [builder.pick(lambda kind: True)[0] for _ in range(source.choose(range(1, 5)))]
    # The same value may leave twice, under two names.
    outputs = [
        v if picked.index(v) == i else builder.add("Identity", [v], [INPUTS["a"]])[0]
        for i, v in enumerate(picked)
    ]
    return Graph(inputs, outputs, builder.nodes, "random")


@st.composite
def graphs(draw, most: int = 12) -> Graph:
    """Random graphs that Hypothesis can make smaller."""
    return build(Source(lambda options: draw(st.sampled_from(options))), most)


def seeded(seed: int, most: int = 20) -> Graph:
    """The random graph of a seed."""
    return build(Source(random.Random(seed).choice), most)
