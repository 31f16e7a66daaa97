"""Copies between arbitrary layouts: Concat, Append, Tile and Reorder, and variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from penstock.backends.native import family, of_any_shape, rows_ns
from penstock.backends.native.growable import GrowableBuffers
from penstock.backends.native.kernel import NativeCall, Site, Tensor, native_kernel, site_of
from penstock.core.records import dataclass, replace
from penstock.core.traced import TRACED, int64s
from penstock.core.types import RunValue, RunValues, ShapeError, TensorType, Type
from penstock.host.native import NativeLibrary
from penstock.ir.graph import Node
from penstock.ir.kernel import Binder, BoundCall, CompiledCall, Kernel, LayoutHints, MemoryUse
from penstock.ir.layout import is_plannable, packed_strides

_SIZES = (1, 2, 4, 8, 16)  # bytes of an element
_MOST_PARTS, _MOST_DIMS = 16, 64  # of a compiled Concat


def _are_copied(types: Sequence[Type | None]) -> bool:
    """Whether all types have one dtype, which compiled code copies."""
    dtypes = {t.dtype if isinstance(t, TensorType) else None for t in types}
    (dtype,) = dtypes if len(dtypes) == 1 else (None,)
    return dtype is not None and dtype.kind in "biufcV" and dtype.itemsize in _SIZES


@of_any_shape("Concat")
def _concat(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel | None:
    if not _are_copied(types):
        return None
    axis, concatenated = node.attrs.get("axis", 1), library.functions.concatenated

    def into(*arrays: RunValue) -> None:
        concatenated(axis, arrays[-1], *arrays[:-1])

    return Kernel(partial(concatenated, axis, None), into)


@family("Concat")
def join_call(site: Site) -> NativeCall | None:
    """Concat of static shapes, also of one tensor: it reads and writes any order of dims."""
    parts = [t for t in site.tensors[:-1] if t is not None]
    if len(parts) < len(site.tensors) - 1 or len(parts) > _MOST_PARTS:
        return None
    output = site.output()
    if not _are_copied([*parts, output]) or len(output.dims) > _MOST_DIMS:
        return None
    assert output.dtype is not None
    size, axis = output.dtype.itemsize, site.attr("axis", 1) % max(len(output.dims), 1)
    # A tensor of rank 0 is copied as one of rank 1.
    shapes = [t.dims or (1,) for t in (*parts, output)]
    is_plain = TRACED.isdisjoint(map(type, chain(*shapes)))
    dense = packed_strides if is_plain else packed_strides.__wrapped__

    def restrided(strides: Sequence[tuple[int, ...] | None]) -> NativeCall:
        in_bytes = [
            tuple([size * x for x in s]) if s else dense(dims, size)
            for s, dims in zip(strides, shapes, strict=True)
        ]
        # Threads divide the result along its outermost dim, like its producers and consumers.
        outer = max(range(len(shapes[-1])), key=lambda i: (shapes[-1][i] > 1, in_bytes[-1][i]))
        table, place, begin = [len(shapes[-1]), size, outer, len(parts)], 0, 0
        for dims, own in zip(shapes[:-1], in_bytes, strict=False):
            table += [place, begin, *chain(*zip(dims, own, in_bytes[-1], strict=True))]
            place += dims[axis] * in_bytes[-1][axis]
            begin += dims[axis] if outer == axis else 0
        arrays = [Tensor(i) for i in range(len(parts))]
        words = (*int64s(table), site.result(), *arrays, *[None] * (_MOST_PARTS - len(parts)))
        items = shapes[-1][outer]
        item_ns = rows_ns(2 * output.nbytes, rows=2 * len(parts)) / max(items, 1)
        return NativeCall("join", words, items, item_ns, restrided=restrided)

    return restrided([None] * len(site.tensors))


@family("ai.onnx.ml.FeatureVectorizer")
def vectorizer_call(site: Site) -> NativeCall | None:
    """FeatureVectorizer of float32 that takes all features of each input: a Concat."""
    parts = [t for t in site.tensors[:-1] if t is not None and len(t.dims) == 2]
    widths = [t.dims[1] for t in parts]
    if len(parts) < len(site.tensors) - 1 or {t.dims[0] for t in parts} != {site.output().dims[0]}:
        return None
    return join_call(site) if [*site.attr("inputdimensions", widths)] == widths else None


@of_any_shape("Tile")
def _tile(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel | None:
    tiled, repeats = library.functions.tiled, node.const(1)
    if node.op.since < 6 or not _are_copied(types[:1]):
        return None
    if repeats is not None and repeats.ndim == 1 and repeats.min(initial=0) >= 0:
        known = repeats.tolist()
        return Kernel(lambda x, _: tiled(x, *known))

    def run(x: np.ndarray, repeats: np.ndarray) -> Any:
        times = repeats.tolist()
        if times and min(times) < 0:
            raise ShapeError(f"repeats {times} must not be negative")
        return tiled(x, *times)

    return Kernel(run)


@of_any_shape("Split")
def _split(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel | None:
    """Split with known axis and sizes: one call creates all views."""
    outputs = [None if value is None else value.type for value in node.outputs]
    x, axis = types[0], node.attrs.get("axis", 0)
    if not isinstance(x, TensorType) or x.shape is None or len(outputs) < 2:
        return None
    parts = [t.shape for t in outputs if isinstance(t, TensorType) and t.shape is not None]
    sizes = [shape[axis] for shape in parts]
    if len(sizes) < len(outputs) or not all(isinstance(size, int) for size in sizes):
        return None
    function = partial(library.functions.views, axis % len(x.shape), tuple(sizes))
    return replace(node.op.compile(node, types), function=function)


@of_any_shape("tensorflow.Unpack")
def _unpack(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel | None:
    x, axis = types[0], node.attrs.get("axis", 0)
    shape = x.shape if isinstance(x, TensorType) else None
    if not shape or not -len(shape) <= axis < len(shape) or len(node.outputs) < 2:
        return None
    if shape[axis] != len(node.outputs):  # unknown, or an error that NumPy's kernel reports
        return None
    function = partial(library.functions.views, axis % len(shape), None)
    return replace(node.op.compile(node, types), function=function)


@of_any_shape("penstock.Reorder")
def _reorder(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel | None:
    """Reorder: a copy from any layout into another."""
    site = site_of(library, node, types)
    call = None if site is None else join_call(site)
    if site is None or call is None:
        return None
    call = replace(call, dims_order=tuple(node.attrs["order"]))
    kernel = native_kernel(site, call)
    return replace(kernel, layout=replace(kernel.layout, contiguous_inputs=()))


@dataclass(frozen=True, slots=True, eq=False)
class _VariableBinder(Binder):
    """Binds functions of variables, which keep Python's calling convention in sequences too."""

    into: Callable[..., RunValue]

    @property
    def compiled_call(self) -> CompiledCall:
        return lambda function, arguments: None

    def bind(
        self, inputs: RunValues, outputs: RunValues, workspace: np.ndarray | None
    ) -> BoundCall:
        return self.into, (*inputs, *outputs)


@of_any_shape("tensorflow.ReadVariableOp")
def _read(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel | None:
    from penstock.ops.tensorflow.state import named_variable

    variable, (output,) = named_variable(node), node.outputs
    if variable is None or output is None or not is_plannable(output.type):
        return None
    function = node.op.compile(node, types).function
    into = partial(library.functions.variable_read, variable)
    return Kernel(function, into, _VariableBinder(into), layout=LayoutHints(contiguous=True))


@of_any_shape("tensorflow.AssignVariableOp")
def _assign(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel | None:
    from penstock.ops.tensorflow.state import named_variable

    variable = named_variable(node)
    function = partial(library.functions.variable_assign, variable)
    return None if variable is None else Kernel(function, function, _VariableBinder(function))


@of_any_shape("penstock.Append")
def _append(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel | None:
    """Append: in place in the buffer of input 0 if that has spare capacity (``c/growable.c``)."""
    if not _are_copied(types):
        return None
    rooms = GrowableBuffers()
    function = partial(library.functions.appended, rooms, node.attrs["axis"])
    return Kernel(function, memory=MemoryUse(checks_budget=True, capacity_bytes=rooms.nbytes))
