"""Products with weights of a few bits in blocks, which are dequantised in registers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from penstock.backends.native.kernel import WORKSPACE, NativeCall, Site, Tensor
from penstock.ops.common.constant_cache import Shared, shared
from penstock.ops.microsoft.quantized_weights import PackedWeights, unpack
from penstock.types import FLOAT32

# As in c/blocks.c.
PANEL = 32
_MOST_BLOCKS = 2048
_TOGETHER = 8  # weights along K that are taken together


class BlockPanels(NamedTuple):
    """Weights as compiled code reads them (``c/blocks.c``)."""

    codes: np.ndarray
    scales: np.ndarray
    shifts: np.ndarray | None


def block_product(site: Site) -> NativeCall | None:
    """The product of float32 with constant weights."""
    x, weights = site.input(0), [site.constant(i) for i in (1, 2, 3)]
    missing = [i for i in (1, 2, 3) if site.input(i) is not None and site.constant(i) is None]
    if x is None or missing or x.dtype != FLOAT32 or site.input(4) is not None or 0 in x.dims:
        return None
    packed = PackedWeights(site.node.attrs)
    if not has_panels(packed):
        return None
    held = block_panels(packed, *weights)
    panels: BlockPanels = held.value
    rows, count = math.prod(x.dims[:-1]), math.ceil(packed.n / PANEL)
    border = rows * PANEL * 4 if packed.n % PANEL else 0
    return NativeCall(
        "block_product",
        (
            *(Tensor(0), *panels, None if site.input(5) is None else Tensor(5)),
            *(site.result(), WORKSPACE if border else None),
            *(rows, packed.k, packed.n, max(packed.bits, 4), packed.block),
        ),
        items=count,
        item_ns=packed.k * (1 + rows * 0.5),
        workspace=border,
        keep=held,
    )


def has_panels(packed: PackedWeights) -> bool:
    """Whether compiled code takes weights of these sizes."""
    together = packed.k % _TOGETHER == 0 == packed.block % _TOGETHER
    return together and packed.blocks <= _MOST_BLOCKS


def block_panels(packed: PackedWeights, *weights: Any) -> Shared[BlockPanels]:
    """The panels of weights, scales and zero points (or None)."""
    name = "native blocks", packed.n, packed.k, packed.bits, packed.block
    return shared(name, lambda: _panels(packed, *weights), *weights)


def _panels(
    packed: PackedWeights, b: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None
) -> BlockPanels:
    n, k, bits, blocks = packed.n, packed.k, packed.bits, packed.blocks
    half = 1 << (bits - 1)
    codes = b.reshape(n, -1)
    if bits < 8:
        codes = np.stack([codes >> i & (1 << bits) - 1 for i in range(0, 8, bits)], axis=-1)
    codes = codes.reshape(n, -1)[:, :k]
    if bits < 4:
        codes = codes + (8 - half)
    columns = _columns(codes)
    if bits == 8:
        columns = np.ascontiguousarray(columns ^ 128)
    else:
        words = columns.reshape(-1, k // 8, 8, PANEL)
        columns = np.zeros((len(words), k // 8, PANEL), np.uint32)
        for i in range(8):
            columns |= words[:, :, i].astype(np.uint32) << 4 * i
    factors = scales.reshape(n, blocks).astype(FLOAT32, copy=False)
    shifts = None
    if zeros is not None:
        points = zeros.reshape(n, -1)
        if zeros.dtype == np.uint8:
            points = unpack(points, bits)
        shifts = _columns((half - points[:, :blocks].astype(FLOAT32)) * factors)
    return BlockPanels(columns, _columns(factors), shifts)


def _columns(matrix: np.ndarray) -> np.ndarray:
    """[n, k] as [panel, k, 32], padded with zeros."""
    count = math.ceil(len(matrix) / PANEL)
    padded = np.zeros((count * PANEL, matrix.shape[1]), matrix.dtype)
    padded[: len(matrix)] = matrix
    return np.ascontiguousarray(padded.reshape(count, PANEL, -1).swapaxes(1, 2))
