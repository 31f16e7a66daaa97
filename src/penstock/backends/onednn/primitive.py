"""Thin typed wrappers: memory descriptors, memory, primitives, and calls of these."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from penstock.backends.onednn.library import Library

# Arguments of primitives (DNNL_ARG_*).
SRC, SRC_1, DST, WEIGHTS, BIAS, SCRATCHPAD = 1, 2, 17, 33, 41, 80
SCALE, SHIFT = 51, 52
SOURCES = 1024  # the first of as many as there are

_TYPES = {"float32": "dnnl_f32", "int32": "dnnl_s32", "int8": "dnnl_s8", "uint8": "dnnl_u8"}
_TYPES["bfloat16"], _TYPES["float16"] = "dnnl_bf16", "dnnl_f16"


def known(dtype: np.dtype | None) -> bool:
    """Whether oneDNN has tensors of this dtype."""
    return dtype is not None and dtype.name in _TYPES


def post_argument(i: int, argument: int) -> int:
    """The argument of a primitive that is an ``argument`` of its post-op i."""
    return 32768 * (i + 1) | argument  # DNNL_ARG_ATTR_MULTIPLE_POST_OP


class Descriptor:
    """Shape, dtype and strides (in bytes) of a tensor; without strides, as the primitive likes."""

    def __init__(
        self,
        library: Library,
        shape: Sequence[int],
        dtype: np.dtype,
        strides: Sequence[int] | None = None,
    ) -> None:
        steps = None if strides is None else tuple(strides)
        self.handle = _descriptor(library, tuple(shape), dtype, steps)

    @classmethod
    def of(cls, library: Library, array: np.ndarray) -> Descriptor:
        """That of an array as it lies in memory."""
        return cls(library, array.shape, array.dtype, array.strides)


@lru_cache(maxsize=4096)
def _descriptor(
    library: Library, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None
) -> Any:
    """As ``Descriptor`` says; a model asks for each of its shapes several times."""
    ffi, lib = library.ffi, library.lib
    made = ffi.new("dnnl_memory_desc_t *")
    kind = getattr(lib, _TYPES[dtype.name])
    dims = ffi.new("dnnl_dim_t[]", shape)
    if strides is None:
        tag = lib.dnnl_format_tag_any
        status = lib.dnnl_memory_desc_create_with_tag(made, len(shape), dims, kind, tag)
    else:
        steps = ffi.new("dnnl_dim_t[]", [step // dtype.itemsize for step in strides])
        status = lib.dnnl_memory_desc_create_with_strides(made, len(shape), dims, kind, steps)
    library.check(status)
    return ffi.gc(made[0], lib.dnnl_memory_desc_destroy)


class Primitive:
    """A compiled primitive: ``create(desc, engine, *arguments, attr)`` is oneDNN's function for its
    descriptor, without what all of them have in common. Raises ``DnnlError``.

    ``scratchpad``: bytes of scratch memory that each call needs, as argument SCRATCHPAD.
    """

    def __init__(
        self, library: Library, create: Callable[..., int], *arguments: Any, attr: Any = None
    ) -> None:
        ffi, lib = library.ffi, library.lib
        self.library = library
        attr = attributes(library) if attr is None else attr
        desc = ffi.new("dnnl_primitive_desc_t *")
        library.check(create(desc, library.engine, *arguments, attr))
        self._desc = ffi.gc(desc[0], lib.dnnl_primitive_desc_destroy)
        made = ffi.new("dnnl_primitive_t *")
        library.check(lib.dnnl_primitive_create(made, self._desc))
        self.handle = ffi.gc(made[0], lib.dnnl_primitive_destroy)
        self.scratchpad = int(
            lib.dnnl_memory_desc_get_size(self.query(lib.dnnl_query_scratchpad_md))
        )

    def query(self, what: int) -> Any:
        """A memory descriptor of the primitive; it goes with the primitive."""
        return self.library.lib.dnnl_primitive_desc_query_md(self._desc, what, 0)

    def query_argument(self, argument: int) -> Any:
        """The memory descriptor of one of its arguments; it goes with the primitive."""
        what = self.library.lib.dnnl_query_exec_arg_md
        return self.library.lib.dnnl_primitive_desc_query_md(self._desc, what, argument)

    @property
    def implementation(self) -> str:
        """What oneDNN calls the code that it chose."""
        ffi = self.library.ffi
        text = ffi.new("const char **")
        what = self.library.lib.dnnl_query_impl_info_str
        self.library.check(self.library.lib.dnnl_primitive_desc_query(self._desc, what, 0, text))
        return str(ffi.string(text[0]).decode())

    @property
    def reference(self) -> bool:
        """Whether that is, as a whole or in a part, code that shows what is meant, which takes a
        hundred times as long as other."""
        return any(part.startswith("ref") for part in re.split(r"[+ ]", self.implementation))

    def call(self, memories: Mapping[int, Any]) -> tuple[Any, tuple[Any, ...]]:
        """The C function and its arguments that run the primitive on ``memories`` (by argument)."""
        ffi, lib = self.library.ffi, self.library.lib
        arguments = ffi.new("dnnl_exec_arg_t[]", len(memories))
        for entry, (argument, memory) in zip(arguments, memories.items(), strict=True):
            entry.arg, entry.memory = argument, memory
        # What the arguments point to lives as long as they do.
        kept = ffi.gc(arguments, _holding(id, (dict(memories), self)))
        return lib.dnnl_primitive_execute, (
            self.handle,
            self.library.stream,
            len(memories),
            kept,
        )

    def run(self, memories: Mapping[int, Any]) -> None:
        """Run it once."""
        function, arguments = self.call(memories)
        self.library.check(function(*arguments))


def attributes(library: Library) -> Any:
    """Attributes with scratch memory of the caller's."""
    ffi, lib = library.ffi, library.lib
    made = ffi.new("dnnl_primitive_attr_t *")
    library.check(lib.dnnl_primitive_attr_create(made))
    attr = ffi.gc(made[0], lib.dnnl_primitive_attr_destroy)
    mode = lib.dnnl_scratchpad_mode_user
    library.check(lib.dnnl_primitive_attr_set_scratchpad_mode(attr, mode))
    return attr


def memory(library: Library, descriptor: Any, array: np.ndarray | None) -> Any:
    """Memory as oneDNN sees it: that of ``array``, which lives at least as long, or none yet."""
    ffi, lib = library.ffi, library.lib
    made = ffi.new("dnnl_memory_t *")
    handle = ffi.NULL if array is None else ffi.cast("void *", address(array))
    library.check(lib.dnnl_memory_create(made, descriptor, library.engine, handle))
    return ffi.gc(made[0], _holding(lib.dnnl_memory_destroy, array))


def _holding(destructor: Any, held: Any) -> Any:
    """``destructor``, with ``held`` for as long as it is not called.

    No Python of ours: what a handler of signals raises in a destructor is lost, and so would be the
    interrupts of whoever wants a run to end.
    """
    made: Any = partial(destructor)
    made.held = held
    return made


def address(array: np.ndarray) -> int:
    """Where the first element of ``array`` lies."""
    start = array.__array_interface__["data"][0]
    assert isinstance(start, int)
    return start


def copying(library: Library, source: Any, target: Any, attr: Any = None) -> Primitive:
    """A copy from one layout, and dtype, to another, given as descriptors."""

    def create(desc: Any, engine: Any, attr: Any) -> int:
        reorder = library.lib.dnnl_reorder_primitive_desc_create
        return int(reorder(desc, source, engine, target, engine, attr))

    return Primitive(library, create, attr=attr)


def reordered(library: Library, array: np.ndarray, descriptor: Any) -> Any:
    """Memory of its own with the elements of ``array``, in the layout of ``descriptor``."""
    lib = library.lib
    size = lib.dnnl_memory_desc_get_size(descriptor)
    held = np.empty(size + 64, np.uint8)
    target = memory(library, descriptor, held[-address(held) % 64 :])
    source = Descriptor.of(library, array)

    made = copying(library, source.handle, descriptor)
    scratch = np.empty(made.scratchpad, np.uint8)
    made.run(
        {
            SRC: memory(library, source.handle, array),
            DST: target,
            SCRATCHPAD: memory(library, made.query(lib.dnnl_query_scratchpad_md), scratch),
        }
    )
    return target


class Weights:
    """A constant in the layouts that primitives have asked for, each made once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[tuple[Any, Any]] = []

    def memory(self, library: Library, constant: np.ndarray, descriptor: Any) -> Any:
        """Memory with the elements of ``constant`` in the layout of ``descriptor``."""
        ffi, lib = library.ffi, library.lib
        with self._lock:
            for known, found in self._made:
                if lib.dnnl_memory_desc_equal(known, descriptor):
                    return found
            copy = ffi.new("dnnl_memory_desc_t *")
            library.check(lib.dnnl_memory_desc_clone(copy, descriptor))
            kept = ffi.gc(copy[0], lib.dnnl_memory_desc_destroy)
            own = Descriptor.of(library, constant)
            if lib.dnnl_memory_desc_equal(own.handle, kept):
                made = memory(library, kept, constant)  # as it is
            else:
                made = reordered(library, constant, kept)
            self._made.append((kept, made))
            return made
