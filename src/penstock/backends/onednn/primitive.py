"""Thin typed wrappers: memory descriptors, memory objects, primitives and their calls."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from penstock.backends.onednn.library import Library
from penstock.ir.layout import ALIGNMENT, address

# Arguments of primitives (DNNL_ARG_*).
SRC, SRC_1, DST, WEIGHTS, BIAS, SCRATCHPAD = 1, 2, 17, 33, 41, 80
SCALE, SHIFT = 51, 52
SOURCES = 1024  # the first of as many as there are

_TYPES = {"float32": "dnnl_f32", "int32": "dnnl_s32", "int8": "dnnl_s8", "uint8": "dnnl_u8"}
_TYPES["bfloat16"], _TYPES["float16"] = "dnnl_bf16", "dnnl_f16"


def post_argument(i: int, argument: int) -> int:
    """The number of the ``argument`` of post-op i among the arguments of the primitive."""
    return 32768 * (i + 1) | argument  # DNNL_ARG_ATTR_MULTIPLE_POST_OP


class Descriptor:
    """Shape, dtype and strides (in bytes) of a tensor; without strides the primitive chooses."""

    def __init__(
        self,
        library: Library,
        shape: Sequence[int],
        dtype: np.dtype,
        strides: Sequence[int] | None = None,
    ) -> None:
        self.shape = tuple(shape)
        own_strides = None if strides is None else tuple(strides)
        self.handle = _descriptor(library, self.shape, dtype, own_strides)

    @classmethod
    def of(cls, library: Library, array: np.ndarray) -> Descriptor:
        """The descriptor of an array as it lies in memory."""
        return cls(library, array.shape, array.dtype, array.strides)


@lru_cache(maxsize=4096)
def _descriptor(
    library: Library, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None
) -> Any:
    """The handle of a ``Descriptor``; a model asks for each of its shapes several times."""
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
        """A memory descriptor of the primitive, which lives as long as the primitive."""
        return self.library.lib.dnnl_primitive_desc_query_md(self._desc, what, 0)

    def query_argument(self, argument: int) -> Any:
        """The memory descriptor of an argument, which lives as long as the primitive."""
        what = self.library.lib.dnnl_query_exec_arg_md
        return self.library.lib.dnnl_primitive_desc_query_md(self._desc, what, argument)

    @property
    def implementation(self) -> str:
        """oneDNN's name of the code that it chose."""
        ffi = self.library.ffi
        text = ffi.new("const char **")
        what = self.library.lib.dnnl_query_impl_info_str
        self.library.check(self.library.lib.dnnl_primitive_desc_query(self._desc, what, 0, text))
        return str(ffi.string(text[0]).decode())

    @property
    def is_reference_impl(self) -> bool:
        """True if oneDNN fell back to a reference implementation, at least in part, which is about
        100 times slower than others."""
        return any(part.startswith("ref") for part in re.split(r"[+ ]", self.implementation))

    def call(self, memories: Mapping[int, Any]) -> tuple[Any, tuple[Any, ...]]:
        """The C function, and its arguments to run the primitive on ``memories``, by argument."""
        ffi, lib = self.library.ffi, self.library.lib
        arguments = ffi.new("dnnl_exec_arg_t[]", len(memories))
        for entry, (argument, memory) in zip(arguments, memories.items(), strict=True):
            entry.arg, entry.memory = argument, memory
        # Keep alive what the arguments point to.
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
    """Attributes of a primitive whose scratch memory the caller provides."""
    ffi, lib = library.ffi, library.lib
    made = ffi.new("dnnl_primitive_attr_t *")
    library.check(lib.dnnl_primitive_attr_create(made))
    attr = ffi.gc(made[0], lib.dnnl_primitive_attr_destroy)
    mode = lib.dnnl_scratchpad_mode_user
    library.check(lib.dnnl_primitive_attr_set_scratchpad_mode(attr, mode))
    return attr


def memory(library: Library, descriptor: Any, array: np.ndarray | None) -> Any:
    """A memory object on ``array``, which it keeps alive, or on no memory yet."""
    ffi, lib = library.ffi, library.lib
    made = ffi.new("dnnl_memory_t *")
    handle = ffi.NULL if array is None else pointer(library, array)
    library.check(lib.dnnl_memory_create(made, descriptor, library.engine, handle))
    return ffi.gc(made[0], _holding(lib.dnnl_memory_destroy, array))


def pointer(library: Library, array: np.ndarray) -> Any:
    """The address of an array, as cffi takes it."""
    if array.flags.c_contiguous and array.dtype.kind != "V":  # others have no buffer
        return library.ffi.from_buffer(array)  # takes a third of the time of ``address``
    return library.ffi.cast("void *", address(array))


def _holding(destructor: Any, held: Any) -> Any:
    """``destructor``, which keeps ``held`` alive until it is called.

    It runs no Python code of ours: a signal handler may raise KeyboardInterrupt there, and an
    exception in a destructor is lost.
    """
    holding: Any = partial(destructor)
    holding.held = held
    return holding


def reorder_primitive(library: Library, source: Any, target: Any, attr: Any = None) -> Primitive:
    """The primitive that copies from one layout and dtype to another, given as descriptors."""

    def create(desc: Any, engine: Any, attr: Any) -> int:
        reorder = library.lib.dnnl_reorder_primitive_desc_create
        return int(reorder(desc, source, engine, target, engine, attr))

    return Primitive(library, create, attr=attr)


def reordered_memory(library: Library, array: np.ndarray, descriptor: Any) -> Any:
    """New memory with the elements of ``array`` in the layout of ``descriptor``."""
    lib = library.lib
    size = lib.dnnl_memory_desc_get_size(descriptor)
    held = np.empty(size + ALIGNMENT, np.uint8)
    target = memory(library, descriptor, held[-address(held) % ALIGNMENT :])
    source = Descriptor.of(library, array)

    made = reorder_primitive(library, source.handle, descriptor)
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
    """A constant in the layouts that primitives have asked for, one copy for each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: list[tuple[Any, Any]] = []

    def memory(self, library: Library, constant: np.ndarray, descriptor: Any) -> Any:
        """Memory with the elements of ``constant`` in the layout of ``descriptor``."""
        ffi, lib = library.ffi, library.lib
        with self._lock:
            for layout, copy in self._copies:
                if lib.dnnl_memory_desc_equal(layout, descriptor):
                    return copy
            clone = ffi.new("dnnl_memory_desc_t *")
            library.check(lib.dnnl_memory_desc_clone(clone, descriptor))
            layout = ffi.gc(clone[0], lib.dnnl_memory_desc_destroy)
            own = Descriptor.of(library, constant)
            if lib.dnnl_memory_desc_equal(own.handle, layout):
                copy = memory(library, layout, constant)  # no copy is needed
            else:
                copy = reordered_memory(library, constant, layout)
            self._copies.append((layout, copy))
            return copy
