"""Tensors of TFLite files: element types, shapes, quantization, and constants, dense or sparse.

The file is not trusted: a shape is compared with the number of bytes before anything is allocated.
Constants are read-only, and views of the bytes that were read if these are aligned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from penstock.core.errors import InvalidModel
from penstock.core.records import NamedTuple, dataclass, field
from penstock.core.types import ANY, STRING, Dim, TensorType, Type, dtype_named
from penstock.frontends.common.diagnostics import TensorError
from penstock.frontends.common.encoding import array_from_bytes, decode_text, vector_of
from penstock.frontends.common.weight_file import ConstantBudget, WeightFile
from penstock.frontends.tflite.flatbuffer import Bytes, FlatTable
from penstock.ir.graph import Value

_TYPES = """
    float32 float16 int32 uint8 int64 string bool int16 complex64 int8 float64 complex128 uint64
    resource variant uint32 uint16 int4 bfloat16 int2
"""
_NAMES = {**dict(enumerate(_TYPES.split())), -1: "uint4"}
HANDLES = frozenset({13, 14})
"""types of tensors that stand for a variable or a list"""
_PACKED = {17: 4, 19: 2, -1: 4}
"""bits of element types that are packed into bytes. As in TFLite's kernels, they are computed as
int8 or uint8"""
_DENSE, _SPARSE = 0, 1
_FREE_BYTES = 2**20
_MAX_GROWTH = 64


@dataclass(frozen=True, eq=False)
class Quantization:
    """The meaning of the integers of a tensor: ``(q - zero_point) * scale``. There is one of each,
    or one per index along ``axis``."""

    scales: Sequence[float]
    zero_points: Sequence[int]
    axis: int = 0
    values: dict[np.dtype, Value] = field(default_factory=dict)
    """the constants of nodes for the scale and, by their type, zero points"""

    @property
    def scale(self) -> np.ndarray:
        """The scales in float32, in which LiteRT computes."""
        return np.array(self.scales, np.float32)

    @property
    def per_channel(self) -> bool:
        return len(self.scales) > 1

    def equals(self, other: Quantization) -> bool:
        """Whether integers represent the same numbers in both."""
        return self.scales == other.scales and self.zero_points == other.zero_points

    def is_of_products(self, x: Quantization, w: Quantization) -> bool:
        """Whether its scale is that of products of ``x`` and ``w``, to the precision of float32."""
        products = x.scale * w.scale
        close = abs(self.scale - products) <= np.float32(1e-3) * products
        return bool((close & (products < np.inf)).all())

    def codes_of(self, bounds: tuple[float, float], dtype: np.dtype) -> list[int]:
        """Return the codes of real numbers, clamped to the range of the type."""
        limits, codes = np.iinfo(dtype), []
        least, most = limits.min, limits.max
        for bound in bounds:
            steps = np.float32(bound) / np.float32(self.scales[0])
            rounded = np.trunc(steps + np.copysign(np.float32(0.5), steps))  # ties away from zero
            code = float(rounded) + self.zero_points[0]
            codes.append(int(min(max(code, least), most)))
        return codes


class DeclaredTensor(NamedTuple):
    """A tensor as the file declares it; ``dtype`` is None for a handle."""

    dtype: np.dtype | None
    quantization: Quantization | None
    table: FlatTable


def dtype_of(tensor: FlatTable) -> np.dtype | None:
    """Return the element type, ``None`` for handles. ``InvalidModel``: an unknown type."""
    number = tensor.type
    if number in HANDLES:
        return None
    if number not in _NAMES:
        raise InvalidModel(f"tensor {tensor.name!r} has an unknown element type, number {number}")
    if number in _PACKED:
        return dtype_named("uint8" if number < 0 else "int8")
    return dtype_named(_NAMES[number])


def input_type(tensor: FlatTable) -> Type:
    """Return the type of a tensor that is fed; dims of -1 in the shape's signature are unknown."""
    dtype = dtype_of(tensor)
    if dtype is None:
        return ANY
    shape: Sequence[int] = tensor.shape_signature
    # Files without unknown dims leave the signature out.
    if len(shape) != len(tensor.shape):
        shape = tensor.shape
    if not shape and tensor.has_rank is False:
        return TensorType(dtype, ())
    dims: tuple[Dim, ...] = tuple(None if dim < 0 else dim for dim in shape)
    return TensorType(dtype, dims)


def quantization_of(tensor: FlatTable) -> Quantization | None:
    """Return the quantization of a tensor, ``None`` if it has none. Raises ``TensorError``."""
    parameters = tensor.quantization
    if parameters is None or not parameters.scale:
        if parameters is not None and parameters.details_type > 1:
            raise TensorError("is quantized in a way that no kernel computes")
        return None
    scales, points = parameters.scale, parameters.zero_point or [0]
    axis, count = parameters.quantized_dimension, len(scales)
    if len(points) not in (1, count):
        raise TensorError(f"has {count} scales, but {len(points)} zero points")
    # A sum of float32 cannot overflow float64, unless one of them is not finite.
    if not (math.isfinite(sum(scales)) and min(scales) >= 0):
        raise TensorError("has a scale that is negative or not finite")
    if max(points) >= 2**31 or min(points) <= -(2**31):
        raise TensorError("has a zero point out of range")
    if count > 1 and not (0 <= axis < len(tensor.shape) and tensor.shape[axis] == count):
        raise TensorError(f"has {count} scales along axis {axis} of shape {tensor.shape}")
    return Quantization(scales, points * (count // len(points)), axis)


def blocks_of(tensor: FlatTable) -> FlatTable | None:
    """Return the parameters of a tensor with a scale for each block; None for others."""
    details = tensor.quantization and tensor.quantization.details
    return details if details is not None and details.kind == "BlockwiseQuantization" else None


@dataclass(eq=False)
class TensorContents(ConstantBudget):
    """Reads the constants of one file."""

    buffers: Sequence[FlatTable]
    weights: WeightFile

    def place(self, tensor: FlatTable) -> Bytes | None:
        """Return the place of a tensor's contents, or ``None``. Raises ``TensorError``."""
        if not 0 <= tensor.buffer < len(self.buffers):
            raise TensorError(f"is in buffer {tensor.buffer}, of {len(self.buffers)}")
        buffer = self.buffers[tensor.buffer]
        if buffer.data.size:
            return buffer.data
        # TFLite only accepts offsets above 1 for contents after the flatbuffer.
        if buffer.offset <= 1 and not buffer.size:
            return None
        if buffer.offset + buffer.size > self.weights.size:
            raise TensorError(
                f"needs bytes {buffer.offset} to {buffer.offset + buffer.size} of a file of "
                f"{self.weights.size}: it was cut short"
            )
        return Bytes(buffer.offset, buffer.size)

    def read(self, tensor: FlatTable, dtype: np.dtype | None, place: Bytes) -> np.ndarray:
        """Return the contents of a constant. Raises ``TensorError``."""
        dims = tuple(tensor.shape)
        if dtype is None:
            raise TensorError("is a handle, which cannot be constant")
        count = self.count(dims, dtype)
        self.spend(count * dtype.itemsize)
        try:
            data = self.weights.read(*place)
        except ValueError as error:
            raise TensorError(f"cannot be read: {error}") from error
        if dtype == STRING:
            array = _strings(data, count)
        else:
            # The shape does not determine how many elements of a sparse tensor are stored.
            stored = count if tensor.sparsity is None else data.size // dtype.itemsize
            array = _elements(data, dtype, stored, _PACKED.get(tensor.type, 0))
            if tensor.sparsity is not None:
                array = self._dense(tensor.sparsity, array, dims)
        array = array.reshape(dims)
        array.flags.writeable = False
        return array

    def _dense(self, sparsity: FlatTable, values: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
        """Return the dense form of a sparse tensor, zero where nothing is stored.

        Levels are the dims, and those of blocks, in the order in which they are stored. Each entry
        of a level is a place within its parent's; the level says how its entries are numbered.
        """
        order, block_dims = sparsity.traversal_order, sparsity.block_map
        levels = sparsity.dim_metadata
        rank = len(dims)
        fits = sorted(order) == list(range(rank + len(block_dims))) and len(levels) == len(order)
        if not (rank and fits) or any(not 0 <= dim < rank for dim in block_dims):
            raise TensorError(f"is sparse in levels {order}, which do not fit its {rank} dims")
        size = math.prod(dims) * values.itemsize
        # Otherwise a few bytes could request all memory.
        if size > _FREE_BYTES + _MAX_GROWTH * self.weights.size:
            raise TensorError(f"takes {size} bytes in dense form, far more than the file has")
        sizes = [level.dense_size for level in levels]
        blocks = {dim: sizes[order.index(rank + i)] for i, dim in enumerate(block_dims)}
        entries = np.zeros(1, np.int64)
        places = np.zeros((1, rank), np.int64)
        for level, metadata in zip(order, levels, strict=True):
            counts, within = _children(metadata, entries, values.size)
            parents = np.repeat(np.arange(entries.size), counts)
            places = places[parents]
            if level < rank:
                places[:, level] += within[0] * blocks.get(level, 1)
            else:
                places[:, block_dims[level - rank]] += within[0]
            entries = within[1]  # children are the parents of the next level
        if entries.size != values.size or np.any((places < 0) | (places >= np.array(dims))):
            raise TensorError(f"is sparse with {values.size} values that are not in its dims")
        dense = np.zeros(dims, values.dtype)
        dense[tuple(places.T)] = values
        return dense


def _children(
    metadata: FlatTable, entries: np.ndarray, most: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Return each entry's number of children, and of these the places and their own numbers."""
    if metadata.format == _DENSE:
        size = metadata.dense_size
        if size < 0 or entries.size * size > most:
            raise TensorError(f"is sparse with a dense dim of {size}, beyond its values")
        within = np.tile(np.arange(size), entries.size)
        return np.full(entries.size, size), (within, np.repeat(entries * size, size) + within)
    segments, indices = _integers(metadata.array_segments), _integers(metadata.array_indices)
    if entries.size and entries.max() + 1 >= segments.size:
        raise TensorError("is sparse with fewer segments than entries")
    begins, counts = segments[entries], segments[entries + 1] - segments[entries]
    ends = begins + counts
    if np.any((begins < 0) | (counts < 0) | (ends > indices.size)) or counts.sum() > most:
        raise TensorError("is sparse with segments out of range")
    # Children are counted through all entries: a child's own number is that minus the number of its
    # first sibling.
    numbers = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return counts, (indices[numbers], numbers)


def _integers(vector: FlatTable | None) -> np.ndarray:
    """Return a vector of a sparse dim, of any of its types of integers."""
    if vector is None:
        return np.empty(0, np.int64)
    small = vector.kind == "Uint8Vector"
    return np.array(list(vector.content("values")) if small else vector.values, np.int64)


def _elements(data: np.ndarray, dtype: np.dtype, count: int, bits: int) -> np.ndarray:
    needed = -(-count * bits // 8) if bits else count * dtype.itemsize
    if data.size != needed:
        raise TensorError(f"has {data.size} bytes, but its shape takes {needed}")
    if not bits:
        return array_from_bytes(data, dtype)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (data[:, np.newaxis] >> shifts).reshape(-1)[:count] << np.uint8(8 - bits)
    return codes.view(dtype) >> dtype.type(8 - bits)  # with the sign of the element


def _strings(data: np.ndarray, count: int) -> np.ndarray:
    """Read strings: their number, the offset of each and of the end, then their bytes."""
    head = array_from_bytes(data[: data.size // 4 * 4], np.dtype(np.int32))
    if not head.size or head[0] != count or head.size < count + 2:
        raise TensorError(f"does not have the {count} strings of its shape")
    offsets = head[1 : count + 2]
    if np.any(np.diff(offsets) < 0) or offsets[0] < 0 or offsets[-1] > data.size:
        raise TensorError("has strings out of range")
    raw = data.tobytes()
    return vector_of([decode_text(raw[a:b]) for a, b in pairwise(offsets)], STRING)
