"""What kernels make of constants, once for all kernels that are made of the same constants.

A session has a plan for every combination of input shapes, and every plan has kernels of its own.
What these make of weights (widened, transposed, less a zero point) is as large as the weights, and
fifty plans would hold fifty copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from penstock.ir.graph import Node
from penstock.ir.op import Compile, Kernel, Types

T = TypeVar("T")


class Shared(Generic[T]):
    """A ``value`` made of ``sources``.

    Nobody but the kernels that use it holds it: they must keep this object, not just the value.
    """

    __slots__ = ("__weakref__", "sources", "value")

    def __init__(self, value: T, sources: tuple[Any, ...]) -> None:
        self.value = value
        self.sources = sources  # as long as these live, nothing else has their identities


_ALL: WeakValueDictionary[Hashable, Shared[Any]] = WeakValueDictionary()
_LOCK = threading.Lock()


def shared(name: Hashable, make: Callable[[], T], *sources: Any) -> Shared[T]:
    """What ``make`` returns, or returned for the same ``name`` and the very same ``sources``.

    It may depend on nothing else. Sources, which may be any objects, are told apart by identity,
    and must not change; constants are the same objects in all plans of a session.
    """
    key = (name, *map(id, sources))
    with _LOCK:
        entry = _ALL.get(key)
    if entry is None:
        fresh = Shared(make(), sources)  # without the lock: it may take long, and share things too
        with _LOCK:
            entry = _ALL.setdefault(key, fresh)
    return entry


def by_attributes(compile: Compile) -> Compile:
    """For a kernel that depends on nothing but attributes, such as a forest or a dictionary.

    Nodes whose attributes are the very same objects share one.
    """

    def compiled(node: Node, types: Types) -> Kernel:
        name = compile.__qualname__, len(node.inputs), len(node.outputs), *node.attrs
        share = shared(name, lambda: compile(node, types).function, *node.attrs.values())
        return Kernel(lambda *inputs: share.value(*inputs))

    return compiled


def held() -> int:
    """How many values are shared at present."""
    return len(_ALL)
