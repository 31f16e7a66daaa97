"""Random programs of conditions and loops: as TensorFlow v1 would build them, and in plain Python.

A program is a block. It names what it computes by numbers: those around it first, its own behind.
The graphs have the shapes that tf.cond and tf.while_loop give them: pivots, a Switch for each value
that a branch captures, a constant Enter for each that a loop does, constants that wait for pivots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.support.tf_graphs import Builder, Type

INT, BOOL = Type("int32"), Type("bool")
OPS = {"AddV2": np.add, "Sub": np.subtract, "Mul": np.multiply, "Maximum": np.maximum}


@dataclass(frozen=True)
class Constant:
    value: int


@dataclass(frozen=True)
class Apply:
    op: str
    a: int
    b: int


@dataclass(frozen=True)
class Cond:
    """If a is less than b, what the first block gives, else what the second does."""

    a: int
    b: int
    sides: tuple[Block, Block]


@dataclass(frozen=True)
class While:
    """``turns`` times, or until the first variable is no less than ``most`` (a number), the body;
    of the variables and of what is around the loop. With ``reads`` the body also adds to the first
    variable what the condition has computed. ``parallel``: iterations at once."""

    starts: tuple[int, ...]
    turns: int
    most: int
    body: Block
    reads: bool
    parallel: int


@dataclass(frozen=True)
class Block:
    steps: tuple[Any, ...]
    results: tuple[int, ...]


# In plain Python.


def evaluate(block: Block, known: Sequence[np.int32]) -> list[np.int32]:
    values = list(known)
    for step in block.steps:
        if isinstance(step, Constant):
            values.append(np.int32(step.value))
        elif isinstance(step, Apply):
            values.append(OPS[step.op](values[step.a], values[step.b]))
        elif isinstance(step, Cond):
            side = step.sides[not values[step.a] < values[step.b]]
            values += evaluate(side, values)
        else:
            carried = [values[i] for i in step.starts]
            turns = 0
            while turns < step.turns and carried[0] < values[step.most]:
                twice = carried[0] + carried[0]
                around = [*values, *carried]
                carried = evaluate(step.body, around)
                if step.reads:
                    carried[0] = carried[0] + twice
                turns += 1
            values += carried
    return [values[i] for i in block.results]


# As a graph.


class Context:
    """Where nodes are: in a branch, or in a loop."""

    def __init__(self, graph: Graph, around: Context | None) -> None:
        self.graph = graph
        self.around = around
        self.pivot = ""
        self.known: dict[str, str] = {}

    def bring(self, value: str) -> str:
        """A value of the contexts around this one, in it."""
        if value not in self.known:
            assert self.around is not None
            outer = self.around.bring(value)
            self.known[value] = self.known[outer] = self.entered(outer)
        return self.known[value]

    def entered(self, value: str) -> str:
        raise NotImplementedError


class Root(Context):
    def bring(self, value: str) -> str:
        return value


class Branch(Context):
    def __init__(self, graph: Graph, around: Context, predicate: str, side: int) -> None:
        super().__init__(graph, around)
        self.predicate, self.side = predicate, side

    def entered(self, value: str) -> str:
        made = self.graph.node("Switch", value, self.predicate, T=INT)
        return f"{made}:{self.side}"


class Loop(Context):
    def __init__(self, graph: Graph, around: Context, frame: dict[str, Any]) -> None:
        super().__init__(graph, around)
        self.frame = frame
        self.constants: set[str] = set()

    def entered(self, value: str) -> str:
        made = self.graph.node("Enter", value, T=INT, **{**self.frame, "is_constant": True})
        self.constants.add(made)
        return made


class Graph(Builder):
    def constant(self, value: int, context: Context) -> str:
        made = self.const(np.int32(value), "", *([f"^{context.pivot}"] if context.pivot else []))
        context.known[made] = made
        return made

    def block(self, block: Block, known: Sequence[str], context: Context) -> list[str]:
        values = list(known)
        for step in block.steps:
            if isinstance(step, Constant):
                values.append(self.constant(step.value, context))
            elif isinstance(step, Apply):
                values.append(self.own(context, self.of(step.op, step, values, context)))
            elif isinstance(step, Cond):
                values += self.cond(step, values, context)
            else:
                values += self.loop(step, values, context)
        return [values[i] for i in block.results]

    def of(self, op: str, step: Apply | Cond, values: Sequence[str], context: Context) -> str:
        """An operation of two numbers; one of constants of a loop alone waits for its pivot."""
        read = [context.bring(values[i]) for i in (step.a, step.b)]
        free = isinstance(context, Loop) and set(read) <= context.constants
        return self.node(op, *read, *([f"^{context.pivot}"] if free else []), T=INT)

    def own(self, context: Context, value: str) -> str:
        context.known[value] = value
        return value

    def cond(self, step: Cond, values: Sequence[str], context: Context) -> list[str]:
        predicate = self.of("Less", step, values, context)
        switch = self.node("Switch", predicate, predicate, T=BOOL)
        again = self.node("Identity", predicate, T=BOOL)
        results = []
        for side, inner in zip((1, 0), step.sides, strict=True):
            branch = Branch(self, context, again, side)
            branch.pivot = self.node("Identity", f"{switch}:{side}", T=BOOL)
            made = [branch.bring(each) for each in self.block(inner, values, branch)]
            results.append([self.node("Identity", each, T=INT) for each in made])
        merged = zip(results[1], results[0], strict=True)
        return [self.own(context, self.node("Merge", f, t, T=INT, N=2)) for f, t in merged]

    def loop(self, step: While, values: Sequence[str], context: Context) -> list[str]:
        name = f"frame{len(self.into)}"
        frame = {"frame_name": name, "parallel_iterations": step.parallel, "is_constant": False}
        start = self.own(context, self.constant(0, context))
        given = [start, *(context.bring(values[i]) for i in step.starts)]
        waits = [f"^{context.pivot}"] if context.pivot else []  # where all given is constant
        enters = [self.node("Enter", each, *waits, T=INT, **frame) for each in given]
        back = [f"{name}/next{i}" for i in range(len(enters))]
        pairs = zip(enters, back, strict=True)
        merges = [self.node("Merge", a, b, T=INT, N=2) for a, b in pairs]
        loop = Loop(self, context, frame)
        loop.pivot = merges[0]
        turns = self.constant(step.turns, loop)
        less = self.node("Less", merges[0], turns, T=INT)
        most = self.node("Less", merges[1], loop.bring(values[step.most]), T=INT)
        both = self.node("LogicalAnd", less, most)
        twice = self.node("AddV2", merges[1], merges[1], T=INT) if step.reads else ""
        goes_on = self.node("LoopCond", both)
        switches = [self.node("Switch", each, goes_on, T=INT) for each in merges]
        inside = [self.node("Identity", f"{each}:1", T=INT) for each in switches]
        loop.pivot = inside[0]
        loop.known.update((each, each) for each in inside)
        made = [loop.bring(v) for v in self.block(step.body, [*values, *inside[1:]], loop)]
        if step.reads:
            read = self.node("Switch", twice, goes_on, T=INT)
            made[0] = self.node("AddV2", made[0], f"{read}:1", T=INT)
        one = self.constant(1, loop)
        made = [self.node("AddV2", inside[0], one, T=INT), *made]
        for each, again in zip(made, back, strict=True):
            # A value of the loop around this one comes back as one of this loop's body.
            here = self.node("Identity", each, f"^{loop.pivot}", T=INT)
            self.node("NextIteration", here, name=again, T=INT)
        exits = [self.node("Exit", each, T=INT) for each in switches[1:]]
        return [self.own(context, each) for each in exits]


def graph(program: Block, inputs: int) -> tuple[bytes, list[str]]:
    """The graph of a program of inputs named ``x0`` and so on, and the names of its results."""
    made = Graph()
    names = [made.placeholder(f"x{i}", "int32") for i in range(inputs)]
    root = Root(made, None)
    made_of = made.block(program, names, root)
    results = [made.node("Identity", each, T=INT) for each in made_of]
    return made.bytes(), results


# Random ones.


@st.composite
def programs(draw: st.DrawFn, inputs: int = 2, depth: int = 3) -> Block:
    return draw(_blocks(inputs, draw(st.integers(1, 2)), depth))


@st.composite
def _blocks(draw: st.DrawFn, known: int, results: int, depth: int) -> Block:
    steps: list[Any] = []

    def number() -> int:
        return draw(st.integers(0, known - 1))

    for _ in range(draw(st.integers(1, 4))):
        kind = draw(
            st.sampled_from(("constant", "apply", "cond", "while") if depth else ("apply",))
        )
        if kind == "constant":
            steps.append(Constant(draw(st.integers(-3, 3))))
            known += 1
        elif kind == "apply":
            steps.append(Apply(draw(st.sampled_from(list(OPS))), number(), number()))
            known += 1
        elif kind == "cond":
            count = draw(st.integers(1, 2))
            sides = [draw(_blocks(known, count, depth - 1)) for _ in range(2)]
            steps.append(Cond(number(), number(), (sides[0], sides[1])))
            known += count
        else:
            count = draw(st.integers(1, 2))
            starts = tuple(number() for _ in range(count))
            most, turns = number(), draw(st.integers(0, 3))
            body = draw(_blocks(known + count, count, depth - 1))
            parallel = draw(st.sampled_from((1, 2, 10)))
            steps.append(While(starts, turns, most, body, draw(st.booleans()), parallel))
            known += count
    return Block(tuple(steps), tuple(number() for _ in range(results)))
