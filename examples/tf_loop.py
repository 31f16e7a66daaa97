"""A loop of TensorFlow's, run in two ways.

``python examples/tf_loop.py [N] [GRAPH.pb]`` counts the steps of the Collatz sequence from N (27)
to 1: an even number is halved, of any other one three times itself and one more is taken. Without a
file the graph is written here, node by node, in the form in which ``tf.while_loop`` with a
``tf.cond`` in its body exports it. A graph of your own needs an input ``n`` and an output
``steps``.

The frames executor moves tokens as TensorFlow does, so that each node runs as often as there; by
default the loop becomes a ``while`` of the program, and the condition an ``if``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import penstock

INT = 'attr { key: "T" value { type: DT_INT32 } }'
FRAME = 'attr { key: "frame_name" value { s: "collatz" } }'


def node(name: str, op: str, *inputs: str, attrs: str = INT) -> str:
    """A node of a GraphDef as text."""
    edges = " ".join(f'input: "{edge}"' for edge in inputs)
    return f'node {{ name: "{name}" op: "{op}" {edges} {attrs} }}\n'


def const(name: str, value: int, after: str = "") -> str:
    """A number, in the frame of the node that it comes ``after``."""
    tensor = f"tensor {{ dtype: DT_INT32 tensor_shape {{}} int_val: {value} }}"
    attrs = 'attr { key: "dtype" value { type: DT_INT32 } } '
    attrs += f'attr {{ key: "value" value {{ {tensor} }} }}'
    return node(name, "Const", *([f"^{after}"] if after else []), attrs=attrs)


def collatz() -> str:
    """The graph: ``n`` and ``steps`` are the variables of the loop."""
    placeholder = 'attr { key: "dtype" value { type: DT_INT32 } } '
    text = node("n", "Placeholder", attrs=placeholder + 'attr { key: "shape" value { shape {} } }')
    text += const("zero", 0)
    for name, initial in (("value", "n"), ("count", "zero")):
        text += node(f"{name}/enter", "Enter", initial, attrs=f"{INT} {FRAME}")
        text += node(
            f"{name}/merge", "Merge", f"{name}/enter", f"{name}/next",
            attrs=f'{INT} attr {{ key: "N" value {{ i: 2 }} }}',
        )  # fmt: skip
        text += node(f"{name}/switch", "Switch", f"{name}/merge", "goes_on")
        text += node(f"{name}/now", "Identity", f"{name}/switch:1")
        text += node(f"{name}/exit", "Exit", f"{name}/switch")
    text += const("one", 1, "value/merge") + node("more", "Greater", "value/merge", "one")
    text += node("goes_on", "LoopCond", "more", attrs="")
    # In the body: one of two branches, and what is left of them.
    text += const("two", 2, "value/now") + node("rest", "FloorMod", "value/now", "two")
    text += const("none", 0, "value/now") + node("odd", "Greater", "rest", "none")
    text += node("branch", "Switch", "value/now", "odd")
    text += const("half/two", 2, "branch") + node("half", "FloorDiv", "branch", "half/two")
    text += const("three", 3, "branch") + node("triple", "Mul", "branch:1", "three")
    text += const("up/one", 1, "branch") + node("up", "AddV2", "triple", "up/one")
    text += node(
        "either", "Merge", "half", "up", attrs=f'{INT} attr {{ key: "N" value {{ i: 2 }} }}'
    )
    text += node("value/next", "NextIteration", "either")
    text += const("step", 1, "count/now") + node("counted", "AddV2", "count/now", "step")
    text += node("count/next", "NextIteration", "counted")
    return text + node("steps", "Identity", "count/exit")


def main(arguments: Sequence[str]) -> None:
    if len(arguments) > 2 or (arguments and not arguments[0].isdecimal()):
        sys.exit("usage: python examples/tf_loop.py [N] [GRAPH.pb]")
    n = np.array(int(arguments[0]) if arguments else 27, np.int32)
    path = Path(arguments[1]) if len(arguments) > 1 else Path("collatz.pbtxt")
    if len(arguments) < 2:
        path.write_text(collatz())

    session = penstock.compile(path, backends=["numpy"])
    print(f"from {n} to 1: {session.run({'n': n})['steps:0']} steps")
    print(f"run by {session.effective.executor}, as this program:\n\n{session.source}")

    frames, trace = penstock.compile(path, executor="frames"), penstock.Trace()
    steps = frames.run({"n": n}, trace=trace)["steps:0"]
    print(f"by frames, {steps} steps; how often nodes ran:")
    for name, count in sorted(trace.counts.items()):
        print(f"  {count:5} {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
