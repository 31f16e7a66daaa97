"""Scopes of steps: the parts of a model that its exporter has written into names.

TensorFlow, TorchScript's exporter and tf2onnx name nodes by the modules around them, with slashes:
"/encoder/layer.0/attention/MatMul". TFLite has such names for values alone, and torch's present
exporter says the modules of a node beside its name, which is ``Model.scopes``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from penstock.ir.graph import Node
from penstock.ops.internal.fused import parts
from penstock.plan.plan import Slot, Step, step_edges

Path = tuple[str, ...]


def scope_of(step: Step, known: Mapping[str, str]) -> Path:
    """The innermost scope that holds all nodes of a step. ``known``: scopes by names of nodes, with
    slashes between their parts; what is not in it has none, unless it is empty."""
    return common([_of_node(node, known) for node in parts(step.node)])


def scopes_of(steps: Sequence[Step], slots: Sequence[Slot], known: Mapping[str, str]) -> list[Path]:
    """The scope of each step of one block. A step without one, which a pass has added, gets what is
    common to those of the steps beside it."""
    scopes = [scope_of(step, known) for step in steps]
    if not any(scopes):
        return scopes
    near: dict[int, set[Path]] = {}
    for a, b in step_edges(slots, steps):
        for one, other in ((a, b), (b, a)):
            if not scopes[one] and scopes[other]:
                near.setdefault(one, set()).add(scopes[other])
    for i, paths in near.items():
        scopes[i] = common(paths)
    return scopes


def scope_in(name: str) -> Path:
    """The scope in a name. TFLite joins the names of what it has fused by semicolons.

    >>> scope_in("/encoder/layer.0/MatMul")
    ('encoder', 'layer.0')
    >>> scope_in("net/stage/Relu;net/stage/conv/Conv2D")
    ('net', 'stage')
    """
    return common([tuple(filter(None, one.split("/")[:-1])) for one in name.split(";") if one])


def common(paths: Iterable[Path]) -> Path:
    """The longest path that all of ``paths`` begin with."""
    columns = zip(*paths, strict=False)
    return tuple([column[0] for column in takewhile(lambda c: len({*c}) == 1, columns)])


def _of_node(node: Node, known: Mapping[str, str]) -> Path:
    if node.op.domain == "penstock":
        return ()  # added for the steps beside it, and named after a value
    if known:
        # What a pass makes of a node has its name before a slash.
        scope = known.get(node.name) or known.get(node.name.partition("/")[0], "")
        return tuple(filter(None, scope.split("/")))
    written = next((value.name for value in node.outputs if value is not None), "")
    return scope_in(node.name) or scope_in(written)
