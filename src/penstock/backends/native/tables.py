"""Random bits, hashes, lookups by key, and distinct elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from penstock.backends.native import by_memory, by_result, family, of_any_shape, rows_ns, str_
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.checkpoints import checkpoint
from penstock.core.records import replace
from penstock.core.types import FLOAT32, INT64, TensorType, Type
from penstock.host.native import NativeLibrary
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ops.common.dtypes import FLOAT64, INT32
from penstock.ops.onnx.random import generator_of

_COUNTERS = 64  # of an item, as in c/tables/random.c
_THREEFRY = 2  # a value of ``algorithm``
_MOST_BITS = 32  # as in c/tables/hashes.c


@family("tflite.RngBitGenerator", work=by_memory)
def random_bits(site: Site) -> NativeCall | None:
    """RngBitGenerator."""
    state, y = site.tensor(0), site.output(1)
    threefry = site.attr("algorithm", 0) == _THREEFRY
    if str_(state.dtype) != "uint64":
        return None
    if state.dims not in ((2,), (2 if threefry else 3,)):
        return None
    count, width = y.nbytes // 4, 2 if threefry else 4
    return NativeCall(
        "random_bits",
        (Tensor(0), site.result(0), site.result(1), state.dims[0], count, int(threefry)),
        items=max(math.ceil(count / (_COUNTERS * width)), 1),  # the first writes the state
        item_ns=rows_ns(15 * _COUNTERS * width),
    )


@family("tflite.LshProjection", work=by_memory)
def projection(site: Site) -> NativeCall | None:
    """LshProjection."""
    seeds, x, weights = (site.input(i) for i in range(3))
    if seeds is None or x is None or seeds.dtype != FLOAT32 or len(seeds.dims) != 2:
        return None
    rows, bits = seeds.dims
    if bits > _MOST_BITS or not x.dims or not x.dims[0]:
        return None
    if weights is not None and weights != TensorType(FLOAT32, x.dims[:1]):
        return None
    count, nbytes = x.dims[0], x.nbytes // x.dims[0]
    arrays = (Tensor(0), Tensor(1), None if weights is None else Tensor(2), site.result())
    words = (bits, count, nbytes, int(bool(site.attr("dense", 0))))
    item_ns = rows_ns(count * bits * (100 + 4 * nbytes))
    return NativeCall("projection", (*arrays, *words), rows, item_ns)


@family("tflite.HashtableLookup", work=by_result)
def by_key(site: Site) -> NativeCall | None:
    """HashtableLookup of numbers."""
    wanted, keys, values = (site.input(i) for i in range(3))
    if wanted is None or keys is None or values is None or wanted.dtype != keys.dtype:
        return None
    if str_(keys.dtype) not in ("int32", "int64") or keys.dims != values.dims[:1]:
        return None
    if not keys.elements or values.dtype is None or values.dtype.kind not in "biufc":
        return None
    arrays = (Tensor(0), Tensor(1), Tensor(2), site.result(0), site.result(1))
    nbytes = values.nbytes // keys.elements
    words = (keys.elements, nbytes, int(keys.dtype == INT64))
    item_ns = rows_ns(2 * nbytes + 60 * math.log2(keys.elements + 1), rows=0.3)
    return NativeCall("by_key", (*arrays, *words), wanted.elements, item_ns)


@of_any_shape("NonZero", "tensorflow.Where")
def nonzero(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel:
    """NonZero and TensorFlow's Where. Strings are left to NumPy's function, as by ``unique``."""
    plain = node.op.compile(node, types)
    by_axis = node.op.name == "NonZero"
    function = partial(library.functions.nonzero, plain.function, checkpoint, by_axis)
    return replace(plain, function=function)


@of_any_shape("Unique", "tensorflow.Unique", "tensorflow.UniqueWithCounts")
def unique(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel | None:
    """Unique of elements. C looks at the array of each call: what it has no code for, such as
    strings, NumPy's function computes."""
    onnx, outputs = not node.op.domain, [v.type for v in node.outputs[1:] if v is not None]
    numbers = {t.dtype for t in outputs if isinstance(t, TensorType)} - {INT64}
    if node.attrs.get("axis") is not None or len(node.inputs) > 1 or numbers - {INT32}:
        return None
    # As in c/tables/distinct.c.
    flags = (not onnx, onnx and node.attrs.get("sorted", 1), onnx, numbers)
    settings = sum(bool(flag) << bit for bit, flag in enumerate(flags)) + 16 * len(node.outputs)
    plain = node.op.compile(node, types)
    function = partial(library.functions.unique, plain.function, checkpoint, settings)
    return replace(plain, function=function)


@of_any_shape("Multinomial")
def multinomial(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Kernel | None:
    """Multinomial of float32 or float64. Draws are those of NumPy's kernel, up to the rounding of
    its sums."""
    x, output = types[0], node.outputs[0]
    dtype = output.type.dtype if output and isinstance(output.type, TensorType) else None
    if not isinstance(x, TensorType) or x.dtype not in (FLOAT32, FLOAT64):
        return None
    if dtype not in (INT32, INT64):
        return None
    bits = generator_of(node.attrs).bit_generator
    # The last keeps what the first points to.
    settings = (bits.capsule, node.attrs.get("sample_size", 1), dtype == INT64, bits)
    plain = node.op.compile(node, types)
    function = partial(library.functions.multinomial, plain.function, checkpoint, settings)
    return Kernel(function)
