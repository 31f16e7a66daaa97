"""Emit: tells the run that a value has been computed.

``Session.stream`` puts it behind the values that are to be read while a run goes on, in the graphs
of loops, too, where it runs in each iteration. It has no result. What the run does with values is
its ``sink``, which may wait.
"""

from __future__ import annotations

from penstock.core.checkpoints import THREAD
from penstock.core.types import RunValue
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Op, Types


def _compile(node: Node, types: Types) -> Kernel:
    name: str = node.attrs["name"]

    def emit(value: RunValue) -> None:
        sink = getattr(THREAD.run, "sink", None)
        if sink is not None:  # none where a plan is tried out
            sink(name, value)

    return Kernel(emit)


def _infer(types: Types, attrs: Attrs, consts: Consts) -> tuple[()]:
    return ()


EMIT = Op("Emit", "penstock", 1, 1, _infer, _compile, pure=False)
"""Input: a value. Attribute: ``name``, under which the run reports it."""
