"""Constants in the layouts that primitives ask for, which can be given back from there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakValueDictionary, ref

import numpy as np

from penstock.backends.onednn.library import Library
from penstock.backends.onednn.primitive import (
    DST,
    SRC,
    blocks_of,
    descriptor_of,
    layout_name,
    memory,
    reorder_primitive,
    reordered,
)
from penstock.core.records import NamedTuple
from penstock.ops.common.constant_cache import saved_copies
from penstock.ops.common.dtypes import INT8

Form = Callable[[np.ndarray], np.ndarray]

_ALL: WeakValueDictionary[Hashable, Weights] = WeakValueDictionary()
_LOCK = threading.RLock()


class Seen(NamedTuple):
    """What primitives see of a constant: ``form(constant)``, which ``name`` stands for, in the
    ``dtype``, by default that of the constant. If ``exact``, this only orders the elements: it is a
    view, or a copy of which ``back`` makes the constant."""

    name: Hashable = None
    form: Form | None = None
    exact: bool = True
    back: Form | None = None
    dtype: np.dtype | None = None


_AS_IT_IS = Seen()


def weights_of(
    constant: np.ndarray, shape: tuple[int, ...] | None = None, seen: Seen = _AS_IT_IS
) -> Weights:
    """The ``Weights`` of a constant, shared by all kernels of it, of which primitives see ``seen``
    with the dims ``shape``, by default its own."""
    key = (shape, seen.name)
    with _LOCK:
        weights = _ALL.get((id(constant), key))
        # By now the id may be that of another array.
        if weights is None or weights.constant() is not constant:
            weights = Weights(constant, key, seen)
            _ALL[id(constant), key] = weights
    return weights


OWNER = "onednn"
"""of saved copies"""


def copies_of(constant: np.ndarray) -> dict[str, np.ndarray]:
    """The copies of a constant in the layouts that primitives have asked for, as bytes, by names
    that are the same in all processes."""
    with _LOCK:
        alive = [weights for weights in _ALL.values() if weights.constant() is constant]
    copies: dict[str, np.ndarray] = {}
    for weights in alive:
        copies |= weights.named_copies()
    return copies


class _Copy(NamedTuple):
    """Memory that is filled with a constant in a layout: the bytes, None where they are those of
    the constant, and the name that they are saved under, if there is one."""

    layout: Any
    memory: Any
    ordered: np.ndarray | None
    name: str | None


class Weights:
    """A constant in the layouts that primitives have asked for, one copy for each.

    After ``release`` only the copies are held. They have the same elements in another order, so
    that ``array`` gives the same constant again.
    """

    def __init__(
        self,
        constant: np.ndarray,
        key: tuple[tuple[int, ...] | None, Hashable],
        seen: Seen,
    ) -> None:
        self._lock = threading.RLock()
        self._held: np.ndarray | None = constant
        self.constant = ref(constant)
        self._type = constant.shape, constant.dtype
        self._key = key
        self._form = seen.form
        self._exact = seen.exact
        self._back = seen.back
        self._copies: list[_Copy] = []
        self._saved = saved_copies(OWNER, constant)
        self._source: tuple[Library, Any, Any, np.ndarray | None] | None = None
        self.shape = constant.shape if key[0] is None else key[0]
        self._dtype = seen.dtype or constant.dtype

    @property
    def is_signed(self) -> bool:
        """Whether primitives see int8."""
        return self._dtype == INT8

    @property
    def is_copied(self) -> bool:
        """Whether it is in the layout of a primitive."""
        return bool(self._copies)

    def memory(
        self, library: Library, descriptor: Any, rounded: bool = False, reader: str = ""
    ) -> Any:
        """Memory with the elements of the constant in the layout of ``descriptor``; they may be
        ``rounded`` to its dtype. Sums of integers that lie behind them depend on the ``reader``."""
        lib = library.lib
        with self._lock:
            for copy in self._copies:
                if lib.dnnl_memory_desc_equal(copy.layout, descriptor):
                    return copy.memory
            layout = library.new("memory_desc", lib.dnnl_memory_desc_clone, descriptor)
            name = layout_name(library, layout, reader)
            name = None if name is None else f"{self._key!r} {name}"
            ordered = self._saved_copy(library, layout, name)
            if ordered is None:
                array = self.array()
                seen = self._seen(array)
                if not lib.dnnl_memory_desc_equal(descriptor_of(library, seen), layout):
                    ordered = reordered(library, seen, layout)
                # The form is a copy, in this very layout: a second one would be of no use.
                elif not np.may_share_memory(seen, array):
                    ordered = seen.reshape(-1).view(np.uint8)
            if ordered is None:  # no copy is needed
                filled = memory(library, layout, seen)
                self._exact = self._exact and self._back is not None
            else:
                filled = memory(library, layout, ordered)
            # From elements that were rounded the constant cannot be given back.
            if not rounded:
                self._source = library, layout, filled, ordered
            self._copies.append(_Copy(layout, filled, ordered, name))
            return filled

    def _saved_copy(self, library: Library, layout: Any, name: str | None) -> np.ndarray | None:
        """The constant in a layout, if it was saved in it."""
        copy = None if name is None else self._saved.get(name)
        size = library.lib.dnnl_memory_desc_get_size(layout)
        fits = copy is not None and copy.nbytes == size and copy.dtype == np.uint8
        return copy if fits else None

    def named_copies(self) -> dict[str, np.ndarray]:
        """The copies, by name."""
        with self._lock:
            named = {copy.name: copy.ordered for copy in self._copies}
        return {name: x for name, x in named.items() if name is not None and x is not None}

    def array(self) -> np.ndarray:
        """The constant, in memory of its own if it was let go."""
        with self._lock:
            array = self.constant()
            if array is None:
                array = self._given_back()
                self.constant = ref(array)
                with _LOCK:
                    _ALL[id(array), self._key] = self
            return array

    def release(self) -> Callable[[], np.ndarray] | None:
        """Stop holding the constant itself, if it can be given back from a copy; returns what
        does so."""
        with self._lock:
            if not self._exact or self._source is None:
                return None
            library, layout, _, ordered = self._source
            has_sums = self._dtype == INT8 and ordered is not None
            if has_sums and blocks_of(library, layout) is None:
                return None
            self._held = None
        return self.array

    def _seen(self, array: np.ndarray) -> np.ndarray:
        """The constant as primitives see it."""
        seen = array if self._form is None else self._form(array)
        shape, _ = self._key
        return seen if shape is None else seen.reshape(shape)

    def _given_back(self) -> np.ndarray:
        assert self._source is not None
        library, layout, copy, ordered = self._source
        array = np.empty(*self._type)
        seen = self._seen(array) if self._back is None else np.empty(self.shape, self._dtype)
        blocks = blocks_of(library, layout) if self._dtype == INT8 else None
        if blocks is not None and ordered is not None:
            # There may be sums behind the elements, of which oneDNN does not read such a layout.
            seen[...] = blocks.elements(ordered, INT8)
        else:
            target = descriptor_of(library, seen)
            back = reorder_primitive(library, layout, target)
            back.run({SRC: copy, DST: memory(library, target, seen)})
        if self._back is not None:
            array = self._back(seen)
        # All readers share it, as they share any constant.
        array.flags.writeable = False
        return array
