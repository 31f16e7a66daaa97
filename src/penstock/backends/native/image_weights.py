"""The weights of convolutions of images, packed for compiled code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np

from penstock.backends.native.dense import (
    GRAIN,
    packed_panels,
    padded,
    pairs_of,
    unpacked_panels,
    unpaired,
)
from penstock.backends.native.image_axes import PADDING, SeenAxis
from penstock.backends.native.image_strides import AXES
from penstock.backends.native.kernel import Tensor, Word
from penstock.core.records import NamedTuple
from penstock.core.traced import int64s
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Node
from penstock.ir.layout import line_aligned, strides_of
from penstock.ops.common.constant_cache import (
    ConstantRef,
    Reordered,
    is_held_by_bfloat16,
    reordered,
)


class Packing(NamedTuple):
    """The packed order of weights: for each phase of the result, a matrix of taps in panels for
    each of ``groups``; without groups (depthwise), one for each phase and channel."""

    taps: tuple[tuple[tuple[int, ...], ...], ...]
    """taps of each axis and phase, as kernel positions"""
    transposed: bool
    given: int
    """groups of the convolution"""
    groups: int
    shape: tuple[int, ...]
    pairs: str
    """pairs of channels: "rounded" to bfloat16, "in turn" for at most 8 filters, or "" for none"""
    repeats: int
    """repetitions of the channels of each tap, without groups"""
    phases: Sequence[tuple[tuple[int, ...], ...]]
    sizes: Sequence[int]
    """elements, or pairs, of each phase; 0 for phases that read only padding"""

    @property
    def seen(self) -> list[tuple[tuple[int, ...], ...]]:
        """The phases with taps along each axis."""
        return [phase for phase in self.phases if PADDING not in phase]

    def given_words(self, w: int, bias: np.ndarray | int | None) -> tuple[Word, ...]:
        """Return the arguments for packing the weights of input ``w`` at run time."""
        kernel = self.shape[2:]
        strides = strides_of((1,) * (AXES - len(kernel)) + kernel, 1)
        taps = [
            sum(k * step for k, step in zip(tap, strides, strict=True))
            for phase in self.seen
            for tap in product(*phase)
        ]
        size, other = math.prod(kernel), self.shape[1] * math.prod(kernel)
        steps = (size, other) if self.transposed else (other, size)
        merged = self.given // self.groups if self.groups else 1
        own = Tensor(bias, True) if isinstance(bias, int) else bias
        return Tensor(w, True), own, *int64s([size, *steps, merged, *taps])

    def pack(self, w: np.ndarray) -> tuple[np.ndarray]:
        if self.transposed:  # [channel, filter of a group, ...]
            w = w.reshape(self.given, -1, *w.shape[1:]).swapaxes(1, 2)
            w = w.reshape(-1, *w.shape[2:])
        w = w.reshape(*w.shape[:2], *[1] * (AXES + 2 - w.ndim), *w.shape[2:])
        phases = [_taps_of(w, phase) for phase in self.seen]
        if self.groups:
            packed = [_panels_of_groups(p, self) for p in phases]
        else:
            rows = [np.tile(p.reshape(len(p), -1).T, self.repeats) for p in phases]
            packed = [line_aligned(row).reshape(-1) for row in rows]
        return (packed[0] if len(packed) == 1 else line_aligned(np.concatenate(packed)),)

    def back(self, packed: np.ndarray) -> np.ndarray:
        """Return the weights from the packed ones of a single phase."""
        if self.groups:
            return _filters_of_panels(packed, self)
        rows = packed.reshape(-1, self.repeats, self.shape[0])[:, 0]
        return np.ascontiguousarray(rows.T).reshape(self.shape)

    def weights(self, w: ConstantRef) -> Reordered:
        own = self.taps if self.transposed else ()
        name = "native image", own, self.given, self.groups, self.pairs, self.repeats
        exact = self.pairs != "rounded" or is_held_by_bfloat16(w.value)
        back = None if self.transposed or not exact else self.back
        return reordered(name, w, self.pack, back, [TensorType(FLOAT32, (sum(self.sizes),))])


def _taps_of(w: np.ndarray, phase: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Return the weights of a phase's taps only."""
    for axis, taps in enumerate(phase, 2):
        # The only phase of a Conv has all taps: no copy is needed.
        if taps != tuple(range(w.shape[axis])):
            w = w.take(taps, axis)
    return w


def weights_order(
    conv: Node,
    shape: tuple[int, ...],
    axes: Sequence[SeenAxis],
    groups: int,
    pairs: str,
    repeats: int = 1,
) -> Packing:
    """Return the packed order of weights of this ``shape``."""
    taps = tuple([axis.taps for axis in axes])
    transposed, given = conv.op.name == "ConvTranspose", conv.attrs.get("group", 1)
    filters, channels = shape[0], shape[1] * given
    filters, channels = (channels, filters) if transposed else (filters, channels)
    each = channels // (2 if pairs else 1) * (padded(filters // groups) if groups else repeats)
    phases = list(product(*taps))
    sizes = [0 if PADDING in p else each * math.prod(map(len, p)) for p in phases]
    return Packing(taps, transposed, given, groups, shape, pairs, repeats, phases, sizes)


def groups_of_vectors(groups: int, filters: int) -> int:
    """Return the number of groups after merging adjacent ones up to 8 filters."""
    if groups == 1:
        return 1
    most = max(GRAIN // 2 // filters, 1)
    return groups // max(m for m in range(1, most + 1) if groups % m == 0)


def _panels_of_groups(w: np.ndarray, packing: Packing) -> np.ndarray:
    """Return the panels of each merged group."""
    given, groups = packing.given, packing.groups
    each, taps = given // groups, math.prod(w.shape[2:])
    own = w.reshape(groups, each, w.shape[0] // given, w.shape[1], taps)
    rows = own[:, 0].transpose(0, 3, 2, 1)
    if each > 1:
        matrices = np.zeros((groups, taps, each, w.shape[1], each, own.shape[2]), FLOAT32)
        for i in range(each):
            matrices[:, :, i, :, i] = own[:, i].transpose(0, 3, 2, 1)
        rows = matrices.reshape(groups, taps * each * w.shape[1], -1)
    if packing.pairs == "in turn":
        turns = np.zeros((groups, taps * each * w.shape[1] // 2, GRAIN // 2, 2), FLOAT32)
        turns[:, :, : rows.shape[-1]] = rows.reshape(groups, -1, 2, rows.shape[-1]).swapaxes(2, 3)
        return line_aligned(turns).reshape(-1)
    if packing.pairs:
        return packed_panels(*[pairs_of(matrix.reshape(-1, matrix.shape[-1])) for matrix in rows])
    return packed_panels(*rows)


def _filters_of_panels(panels: np.ndarray, packing: Packing) -> np.ndarray:
    """Return the filters from the panels of ``_panels_of_groups``."""
    given, groups, shape = packing.given, packing.groups, packing.shape
    each, taps, filters = given // groups, math.prod(shape[2:]), shape[0] // given
    own = np.empty((groups, each, filters, shape[1], taps), FLOAT32)
    dims = taps * each * shape[1], each * filters
    for group, part in zip(own, panels.reshape(groups, -1), strict=True):
        if packing.pairs == "in turn":
            matrix = part.reshape(-1, GRAIN // 2, 2)[:, : dims[1]].swapaxes(1, 2)
        elif packing.pairs:
            matrix = unpaired(unpacked_panels((dims[0] // 2, dims[1]), part), dims[0])
        else:
            matrix = unpacked_panels(dims, part)
        matrix = matrix.reshape(taps, each, shape[1], each, filters)
        for i in range(each):
            group[i] = matrix[:, i, :, i].transpose(2, 1, 0)
    return own.reshape(shape)
