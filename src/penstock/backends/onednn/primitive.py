"""Thin typed wrappers: memory descriptors, memory objects, primitives and their calls."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from penstock.backends.onednn.library import Library
from penstock.core.records import NamedTuple
from penstock.host.malloc import new_bytes
from penstock.ir.layout import ALIGNMENT, address, packed_strides

# Arguments of primitives (DNNL_ARG_*).
SRC, SRC_1, DST, WEIGHTS, BIAS, SCRATCHPAD = 1, 2, 17, 33, 41, 80
SCALE, SHIFT = 51, 52

_TYPES = {"bfloat16": "bf16", "float32": "f32", "int32": "s32", "int8": "s8", "uint8": "u8"}


def post_argument(i: int, argument: int) -> int:
    """The number of the ``argument`` of post-op i among the arguments of the primitive."""
    return 32768 * (i + 1) | argument  # DNNL_ARG_ATTR_MULTIPLE_POST_OP


def descriptor(
    library: Library, shape: Sequence[int], dtype: np.dtype, strides: Sequence[int] | None = None
) -> Any:
    """The memory descriptor of a tensor, with strides in bytes; without strides the primitive
    chooses the layout."""
    return _descriptor(library, tuple(shape), dtype, None if strides is None else tuple(strides))


@lru_cache(maxsize=256)
def _descriptor(
    library: Library, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None
) -> Any:
    """Cached, as most shapes of a model occur several times. Large models have up to 160 of them.
    Each takes 1.2 KB, and between other blocks keeps their pages from the system."""
    lib, code = library.lib, library.constant(_TYPES[dtype.name])
    if strides is None:
        create, layout = lib.dnnl_memory_desc_create_with_tag, lib.dnnl_format_tag_any
    else:
        create = lib.dnnl_memory_desc_create_with_strides
        layout = [step // dtype.itemsize for step in strides]
    return library.new("memory_desc", create, len(shape), shape, code, layout)


def descriptor_of(library: Library, array: np.ndarray) -> Any:
    """The descriptor of an array as it lies in memory."""
    return descriptor(library, array.shape, array.dtype, array.strides)


class Primitive:
    """A compiled primitive; raises ``DnnlError`` if oneDNN has none.

    Its descriptor is created by ``dnnl_<name>_primitive_desc_create``. ``arguments`` are those of
    the function between the engine and the attributes, but for the kind of propagation: a str
    names a constant (``dnnl_<str>``), None is NULL, and a list becomes an array. ``scratchpad``:
    bytes of scratch memory that each call needs, as argument SCRATCHPAD. ``releasable``: prefer an
    implementation whose code is freed with the primitive.
    """

    def __init__(
        self,
        library: Library,
        name: str,
        arguments: Iterable[Any],
        attr: Any = None,
        *,
        releasable: bool = False,
    ) -> None:
        lib, null = library.lib, library.ffi.NULL
        self.library = library
        # Reorders have an engine behind each descriptor instead.
        leading = [library.engine] if name != "reorder" else []
        if name.endswith("_forward"):
            leading.append(lib.dnnl_forward_inference)
        rest = [
            library.constant(x) if isinstance(x, str) else null if x is None else x
            for x in arguments
        ]
        create = getattr(lib, f"dnnl_{name}_primitive_desc_create")
        attr = attributes(library) if attr is None else attr
        new_desc = partial(library.new, "primitive_desc", create, *leading, *rest, attr)
        self._desc = new_desc()
        if releasable and not self._skip_kept_code():
            self._desc = new_desc()
        self.handle = library.new("primitive", lib.dnnl_primitive_create, self._desc)
        self.scratchpad = int(
            lib.dnnl_memory_desc_get_size(self.query(lib.dnnl_query_scratchpad_md))
        )

    def _skip_kept_code(self) -> bool:
        """Go on to the first implementation whose code goes with the primitive; returns whether
        there is one that is as fast.

        oneDNN 3.2 keeps the code of brgemm convolutions for good, for equal ones to come, and never
        finds code with post-ops equal (fixed after 3.3 by its pull request 1757).
        """
        while self.implementation.startswith("brgconv"):
            if self.library.lib.dnnl_primitive_desc_next_impl(self._desc):
                return False
        return self.implementation.startswith(("brdgmm", "jit"))

    def query(self, what: int, index: int = 0) -> Any:
        """A memory descriptor of the primitive, which lives as long as the primitive."""
        return self.library.lib.dnnl_primitive_desc_query_md(self._desc, what, index)

    def query_argument(self, argument: int) -> Any:
        """The memory descriptor of an argument, which lives as long as the primitive."""
        return self.query(self.library.lib.dnnl_query_exec_arg_md, argument)

    @property
    def implementation(self) -> str:
        """oneDNN's name of the code that it chose."""
        ffi, lib = self.library.ffi, self.library.lib
        text = ffi.new("const char **")
        what = lib.dnnl_query_impl_info_str
        self.library.check(lib.dnnl_primitive_desc_query(self._desc, what, 0, text))
        return str(ffi.string(text[0]).decode())

    def dtype_of(self, argument: int) -> int:
        """oneDNN's code of the dtype of an argument."""
        code = self.library.ffi.new("int[1]")
        query, what = self.library.lib.dnnl_memory_desc_query, self.library.lib.dnnl_query_data_type
        self.library.check(query(self.query_argument(argument), what, code))
        return int(code[0])

    @property
    def code_bytes(self) -> int:
        """About what it takes, its machine code included, as measured by resident memory."""
        return 150 << 10 if self.implementation.startswith("brg") else 64 << 10

    @property
    def is_reference_impl(self) -> bool:
        """Whether oneDNN fell back to a reference implementation, at least in part, which is about
        100 times slower than others."""
        return any(part.startswith("ref") for part in re.split(r"[+ ]", self.implementation))

    def scratch_memory(self, workspace: np.ndarray | None) -> Any:
        """Memory for argument SCRATCHPAD: on ``workspace`` if that is large enough, else on new
        memory."""
        if workspace is None or workspace.nbytes < self.scratchpad:
            # What a plan sets aside is enough for packed tensors; for other strides more may be
            # needed.
            workspace = np.empty(self.scratchpad, np.uint8)
        md = self.query(self.library.lib.dnnl_query_scratchpad_md)
        return memory(self.library, md, workspace if self.scratchpad else None)

    def call(self, memories: Mapping[int, Any]) -> tuple[Any, tuple[Any, ...]]:
        """The C function, and its arguments to run the primitive on ``memories``, by argument."""
        lib = self.library.lib
        arguments = self.library.ffi.new("dnnl_exec_arg_t[]", list(memories.items()))
        kept = self.library.kept(arguments, id, (dict(memories), self))
        return lib.dnnl_primitive_execute, (self.handle, self.library.stream, len(memories), kept)

    def run(self, memories: Mapping[int, Any]) -> None:
        """Run it once, with scratch memory of its own."""
        function, arguments = self.call({**memories, SCRATCHPAD: self.scratch_memory(None)})
        self.library.check(function(*arguments))


def attributes(library: Library) -> Any:
    """Attributes of a primitive whose scratch memory the caller provides."""
    lib = library.lib
    attr = library.new("primitive_attr", lib.dnnl_primitive_attr_create)
    # So that plans have scratch memory in their arena, where it is shared by steps.
    mode = lib.dnnl_scratchpad_mode_user
    library.check(lib.dnnl_primitive_attr_set_scratchpad_mode(attr, mode))
    return attr


def append_post_ops(library: Library, attr: Any, post_ops: Iterable[tuple[Any, ...]]) -> None:
    """Add post-ops to attributes: of each, the X in ``dnnl_post_ops_append_X``, and the arguments
    of that function."""
    lib = library.lib
    ops = library.new("post_ops", lib.dnnl_post_ops_create)
    for name, *arguments in post_ops:
        library.check(getattr(lib, f"dnnl_post_ops_append_{name}")(ops, *arguments))
    library.check(lib.dnnl_primitive_attr_set_post_ops(attr, ops))


def memory(library: Library, descriptor: Any, array: np.ndarray | None) -> Any:
    """A memory object on ``array``, which it keeps alive, or on no memory yet."""
    start = library.ffi.NULL if array is None else pointer(library, array)
    create = library.lib.dnnl_memory_create
    return library.new("memory", create, descriptor, library.engine, start, keep=array)


def pointer(library: Library, array: np.ndarray) -> Any:
    """The address of an array, as cffi takes it."""
    if array.flags.c_contiguous and array.dtype.kind != "V":  # others have no buffer
        return library.ffi.from_buffer(array)  # takes a third of the time of ``address``
    return library.ffi.cast("void *", address(array))


def new_memory(library: Library, descriptor: Any) -> Any:
    """A memory object on new memory of its own, which is aligned."""
    return memory(library, descriptor, described_bytes(library, descriptor))


def described_bytes(library: Library, descriptor: Any) -> np.ndarray:
    """As many new bytes as a descriptor needs, aligned."""
    size = library.lib.dnnl_memory_desc_get_size(descriptor)
    array = new_bytes(size + ALIGNMENT)
    start = -address(array) % ALIGNMENT
    return array[start : start + size]


class Blocks(NamedTuple):
    """A layout of blocks: element ``i`` of an axis lies in block ``i // n``, which are ``strides``
    elements apart, where ``n`` is the product of the ``sizes`` of the inner blocks of this axis."""

    dtype: int
    dims: list[int]
    padded: list[int]
    strides: list[int]
    sizes: list[int]
    axes: list[int]

    def elements(self, copy: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """The elements of ``copy``, bytes in this layout, in their own order."""
        rank, outer = len(self.dims), list(self.padded)
        for size, axis in zip(self.sizes, self.axes, strict=True):
            outer[axis] //= size
        inner = packed_strides(self.sizes, 1)
        strides = [step * dtype.itemsize for step in (*self.strides, *inner)]
        shape = (*outer, *self.sizes)
        apart = np.ndarray(shape, dtype, copy, 0, strides)
        order = [
            axis
            for own in range(rank)
            for axis in (own, *[rank + i for i, of in enumerate(self.axes) if of == own])
        ]
        whole = apart.transpose(order).reshape(self.padded)
        return whole[tuple(map(slice, self.dims))]


def blocks_of(library: Library, descriptor: Any) -> Blocks | None:
    """The layout of a descriptor; None if it is not made of blocks."""
    ffi, lib = library.ffi, library.lib
    query, one, many = lib.dnnl_memory_desc_query, ffi.new("int[2]"), ffi.new("dnnl_dim_t **")

    def number(what: int) -> int:  # ``one`` has room for a dnnl_dim_t, too
        library.check(query(descriptor, what, one))
        return int(one[0])

    def numbers(what: int, count: int) -> list[int]:
        library.check(query(descriptor, what, many))
        return list(ffi.unpack(many[0], count)) if count else []

    if number(lib.dnnl_query_format_kind) != lib.dnnl_blocked:
        return None
    # `Blocks` has no place for where a part of a larger layout begins.
    if number(lib.dnnl_query_submemory_offset_s64):
        return None
    rank, blocks = number(lib.dnnl_query_ndims_s32), number(lib.dnnl_query_inner_nblks_s32)
    dims, padded, strides = [
        numbers(what, rank)
        for what in (lib.dnnl_query_dims, lib.dnnl_query_padded_dims, lib.dnnl_query_strides)
    ]
    sizes, axes = [
        numbers(what, blocks) for what in (lib.dnnl_query_inner_blks, lib.dnnl_query_inner_idxs)
    ]
    return Blocks(number(lib.dnnl_query_data_type), dims, padded, strides, sizes, axes)


def layout_name(library: Library, descriptor: Any, reader: str) -> str | None:
    """A name of the layout and the dtype of a descriptor, the same for equal ones in all processes;
    None for layouts that are not made of blocks. Integers may have sums behind them. No query tells
    of these, but the ``reader``, the primitive that has asked for them: without it, no name.
    """
    lib, blocks = library.lib, blocks_of(library, descriptor)
    if blocks is None:
        return None
    dtype, *parts = blocks
    if dtype in (lib.dnnl_f32, lib.dnnl_bf16):
        return f"{dtype} {parts}"
    return f"{dtype} {parts} {reader}" if dtype == lib.dnnl_s8 and reader else None


def reorder_primitive(library: Library, source: Any, target: Any, attr: Any = None) -> Primitive:
    """The primitive that copies from one layout and dtype to another, given as descriptors."""
    return Primitive(library, "reorder", [source, library.engine, target, library.engine], attr)


def reordered(library: Library, array: np.ndarray, descriptor: Any) -> np.ndarray:
    """New bytes with the elements of ``array`` in the layout of ``descriptor``."""
    source, target = descriptor_of(library, array), described_bytes(library, descriptor)
    copy = reorder_primitive(library, source, descriptor)
    copy.run({SRC: memory(library, source, array), DST: memory(library, descriptor, target)})
    return target
