"""Random graphs of TensorFlow's control flow: loops in loops and branches, of one integer each."""

from __future__ import annotations

from random import Random

import numpy as np

from tests.support.tf_graphs import Builder, Type
from tests.support.tf_loops import INT, Names, add, cond, const, enter, while_loop

OPS = ("AddV2", "Sub", "Mul", "Maximum", "Minimum")


class RandomGraph:
    """A graph with an input ``x``; ``fetches`` are names of what leaves it. ``unraised``: its loops
    read whether an iteration is their first, for which no structured loop has a value. ``uneven``:
    some values live in one branch alone, Merges join Switches of several predicates, and nodes wait
    for any others."""

    def __init__(self, seed: int, *, unraised: bool = False, uneven: bool = False) -> None:
        self.random = Random(seed)
        self.unraised = unraised
        self.uneven = uneven
        self.b = Builder()
        self.loops = 0
        x = self.b.placeholder("x", "int32")
        known = [x, self.b.const(np.int32(3)), self.b.const(np.int32(-2))]
        self.fetches = self.block(known, 3, self.random.randint(3, 6))[3:]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(node.name for node in self.b.proto.node)

    def placed(self, devices: int, seed: int) -> bytes:
        """The graph, each node on a device by chance."""
        random = Random(seed)
        for node in self.b.proto.node:
            node.device = f"/device:CPU:{random.randrange(devices)}"
        return self.b.bytes()

    def block(self, known: Names, depth: int, length: int) -> list[str]:
        """``known``, and more values of the same frame and branch."""
        values = list(known)
        for _ in range(length):
            kinds = ["compute", "compute", "constant", "trigger"]
            kinds += ["one_side", "nested_switches", "controlled"] if self.uneven else []
            kinds += ["branch", "loop", "loop"] if depth else []
            values.append(getattr(self, self.random.choice(kinds))(values, depth))
        return values

    def some(self, values: Names, count: int) -> list[str]:
        return [self.random.choice(values) for _ in range(count)]

    def compute(self, values: Names, depth: int) -> str:
        both = values if len(values) == 2 else self.some(values, 2)
        # Small, whatever is done how often.
        made = add(self.b, *both, op=self.random.choice(OPS))
        return add(self.b, made, const(self.b, 97, made), op="FloorMod")

    def constant(self, values: Names, depth: int) -> str:
        return const(self.b, self.random.randint(-5, 5), self.random.choice(values))

    def trigger(self, values: Names, depth: int) -> str:
        before = [f"^{value.split(':')[0]}" for value in self.some(values, 2)]
        return const(self.b, 1, self.b.node("ControlTrigger", *dict.fromkeys(before)))

    def one_side(self, values: Names, depth: int) -> str:
        switch = self.b.node("Switch", self.some(values, 1)[0], self.predicate(values), T=INT)
        return self.b.node("Identity", switch + self.random.choice(["", ":1"]), T=INT)

    def nested_switches(self, values: Names, depth: int) -> str:
        outer = self.b.node("Switch", self.some(values, 1)[0], self.predicate(values), T=INT)
        inner = self.b.node("Switch", f"{outer}:1", self.predicate(values), T=INT)
        sides = self.random.sample([outer, inner, f"{inner}:1"], 3)
        merge = self.b.node("Merge", *sides, T=INT, N=3)
        return add(self.b, merge, f"{merge}:1")

    def controlled(self, values: Names, depth: int) -> str:
        x, y, before = self.some(values, 3)
        return self.b.node("AddV2", x, y, f"^{before.split(':')[0]}", T=INT)

    def predicate(self, values: Names) -> str:
        return self.b.node("Less", *self.some(values, 2), T=INT)

    def branch(self, values: Names, depth: int) -> str:
        def inside(known: Names) -> str:
            made = self.block(known, depth - 1, self.random.randint(1, 3))[-1]
            return self.compute([made, known[0]], 0)

        taken = self.some(values, 2)
        return cond(self.b, self.predicate(values), taken, inside, inside)

    def index(self, variable: str) -> str:
        """Which input the Merge of a loop's variable has taken."""
        nodes = {node.name: node for node in self.b.proto.node}
        switch, _, _ = nodes[variable].input[0].partition(":")
        return f"{nodes[switch].input[0]}:1"

    def loop(self, values: Names, depth: int) -> str:
        b, random = self.b, self.random
        self.loops += 1
        frame, parallel = f"f{self.loops}", random.choice([1, 2, 10])
        constant = enter(b, frame, random.choice(values), parallel, True)
        limit = enter(b, frame, const(b, random.randint(0, 4), values[0]), parallel, True)
        start = const(b, 0, random.choice(values))

        def less(variables: Names) -> str:
            return b.node("Less", variables[0], limit, T=Type("int32"))

        def body(variables: Names) -> Names:
            made = self.block([*variables, constant], depth - 1, random.randint(1, 4))
            # What comes after triggers, and constants, would live on when the loop is over.
            going = [self.compute([value, variables[0]], 0) for value in self.some(made, 2)]
            if self.unraised:
                going[0] = add(self.b, going[0], self.index(variables[1]))
            return [add(b, variables[0], const(b, 1, variables[0])), *going]

        exits = while_loop(b, frame, [start, *self.some(values, 2)], less, body, parallel)
        return random.choice(exits)
