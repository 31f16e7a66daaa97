"""TensorFlow's loops and conditions for tests, as tf.while_loop and tf.cond write them; all of
int32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tests.support.tf_graphs import Builder, Type

INT = Type("int32")
Names = Sequence[str]


def add(b: Builder, x: str, y: str, op: str = "AddV2") -> str:
    return b.node(op, x, y, T=INT)


def const(b: Builder, value: int, after: str) -> str:
    """A constant in the frame of ``after``."""
    return b.const(np.int32(value), "", f"^{after.split(':')[0]}")


def enter(b: Builder, frame: str, value: str, parallel: int, constant: bool = False) -> str:
    return b.node(
        "Enter", value, T=INT, frame_name=frame, parallel_iterations=parallel, is_constant=constant
    )


def while_loop(
    b: Builder,
    frame: str,
    initial: Names,
    condition: Callable[[Names], str],
    body: Callable[[Names], Names],
    parallel: int = 10,
) -> list[str]:
    """What leaves a loop. ``condition`` and ``body`` take the names of its variables."""
    nexts = [f"{frame}/next{i}" for i in range(len(initial))]
    entered = [enter(b, frame, value, parallel) for value in initial]
    merged = [
        b.node("Merge", one, again, T=INT, N=2) for one, again in zip(entered, nexts, strict=True)
    ]
    goes_on = b.node("LoopCond", condition(merged), name=f"{frame}/cond")
    switches = [b.node("Switch", value, goes_on, T=INT) for value in merged]
    inside = [b.node("Identity", f"{switch}:1", T=INT) for switch in switches]
    for name, value in zip(nexts, body(inside), strict=True):
        b.node("NextIteration", value, name=name, T=INT)
    return [b.node("Exit", switch, T=INT) for switch in switches]


def cond(
    b: Builder,
    predicate: str,
    values: Names,
    then: Callable[[Names], str],
    other: Callable[[Names], str],
) -> str:
    """What one of two branches makes of ``values``."""
    switches = [b.node("Switch", value, predicate, T=INT) for value in values]
    no = other([b.node("Identity", switch, T=INT) for switch in switches])
    yes = then([b.node("Identity", f"{switch}:1", T=INT) for switch in switches])
    return b.node("Merge", no, yes, T=INT, N=2)


def counting(b: Builder, n: str, parallel: int = 10, op: str = "Neg") -> str:
    """``while i < n: i, sum = i + 1, sum - op(i)``; the sum."""
    zero = b.const(np.int32(0))
    limit = enter(b, "while", n, parallel, True)

    def body(values: Names) -> Names:
        i, total = values
        slow = b.node(op, i, T=INT)
        return [add(b, i, const(b, 1, i)), add(b, total, slow, "Sub")]

    def less(values: Names) -> str:
        return b.node("Less", values[0], limit, T=INT)

    return while_loop(b, "while", [zero, zero], less, body, parallel)[1]
