"""Values computed from constants, shared by all kernels of the same constants.

A session has a plan for each combination of input shapes, and each plan has its own kernels.
Prepared weights (widened, transposed, less a zero point) are as large as the weights, and fifty
plans would hold fifty copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary, ref

import numpy as np

from penstock.core.origins import Origin, origin_of
from penstock.core.records import NamedTuple
from penstock.core.shared_arrays import held_once, let_pages_go
from penstock.core.types import FLOAT32, RunValue, TensorType
from penstock.host.fork import shared_lock
from penstock.host.malloc import note_freed
from penstock.ir.graph import Node, Value
from penstock.ir.kernel import Kernel
from penstock.ir.layout import line_aligned
from penstock.ir.op import Attrs, Types
from penstock.ops.registry import Compile

T = TypeVar("T")


class Shared(Generic[T]):
    """A ``value`` computed from ``sources``. The cache holds it weakly: kernels must keep this
    object, not just the value."""

    __slots__ = ("__weakref__", "sources", "value")

    def __init__(self, value: T, sources: tuple[Any, ...]) -> None:
        self.value = value
        self.sources = sources  # kept alive, so that their ids are not reused


_ALL: WeakValueDictionary[Hashable, Shared[Any]] = WeakValueDictionary()
_LOCK = shared_lock()


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
    # The id may have belonged to a deleted array.
    return saved.copies if saved is not None and saved.constant is constant else {}


Arrays = tuple[np.ndarray, ...]


class Reordered:
    """``arrays`` with the elements of a constant in another order. ``back``, if given, converts
    them back to an equal array. After ``release``, only ``arrays`` are held."""

    def __init__(
        self,
        name: Hashable,
        constant: np.ndarray,
        arrays: Arrays,
        back: Callable[..., np.ndarray] | None,
    ) -> None:
        self.arrays = arrays
        self.name = name
        self._back = back
        self._held: np.ndarray | None = constant
        self.constant = ref(constant)
        self.origin = origin_of(constant)

    def array(self) -> np.ndarray:
        """The constant, converted back to new memory if it was released."""
        with _LOCK:
            array = self.constant()
            if array is None:
                assert self._back is not None
                array = self._back(*self.arrays)
                array.flags.writeable = False
                self.constant = ref(array)
                _REORDERED[id(array), self.name] = self
            return array

    def by_name(self) -> dict[str, np.ndarray]:
        """The arrays by the names under which they are saved."""
        return dict(zip(_names(self.name, len(self.arrays)), self.arrays, strict=True))

    @property
    def restores(self) -> bool:
        """Whether the constant can be converted back."""
        return self._back is not None

    @property
    def is_released(self) -> bool:
        """Whether the constant may have gone."""
        return self._held is None

    def release(self) -> Callable[[], np.ndarray]:
        """Stop holding the constant. Returns a function that converts it back."""
        self._held = None
        return self.array


class ConstantRef(NamedTuple):
    """The type of a constant that a kernel reads in another order. Its contents, which other
    kernels may hold only in that order, are read only if no copy in it exists yet."""

    value: Value
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def weights_of(value: Value | None) -> ConstantRef | None:
    """A constant whose contents need not be read; None for another value."""
    if value is None or not value.is_constant or not isinstance(value.type, TensorType):
        return None
    if not value.type.static or value.type.dtype is None:
        return None
    return ConstantRef(value, value.type.dims, value.type.dtype)


def is_held_by_bfloat16(value: Value | None) -> bool:
    """Whether a value is a float32 constant whose elements bfloat16 represents exactly. It has one
    NaN only, so a constant with others is not."""
    array = value.peek if value is not None and value.is_constant else None
    if array is None or array.dtype != FLOAT32:
        return False
    flat = np.ascontiguousarray(array).reshape(-1)
    # Most constants with other elements have some in front.
    some = flat[:_FEW].view(np.uint32) & _LOW_BITS
    return not (some.any() or (flat.view(np.uint32) & _LOW_BITS).any() or np.isnan(flat).any())


_FEW, _LOW_BITS = 64, np.uint32(0xFFFF)
_LARGE = 1 << 16
"""bytes of a constant from which on it is released as soon as a reordered copy exists"""
_REORDERED: WeakValueDictionary[tuple[int, Hashable], Reordered] = WeakValueDictionary()


def reordered(
    name: Hashable,
    weights: np.ndarray | ConstantRef,
    make: Callable[[np.ndarray], Arrays],
    back: Callable[..., np.ndarray] | None,
    types: Sequence[TensorType],
) -> Reordered:
    """As ``shared``, where ``back(*make(constant))`` is equal to the constant bit by bit; without
    ``back`` the constant cannot be released.

    ``types`` are those of the arrays. They are stored in files of sessions, and must be safe for
    kernels to read whatever their contents.
    """
    if isinstance(weights, ConstantRef):
        resident_in = weights.value.resident_in
        if isinstance(resident_in, Reordered) and resident_in.name == name:
            return resident_in
        constant = weights.value.const
        assert constant is not None
    else:
        constant = weights
    with _LOCK:
        entry = _REORDERED.get((id(constant), name))
    # As above, the id may be of another array by now.
    if entry is None or entry.constant() is not constant:
        copies, wanted = saved_copies(REORDERED, constant), [(t.dtype, t.dims) for t in types]
        names = _names(name, len(types)) if copies else ()
        arrays = tuple([copies[each] for each in names if each in copies])
        # A file may have anything under these names.
        if not arrays or [(array.dtype, array.shape) for array in arrays] != wanted:
            # Of another session of the model, most often.
            arrays = tuple([held_once(array, line_aligned) for array in make(constant)])
        assert [(array.dtype, array.shape) for array in arrays] == wanted
        entry = Reordered(name, constant, arrays, back)
        with _LOCK:
            _REORDERED[id(constant), name] = entry
        nbytes = constant.nbytes
        if isinstance(weights, ConstantRef) and back is not None and nbytes >= _LARGE:
            # At once, and not when all is packed: most weights are never held twice.
            weights.value.release(entry.release())
            let_pages_go(constant)
            del constant
            note_freed(nbytes)
    return entry


def _names(name: Hashable, count: int) -> list[str]:
    """The names under which arrays are saved."""
    return [f"{name!r} {i}" for i in range(count)]


REORDERED = "reordered"
"""the owner of saved copies that ``reordered`` makes"""


def copies_of(constants: Iterable[Value]) -> list[dict[str, np.ndarray]]:
    """The arrays that ``reordered`` has created from each constant, by name. For a released
    constant, the arrays from which it is converted back."""
    of_array: dict[int, dict[str, np.ndarray]] = {}
    # References: whatever thread drops the last reference to an entry takes it out, without a lock.
    for reference in _REORDERED.valuerefs():
        entry = reference()
        if entry is not None and (array := entry.constant()) is not None:
            of_array.setdefault(id(array), {}).update(entry.by_name())
    copies = []
    for value in constants:
        held, home = value.held, value.resident_in
        if held is None and isinstance(home, Reordered):
            copies.append(home.by_name())
        else:
            copies.append({} if held is None else of_array.get(id(held), {}))
    return copies


def sources_after_release(
    constants: Iterable[np.ndarray],
) -> list[ref[np.ndarray] | ref[Reordered]]:
    """Return a reference that gives each constant later: itself while it is alive, or the entry
    that restores it."""
    homes: dict[int, Reordered] = {}
    for reference in _REORDERED.valuerefs():
        entry = reference()
        if entry is not None and entry.is_released and (array := entry.constant()) is not None:
            homes[id(array)] = entry
    found = [(constant, homes.get(id(constant))) for constant in constants]
    return [ref(constant) if home is None else ref(home) for constant, home in found]


def origin_of_constant(value: Value) -> Origin | None:
    """Where the contents of a constant were read from, held or not."""
    held, entry = value.held, value.resident_in
    if held is None:
        return entry.origin if isinstance(entry, Reordered) else None
    return origin_of(held)


def by_attributes(make: Callable[[Attrs], Callable[..., RunValue]]) -> Compile:
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
