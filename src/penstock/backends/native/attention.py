"""Scaled dot-product attention as one kernel, blocked by queries and keys.

Separate steps would write the scores of all heads to memory and read them again. Here the scores of
a few queries with a block of keys stay in the L1 cache, and these keys with their values in the L2
cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from struct import Struct

import numpy as np

from penstock.backends.native import below_numpy, family, of_any_shape, part_ns
from penstock.backends.native.growable import GrowableBuffers
from penstock.backends.native.kernel import NativeCall, Site, Tensor, Word
from penstock.core.checkpoints import checkpoint
from penstock.core.records import NamedTuple
from penstock.core.traced import int64s
from penstock.core.types import FLOAT32, TensorType, Type
from penstock.host.native import NativeLibrary
from penstock.host.threads import core_budget
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel, MemoryUse
from penstock.ir.layout import strides_of
from penstock.ir.op import Attrs
from penstock.ops.common import shape_rules as rules
from penstock.ops.internal.attention import STACKED_ATTENTION
from penstock.ops.registry import MICROSOFT
from penstock.ops.result_bytes import counted
from penstock.ops.work_estimate import Workload

_KEYS, _COPIED, _MOST_PART, _TERMS, _LANES = 256, 32768, 768, 2, 16  # as in c/attention/attention.c

_LEAST = 1e-18  # the least factor of scores
_ZEROS = ("", "nan", "unseen")  # as in c/attention/attention.c
# Most queries per item if there are enough items; the least total items, and items per core.
_PART, _LEAST_ITEMS, _ITEMS_OF_CORE = 96, 8, 4


class _Sizes(NamedTuple):
    """Sizes of an Attention: the leading dims, whose last one is heads; the number of heads that
    share keys; and the sizes of each head."""

    lead: tuple[int, ...]
    group: int
    queries: int
    width: int
    keys: int
    out: int

    @property
    def heads(self) -> int:
        return math.prod(self.lead)

    @property
    def block(self) -> int:
        """Largest number of keys in a block; 0 if not even one key and value fit."""
        # The buffers for copied keys and for values have equal sizes.
        most = min(_KEYS, _COPIED // max(self.width, _padded(self.out)) // _LANES * _LANES)
        return most if self.out <= _KEYS else 0

    @property
    def parts(self) -> int:
        """Number of parts into which the queries of a head are divided. Each part copies the keys
        if these are several blocks."""
        most = math.ceil(self.queries / _PART)
        if self.keys <= self.block:
            return most
        items = max(_LEAST_ITEMS, _ITEMS_OF_CORE * core_budget())
        least = math.ceil(self.queries / _MOST_PART)
        return max(least, min(most, math.ceil(items / self.heads)))


def attention_workload(node: Node) -> Workload | None:
    """Return the workload of an Attention; None if no kernel is available."""
    types = [None if value is None else value.type for value in node.inputs]
    if any(isinstance(t, TensorType) and not t.static for t in types):
        return below_numpy(node)  # few queries
    sizes = _sizes(node, types)
    if sizes is None:
        return None
    queries, width, keys, out = sizes[2:]
    products = 2 * queries * _padded(keys) * width + 2 * queries * keys * _padded(out)
    # A single block of keys is copied once for all parts of a head that a thread takes.
    copies = 1 if keys <= sizes.block else sizes.parts
    # Separate steps would copy a transposed operand, too, once.
    sources = [value and value.producer for value in node.inputs[1:3]]
    transposed = [source is not None and source.op.name == "Transpose" for source in sources]
    transposed[0] |= not node.attrs.get("keys_last", 0)
    copied = keys * (width * (copies - transposed[0]) + out * (copies - transposed[1]))
    head = Workload("attention", copied * FLOAT32.itemsize, products, 0, queries * _padded(keys))
    return head.part(1 / sizes.heads)


@family("penstock.Attention", work=attention_workload)
def attention_call(site: Site) -> NativeCall | None:
    """Attention of many queries: head sizes of at most 256 for values and 2,048 for queries, with
    at most two biases."""
    sizes = _sizes(site.node, site.tensors[: len(site.node.inputs)])
    if sizes is None or site.output().dtype != FLOAT32:
        return None
    return _call(site, sizes, (None,) * len(site.tensors))


def _padded(n: int) -> int:
    return -(-n // _LANES) * _LANES


def _sizes(node: Node, types: Sequence[Type | None]) -> _Sizes | None:
    """Return the sizes of an Attention that the kernel supports; None for others."""
    given = [t for t in types if isinstance(t, TensorType) and t.static and t.dtype == FLOAT32]
    if len(given) < len(types) - types.count(None) or len(given) - 3 > _TERMS:
        return None
    if not _LEAST < abs(node.attrs["scale"]) < 1 / _LEAST:
        return None  # separate steps may overflow where a fused one does not, and vice versa
    q, k, v, *terms = (t.dims for t in given)
    keys = k[-1 if node.attrs.get("keys_last", 0) else -2]
    sizes = _Sizes(q[:-2], q[-3] // max(k[-3], 1), q[-2], q[-1], keys, v[-1])
    whole = (*q[:-1], keys)
    if not all(q + k + v) or not sizes.block or k[:-3] != q[:-3]:
        return None
    return sizes if all(_broadcasts(term, whole) for term in terms) else None


def _broadcasts(dims: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether ``dims`` broadcast to ``whole``."""
    pairs = zip(reversed(dims), reversed(whole), strict=False)
    return len(dims) <= len(whole) and all(n in (1, m) for n, m in pairs)


def _call(site: Site, sizes: _Sizes, strides: Sequence[tuple[int, ...] | None]) -> NativeCall:
    """Return the call for tensors of these strides."""
    output, group = len(site.node.inputs), sizes.group
    biases = [i for i in range(3, output) if site.tensors[i] is not None]
    # Heads that share keys become a separate dim, along which keys have stride 0.
    lead = (*sizes.lead[:-1], sizes.lead[-1] // group, group) if group > 1 else sizes.lead

    # Constants with non-contiguous rows are copied; other tensors are read element by element.
    copies = {
        i: np.ascontiguousarray(term)
        for i in biases
        if (term := site.constant(i)) is not None and (strides[i] or (1,))[-1] != 1
    }

    def steps_of(i: int) -> list[int]:
        type_ = site.tensors[i]
        assert type_ is not None
        own = (None if i in copies else strides[i]) or strides_of(type_.dims, 1)
        missing = len(sizes.lead) + 2 - len(type_.dims)
        dims = [*[1] * missing, *type_.dims]
        steps = [
            0 if n == 1 else step for n, step in zip(dims, [0] * missing + [*own], strict=True)
        ]
        if group > 1:
            # Heads of a group share keys and values, so their stride is 0.
            inner = steps[-3] if dims[-3] == sizes.lead[-1] and i not in (1, 2) else 0
            steps[-3:-2] = [inner * group or steps[-3], inner]
        if i == 1 and not site.attr("keys_last", 0):
            # The kernel takes keys transposed: [width, keys].
            steps[-2:] = steps[:-3:-1]
        return steps

    terms: list[Word] = [copies.get(i, Tensor(i)) for i in biases]
    missing = _TERMS - len(terms)
    steps = [steps_of(i) for i in (0, 1, 2, *biases)]
    steps += [[0] * (len(lead) + 2)] * missing
    steps.append(steps_of(output))
    parts = sizes.parts
    work = attention_workload(site.node)
    assert work is not None
    return NativeCall(
        "attention",
        (
            *(Tensor(0), Tensor(1), Tensor(2), *terms, *(None,) * missing),
            site.result(),
            len(lead),
            *int64s(lead, [*chain(*steps)]),
            *sizes[2:],
            *(parts, math.ceil(sizes.keys / sizes.block)),
            *(site.node.attrs["scale"], site.attr("softcap", 0.0)),
            *(_ZEROS.index(site.attr("zeros", "")), None, 0),
        ),
        items=sizes.heads * parts,
        item_ns=part_ns(work.part(sizes.heads * parts)),
        any_layout=True,
        restrided=partial(_call, site, sizes),
    )


# Numbers of keys that are known only at run time.

_ATTENTION = Struct("=10q2d")  # as in c/attention/attention_functions.c
_DECODER = "DecoderMaskedMultiHeadAttention"


@of_any_shape(
    *("Attention", "penstock.StackedAttention"),
    *("com.microsoft.GroupQueryAttention", "com.microsoft.DecoderMaskedMultiHeadAttention"),
    "com.microsoft.SparseAttention",
)
def cached_attention(
    library: NativeLibrary, node: Node, types: Sequence[Type | None]
) -> Kernel | None:
    """Float attention with a past: ONNX's Attention, and com.microsoft's for grouped queries or
    with a preallocated buffer. A past of unknown length grows in place (``host/c/growable.c``)."""
    attrs, stacked = node.attrs, node.op is STACKED_ATTENTION
    buffered = node.op.name == _DECODER
    grouped = node.op.domain == MICROSOFT and not buffered
    chosen = (_of_groups if grouped else _of_buffers if buffered else _of_onnx)(attrs)
    tensors = [t if isinstance(t, TensorType) else None for t in types]
    past = 3 if grouped else 5 if buffered else 4
    olds = tensors[past : past + 1] * 2 if stacked else tensors[past : past + 2]
    q, *others = [*tensors[:3], *olds]
    if len(others) < 4 or chosen is None or not _are_real(q, others, grouped):
        return None
    if len(node.outputs) != 3 - stacked or None in node.outputs:
        return None
    scale, softcap = float(attrs.get("scale") or 0), float(attrs.get("softcap") or 0)
    # A past of unknown length is a decoder's cache, whose next step is fed the present.
    grows = any(not t.static for t in others[2:] if t is not None)
    rooms = GrowableBuffers()
    settings = (
        _ATTENTION.pack(*chosen, stacked, grows, attrs.get("sparse_block_size", 0), scale, softcap),
        rooms,
    )
    # The fallback for cases that the C code, which checks the arrays of each call, does not
    # support.
    otherwise = counted(node, node.op.compile(node, types).function)
    function = partial(library.functions.cached_attention, otherwise, checkpoint, settings)
    return Kernel(function, memory=MemoryUse(grows, rooms.nbytes))


def _are_real(q: TensorType | None, others: Sequence[TensorType | None], grouped: bool) -> bool:
    """Whether queries and ``others`` (keys, values, past keys and past values) are float32.
    GroupQueryAttention may pack keys and values with the queries, and may have no past.
    """
    pairs = others[:2], others[2:]
    read = [q, *[t for pair in pairs if not grouped or any(pair) for t in pair]]
    return all(t is not None and t.dtype == FLOAT32 for t in read)


def _of_groups(attrs: Attrs) -> list[int] | None:
    """Return the settings of a GroupQueryAttention or SparseAttention in the order of the C struct;
    None if no kernel is available."""
    if attrs.get("sliding_window_cache") or attrs.get("smooth_softmax", -1) == 1:
        return None
    if {attrs.get(f"{name}_quant_type", "NONE") for name in "kv"} != {"NONE"}:
        return None
    window = max(attrs.get("local_window_size", -1), 0)
    chosen = [attrs["num_heads"], attrs["kv_num_heads"], attrs.get("causal", 1), window]
    form = 3 if "sparse_block_size" in attrs else 1
    return [*chosen, attrs.get("do_rotary", 0), attrs.get("rotary_interleaved", 0), form]


def _of_onnx(attrs: Attrs) -> list[int] | None:
    """As ``_of_groups``, for ONNX's Attention."""
    left, right = (attrs.get(f"{side}_window_size", -1) for side in ("left", "right"))
    causal = bool(attrs.get("is_causal"))
    if right != -1 or (left != -1 and not causal) or attrs.get("scale") == 0:
        return None
    if rules.dtype_attribute(attrs, "softmax_precision"):
        return None
    heads = [attrs.get(f"{name}_num_heads", 0) for name in ("q", "kv")]
    # com.microsoft's windows include the query's own key.
    return [*heads, int(causal), left + 1, *[0] * 3]


def _of_buffers(attrs: Attrs) -> list[int]:
    """As ``_of_groups``, for DecoderMaskedMultiHeadAttention."""
    return [attrs["num_heads"], attrs["num_heads"], *[0] * 4, 2]


@of_any_shape("penstock.Attention")
def attention_over_any_keys(
    library: NativeLibrary, node: Node, types: Sequence[Type | None]
) -> Kernel | None:
    """``penstock.Attention`` of floats over any number of keys."""
    if all(isinstance(t, TensorType) and t.static for t in types if t is not None):
        return None  # ``attention_call`` supports these
    if node.attrs.get("softcap") or node.attrs.get("keys_last") or len(types) > 4:
        return None
    if any(not isinstance(t, TensorType) or t.dtype != np.float32 for t in types[:3]):
        return None
    otherwise = node.op.compile(node, types).function
    scale = float(node.attrs["scale"])
    return Kernel(partial(library.functions.attention, otherwise, checkpoint, scale))


_PACKED = Struct("=2d2q")  # as in c/attention/attention_functions.c


@of_any_shape("penstock.PackedAttention")
def packed_attention(
    library: NativeLibrary, node: Node, types: Sequence[Type | None]
) -> Kernel | None:
    """Attention within each sample of packed rows."""
    read = [t for i, t in enumerate(types) if t is not None and i != 3]
    if any(not isinstance(t, TensorType) or t.dtype != FLOAT32 for t in read):
        return None
    attrs, otherwise = node.attrs, node.op.compile(node, types).function
    if not _LEAST < abs(attrs["scale"]) < 1 / _LEAST:
        return None
    zeros, keys_last = _ZEROS.index(attrs.get("zeros", "")), attrs.get("keys_last", 0)
    settings = _PACKED.pack(attrs["scale"], attrs.get("softcap", 0.0), zeros, keys_last)
    return Kernel(partial(library.functions.packed_attention, otherwise, checkpoint, settings))


_PAGED = Struct("=6q2d")  # as in c/attention/attention_functions.c


@of_any_shape("penstock.PagedAttention")
def paged_attention(
    library: NativeLibrary, node: Node, types: Sequence[Type | None]
) -> Kernel | None:
    """Attention of the rows of many requests over their pages."""
    read = [types[0], *[t for t in (*types[1:4], *types[6:]) if t is not None]]
    if any(not isinstance(t, TensorType) or t.dtype != FLOAT32 for t in read):
        return None
    attrs, otherwise = node.attrs, node.op.compile(node, types).function
    settings = _PAGED.pack(
        *(attrs["positions"], attrs["keys_at"], attrs["values_at"], attrs.get("window", 0)),
        *(attrs.get("groups", 0), attrs.get("value_size", 0)),
        *(attrs["scale"], attrs.get("softcap", 0.0)),
    )
    return Kernel(partial(library.functions.paged_attention, otherwise, checkpoint, settings))
