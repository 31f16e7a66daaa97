"""Values computed from constants, shared by all kernels of the same constants.

A session has a plan for each combination of input shapes, and each plan has its own kernels.
Prepared weights (widened, transposed, less a zero point) are as large as the weights, and fifty
plans would hold fifty copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary, ref

import numpy as np

from penstock.ir.graph import Node
from penstock.ir.op import Attrs, Kernel, Types
from penstock.ops.registry import Compile
from penstock.types import TensorType, type_of

T = TypeVar("T")


class Shared(Generic[T]):
    """A ``value`` computed from ``sources``. The cache holds it weakly: kernels must keep this
    object, not just the value."""

    __slots__ = ("__weakref__", "sources", "value")

    def __init__(self, value: T, sources: tuple[Any, ...]) -> None:
        self.value = value
        self.sources = sources  # kept alive, so that their ids are not reused


_ALL: WeakValueDictionary[Hashable, Shared[Any]] = WeakValueDictionary()
_LOCK = threading.RLock()


def shared(name: Hashable, make: Callable[[], T], *sources: Any) -> Shared[T]:
    """Return ``make()``, computed once for one ``name`` and the same ``sources``.

    The result may depend on nothing else. Sources may be any objects; they are compared by
    identity, and must not change. Constants are the same objects in all plans of a session.
    """
    key = (name, *map(id, sources))
    with _LOCK:
        entry = _ALL.get(key)
    if entry is None:
        # Without the lock: it may be slow, and call shared() itself.
        fresh = Shared(make(), sources)
        with _LOCK:
            entry = _ALL.setdefault(key, fresh)
    return entry


class SavedCopies:
    """Copies of a constant, by names that their ``owner`` gives them, as a file has them. What is
    computed from the constant while this object lives takes them instead."""

    def __init__(self, owner: str, constant: np.ndarray, copies: Mapping[str, np.ndarray]) -> None:
        self.constant = constant
        self.copies = copies
        _SAVED[owner, id(constant)] = self


_SAVED: WeakValueDictionary[tuple[str, int], SavedCopies] = WeakValueDictionary()


def saved_copies(owner: str, constant: np.ndarray) -> Mapping[str, np.ndarray]:
    """The copies of a constant that were saved, by name."""
    saved = _SAVED.get((owner, id(constant)))
    return saved.copies if saved is not None and saved.constant is constant else {}


class Reordered(Generic[T]):
    """A ``value`` that has the elements of a constant in another order, from which ``back`` makes
    an equal array. After ``let_go`` only the value is held."""

    def __init__(
        self, name: Hashable, constant: np.ndarray, value: T, back: Callable[[T], np.ndarray]
    ) -> None:
        self.value = value
        self._name = name
        self._back = back
        self._held: np.ndarray | None = constant
        self.constant = ref(constant)

    def array(self) -> np.ndarray:
        """The constant, in memory of its own if it was let go."""
        with _LOCK:
            array = self.constant()
            if array is None:
                array = self._back(self.value)
                array.flags.writeable = False
                self.constant = ref(array)
                _REORDERED[id(array), self._name] = self
            return array

    def let_go(self) -> Callable[[], np.ndarray]:
        """Stop holding the constant; returns what gives it back."""
        self._held = None
        return self.array


_REORDERED: WeakValueDictionary[tuple[int, Hashable], Reordered[Any]] = WeakValueDictionary()


def reordered(
    name: Hashable,
    constant: np.ndarray,
    make: Callable[[np.ndarray], T],
    back: Callable[[T], np.ndarray],
    saved_as: TensorType | None = None,
) -> Reordered[T]:
    """As ``shared``, where ``back(make(constant))`` is equal to the constant bit by bit.

    With ``saved_as``, the type of ``make(constant)``, that is an array of numbers which files of
    sessions have: any numbers must do no harm.
    """
    with _LOCK:
        entry = _REORDERED.get((id(constant), name))
    if entry is None or entry.constant() is not constant:
        value: Any = None
        if saved_as is not None:
            value = saved_copies(REORDERED, constant).get(repr(name))
        if value is None or type_of(value) != saved_as:
            value = make(constant)
        assert saved_as is None or type_of(value) == saved_as
        entry = Reordered(name, constant, value, back)
        with _LOCK:
            _REORDERED[id(constant), name] = entry
    return entry


REORDERED = "reordered"
"""the owner of saved copies that ``reordered`` makes"""


def copies_of(constant: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays that ``reordered`` has made of a constant, by name."""
    with _LOCK:
        entries = list(_REORDERED.items())
    return {
        repr(name): entry.value
        for (_, name), entry in entries
        if isinstance(entry.value, np.ndarray) and entry.constant() is constant
    }


def by_attributes(make: Callable[[Attrs], Callable[..., Any]]) -> Compile:
    """The compile function of kernels that depend on attributes only, such as those of forests and
    dictionaries: ``make`` returns their function.

    Nodes whose attributes are the same objects share one.
    """

    def compile(node: Node, types: Types) -> Kernel:
        share = shared((make, *node.attrs), lambda: make(node.attrs), *node.attrs.values())
        return Kernel(lambda *inputs: share.value(*inputs))

    return compile


def held() -> int:
    """Return the number of shared values that are alive."""
    return len(_ALL)
