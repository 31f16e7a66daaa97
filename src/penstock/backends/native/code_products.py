"""Quantized (8-bit) convolutions and matrix products with quantized or float results: calls of
``quantized_convolution.c`` for channels-last images, and for rows of matrices.

A matrix product is a convolution of an image of one row, whose columns are the rows of the product.
Weights are constants, except in products of two computed matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from penstock.backends.native import part_ns
from penstock.backends.native.bounds import bounds_of
from penstock.backends.native.image_strides import WINDOW, of_any_strides
from penstock.backends.native.integer_panels import IntegerPanels, integer_panels, panel_types
from penstock.backends.native.kernel import WORKSPACE, NativeCall, Site, Tensor
from penstock.core.records import NamedTuple, replace
from penstock.core.traced import int64s
from penstock.core.types import FLOAT32, TensorType
from penstock.ir.graph import Node, Value
from penstock.ir.layout import line_aligned, new_lines
from penstock.ops.common.constant_cache import ConstantRef, Reordered, reordered
from penstock.ops.common.dtypes import INT8, INT32, UINT8
from penstock.ops.common.fixed_point import Multiplier
from penstock.ops.common.windows import Window, windows
from penstock.ops.internal.fused import is_fused
from penstock.ops.work_estimate import Workload

# As in c/windows/quantized_convolution.c.
_PANEL, _GROUP, CHUNK, _COPIED, _LINES, MOST_TAPS = 32, 4, 64, 65536, 4, 256
_ONE, _SLACK = float(1 << 15), 2
TILE = 64  # bytes per row of a tile (AMX)
_ITEMS, _LEAST_WORK = 8, 1 << 22  # items that suffice for a call; operations of one
_LEAST_WEIGHTS, _MOST_WEIGHTS = 1 << 17, 1 << 19  # weight bytes: of an item; that stay cached

_POINT = Window(1, 1, 1)


class Rescaling(NamedTuple):
    """Conversion of integer accumulators to results, by filter: (accumulator + ``terms``) *
    ``factors`` + ``offsets``. Results are floats, clipped to ``low`` and ``high``, or codes with
    the range and zero point in ``bounds`` (``code_bounds``). With ``exact`` multipliers, codes are
    computed in integer arithmetic, and factors only give a first estimate. Tensors hold floats, per
    tensor or per filter; so may an array of factors."""

    terms: np.ndarray
    factors: np.ndarray | Tensor | None = None
    offsets: np.ndarray | Tensor | None = None
    bounds: np.ndarray | None = None
    low: float = -math.inf
    high: float = math.inf
    by_filter: bool = True
    """whether factors are per filter"""
    exact: Multiplier | None = None

    def of_each(self, exact: Multiplier) -> Rescaling:
        """Return this with exact multipliers, per tensor or per filter."""
        return self._replace(exact=Multiplier(*[of_each(part, self.terms.size) for part in exact]))

    def of_codes(
        self, arranged: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return constant factors and offsets as compiled code reads them, and the bounds."""
        factors, offsets, bounds = self.factors, self.offsets, self.bounds
        assert isinstance(factors, np.ndarray) and isinstance(offsets, np.ndarray)
        assert bounds is not None
        if self.exact is None:
            one, two = arranged(factors.astype(FLOAT32)), arranged(offsets.astype(FLOAT32))
            return line_aligned(one), line_aligned(two), bounds
        numbers, shifts = [arranged(part.astype(INT32)) for part in self.exact]
        bounds = bounds.copy()
        _, zero, low, *_ = view = bounds.view(np.int64)
        view[-1] = numbers.size if (self.exact.shifts > 0).all() else -numbers.size
        factors = np.ldexp(_ONE * numbers, -31 - shifts)
        # The amount that the first rounding, to an integer, adds to ties of the second one.
        offsets = np.ldexp(_ONE / 2, -shifts) * (numbers > 0)
        offsets += _ONE / 2 + _SLACK if low == zero else 0
        return _behind_each_other(factors, numbers), _behind_each_other(offsets, shifts), bounds


def _behind_each_other(reals: np.ndarray, integers: np.ndarray) -> np.ndarray:
    """Return float32 numbers followed by int32 numbers, in one array."""
    joined = new_lines((2, reals.size), FLOAT32)
    joined[0] = reals
    joined[1].view(INT32)[:] = integers
    return joined.reshape(-1)


def of_each(numbers: np.ndarray, count: int) -> np.ndarray:
    """Broadcast one or ``count`` numbers to ``count``."""
    if numbers.shape == (count,):
        return numbers
    return numbers.repeat(count) if numbers.size == 1 else np.broadcast_to(numbers, (count,))


class Operand(NamedTuple):
    """Codes computed at run time, and their zero point: a number or a one-element tensor."""

    tensor: int
    zero: int | Tensor = 0


class CodeWeights(NamedTuple):
    """Weights from the constant ``source``: its ``codes`` with ``dims`` [filters, channels per
    group, taps of each axis] and zero points ``zeros``. ``back`` returns the inverse for a number
    of rows of the panels."""

    source: np.ndarray | ConstantRef
    dims: tuple[int, ...]
    codes: Callable[[np.ndarray], np.ndarray]
    zeros: np.ndarray
    name: tuple
    back: Callable[[int], Callable] | None = None
    groups: int = 1


class Axes(NamedTuple):
    """Number of images and their axes, with rows and columns swapped if ``turned``."""

    images: int
    rows: Window
    columns: Window
    planes: Window = _POINT
    turned: bool = False

    @property
    def are_rows(self) -> bool:
        """Whether images have one element per channel, as rows of a matrix do."""
        return self.planes == self.rows == self.columns == _POINT


class _Depth(NamedTuple):
    """Reduction depth of one position: ``parts`` of ``part`` codes each, padded to ``size``; tiles
    process ``deep`` codes at once."""

    parts: int
    part: int
    size: int
    deep: int


class _Packed(NamedTuple):
    """Weights packed in panels, with the sums and zero points of ``filters``; ``channels`` and
    ``filters`` are per group; panels are None until known. ``where`` has the offsets of each group
    in the input and in the result, and its weights, of ``weights_step`` bytes, ``filter_step``
    padded filters, and ``factors_step`` factors."""

    depth: _Depth
    channels: int
    filters: int
    where: np.ndarray
    weights_step: int
    filter_step: int
    factors_step: int = 0
    panels: np.ndarray | None = None
    sums: np.ndarray | None = None
    zeros: np.ndarray | None = None


def axes_of(site: Site, node: Node, tensor: int, taps: Sequence[int]) -> Axes | None:
    """Return the axes of the input ``tensor`` as images; None if no kernel is available."""
    x = site.tensor(tensor)
    if not 3 <= len(x.dims) <= 5 or 0 in (*x.dims, *site.output().dims, *taps):
        return None
    axes = [_POINT] * (5 - len(x.dims))
    axes += list(windows(node.attrs, taps, x.dims[2:]))
    if False in [axis.addressable for axis in axes]:
        return None
    # An image of one column is transposed to a row, whose taps are computed together.
    planes, rows, columns = axes
    turned = columns == _POINT
    rows, columns = (columns, rows) if turned else (rows, columns)
    return Axes(x.dims[0], rows, columns, planes, turned)


def products_of_images(
    site: Site, axes: Axes, x: Operand, weights: CodeWeights, rescaling: Rescaling
) -> NativeCall | None:
    """Return a call for a convolution of images of any strides with ``weights``, or None."""
    numbers = x.zero, rescaling.factors
    by_image = any(_step_of_images(site, axes, own) for own in numbers)
    if axes.are_rows and weights.groups == 1 and not by_image:
        return products_of_rows(site, x, weights, rescaling)
    call = _products(site, axes, x, _merged(weights), rescaling)
    if call is None:
        return None
    images = x.tensor, len(site.node.inputs)
    return of_any_strides(site, call, images, turned=axes.turned)


def products_of_rows(
    site: Site, x: Operand, weights: CodeWeights, rescaling: Rescaling
) -> NativeCall | None:
    """Return the call of a product of contiguous rows, which become the columns of one image."""
    type_, (n, k, *_) = site.tensor(x.tensor), weights.dims
    if 0 in (*type_.dims, n) or not type_.dims:
        return None
    call = _products(site, _axes_of_rows(type_.elements // k), x, weights, rescaling)
    return None if call is None else _of_rows(call, k, n)


def products_of_matrices(
    site: Site, x: Operand, w: Operand, rescaling: Rescaling
) -> NativeCall | None:
    """Return the call of a product of two computed matrices, with any batch dims."""
    a, b, dims = site.tensor(x.tensor), site.tensor(w.tensor), site.output().dims
    if min(len(a.dims), len(b.dims)) < 2 or 0 in (*a.dims, *b.dims):
        return None
    k, n = b.dims[-2:]
    matrices, lead = math.prod(b.dims[:-2]), dims[:-2]
    # With a single matrix, all rows form one product.
    rows = a.dims[-2] if matrices > 1 else a.elements // k
    axes = _axes_of_rows(rows)
    depth, every = _depth(axes, k), _up(n, _PANEL)
    where = np.zeros((1, 3), np.int64)
    if matrices > 1:
        indices = [
            np.broadcast_to(np.arange(math.prod(own)).reshape(own), lead).reshape(-1)
            for own in (a.dims[:-2], b.dims[:-2])
        ]
        size = len(indices[0])
        where = np.stack([indices[0] * rows * k, np.arange(size) * rows * n, indices[1]], axis=1)
    packed = _Packed(depth, k, n, line_aligned(where), depth.size * every, every)
    rescaling = rescaling._replace(terms=np.zeros(n, INT32))
    call = _call(site, axes, x, packed, rescaling)
    if call is None:
        return None
    call = _of_rows(call, k, n)
    late = w.zero if isinstance(w.zero, Tensor) else None
    change = 128 if b.dtype == UINT8 else 0
    strides = k * n, n, 1
    behind = (
        *(WORKSPACE, Tensor(w.tensor), late, matrices, k, *strides, change),
        *(0 if isinstance(w.zero, Tensor) else w.zero, call.items),
    )
    packing = Workload(elements=b.elements)
    return replace(
        call,
        kernel="code_matrices",
        words=(*call.words, *behind),
        items=1,
        item_ns=call.items * call.item_ns + part_ns(packing),
        stages=(2, call.items),
        workspace=matrices * (packed.weights_step + 8 * every),
    )


def _axes_of_rows(rows: int) -> Axes:
    return Axes(1, _POINT, Window(rows, rows, 1))


def _of_rows(call: NativeCall, k: int, n: int) -> NativeCall:
    """Return the call for rows of ``k`` input and ``n`` result elements."""
    steps = int64s(*[[0, 1, 0, size, 0] for size in (k, n)])
    return replace(call, words=(*call.words[:-2], *steps))


def merged_groups(groups: int, filters: int, channels: int) -> int:
    """Return how many adjacent groups, each of these ``filters`` and ``channels``, to merge."""
    most = max(min(_PANEL // max(filters, 1), TILE // max(channels, 1)), 1)
    return max(m for m in range(1, most + 1) if groups % m == 0)


def _merged(weights: CodeWeights) -> CodeWeights:
    """Return weights with adjacent groups merged where that takes no more work."""
    groups = weights.groups
    filters, channels, *taps = weights.dims
    count = merged_groups(groups, filters // groups, channels)
    zeros = weights.zeros.reshape(filters, 1, 1)

    def codes(source: np.ndarray) -> np.ndarray:
        own = weights.codes(source).reshape(filters, channels, -1)
        # Codes equal to the zero point contribute nothing.
        every = np.broadcast_to(zeros, (filters, channels * count, own.shape[-1]))
        every = every.astype(own.dtype).reshape(
            -1, count, filters // groups, count, channels, own.shape[-1]
        )
        for i in range(count):
            every[:, i, :, i] = own.reshape(-1, count, filters // groups, *own.shape[1:])[:, i]
        return every.reshape(filters, channels * count, *taps)

    if count == 1:
        return weights
    dims = filters, channels * count, *taps
    name = (*weights.name, groups)
    return weights._replace(dims=dims, codes=codes, name=name, back=None, groups=groups // count)


def _depth(axes: Axes, channels: int) -> _Depth:
    # Where the taps of a row are adjacent in memory, their input is one part.
    columns = axes.columns
    taps = columns.kernel if columns.dilation > 1 else 1
    part = columns.kernel // taps * channels
    tiles = -(-part // TILE)
    deep = _up(-(-part // tiles), 4)
    return _Depth(axes.planes.kernel * axes.rows.kernel * taps, part, tiles * deep, deep)


def _panels_of(weights: CodeWeights, depth: _Depth) -> Reordered:
    """Return the weights as panels of each group, with filters as columns."""
    filters, channels = weights.dims[:2]
    each = filters // weights.groups

    def panels(source: np.ndarray) -> IntegerPanels:
        codes = weights.codes(source).reshape(weights.groups, each, channels, -1)
        matrices = codes.transpose(0, 3, 2, 1).reshape(weights.groups, -1, each)
        made = [
            integer_panels(matrix, zeros, (depth.part, depth.size))
            for matrix, zeros in zip(matrices, weights.zeros.reshape(-1, each), strict=True)
        ]
        if len(made) == 1:
            return made[0]
        return IntegerPanels(
            *[line_aligned(np.concatenate(arrays)) for arrays in zip(*made, strict=True)]
        )

    back = None if weights.back is None else weights.back(depth.size)
    types = [
        TensorType(type_.dtype, (weights.groups * type_.elements,))
        for type_ in panel_types(depth.parts * depth.size, each)
    ]
    return reordered((*weights.name, weights.dims, depth), weights.source, panels, back, types)


def _products(
    site: Site, axes: Axes, x: Operand, weights: CodeWeights, rescaling: Rescaling
) -> NativeCall | None:
    """Return the call of products of the windows of ``x`` with ``weights``."""
    filters, channels, *_ = weights.dims
    count, depth = weights.groups, _depth(axes, channels)
    each = filters // count
    if depth.parts > MOST_TAPS:
        return None
    packed = _panels_of(weights, depth)
    panels, *others = packed.arrays
    where = np.arange(count)[:, None] * np.array([channels, each, 1])
    factors_step = _up(each, CHUNK) if rescaling.bounds is not None else each
    step = _up(each, CHUNK)
    sums, zeros = [_rows_of(array, count, step) for array in others]
    weights_step = panels.size // count
    known = _Packed(
        *(depth, channels, each, line_aligned(where), weights_step, step, factors_step),
        *(panels, sums, zeros if zeros.any() else None),
    )
    call = _call(site, axes, x, known, rescaling)
    return None if call is None else replace(call, keep=packed)


def _rows_of(array: np.ndarray, groups: int, size: int) -> np.ndarray:
    """Return per-filter numbers, zero-padded to ``size`` in each group."""
    if array.size == groups * size:
        return array.reshape(groups, size)
    result = np.zeros((groups, size), array.dtype)
    own = array.reshape(groups, -1)
    result[:, : own.shape[1]] = own
    return result


def _call(
    site: Site, axes: Axes, operand: Operand, packed: _Packed, rescaling: Rescaling
) -> NativeCall | None:
    """Return the call for these weights."""
    x, depth, channels, filters = site.input(operand.tensor), *packed[:3]
    assert x is not None
    planes, rows, columns = axes.planes, axes.rows, axes.columns
    count = len(packed.where)
    block, chunk, reach = divided(rows, columns, channels * planes.kernel, adjacent_columns=False)
    if block < 1:
        return None
    positions = axes.images * planes.count * -(-rows.count // block) * -(-columns.count // chunk)
    positions *= count
    # Items also divide filters if there are few positions, or if the caches do not hold the
    # weights.
    every, seen, panel = -(-filters // _PANEL), block * chunk, depth.parts * depth.size * _PANEL
    size, ops = panel * every, 2 * panel * seen * every
    parts = min(_ITEMS // positions, every, max(ops // _LEAST_WORK, size // _LEAST_WEIGHTS))
    parts = max(parts, -(-size // _MOST_WEIGHTS) if positions > 1 else 1, 1)
    some = _up(-(-every // parts), _GROUP)
    rated = ops / site.library.integer_speed
    work = Workload("codes image, a part", seen * channels, rated, 0, seen * every * _PANEL)
    # A model's weights may exceed the caches: threads that pay off then cost little otherwise.
    read = Workload("codes product", weights=size, items=1)
    terms = rescaling.terms
    late = operand.zero if isinstance(operand.zero, Tensor) else None
    own, bounds = count if packed.factors_step else 1, rescaling.bounds
    if rescaling.bounds is None:
        factors, offsets = [
            np.ascontiguousarray(each, FLOAT32) if isinstance(each, np.ndarray) else each
            for each in rescaling[1:3]
        ]
    else:
        factors, offsets, bounds = rescaling.of_codes(
            lambda each: _rows_of(each, own, _up(each.size // own, CHUNK)).reshape(-1)
        )
    return NativeCall(
        "quantized_convolution",
        (
            *(Tensor(operand.tensor), packed.panels, late, packed.sums),
            *(_rows_of(terms, count, packed.filter_step) if terms.any() else None, packed.zeros),
            *(factors, offsets, site.result()),
            *(*int64s(*map(WINDOW, (planes, rows, columns))), bounds),
            *(rescaling.low, rescaling.high, packed.where, count, *packed[4:6]),
            *(int(rescaling.by_filter), packed.factors_step),
            *[_step_of_images(site, axes, own) for own in (late, factors)],
            *(axes.images, channels, filters, depth.size // 4, depth.deep // 4),
            *(block, chunk, reach, some, 128 if x.dtype == INT8 else 0),
            *(0 if late else operand.zero, None, None),
        ),
        items=positions * -(-every // some),
        item_ns=max(part_ns(work), part_ns(read)) * some / every,
    )


def _step_of_images(site: Site, axes: Axes, numbers: object) -> int:
    """Return the step between the numbers of images; 0 if all images have the same."""
    if not isinstance(numbers, Tensor) or axes.images == 1:
        return 0
    dims = site.tensor(numbers.index).dims
    return math.prod(dims[1:]) if len(dims) > 2 and dims[0] == axes.images else 0


def divided(
    rows: Window, columns: Window, channels: int, *, adjacent_columns: bool
) -> tuple[int, int, int]:
    """Return the rows and columns of the result whose input fits into the copy buffer (less than 1
    if none), and the excess of columns, a stride apart, in a row of the copy. Rows, rather than
    columns, are adjacent unless ``adjacent_columns``."""
    # The buffer has a fixed size, and is on the thread's stack.
    reach = (columns.kernel - 1) * columns.dilation // columns.stride

    def block_of(chunk: int) -> int:
        seen, below = _COPIED // (columns.stride * (chunk + reach) * channels), rows.span - 1
        if adjacent_columns:
            return (seen - below - 1) // rows.stride + 1
        return seen // rows.stride - below // rows.stride

    # Divide columns first: several rows are computed together.
    chunk = columns.count
    while block_of(chunk) < min(_LINES, rows.count) and chunk > 1:
        chunk = -(-chunk // 2)
    block = min(block_of(chunk), rows.count)
    return block - (block % _LINES if block > _LINES else 0), chunk, reach


def code_bounds(
    dtype: np.dtype, zero: int, low: float = -math.inf, high: float = math.inf
) -> np.ndarray:
    """Return the range of codes with this zero point as the struct of quantized_convolution.c: a
    double and four integers. ``low`` and ``high`` have the zero point subtracted."""
    ends, change = np.iinfo(dtype), 128 if dtype == INT8 else 0
    least, most = ends.min - zero, ends.max - zero
    low, high = [min(max(end, least), most) for end in (low, high)]
    bounds = np.array([high, 0.0, 0.0, 0.0, 0.0])
    bounds.view(np.int64)[1:] = zero + change, int(low) + zero + change, change, 0
    return bounds


def operand_zero(
    site: Site, i: int, dtype: np.dtype | None, images: int = 1
) -> int | Tensor | None:
    """Return the zero point in input ``i`` (-1 for none), or those of each of the ``images``; None
    if it is not of this dtype."""
    type_ = None if i < 0 else site.input(i)
    if type_ is None:
        return 0
    if type_.elements not in (1, images) or type_.dtype != dtype:
        return None
    constant = site.constant(i)
    return Tensor(i) if constant is None or constant.size > 1 else int(constant.item())


def site_inputs(site: Site) -> Sequence[Value | None]:
    """Return the values that the parts of a fused node read, in the order of its inputs."""
    node = site.node
    return node.attrs["region"].inputs if is_fused(node) else node.inputs


def scaled_sums(site: Site, nodes: Sequence[Node], filters: int, axis: int) -> Rescaling | None:
    """Return the rescaling that ``nodes`` after an integer product express: a Cast to float32, then
    optionally a Mul by factors, an Add of terms, and bounds. Factors and terms are per tensor or
    per index of ``axis``. None for other nodes."""
    place = {value: i for i, value in enumerate(site_inputs(site))}
    cast, *others = nodes
    result, output = cast.outputs[0], site.output()
    if cast.op.name != "Cast" or result is None or result.dtype != FLOAT32:
        return None
    if any(v is None or v.type != output for own in nodes for v in own.outputs):
        return None
    held: dict[str, tuple[np.ndarray | Tensor, bool]] = {}
    for name in ("Mul", "Add"):
        own = [v for v in others[0].inputs if v is not result] if others else []
        if others and others[0].op.name == name and len(own) == 1 and own[0] in place:
            numbers = _numbers(site, place[own[0]], filters, axis)
            if numbers is None or (name == "Add" and not numbers[1]):
                return None
            held[name], result, others = numbers, others[0].outputs[0], others[1:]
    limits = bounds_of(site, place, others)
    if limits is None:
        return None
    factors, by_filter = held.get("Mul", (np.ones(1, FLOAT32), False))
    offsets, _ = held.get("Add", (None, True))
    terms = np.zeros(filters, INT32)
    return Rescaling(terms, factors, offsets, None, *limits, by_filter)


def _numbers(
    site: Site, i: int, filters: int, axis: int
) -> tuple[np.ndarray | Tensor, bool] | None:
    """Return the floats of an input, and whether they are per index of the result's ``axis``, as
    constants always are; None if they have another form."""
    type_, rank = site.tensor(i), len(site.output().dims)
    if type_.dtype != FLOAT32 or len(type_.dims) > rank:
        return None
    dims = (*[1] * (rank - len(type_.dims)), *type_.dims)
    constant, most = site.constant(i), [1] * rank
    most[axis] = filters
    if axis == 1 < rank - 1 and constant is None:
        most[0] = site.output().dims[0]  # of each image
    if any(dim not in (1, n) for dim, n in zip(dims, most, strict=True)):
        return None
    if constant is None:
        return Tensor(i, own_order=True), dims[axis] == filters
    return np.ascontiguousarray(np.broadcast_to(constant.reshape(-1), (filters,))), True


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
