"""Matrix products and experts with block-quantized weights, dequantized in registers."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.backends.native import family, rows_ns
from penstock.backends.native.kernel import WORKSPACE, Finish, NativeCall, Site, Tensor, Word
from penstock.core.shared_arrays import let_pages_go
from penstock.core.types import FLOAT32, TensorType
from penstock.host.native import in_c_order
from penstock.host.threads import core_budget
from penstock.ops.common.constant_cache import ConstantRef, Reordered, Shared, reordered, shared
from penstock.ops.microsoft.quantized_weights import PackedWeights, unpack

if TYPE_CHECKING:
    from penstock.ops.microsoft.experts import ExpertLayer

# As in c/products/blocks.c.
PANEL = 32
_MOST_BLOCKS = 2048
_TOGETHER = 8  # weights along K that are processed together


@family("com.microsoft.MatMulNBits")
def block_product(site: Site) -> NativeCall | None:
    """MatMulNBits of float32 with constant weights."""
    x, b, scales, zeros = site.tensor(0), site.weights(1), site.weights(2), site.constant(3)
    if b is None or scales is None or (zeros is None and site.input(3) is not None):
        return None
    if x.dtype != FLOAT32 or site.input(4) is not None or 0 in x.dims:
        return None
    bias = site.input(5)
    if bias is not None and bias.dtype != FLOAT32:
        return None
    packed = PackedWeights(site.node.attrs)
    if not has_panels(packed):
        return None
    codes, factors = _codes_of(packed, b), _factors_of(packed, scales, zeros)
    rows, count = math.prod(x.dims[:-1]), math.ceil(packed.n / PANEL)
    held = {1: codes} if codes.restores else {}
    if isinstance(factors, Reordered):
        held[2] = factors
    if site.attr("accuracy_level", 0) == _BY_CODES and not (site.exact or site.ordered):
        return _by_codes(site, packed, codes, factors, held)
    # The last panel has more columns than the result; they are computed in workspace.
    border = rows * PANEL * 4 if packed.n % PANEL else 0
    return NativeCall(
        "block_product",
        (
            *(Tensor(0), *codes.arrays, *_pair(factors), None if bias is None else Tensor(5)),
            *(site.result(), WORKSPACE if border else None),
            *(rows, packed.k, packed.n, max(packed.bits, 4), packed.block),
            int(site.ordered),
        ),
        items=count,
        item_ns=rows_ns(packed.k * (20 + 10 * rows)),
        workspace=border,
        keep=(codes, factors),
        reordered=held,
    )


_BY_CODES = 4
"""the ``accuracy_level`` that allows rows to become int8"""
_ROWS_OF_PIECE = 256
_PIECES = 16  # most pieces per core
_TILE = 16  # rows of a tile: codes have room for whole tiles


def _by_codes(
    site: Site,
    packed: PackedWeights,
    codes: Reordered,
    factors: _Factors,
    held: dict[int, Reordered],
) -> NativeCall:
    """Return the call of a product whose rows are quantized to int8 by block."""
    x, bias = site.tensor(0), None if site.input(5) is None else Tensor(5)
    rows, panels = math.prod(x.dims[:-1]), math.ceil(packed.n / PANEL)
    together = min(rows, _ROWS_OF_PIECE)
    of_rows = math.ceil(rows / together)
    some = max(1, of_rows * panels // (_PIECES * core_budget()))
    pieces = of_rows * math.ceil(panels / some)
    return NativeCall(
        "block_codes",
        (
            *(Tensor(0), *codes.arrays, *_pair(factors), bias, site.result(), WORKSPACE),
            *(rows, packed.k, packed.n, max(packed.bits, 4), packed.block),
            *(together, some, pieces),
        ),
        items=1,
        item_ns=rows_ns(panels * packed.k * (10 + rows)),
        workspace=math.ceil(rows / _TILE) * _TILE * (packed.k + 8 * packed.blocks),
        stages=(2, pieces),
        keep=(codes, factors),
        reordered=held,
    )


_ACTIVATIONS = ("relu", "gelu", "silu", "identity", "swiglu")
_ROWS = 32  # TOGETHER of c/products/blocks.c
# Most operations per item, a quarter of a second: all tokens may choose one expert.
_MOST_FLOPS = 6_000_000_000


@family("com.microsoft.MoE", "com.microsoft.QMoE")
def experts_call(site: Site) -> NativeCall | None:
    """MoE or QMoE, computing only each token's experts; constant weights, float32 or quantized."""
    # Lazy import: most models with block-quantized weights have no experts.
    from penstock.ops.microsoft.experts import MOE, QMOE, ROUTER_WEIGHTS, fusion_of

    layers = QMOE if site.node.op.name == "QMoE" else MOE
    x, scores, shares = (site.input(i) for i in (0, 1, ROUTER_WEIGHTS))
    if x is None or scores is None or 0 in (*x.dims, *scores.dims):
        return None
    if any(t is not None and t.dtype != FLOAT32 for t in (x, scores, shares)):
        return None
    attrs, hidden, (tokens, count) = site.node.attrs, x.dims[-1], scores.dims
    fusion, chosen = fusion_of(attrs), int(attrs.get("k", 1))
    first = site.tensor(layers[0].weights)
    inner = first.dims[1] // (2 if fusion else 1)
    words: list[Word] = []
    keep: list[Any] = []
    held: dict[int, Reordered] = {}
    for layer in layers:
        size = inner if layer.name == "fc2" else hidden
        of_layer = _layer_words(site, layer, size, keep, held)
        if of_layer is None:
            return None
        words += of_layer
    limit = float(attrs.get("swiglu_limit", math.inf))
    is_normalized = bool(attrs.get("normalize_routing_weights", 0))
    is_normalized |= shares is None and layers is QMOE
    token_flops = 6 * chosen * hidden * inner
    together = min(max(_MOST_FLOPS // token_flops // _ROWS, 1) * _ROWS, tokens)
    activation = _ACTIVATIONS.index(attrs.get("activation_type", "relu"))
    numbers = float(attrs.get("activation_alpha", 1.0)), float(attrs.get("activation_beta", 0.0))
    given = None if shares is None else Tensor(ROUTER_WEIGHTS)
    return NativeCall(
        "experts",
        (
            *(Tensor(0), Tensor(1), given, *words, site.result()),
            *(tokens, count, chosen, hidden, inner, fusion, activation, is_normalized, together),
            *(*numbers, limit, int(site.ordered)),
        ),
        items=count * math.ceil(tokens / together),
        item_ns=rows_ns(4 * hidden * inner * together * chosen / count),
        can_fail=True,  # out of memory
        keep=keep,
        reordered=held,
        # Each expert writes a separate row per token: threads share no accumulator, and the sum has
        # a fixed order.
        finish=Finish(
            (TensorType(FLOAT32, (tokens, chosen, hidden)),),
            lambda results: results.sum(axis=1).reshape(x.dims),
        ),
    )


def _layer_words(
    site: Site, layer: ExpertLayer, size: int, keep: list[Any], held: dict[int, Reordered]
) -> list[Word] | None:
    """Return the argument words of a layer, None if unsupported; their arrays are appended to
    ``keep``, and the weights in panels to ``held``."""
    from penstock.ops.microsoft.experts import packed_experts

    weights, ref = site.input(layer.weights), site.weights(layer.weights)
    if weights is None:
        return [None] * 8 if layer.name == "fc3" else None
    places = layer.scales, layer.zeros, layer.bias
    scales = site.weights(layer.scales) if layer.scales >= 0 else None
    zeros, bias = (site.constant(i) if i >= 0 else None for i in places[1:])
    given = [site.input(i) if i >= 0 else None for i in places]
    if ref is None or [x is None for x in given] != [a is None for a in (scales, zeros, bias)]:
        return None
    count, rows, _ = weights.dims
    if rows % PANEL or (bias is not None and bias.dtype != FLOAT32):
        return None
    factors: tuple[np.ndarray | None, np.ndarray | None] = None, None
    if scales is None:
        if layer.scales >= 0 or weights.dtype != FLOAT32:
            return None
        types = [TensorType(FLOAT32, (count * rows // PANEL, size, PANEL))]
        pack, back = partial(_panels_of_floats, size), partial(_rows_of_floats, weights.dims)
        panels = reordered(("native experts", weights.dims), ref, pack, back, types)
        bits, block = 32, size
    else:
        packed = packed_experts(layer, count * rows, size, site.node.attrs)
        # Per-row zero points are packed along rows.
        if not has_panels(packed) or (zeros is not None and zeros.ndim < 3):
            return None
        if packed.k != packed.blocks * packed.block:
            return None
        panels, made = _codes_of(packed, ref), _factors_of(packed, scales, zeros)
        factors, bits, block = _pair(made), max(packed.bits, 4), packed.block
        keep.append(made)
        if isinstance(made, Reordered):
            held[layer.scales] = made
    held[layer.weights] = panels
    added = None if bias is None else Tensor(layer.bias)
    return [*panels.arrays, *factors, added, size, rows, bits, block]


def has_panels(packed: PackedWeights) -> bool:
    """Whether compiled code supports weights of these sizes."""
    together = packed.k % _TOGETHER == 0 == packed.block % _TOGETHER
    return together and packed.blocks <= _MOST_BLOCKS


def _codes_of(packed: PackedWeights, b: np.ndarray | ConstantRef) -> Reordered:
    """Return the panels of codes: [panel, K / 8, 32] words of eight 4-bit codes, or [panel, K, 32]
    8-bit codes with four along K adjacent."""
    name = "native block words", packed.n, packed.k, packed.bits, packed.block
    rows, dtype = (packed.k, np.uint8) if packed.bits == 8 else (packed.k // 8, np.uint32)
    panels = TensorType(np.dtype(dtype), (math.ceil(packed.n / PANEL), rows, PANEL))
    # Padding codes after the last weight of a row are not in panels.
    back = partial(_rows, packed, b.shape) if packed.k == packed.blocks * packed.block else None
    return reordered(name, b, lambda b: (_panels(packed, b),), back, [panels])


def _panels_of_floats(k: int, weights: np.ndarray) -> tuple[np.ndarray]:
    return (_columns(weights.reshape(-1, k)),)


def _rows_of_floats(shape: tuple[int, ...], panels: np.ndarray) -> np.ndarray:
    return panels.swapaxes(1, 2).reshape(shape)


# Eight 4-bit codes, the first lowest, or four 8-bit codes already form a word in memory: panels
# transpose rows of words.


def _panels(packed: PackedWeights, b: np.ndarray) -> np.ndarray:
    rows, bits = b.reshape(packed.n, -1), packed.bits
    if bits < 4:
        # 2-bit codes are widened to 4 bits: twice the memory, but the same kernel.
        rows = _widened(bits)[rows]
    words = rows.view("<u4")[:, : packed.k * max(bits, 4) // 32]
    panels = _columns(words.astype(np.uint32, copy=False))
    if bits < 8:
        return panels
    panels ^= np.uint32(_SIGNS)
    return panels.astype("<u4", copy=False).view(np.uint8).reshape(len(panels), packed.k, PANEL)


def _rows(packed: PackedWeights, shape: tuple[int, ...], panels: np.ndarray) -> np.ndarray:
    """Return the packed codes from which ``panels`` were built."""
    bits = packed.bits
    words = panels.reshape(len(panels), -1, PANEL * panels.itemsize // 4)
    if bits == 8:
        words = panels.reshape(len(panels), -1, PANEL, 4).view("<u4")[..., 0] ^ np.uint32(_SIGNS)
    rows = in_c_order()(words.swapaxes(1, 2)).reshape(-1, words.shape[1])[: packed.n]
    rows = rows.astype("<u4", copy=False).view(np.uint8)
    if bits < 4:
        wide = _widened(bits)
        narrow = np.zeros(1 << 8 * wide.itemsize, np.uint8)
        narrow[wide] = np.arange(len(wide))
        rows = narrow[rows.view(wide.dtype)]
    return rows.reshape(shape)


_SIGNS = 0x80808080
"""XOR mask that turns four codes with zero point 128 into signed numbers"""


def _widened(bits: int) -> np.ndarray:
    """Return a table from bytes of narrower codes to 4-bit codes with zero point 8."""
    count, raised = 8 // bits, 8 - (1 << (bits - 1))
    codes = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1
    words = (codes + raised << 4 * np.arange(count)).sum(axis=1)
    return words.astype(f"<u{count // 2}")


_Panels: TypeAlias = "tuple[np.ndarray, np.ndarray | None]"
_Factors: TypeAlias = "Reordered | Shared[_Panels]"


def _factors_of(packed: PackedWeights, ref: ConstantRef, zeros: np.ndarray | None) -> _Factors:
    """Return the panels of scales, and of the terms that zero points add."""
    n, half = packed.n, 1 << (packed.bits - 1)
    if zeros is None and ref.dtype == FLOAT32:
        types = [TensorType(FLOAT32, (math.ceil(n / PANEL), packed.blocks, PANEL))]
        pack, back = partial(_panels_of_scales, n), partial(_scales, n, ref.shape)
        return reordered(("native scales", n, packed.blocks), ref, pack, back, types)
    scales = ref.value.const
    assert scales is not None

    def make() -> _Panels:
        factors = scales.reshape(n, packed.blocks).astype(FLOAT32, copy=False)
        panels = _columns(factors)
        if zeros is None:
            return panels, None
        points = zeros.reshape(n, -1)
        if zeros.dtype == np.uint8:
            points = unpack(points, packed.bits)
        shifts = (half - points[:, : packed.blocks].astype(FLOAT32)) * factors
        let_pages_go(scales)
        return panels, _columns(shifts)

    return shared(("native factors", n, packed.blocks, packed.bits), make, scales, zeros)


def _panels_of_scales(n: int, scales: np.ndarray) -> tuple[np.ndarray]:
    return (_columns(scales.reshape(n, -1)),)


def _scales(n: int, shape: tuple[int, ...], panels: np.ndarray) -> np.ndarray:
    return panels.swapaxes(1, 2).reshape(-1, panels.shape[1])[:n].reshape(shape)


def _pair(factors: _Factors) -> _Panels:
    return (factors.arrays[0], None) if isinstance(factors, Reordered) else factors.value


def _columns(matrix: np.ndarray) -> np.ndarray:
    """Return [n, k] as [panel, k, 32], zero-padded."""
    count = math.ceil(len(matrix) / PANEL)
    if len(matrix) < count * PANEL:
        padded = np.zeros((count * PANEL, matrix.shape[1]), matrix.dtype)
        padded[: len(matrix)] = matrix
        matrix = padded
    return in_c_order()(matrix.reshape(count, PANEL, -1).swapaxes(1, 2))
