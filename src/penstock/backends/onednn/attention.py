"""Attention in blocks of rows: a product, its softmax, and a product of that.

In three steps, the scores of all queries with all keys would be written to memory and read again.
Here they stay in the cache: for each head, keys and values are brought into the layout that
products prefer, and then a few hundred queries at a time go through all three. Each thread has
heads of its own: the products are too small to be divided well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.algorithms.checkpoints import THREAD, checkpoint
from penstock.algorithms.records import dataclass
from penstock.backends.onednn.eltwise_algorithms import NAN_TO_ZERO
from penstock.backends.onednn.kernel import in_sequence
from penstock.backends.onednn.layouts import ITEM, padded
from penstock.backends.onednn.library import Library
from penstock.backends.onednn.post_ops import PRELU, PostOp, post_ops_of
from penstock.backends.onednn.primitive import (
    DST,
    SCRATCHPAD,
    SRC,
    SRC_1,
    WEIGHTS,
    Primitive,
    append_post_ops,
    attributes,
    descriptor,
    descriptor_of,
    memory,
    post_argument,
    reorder_primitive,
)
from penstock.host.current_run import working_for
from penstock.host.threads import fulfil, pool
from penstock.ir.graph import Node
from penstock.ir.layout import ALIGNMENT, LateArray, address
from penstock.ir.op import Kernel
from penstock.ops.internal.attention_region import AttentionRegion, attention_region
from penstock.types import FLOAT32, TensorType, Type

# Bytes of scores in a block, which the cache of a core has room for beside keys and values; and
# bytes of all scores, and of those of a head, from which on blocks pay off: fewer stay in the cache
# anyway, and a head of few positions takes longer to call primitives for than to compute.
_BLOCK = 1 << 20
_WORTH, _WORTH_HEAD = 1 << 21, 1 << 18

# Operations between which a run looks whether it must stop: some milliseconds.
_MOST_FLOPS = 1 << 29

# Room for scratch memory of primitives; where it is too small, they get memory of their own.
_SCRATCH = 1 << 17


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Attention of a fused node, in which ``post_ops`` follow the first product."""

    region: AttentionRegion
    post_ops: tuple[PostOp, ...]

    def flops(self, heads: int) -> int:
        """The operations of the products of some heads."""
        _, queries, width, keys, out = self.region.dims
        return 2 * heads * queries * keys * (width + out)

    @property
    def operands(self) -> list[int]:
        """The inputs that post-ops read, of more than one element."""
        read = [post.tensor for post in self.post_ops if post.eltwise is None]
        return [i for i in read if self.region.types[i].dims]

    @property
    def rows(self) -> int:
        """Queries in a block, such that the blocks are about equal."""
        _, queries, _, keys, _ = self.region.dims
        most = max(16, _BLOCK // (ITEM * keys))
        return -(-queries // -(-queries // most))

    @property
    def offsets(self) -> list[int]:
        """The beginnings of the parts of a workspace: queries, keys, values and results of a head,
        a block of scores, and scratch memory of primitives."""
        _, queries, width, keys, out = self.region.dims
        offsets = [0]
        for size in (queries * width, 2 * width * keys, 2 * keys * out, queries * out):
            offsets.append(_aligned(offsets[-1] + ITEM * size))
        return [*offsets, _aligned(offsets[-1] + ITEM * self.rows * keys)]

    @property
    def nbytes(self) -> int:
        """Bytes of workspace for each thread."""
        return self.offsets[-1] + _SCRATCH


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _attention_of(node: Node, types: Sequence[Type | None]) -> Attention | None:
    region = attention_region(node, types)
    if region is None:
        return None
    chain = [region.product, *region.between]
    post_ops = post_ops_of(chain, region.place, list(region.types)) if region.between else ()
    if post_ops is None or any(post.binary == PRELU for post in post_ops):
        return None
    heads, queries, _, keys, _ = region.dims
    head = ITEM * queries * keys
    if head < _WORTH_HEAD or head * heads < _WORTH:
        return None
    return Attention(region, post_ops)


def attention_kernel(library: Library, node: Node, types: Sequence[Type | None]) -> Kernel | None:
    """The kernel of a fused node with a softmax; None if it is no attention, or too small for
    blocks. Raises ``DnnlError`` if oneDNN lacks one of its primitives."""
    attention = _attention_of(node, types)
    result = node.outputs[0]
    output = None if result is None else result.type
    if attention is None or not isinstance(output, TensorType):
        return None
    constant = [value is not None and value.const is not None for value in node.inputs]
    binder = AttentionBinder(library, attention, constant, output.dims)
    example = [np.empty(type_.dims, FLOAT32) for type_ in (*attention.region.types, output)]
    with _one_thread(library):
        room = np.empty(attention.nbytes, np.uint8)
        _Program(library, attention, example[:-1], example[-1], room, range(1))

    def into(*arrays: Any) -> None:
        run, arguments = binder.bind(arrays[:-1], arrays[-1:], None)
        run(*arguments)

    def function(*inputs: Any) -> Any:
        out = np.empty(output.dims, FLOAT32)
        into(*inputs, out)
        return out

    return Kernel(
        function,
        into,
        workspace=binder.teams * attention.nbytes,
        dims_order=tuple(range(len(output.dims))),
        any_layout=True,
        prefer_bound=True,
        binder=binder,
    )


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBinder:
    """Binds attention to its arguments: programs of a few primitives, one for each thread.
    ``constant``: which inputs never change; ``dims``: those of the output."""

    library: Library
    attention: Attention
    constant: Sequence[bool]
    dims: tuple[int, ...]
    implementation = "blocks of rows"

    @property
    def teams(self) -> int:
        """The threads among which heads are divided, of those that kernels have now."""
        return min(self.library.threads, self.attention.region.dims[0])

    def bind(
        self, inputs: Sequence[Any], outputs: Sequence[Any], workspace: np.ndarray | None
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        library, attention, count = self.library, self.attention, self.teams
        # oneDNN has only reference implementations for operands with gaps in their rows.
        scattered = [i for i in attention.operands if _has_gaps(inputs[i])]
        copied = [i for i in scattered if not self.constant[i]]
        arrays = [
            np.ascontiguousarray(x)
            if i in scattered
            else _placed(x, type_.dims, in_order=i in attention.operands)
            for i, (type_, x) in enumerate(zip(attention.region.types, inputs, strict=True))
        ]
        output = _placed(outputs[0], self.dims)
        size = count * attention.nbytes
        if workspace is None or workspace.nbytes < size:
            workspace = np.empty(size, np.uint8)
        heads = range(attention.region.dims[0])
        with _one_thread(library):
            programs = [
                _Program(library, attention, arrays, output, room, heads[i::count])
                for i, room in enumerate(np.split(workspace[:size], count))
            ]
        program = partial(_at_once, library, programs) if programs[1:] else programs[0].run
        memories = [entry for program in programs for entry in program.memories]
        for own in programs:
            own.memories = []
        late = [
            _Late(library, array, memories)
            for x, array in zip((*inputs, *outputs), (*arrays, output), strict=True)
            if not isinstance(x, np.ndarray)
        ]
        if not copied and not late:
            return program, ()
        writes = bool(late) and late[-1].array is output

        def run(*given: np.ndarray) -> None:
            for i, x in zip(copied, given, strict=False):
                np.copyto(arrays[i], x)
            for place, x in zip(late, given[len(copied) :], strict=True):
                if not place.move(x) and place.array is not output:
                    np.copyto(place.array, x)
            program()
            if writes and not late[-1].moved:
                np.copyto(given[-1], output)

        of_late = [x for x in (*inputs, *outputs) if not isinstance(x, np.ndarray)]
        return run, (*[inputs[i] for i in copied], *of_late)


def _placed(x: Any, dims: tuple[int, ...], in_order: bool = False) -> np.ndarray:
    """An array; in place of one that is given during the run, memory that lies as is expected of
    that, or with its dims ``in_order``."""
    if isinstance(x, np.ndarray):
        return x
    order = x.order if isinstance(x, LateArray) else None
    if order is None or in_order:
        return np.empty(dims, FLOAT32)
    return np.empty([dims[axis] for axis in order], FLOAT32).transpose(np.argsort(order))


class _Late:
    """An array that is given during the run: ``array`` is memory in its place, and some of
    ``memories``, objects of oneDNN and their addresses, are on that."""

    def __init__(
        self, library: Library, array: np.ndarray, memories: Sequence[tuple[Any, int]]
    ) -> None:
        begin = address(array)
        self.array, self._library = array, library
        self._memories = [(m, at - begin) for m, at in memories if 0 <= at - begin < array.nbytes]
        self._begin = begin
        self.moved = False
        """whether the memory objects are on the array that was given"""

    def move(self, x: np.ndarray) -> bool:
        """Bring the memory objects to an array, if that lies as is expected, else back; return
        whether it does."""
        self.moved = x.strides == self.array.strides and x.flags.aligned
        begin = address(x if self.moved else self.array)
        if begin != self._begin:
            cast, set_handle = self._library.ffi.cast, self._library.lib.dnnl_memory_set_data_handle
            for target, offset in self._memories:
                self._library.check(set_handle(target, cast("void *", begin + offset)))
            self._begin = begin
        return self.moved


def _has_gaps(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.shape[-1] > 1 and array.strides[-1] != ITEM


@contextmanager
def _one_thread(library: Library) -> Iterator[None]:
    """Let kernels that the calling thread creates or runs meanwhile have one thread."""
    before = library.threads
    library.set_threads(1)
    try:
        yield
    finally:
        library.set_threads(before)


def _at_once(library: Library, programs: Sequence[_Program]) -> None:
    """Run the programs, each on an idle thread of the host's pool; the calling thread runs the
    first one, and those for which no thread is idle."""
    own = [programs[0]]
    taken: list[Future[None]] = []

    current = THREAD.run

    def run(program: _Program) -> None:
        library.set_threads(1)
        working_for(current, program.run)

    for program in programs[1:]:
        future: Future[None] = Future()
        if pool().offer(partial(fulfil, future, partial(run, program))):
            taken.append(future)
        else:
            own.append(program)
    try:
        with _one_thread(library):
            for program in own:
                program.run()
    finally:
        _wait(taken)
    for future in taken:
        future.result()


def _wait(futures: Sequence[Future[None]]) -> None:
    """Wait for all: they write into memory of the run. An interrupt is raised afterwards."""
    interrupt: BaseException | None = None
    while not all(future.done() for future in futures):
        try:
            wait(futures)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


class _Program:
    """The calls for given arrays, in their order."""

    def __init__(
        self,
        library: Library,
        attention: Attention,
        inputs: Sequence[np.ndarray],
        output: np.ndarray,
        workspace: np.ndarray,
        heads: range,
    ) -> None:
        self.library = library
        self.attention = attention
        self.inputs = inputs
        offsets = attention.offsets
        self.places = [workspace[a:b].view(FLOAT32) for a, b in pairwise(offsets)]
        self.scratch = workspace[offsets[-1] :]
        self.memories: list[tuple[Any, int]] = []
        """those on the arrays, and where they begin"""
        calls = list(self._calls(output, heads))
        most = max(1, _MOST_FLOPS * len(calls) // max(1, attention.flops(len(heads))))
        self.parts = [in_sequence(library, calls[i : i + most]) for i in range(0, len(calls), most)]

    def run(self) -> None:
        for part in self.parts:
            checkpoint()
            part()

    def _calls(self, output: np.ndarray, heads: range) -> Iterator[tuple[Any, ...]]:
        attention, library = self.attention, self.library
        region = attention.region
        _, queries, width, keys, out = region.dims
        read = [self.inputs[i] for i in (region.query, region.key, region.value)]
        *sources, results = map(_by_head, (*read, output))
        own_q, own_y = (
            self.places[i][: queries * n].reshape(queries, n) for i, n in ((0, width), (3, out))
        )
        scores, rows = self.places[4], attention.rows
        blocks = {rows: self._block(rows)}
        first, _, second = blocks[rows]
        if queries % rows:
            blocks[queries % rows] = self._block(queries % rows, first, second)
        layouts = [product.query_argument(WEIGHTS) for product in (first, second)]
        own = [self._memory(a, b) for a, b in zip(layouts, self.places[1:3], strict=True)]
        copies = [
            reorder_primitive(library, descriptor_of(library, source[0]), layout)
            for source, layout in zip(sources[1:], layouts, strict=True)
        ]
        # Queries and results without gaps are read and written where they are.
        ends = [(sources[0][0], own_q), (own_y, results[0])]
        copy_q, copy_y = (
            None
            if source.strides == target.strides
            else reorder_primitive(library, *[descriptor_of(library, x) for x in (source, target)])
            for source, target in ends
        )
        for head in heads:
            for source, target, copy in zip(sources[1:], own, copies, strict=True):
                yield self._call(copy, {SRC: self._of(source[head]), DST: target})
            q, y = sources[0][head], results[head]
            if copy_q:
                yield self._call(copy_q, {SRC: self._of(q), DST: self._of(own_q)})
                q = own_q
            for start in range(0, queries, rows):
                stop = min(start + rows, queries)
                one, softmax, other = blocks[stop - start]
                block = self._of(scores[: (stop - start) * keys].reshape(stop - start, keys))
                part = self._of(q[start:stop])
                result = self._of((own_y if copy_y else y)[start:stop])
                posts = {
                    post_argument(i, SRC_1): self._of(self._operand(post, head, start, stop))
                    for i, post in enumerate(attention.post_ops)
                    if post.eltwise is None
                }
                yield self._call(one, {SRC: part, WEIGHTS: own[0], DST: block, **posts})
                yield self._call(softmax, {SRC: block, DST: block})
                yield self._call(other, {SRC: block, WEIGHTS: own[1], DST: result})
            if copy_y:
                yield self._call(copy_y, {SRC: self._of(own_y), DST: self._of(y)})

    # Primitives.

    def _block(
        self, rows: int, first: Primitive | None = None, second: Primitive | None = None
    ) -> tuple[Primitive, Primitive, Primitive]:
        """The primitives of a block. Products take their weights in the layouts of those of the
        primitives ``first`` and ``second``, if these are given."""
        library = self.library
        _, _, width, keys, out = self.attention.region.dims

        def product(inner: int, columns: int, like: Primitive | None, attr: Any) -> Primitive:
            any_layout = descriptor(library, (inner, columns), FLOAT32)
            weights = like.query_argument(WEIGHTS) if like else any_layout
            ends = self._plain(rows, inner), self._plain(rows, columns)
            return Primitive(library, "matmul", [ends[0], weights, None, ends[1]], attr)

        attr = attributes(library)
        if self.attention.region.guarded:
            append_post_ops(library, attr, [NAN_TO_ZERO.call(library)])
        block = self._plain(rows, keys)
        softmax = Primitive(library, "softmax_forward", ["softmax_accurate", block, block, 1], attr)
        scaled = product(width, keys, first, self._attributes(rows))
        return scaled, softmax, product(keys, out, second, None)

    def _attributes(self, rows: int) -> Any:
        """The attributes of a product with the post-ops."""
        library, calls = self.library, []
        for post in self.attention.post_ops:
            if post.eltwise is not None:
                calls.append(post.eltwise.call(library))
            else:
                layout = descriptor_of(library, self._operand(post, 0, 0, rows))
                calls.append(("binary", library.constant(f"binary_{post.binary}"), layout))
        attr = attributes(library)
        append_post_ops(library, attr, calls)
        return attr

    # Memory.

    def _operand(self, post: PostOp, head: int, start: int, stop: int) -> np.ndarray:
        """The operand of a post-op for some rows of a head: one row, if all have the same."""
        array, lead = self.inputs[post.tensor], self.attention.region.lead
        whole = array.reshape(padded(array.shape, len(lead) + 2))
        batch = np.broadcast_to(whole, (*lead, *whole.shape[-2:]))
        matrix = batch[np.unravel_index(head, lead)]
        return matrix if matrix.shape[0] == 1 else matrix[start:stop]

    def _plain(self, rows: int, columns: int) -> Any:
        return descriptor(self.library, (rows, columns), FLOAT32, (ITEM * columns, ITEM))

    def _of(self, array: np.ndarray) -> Any:
        """A memory object on an array."""
        return self._memory(descriptor_of(self.library, array), array)

    def _memory(self, layout: Any, array: np.ndarray) -> Any:
        size = self.library.lib.dnnl_memory_desc_get_size(layout)
        if size > array.nbytes and array.flags.c_contiguous:
            array = np.empty(size, np.uint8)  # a layout with more padding than there is room for
        created = memory(self.library, layout, array)
        self.memories.append((created, address(array)))
        return created

    def _call(self, primitive: Primitive, memories: dict[int, Any]) -> tuple[Any, ...]:
        memories[SCRATCHPAD] = primitive.scratch_memory(self.scratch)
        return primitive.call(memories)[1]


def _by_head(array: np.ndarray) -> list[np.ndarray]:
    """The matrices of a stack of matrices, as views."""
    return [array[index] for index in np.ndindex(array.shape[:-2])]
