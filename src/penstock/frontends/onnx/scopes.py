"""Where nodes stand while a model is imported: which names, operations and attributes they mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from onnx import AttributeProto, NodeProto

from penstock.frontends.onnx.upgrades import Meaning
from penstock.ir.graph import Node, Value


class Scope:
    """The names of a graph or function body, and of the graphs around it."""

    __slots__ = ("names", "parent")

    def __init__(self, parent: Scope | None = None) -> None:
        self.names: dict[str, Value | None] = {}
        self.parent = parent

    def find(self, name: str) -> Value | None:
        """What a name stands for; ``None`` is an input of a function that a call left out."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        # Nobody defines it: verify reports that, with all who use it.
        value = self.names[name] = Value(name)
        return value


Meanings: TypeAlias = dict[tuple[str, str], "Meaning | str"]
"""What operations mean by domain and name; text is why one means nothing."""


@dataclass(slots=True)
class Call:
    """A call of a function: its attributes, each with the frame that it was written in."""

    attributes: Mapping[str, tuple[AttributeProto, Frame]]
    constants: dict[int, np.ndarray | None]  # of the function, by node, for all of its calls


@dataclass(slots=True)
class Frame:
    """Where nodes stand: what their names, operations and attribute references mean there."""

    scope: Scope
    opsets: Mapping[str, int]
    where: str
    depth: int = 1
    prefix: str = ""  # of names, within functions
    call: Call | None = None
    body: bool = False  # whether these are the very nodes of a function, not of a graph in it
    meanings: Meanings = field(default_factory=dict)


NodeMeaning: TypeAlias = tuple[int, NodeProto, list[Value | None] | None]
"""A node at its position, and the values that it is to produce; ``None`` if it is done with."""

Entry: TypeAlias = tuple[Iterator[NodeMeaning], Frame, list[Node]]
"""Nodes to import in a frame, and those to add after them."""
