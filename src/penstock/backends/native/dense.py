"""Dense layers: matrix products with constant weights, and their fused epilogues.

A product of few rows is bound by reading the matrix from memory (``dense.c``). If operands may be
rounded to bfloat16, pairs of numbers are multiplied at once: the matrix is packed into pairs at
compile time, x is written as pairs to workspace first.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from penstock.backends.native import (
    AnyShapeCall,
    ahead_of_cache,
    blocks_of_rows,
    family,
    fused_with,
    part_ns,
    rows_ns,
    str_,
)
from penstock.backends.native.bounds import bounds_of
from penstock.backends.native.kernel import (
    ROUNDED,
    WORKSPACE,
    NativeCall,
    Site,
    Tensor,
    UnsupportedError,
    Word,
)
from penstock.core.records import NamedTuple, replace
from penstock.core.types import FLOAT32, TensorType, dtypes
from penstock.host.malloc import weight_bytes
from penstock.host.native import in_c_order
from penstock.ir.graph import Node, Value
from penstock.ops.common.constant_cache import (
    ConstantRef,
    Reordered,
    is_held_by_bfloat16,
    reordered,
)
from penstock.ops.internal.fused import is_fused, parts
from penstock.ops.work_estimate import Workload

PANEL, GRAIN, BLOCK = 64, 16, 192  # as in c/products/panels.h
NO_PROGRAM: tuple[Word, ...] = (None,) * 30  # of struct elementwise
_BLOCK_ELEMENTS = 1 << 19  # most elements in the rows of an item
_MOST_PADDING = 1 << 18  # most elements of a panel matrix that is more than half padding


class _Layer(NamedTuple):
    """A product and its operands; ``bias`` and ``addend`` are added to it, sums are clipped to
    ``low`` and ``high``, and the parts of the fused node from ``first`` on follow."""

    x: int
    w: int
    transposed: bool
    bias: np.ndarray | None
    addend: int | None
    low: float
    high: float
    first: int


class _Dims(NamedTuple):
    rows: int
    inner: int
    columns: int


def dense_workload(node: Node) -> Workload | None:
    """Return the workload of a node that begins with a product; None if no kernel is available."""
    dims = _dims(node)
    if dims is None:
        return None
    rows, inner, columns = dims
    odd = rows * columns if columns % GRAIN else 0
    # No backend's estimate includes the time of reading the matrix.
    return Workload("dense", flops=2 * rows * inner * padded(columns), elements=odd)


def dense_call(site: Site) -> NativeCall | None:
    """MatMul and Gemm of float32 with a constant matrix, with a fused elementwise epilogue."""
    dims = _dims(site.node)
    layer = None if dims is None else _layer(site)
    w = None if layer is None else site.weights(layer.w)
    if dims is None or layer is None or w is None:
        return None
    words = NO_PROGRAM
    program_ns, count = 0.0, len(parts(site.node))
    if layer.first < count:
        from penstock.backends.native.elementwise import program_behind

        try:
            program = program_behind(site, layer.first)(site.output().dims[-1], None)
        except UnsupportedError:
            return None
        words, program_ns = program.words, program.item_ns * program.items / site.output().elements
    rows, inner, columns = dims
    panels = math.ceil(columns / PANEL)
    read_inner = math.ceil(inner / 2) if site.rounds else inner  # numbers or pairs
    # The rows of an item are read again for each panel, and should stay in a cache.
    most = min(BLOCK, max(_BLOCK_ELEMENTS // read_inner, 1))
    blocks = blocks_of_rows(rows, panels, most, 2 * rows * inner * columns)
    block = math.ceil(rows / blocks)
    weights = _panels(w, layer.transposed, site.rounds)
    bias = None
    if layer.bias is not None:
        bias = np.zeros(panels * PANEL, FLOAT32)
        bias[:columns] = layer.bias
    element_ns = _element_ns(block)
    items = math.ceil(rows / block) * panels
    pairs = WORKSPACE if site.rounds else None
    # A single row has a separate loop with another summation order.
    alone = rows == 1 and not site.rounds and not site.ordered
    held = {"reordered": {layer.w: weights}} if weights.restores else {"keep": weights}
    call = NativeCall(
        "dense",
        (
            *(Tensor(layer.x), *weights.arrays, bias),
            *(None if layer.addend is None else Tensor(layer.addend), site.result()),
            *(rows, inner, columns, block, pairs, items),
            *(layer.low, layer.high, int(alone), int(layer.first < count), *words),
        ),
        items=items,
        item_ns=read_inner * columns / panels * element_ns + block * PANEL * program_ns,
        **held,
    )
    return of_pairs(call, "dense", rows * read_inner) if site.rounds else call


def of_pairs(call: NativeCall, name: str, pairs: int) -> NativeCall:
    """Return a call that rounds its input to ``pairs`` of bfloat16 in a stage before its items."""
    return replace(
        call,
        kernel=ROUNDED + name,
        items=1,
        item_ns=call.items * call.item_ns + rows_ns(2 * pairs),
        stages=(2, call.items),
        workspace=pairs * FLOAT32.itemsize,
    )


def pairs_of(matrix: np.ndarray) -> np.ndarray:
    """Return a matrix rounded to bfloat16: pairs of elements of two adjacent rows, viewed as
    float32 [ceil(rows / 2), columns]; an odd last row is paired with zeros."""
    rows, columns = matrix.shape
    halves = np.zeros((math.ceil(rows / 2), columns, 2), dtypes()["bfloat16"])
    with np.errstate(all="ignore"):
        halves[:, :, 0] = matrix[::2]
        halves[: rows // 2, :, 1] = matrix[1::2]
    pairs: np.ndarray = halves.view(FLOAT32)[..., 0]
    return pairs


def unpaired(pairs: np.ndarray, rows: int) -> np.ndarray:
    """Return the matrix with this many rows from its ``pairs_of``."""
    halves = pairs.reshape(*pairs.shape, 1).view(dtypes()["bfloat16"]).swapaxes(1, 2)
    matrix: np.ndarray = halves.reshape(-1, pairs.shape[1])[:rows].astype(FLOAT32)
    return matrix


def _product_workload(node: Node) -> Workload | None:
    work = dense_workload(node)
    if work is not None:
        return work
    from penstock.backends.native.matmul import product_workload  # not needed by dense layers

    return product_workload(node)


@family(fused_with("Gemm"), fused_with("MatMul"), "Gemm", "MatMul", work=_product_workload)
def product_call(site: Site) -> NativeCall | None:
    """A product with a constant matrix, or of small matrices."""
    call = dense_call(site)
    if call is not None:
        return call
    from penstock.backends.native.matmul import product

    return product(site)


@ahead_of_cache("MatMul")
def product_of_any_shape(site: Site) -> AnyShapeCall | None:
    """MatMul of floats, of any shape."""
    x = site.input(0)
    is_real = x is not None and str_(x.dtype) in ("float32", "float64")
    return (site.library.functions.product, site.weights(1) is not None) if is_real else None


def _element_ns(rows: int) -> float:
    """Return the time of an element of the matrix, for at most ``BLOCK`` rows: reading it and
    multiplying overlap, and the slower of the two counts."""
    multiplied = part_ns(Workload("dense", flops=2 * rows))
    return max(multiplied, part_ns(Workload("dense", weights=FLOAT32.itemsize)))


def padded(columns: int) -> int:
    """Round a number of columns up to whole vectors."""
    return math.ceil(columns / GRAIN) * GRAIN


def _dims(node: Node) -> _Dims | None:
    """Return the dims of a node's product; None if it is not of float32 with a constant matrix, or
    the matrix is tall and narrow."""
    product = parts(node)[0]
    x, w = product.inputs[:2]
    if x is None or w is None or x.is_constant or not w.is_constant:
        return None
    left, matrix = x.type, w.type
    if not isinstance(left, TensorType) or not isinstance(matrix, TensorType):
        return None
    if not left.static or len(left.dims) < 2 or len(matrix.dims) != 2 or not left.elements:
        return None
    if left.dtype != FLOAT32 or matrix.dtype != FLOAT32:
        return None
    attrs = product.attrs
    if attrs.get("transA", 0) or attrs.get("alpha", 1.0) != 1:
        return None
    inner, columns = matrix.dims[::-1] if attrs.get("transB", 0) else matrix.dims
    if inner != left.dims[-1] or not columns:
        return None
    if padded(columns) > 2 * columns and inner * padded(columns) > _MOST_PADDING:
        return None
    return _Dims(left.elements // inner, inner, columns)


def _layer(site: Site) -> _Layer | None:
    """Return the dense layer that a node computes, or None if no kernel is available for it."""
    node = site.node
    every = parts(node)
    product, *others = every
    inputs = node.attrs["region"].inputs if is_fused(node) else node.inputs
    place: dict[Value | None, int] = {value: i for i, value in enumerate(inputs)}
    result, output = product.outputs[0], site.output()
    bias, addend, first = None, None, 1
    columns = output.dims[-1]
    for part in every:
        value = part.outputs[0]
        if value is None or (value.type is not output and value.type != output):
            return None

    def term(value: Value | None, factor: float = 1.0) -> bool:
        """Add a tensor to the sums; return whether that is supported."""
        nonlocal bias, addend
        i = place.get(value)
        type_ = None if i is None else site.tensors[i]
        if i is None or type_ is None or type_.dtype != FLOAT32:
            return False
        const = site.constant(i)
        is_row = const is not None and (const.size == 1 or const.size == const.shape[-1] == columns)
        if const is not None and is_row and bias is None and addend is None:
            bias = const * FLOAT32.type(factor)
            return True
        # An addend matrix is read while sums are stored, without a factor.
        if addend is None and factor == 1 and type_.dims == output.dims:
            addend = i
            return True
        return False

    # As ONNX defines, C is not read if beta is 0: NaN there must not reach the result.
    third, factor = product.input(2), float(product.attrs.get("beta", 1.0))
    if third is not None and factor and not term(third, factor):
        return None
    for part in others:
        # Any other operation and those after it are left to the program, which takes any terms.
        if part.op.name != "Add":
            break
        added = [value for value in part.inputs if value is not result]
        if len(added) != 1 or not term(added[0]):
            break
        result, first = part.outputs[0], first + 1
    transposed = bool(product.attrs.get("transB", 0))
    x, w = place[product.inputs[0]], place[product.inputs[1]]
    bounds = bounds_of(site, place, every[first:])
    low, high = bounds or (-math.inf, math.inf)
    return _Layer(x, w, transposed, bias, addend, low, high, len(every) if bounds else first)


def _panels(w: ConstantRef, transposed: bool, rounds: bool) -> Reordered:
    """Return the panels of a matrix."""
    inner, columns = w.shape[::-1] if transposed else w.shape
    inner = math.ceil(inner / 2) if rounds else inner
    type_ = TensorType(FLOAT32, (inner * padded(columns),))
    pack = partial(_packed, transposed, rounds)
    exact = not rounds or is_held_by_bfloat16(w.value)
    back = partial(_unpacked, w.shape, transposed, rounds) if exact else None
    return reordered(("dense", transposed, *["bfloat16"] * rounds), w, pack, back, [type_])


def _parts_of(panels: np.ndarray, inner: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return views of the full panels of 64 columns, as [inner, panel, 64], and of the last one."""
    whole = (columns - 1) // PANEL
    split = whole * inner * PANEL
    first = panels[:split].reshape(whole, inner, PANEL).swapaxes(0, 1)
    return first, panels[split:].reshape(inner, -1)


def _packed(transposed: bool, rounds: bool, w: np.ndarray) -> tuple[np.ndarray]:
    matrix = in_c_order()(w.T) if transposed else w
    return (packed_panels(pairs_of(matrix) if rounds else matrix),)


def packed_panels(*matrices: np.ndarray) -> np.ndarray:
    """Return the concatenated panels of matrices of one shape, whose rows may have several axes;
    aligned, as a vector across two cache lines takes two loads."""
    *rows, columns = matrices[0].shape
    size = math.prod(rows) * padded(columns)
    panels: np.ndarray = weight_bytes(4 * size * len(matrices)).view(FLOAT32)
    for matrix, own in zip(matrices, panels.reshape(-1, size), strict=True):
        parts = _parts_of(own, math.prod(rows), columns)
        whole, last = [part.reshape(*rows, *part.shape[1:]) for part in parts]
        count = whole.shape[-2] * PANEL
        whole[...] = matrix[..., :count].reshape(whole.shape)
        last[..., : columns - count] = matrix[..., count:]
        last[..., columns - count :] = 0
    return panels


def _unpacked(
    shape: tuple[int, ...], transposed: bool, rounds: bool, panels: np.ndarray
) -> np.ndarray:
    inner, columns = shape[::-1] if transposed else shape
    matrix = unpacked_panels((math.ceil(inner / 2) if rounds else inner, columns), panels)
    matrix = unpaired(matrix, inner) if rounds else matrix
    return np.ascontiguousarray(matrix.T) if transposed else matrix


def unpacked_panels(shape: tuple[int, ...], panels: np.ndarray) -> np.ndarray:
    """Return the matrix of this shape from its panels."""
    inner, columns = shape
    whole, last = _parts_of(panels, inner, columns)
    count = whole.shape[1] * PANEL
    matrix = np.empty((inner, columns), FLOAT32)
    matrix[:, :count].reshape(whole.shape)[...] = whole
    matrix[:, count:] = last[:, : columns - count]
    return matrix
