"""Attention in blocks of rows: a product, its softmax, and a product of that.

In three steps, the scores of all queries with all keys would be written to memory and read again.
Here they stay in the cache: for each head, keys and values are brought into the layout that
products prefer, and then a few hundred queries at a time go through all three. Several threads each
have heads of their own: the products are too small to be divided well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock.backends.onednn.layouts import padded
from penstock.backends.onednn.library import Library
from penstock.backends.onednn.post_ops import PostOp, PostOps, post_ops_of
from penstock.backends.onednn.primitive import (
    DST,
    SCRATCHPAD,
    SRC,
    SRC_1,
    WEIGHTS,
    Descriptor,
    Primitive,
    attributes,
    memory,
    post_argument,
    reorder_primitive,
)
from penstock.host.threads import pool
from penstock.ir.graph import Node
from penstock.ir.layout import ALIGNMENT
from penstock.ir.op import Kernel
from penstock.ops.internal.zero_nan import ZERO_NAN
from penstock.types import FLOAT32, TensorType, Type

# Bytes of scores that are worked on at once: what the cache of a core has room for beside keys and
# values. What fits into it as a whole needs no blocks.
_BLOCK = 1 << 20
_WORTH = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """A fused node: softmax(post_ops(``query`` @ ``key``)) @ ``value``, by the indices of its
    inputs. ``guarded``: rows of NaN become 0."""

    types: tuple[TensorType, ...]
    constants: tuple[np.ndarray | None, ...]
    query: int
    key: int
    value: int
    post_ops: PostOps
    guarded: bool

    @property
    def dims(self) -> tuple[int, int, int, int, int]:
        """Heads, queries, the width of a query, keys, and the width of a value."""
        q, v = self.types[self.query].dims, self.types[self.value].dims
        return math.prod(q[:-2]), q[-2], q[-1], v[-2], v[-1]

    @property
    def rows(self) -> int:
        """Queries in a block, such that the blocks are about equal."""
        _, queries, _, keys, _ = self.dims
        most = max(16, _BLOCK // (FLOAT32.itemsize * keys))
        return -(-queries // -(-queries // most))


def attention_of(node: Node, types: Sequence[Type | None]) -> Attention | None:
    """The attention that a fused node is; None if it is none, or too small for blocks."""
    region = node.attrs["region"]
    nodes = list(region.nodes)
    last = nodes.pop()
    guarded = nodes[-1].op is ZERO_NAN
    if guarded:
        nodes.pop()
    softmax = nodes.pop()
    if last.op.name != "MatMul" or softmax.op.name != "Softmax" or nodes[0].op.name != "MatMul":
        return None
    place = {value: i for i, value in enumerate(region.inputs)}
    kinds: list[TensorType] = []
    for kind in types:
        if not isinstance(kind, TensorType) or not kind.static or kind.dtype != FLOAT32:
            return None
        kinds.append(kind)
    read = [*nodes[0].inputs, last.inputs[1]]
    if any(value not in place for value in read) or len(last.inputs) != 2:
        return None
    query, key, value = (place[v] for v in read if v is not None)
    q, k, v = (kinds[i].dims for i in (query, key, value))
    rank = len(q)
    if not 3 <= rank == len(k) == len(v) or not q[:-2] == k[:-2] == v[:-2] or not all(q + k + v):
        return None
    axis = softmax.attrs.get("axis", -1)
    if softmax.op.since < _SINGLE_AXIS or axis not in (-1, rank - 1):
        return None
    constants = [None if value is None else value.const for value in node.inputs]
    posts = PostOps()
    if len(nodes) > 1:
        found = post_ops_of(nodes, place, kinds, constants)
        if found is None or any(post.binary == "prelu" for post in found.ops):
            return None
        posts = found
    if FLOAT32.itemsize * math.prod(q[:-1]) * v[-2] < _WORTH:
        return None
    return Attention(tuple(kinds), tuple(constants), query, key, value, posts, guarded)


_SINGLE_AXIS = 13


def attention_kernel(library: Library, attention: Attention, output: TensorType) -> Kernel:
    """The kernel of attention; raises ``DnnlError`` if oneDNN lacks one of its primitives."""
    binder = AttentionBinder(library, attention)
    binder.check(output)

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
        workspace=binder.workspace,
        dims_order=tuple(range(len(output.dims))),
        any_layout=True,
        prefer_bound=True,
        binder=binder,
    )


class AttentionBinder:
    """Binds attention to its arguments: programs of a few primitives, one for each thread."""

    implementation = "blocks of rows"

    def __init__(self, library: Library, attention: Attention) -> None:
        self.library = library
        self.attention = attention

    @property
    def workspace(self) -> int:
        """Bytes of scratch memory for the present number of threads."""
        return _teams(self.library, self.attention) * _Space(self.attention).nbytes

    def check(self, output: TensorType) -> None:
        """Raise ``DnnlError`` now, and not in a run, if oneDNN lacks a primitive."""
        attention = self.attention
        example = [np.empty(type_.dims, FLOAT32) for type_ in attention.types]
        room = np.empty(_Space(attention).nbytes, np.uint8)
        with _one_thread(self.library):
            result = np.empty(output.dims, FLOAT32)
            _Program(self.library, attention, example, result, room, range(1))

    def bind(
        self, inputs: Sequence[Any], outputs: Sequence[Any], workspace: np.ndarray | None
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        late = [i for i, x in enumerate(inputs) if not isinstance(x, np.ndarray)]
        arrays = [
            np.empty(type_.dims, FLOAT32) if i in late else x
            for i, (type_, x) in enumerate(zip(self.attention.types, inputs, strict=True))
        ]
        programs = self._programs(arrays, outputs[0], workspace)
        program = partial(_at_once, self.library, programs) if programs[1:] else programs[0].run
        if not late:
            return program, ()
        copies = [arrays[i] for i in late]

        def run(*given: np.ndarray) -> None:
            for copy, x in zip(copies, given, strict=True):
                np.copyto(copy, x)
            program()

        return run, tuple([inputs[i] for i in late])

    def _programs(
        self, inputs: Sequence[np.ndarray], output: np.ndarray, workspace: np.ndarray | None
    ) -> list[_Program]:
        """A program for each thread that kernels now have, with heads of its own."""
        library, attention = self.library, self.attention
        count = _teams(library, attention)
        size = _Space(attention).nbytes
        if workspace is None or workspace.nbytes < count * size:
            workspace = np.empty(count * size, np.uint8)
        with _one_thread(library):
            return [
                _Program(
                    library,
                    attention,
                    inputs,
                    output,
                    workspace[i * size : (i + 1) * size],
                    range(i, attention.dims[0], count),
                )
                for i in range(count)
            ]


def _teams(library: Library, attention: Attention) -> int:
    return min(library.threads, attention.dims[0])


@contextmanager
def _one_thread(library: Library) -> Iterator[None]:
    """Let kernels that the calling thread creates or runs meanwhile have one thread."""
    before = library.threads
    if before > 1:
        library.set_threads(1)
    try:
        yield
    finally:
        if before > 1:
            library.set_threads(before)


def _at_once(library: Library, programs: Sequence[_Program]) -> None:
    """Run the programs, each on an idle thread of the host's pool; the calling thread runs the
    first one, and those for which no thread is idle."""
    own = [programs[0]]
    taken: list[Future[None]] = []
    for program in programs[1:]:
        future: Future[None] = Future()
        if pool().offer(partial(_fulfil, library, program, future)):
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


def _fulfil(library: Library, program: _Program, future: Future[None]) -> None:
    try:
        library.set_threads(1)
        program.run()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


def _wait(futures: Sequence[Future[None]]) -> None:
    """Wait for all, since they write into memory of the run. An interrupt of the calling thread is
    raised afterwards."""
    interrupt: BaseException | None = None
    while not all(future.done() for future in futures):
        try:
            wait(futures)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


class _Space:
    """The parts of the workspace: queries, keys, values and results of a head, and a block."""

    def __init__(self, attention: Attention) -> None:
        _, queries, width, keys, out = attention.dims
        sizes = [queries * width, 2 * width * keys, 2 * keys * out, queries * out]
        sizes.append(attention.rows * keys)
        self.offsets = [0]
        for size in sizes:
            end = self.offsets[-1] + FLOAT32.itemsize * size
            self.offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
        self.scratch = self.offsets.pop()
        self.nbytes = self.scratch + _SCRATCH


# Room for what primitives themselves need; where it is not enough, they get memory of their own.
_SCRATCH = 1 << 17


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
        space = _Space(attention)
        parts = [*space.offsets[1:], space.scratch]
        self.places = [
            workspace[a:b].view(FLOAT32) for a, b in zip(space.offsets, parts, strict=True)
        ]
        self.scratch = workspace[space.scratch :]
        self.calls = list(self._calls(output, heads))

    def run(self) -> None:
        execute, check = self.library.lib.dnnl_primitive_execute, self.library.check
        for arguments in self.calls:
            status = execute(*arguments)
            if status:
                check(status)

    def _calls(self, output: np.ndarray, heads: range) -> Iterator[tuple[Any, ...]]:
        attention, library = self.attention, self.library
        _, queries, width, keys, out = attention.dims
        q, k, v = (
            _by_head(self.inputs[i]) for i in (attention.query, attention.key, attention.value)
        )
        y = _by_head(output)
        own_q, own_y = (
            place[: queries * n].reshape(queries, n)
            for place, n in ((self.places[0], width), (self.places[3], out))
        )
        scores = self.places[4]
        rows = attention.rows
        first, second = (
            self._product(rows, width, keys, True),
            self._product(rows, keys, out, False),
        )
        inner = {rows: (first, self._softmax(rows, keys), second)}
        rest = queries % rows
        if rest:
            inner[rest] = (
                self._product(rest, width, keys, True, first),
                self._softmax(rest, keys),
                self._product(rest, keys, out, False, second),
            )
        key_md, value_md = first.query_argument(WEIGHTS), second.query_argument(WEIGHTS)
        copies = [
            reorder_primitive(library, self._lies(q[0]), self._lies(own_q)),
            reorder_primitive(library, self._lies(k[0]), key_md),
            reorder_primitive(library, self._lies(v[0]), value_md),
            reorder_primitive(library, self._lies(own_y), self._lies(y[0])),
        ]
        weights = self._memory(key_md, self.places[1]), self._memory(value_md, self.places[2])
        ours = self._of(own_q), weights[0], weights[1], self._of(own_y)
        for head in heads:
            for source, target, copy in zip((q, k, v), ours, copies, strict=False):
                yield self._call(copy, {SRC: self._of(source[head]), DST: target})
            for start in range(0, queries, rows):
                stop = min(start + rows, queries)
                one, softmax, other = inner[stop - start]
                block = self._of(scores[: (stop - start) * keys].reshape(stop - start, keys))
                part, result = (self._of(x[start:stop]) for x in (own_q, own_y))
                posts = self._operands(head, start, stop)
                yield self._call(one, {SRC: part, WEIGHTS: weights[0], DST: block, **posts})
                yield self._call(softmax, {SRC: block, DST: block})
                yield self._call(other, {SRC: block, WEIGHTS: weights[1], DST: result})
            yield self._call(copies[3], {SRC: ours[3], DST: self._of(y[head])})

    # Primitives.

    def _product(
        self, rows: int, inner: int, columns: int, scores: bool, like: Primitive | None = None
    ) -> Primitive:
        """The product of a block; its second operand has the layout that primitive ``like``
        prefers."""
        library = self.library
        weights = (
            Descriptor(library, (inner, columns), FLOAT32).handle
            if like is None
            else like.query_argument(WEIGHTS)
        )
        return Primitive(
            library,
            library.lib.dnnl_matmul_primitive_desc_create,
            _plain(library, rows, inner),
            weights,
            library.ffi.NULL,
            _plain(library, rows, columns),
            attr=self._attributes(rows) if scores else None,
        )

    def _softmax(self, rows: int, keys: int) -> Primitive:
        library = self.library
        attr = attributes(library)
        if self.attention.guarded:
            # oneDNN's relu turns NaN into 0, and keeps all other results of a softmax.
            posts = _post_ops(library)
            library.check(
                library.lib.dnnl_post_ops_append_eltwise(
                    posts, library.lib.dnnl_eltwise_relu, 0.0, 0.0
                )
            )
            library.check(library.lib.dnnl_primitive_attr_set_post_ops(attr, posts))
        block = _plain(library, rows, keys)
        lib = library.lib
        return Primitive(
            library,
            lib.dnnl_softmax_forward_primitive_desc_create,
            lib.dnnl_forward_inference,
            lib.dnnl_softmax_accurate,
            block,
            block,
            1,
            attr=attr,
        )

    def _attributes(self, rows: int) -> Any:
        library = self.library
        attr = attributes(library)
        posts = _post_ops(library)
        for post in self.attention.post_ops.ops:
            if post.eltwise is not None:
                name, alpha, beta = post.eltwise
                code = getattr(library.lib, f"dnnl_eltwise_{name}")
                library.check(library.lib.dnnl_post_ops_append_eltwise(posts, code, alpha, beta))
            else:
                code = getattr(library.lib, f"dnnl_binary_{post.binary}")
                operand = self._operand(post, 0, 0, rows)
                descriptor = Descriptor.of(library, operand).handle
                library.check(library.lib.dnnl_post_ops_append_binary(posts, code, descriptor))
        library.check(library.lib.dnnl_primitive_attr_set_post_ops(attr, posts))
        return attr

    # Memory.

    def _operand(self, post: PostOp, head: int, start: int, stop: int) -> np.ndarray:
        """The operand of a post-op for some rows of a head: one row, if all have the same."""
        array = self.inputs[post.tensor]
        dims = self.attention.post_ops.dims
        whole = array.reshape(padded(array.shape, len(dims)))
        batch = np.broadcast_to(whole, (*dims[:-2], *whole.shape[-2:]))
        each = batch[np.unravel_index(head, dims[:-2])]
        return each if each.shape[0] == 1 else each[start:stop]

    def _operands(self, head: int, start: int, stop: int) -> dict[int, Any]:
        return {
            post_argument(i, SRC_1): self._of(self._operand(post, head, start, stop))
            for i, post in enumerate(self.attention.post_ops.ops)
            if post.eltwise is None
        }

    def _lies(self, array: np.ndarray) -> Any:
        return Descriptor.of(self.library, array).handle

    def _of(self, array: np.ndarray) -> Any:
        """A memory object on an array."""
        return self._memory(self._lies(array), array)

    def _memory(self, descriptor: Any, array: np.ndarray) -> Any:
        size = self.library.lib.dnnl_memory_desc_get_size(descriptor)
        if size > array.nbytes and array.flags.c_contiguous:
            array = np.empty(size, np.uint8)  # a layout with more padding than there is room for
        return memory(self.library, descriptor, array)

    def _call(self, primitive: Primitive, memories: dict[int, Any]) -> tuple[Any, ...]:
        md = primitive.query(self.library.lib.dnnl_query_scratchpad_md)
        scratch = self.scratch
        if scratch.nbytes < primitive.scratchpad:
            scratch = np.empty(primitive.scratchpad, np.uint8)
        memories[SCRATCHPAD] = memory(self.library, md, scratch if primitive.scratchpad else None)
        _, arguments = primitive.call(memories)
        return arguments


def _plain(library: Library, rows: int, columns: int) -> Any:
    steps = (FLOAT32.itemsize * columns, FLOAT32.itemsize)
    return Descriptor(library, (rows, columns), FLOAT32, steps).handle


def _post_ops(library: Library) -> Any:
    made = library.ffi.new("dnnl_post_ops_t *")
    library.check(library.lib.dnnl_post_ops_create(made))
    return library.ffi.gc(made[0], library.lib.dnnl_post_ops_destroy)


def _by_head(array: np.ndarray) -> list[np.ndarray]:
    """The matrices of a stack of matrices, as views."""
    return [array[index] for index in np.ndindex(array.shape[:-2])]
