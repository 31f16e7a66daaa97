"""Emit: reports a value to the run when it is computed.

``Session.stream`` inserts it after the values to stream, also in the bodies of loops, where it runs
in each iteration. It has no outputs. The run passes values to its ``sink``, which may block.
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
        if sink is not None:  # None in trial runs of a plan
            sink(name, value)

    return Kernel(emit)


def _infer(types: Types, attrs: Attrs, consts: Consts) -> tuple[()]:
    return ()


EMIT = Op("Emit", "penstock", 1, 1, _infer, _compile, pure=False)
"""Input: a value. Attribute: ``name``, under which the run reports it."""
