"""Elements kept, set or moved by their places: triangles, one-hot vectors, sequences in reverse."""

from __future__ import annotations

import math

import numpy as np

from penstock.backends.native import family, rows_ns
from penstock.backends.native.kernel import NativeCall, Site, Tensor
from penstock.core.types import FLOAT32, INT64, STRING, TensorType
from penstock.ops.common.dtypes import INT32
from penstock.ops.common.shape_rules import normalize_axis
from penstock.ops.onnx.pooling import unpooled_shape


def _size(x: TensorType | None) -> int:
    """The bytes of an element; 0 if there is none, or it is a string."""
    if x is None or x.dtype is None or x.dtype == STRING or not x.elements:
        return 0
    return x.dtype.itemsize


@family("Trilu")
def trilu(site: Site) -> NativeCall | None:
    """Trilu with a constant diagonal."""
    x, k = site.tensor(0), site.constant(1)
    if not _size(x) or len(x.dims) < 2 or (k is None and site.input(1) is not None):
        return None
    if k is not None and k.size != 1:
        return None
    rows, columns = x.dims[-2:]
    diagonal = 0 if k is None else max(-rows, min(int(k.item()), columns))
    words = (rows, columns, diagonal, site.attr("upper", 1), _size(x))
    row_ns = rows_ns(columns * _size(x), rows=0.3)
    return NativeCall("triangle", (Tensor(0), site.result(), *words), x.elements // columns, row_ns)


@family("EyeLike")
def eye_like(site: Site) -> NativeCall | None:
    """EyeLike."""
    y = site.output()
    if not _size(y):
        return None
    rows, columns = y.dims
    words = (np.ones(1, y.dtype), columns, max(-rows, min(site.attr("k", 0), columns)), _size(y))
    row_ns = rows_ns(columns * _size(y), rows=0.3)
    return NativeCall("diagonal", (site.result(), *words), rows, row_ns)


@family("OneHot", "tensorflow.OneHot")
def one_hot(site: Site) -> NativeCall | None:
    """OneHot of integers with a constant depth; TensorFlow's with constant values, the second
    first."""
    indices, depth, y = site.tensor(0), site.constant(1), site.output()
    pair, values = [site.constant(i) for i in (3, 2)], site.tensor(2)
    if depth is None or values.dtype != y.dtype:
        return None
    known = np.array([x.item() for x in pair if x is not None and x.size == 1], y.dtype)
    if known.size < 2 and values.dims != (2,):
        return None
    if indices.dtype not in (INT32, INT64) or _size(y) not in (1, 2, 4, 8):
        return None
    axis = normalize_axis(site.attr("axis", -1), len(y.dims))
    inner, from_end = math.prod(y.dims[axis + 1 :]), site.node.op.since == 11
    words = (y.dims[axis], inner, int(indices.dtype == INT64), int(from_end))
    return NativeCall(
        f"classes_{_size(y)}",
        (Tensor(0), known if known.size > 1 else Tensor(2), site.result(), *words),
        items=math.prod(y.dims[:axis]),
        item_ns=rows_ns(inner * (40 + y.dims[axis] * _size(y)), rows=0.3),
    )


@family("ReverseSequence")
def reverse_sequence(site: Site) -> NativeCall | None:
    """ReverseSequence."""
    x, lengths = site.tensor(0), site.tensor(1)
    time_first = site.attr("time_axis", 0) == 0
    if not _size(x) or len(x.dims) < 2 or lengths.dtype != INT64:
        return None
    times, batches = x.dims[:2] if time_first else x.dims[1::-1]
    if {site.attr("time_axis", 0), site.attr("batch_axis", 1)} != {0, 1}:
        return None
    if lengths.dims != (batches,):
        return None
    words = (times, batches, x.nbytes // (times * batches), int(time_first))
    return NativeCall(
        "sequences",
        (Tensor(0), Tensor(1), site.result(), *words),
        items=x.dims[0],
        item_ns=rows_ns(x.dims[1] * words[2], rows=0.4 * x.dims[1]),
        can_fail=True,
    )


@family("com.microsoft.NGramRepeatBlock")
def without_repeated(site: Site) -> NativeCall | None:
    """NGramRepeatBlock."""
    ids, scores = site.tensor(0), site.tensor(1)
    if (ids.dtype, scores.dtype) != (INT64, FLOAT32):
        return None
    (rows, words), length = scores.dims, ids.dims[1]
    size = min(site.node.attrs["ngram_size"], length + 1)
    return NativeCall(
        "repeated",
        (Tensor(0), Tensor(1), site.result(), length, words, size),
        items=rows,
        item_ns=rows_ns(2 * words + 4 * length, rows=1),
        inplace=(1,),
        can_fail=True,
    )


@family("MaxUnpool")
def max_unpool(site: Site) -> NativeCall | None:
    """MaxUnpool whose indices are those of the result."""
    x, places, y = site.tensor(0), site.tensor(1), site.output()
    if _size(x) not in (2, 4, 8) or places.dtype != INT64:
        return None
    if unpooled_shape(x, site.node.attrs) != y.dims:
        return None
    words = (Tensor(0), Tensor(1), site.result(), x.elements, y.elements)
    item_ns = rows_ns(20 * x.elements + y.elements)
    return NativeCall(f"unpooled_{_size(x)}", words, 1, item_ns, can_fail=True)


@family("TensorScatter")
def tensor_scatter(site: Site) -> NativeCall | None:
    """TensorScatter."""
    x, update, starts = site.tensor(0), site.tensor(1), site.input(2)
    if not _size(x) or not update.elements:
        return None
    axis = normalize_axis(site.attr("axis", -2), len(x.dims))
    rows, entry = math.prod(x.dims[1:axis]), math.prod(x.dims[axis + 1 :]) * _size(x)
    if starts is not None and (starts.dtype not in (INT32, INT64) or starts.dims != x.dims[:1]):
        return None
    wide, mode = starts is not None and starts.dtype == INT64, site.attr("mode", "linear")
    return NativeCall(
        "updated",
        (
            *(Tensor(0), Tensor(1), None if starts is None else Tensor(2), site.result()),
            *(rows, x.dims[axis], update.dims[axis], entry),
            *(int(wide), int(mode == "circular")),
        ),
        items=x.dims[0] * rows,
        item_ns=rows_ns(x.dims[axis] * entry / 4, rows=2),
        inplace=(0,),
        can_fail=True,
    )
