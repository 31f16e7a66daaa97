"""Shape arithmetic shared by the ``infer`` functions of all families."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.core.types import STRING, Dim, Shape, ShapeError, TensorType, Type, find_dtype
from penstock.ir.op import Attrs, Consts, Infer, Types

if TYPE_CHECKING:
    from penstock.ir.graph import Node

Index: TypeAlias = tuple[Any, ...]
"""An index of an array: numbers, slices, arrays, None and an ellipsis."""
MAX_WHOLE_NUMBERS = 65536
"""Inference reads the elements of constants up to this size."""


def tensor(types: Types, index: int) -> TensorType:
    """The type of an input as a tensor type; unknown if it is left out or any. Raises
    ``ShapeError`` for another type.

    Args:
        types: The types of a node's inputs.
        index: The position of the input.
    """
    if index < len(types):
        type_ = types[index]
        if type_.__class__ is TensorType:
            return type_
        if type_ is not None and type(type_).__name__ != "AnyType":
            raise ShapeError(f"input {index} must be a tensor, not {type_}")
    return TensorType()


def given(inputs: Sequence[object], index: int) -> bool:
    """Whether input ``index`` is given, by a node's inputs, their types or their values."""
    return index < len(inputs) and inputs[index] is not None


def pad_with_none(sequence: Sequence[Any], count: int) -> list[Any]:
    """``sequence`` extended by ``None`` to ``count`` entries."""
    return [*sequence, *(None,) * (count - len(sequence))]


def constants(node: Node, count: int = 0) -> list[np.ndarray | None]:
    """The constants among a node's inputs; for at least ``count`` inputs."""
    return pad_with_none([None if v is None else v.const for v in node.inputs], count)


def all_constant(node: Node, indices: Iterable[int]) -> bool:
    """Whether all given inputs of a node are constants."""
    values = [node.inputs[i] for i in indices if i < len(node.inputs)]
    return all(value is None or value.is_constant for value in values)


def ints(
    types: Types, consts: Consts, index: int, most_dims: int | None = 1
) -> tuple[Dim, ...] | None:
    """The contents of an integer input, if known from a constant or shape arithmetic.
    Raises ``ShapeError`` if it is known to have more than ``most_dims`` dims, which None allows."""
    const = consts[index] if index < len(consts) else None
    type_ = types[index] if index < len(types) else None
    shape = const.shape if const is not None else getattr(type_, "shape", None)
    if most_dims is not None and shape is not None and len(shape) > most_dims:
        raise ShapeError(
            f"input {index} has shape {list(shape)}, and is to have at most {most_dims} "
            + ("dim" if most_dims == 1 else "dims")
        )
    data = type_.data if isinstance(type_, TensorType) else None
    return _whole_numbers(const) if const is not None and data is None else data


def one_integer(types: Types, consts: Consts, index: int, name: str, low: int | None = None) -> Dim:
    """The single element of an integer input, at least ``low``, if known."""
    contents = ints(types, consts, index)
    if contents is None:
        return None
    if len(contents) != 1:
        raise ShapeError(f"{name} must have one element, it has {len(contents)}")
    if low is not None and isinstance(contents[0], int) and contents[0] < low:
        raise ShapeError(f"{name} must be at least {low}, it is {contents[0]}")
    return contents[0]


def _whole_numbers(const: np.ndarray) -> tuple[int, ...] | None:
    """The elements of a constant; ``None`` if one is not an integer or there are too many."""
    if const.size > MAX_WHOLE_NUMBERS or const.dtype == STRING:
        return None
    flat = np.asarray(const).reshape(-1)
    if flat.dtype.kind not in "biu":
        flat = flat.astype(np.float64)
        if not (np.isfinite(flat).all() and (flat == np.trunc(flat)).all()):
            return None
    return tuple(map(int, flat.tolist()))


_INT = {int}


def all_known(values: Sequence[Dim] | None) -> tuple[int, ...] | None:
    """Dims, or contents of an integer input, as ints; ``None`` unless all are known."""
    known = values is not None and {*map(type, values)} <= _INT
    return tuple(values) if known else None  # type: ignore[arg-type]


def known_ints(node: Node, types: Types, index: int) -> tuple[int, ...] | None:
    """The contents of integer input ``index`` when a kernel is compiled, if all are known."""
    if index >= len(node.inputs):
        return None
    value, type_ = node.inputs[index], types[index] if index < len(types) else None
    data = type_.data if isinstance(type_, TensorType) else None
    if data is None and value is not None and value.const is not None:
        return _whole_numbers(value.const)
    return all_known(data)


# The dtypes that ``TensorProto.DataType`` numbers, in its order; 0 is undefined.
_ELEMENT_TYPES = (
    *("", "float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool"),
    *("float16", "float64", "uint32", "uint64", "complex64", "complex128", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "uint4", "int4"),
    *("float4_e2m1fn", "float8_e8m0fnu", "uint2", "int2", "float6_e2m3fn", "float6_e3m2fn"),
)


def dtype_attribute(attrs: Attrs, name: str) -> np.dtype | None:
    """The dtype with the ONNX number in attribute ``name``; ``None`` if it is 0 or missing."""
    code = attrs.get(name) or 0
    if code == 0:
        return None
    if isinstance(code, int) and 0 < code < len(_ELEMENT_TYPES):
        dtype = find_dtype(_ELEMENT_TYPES[code])
        if dtype is not None:  # an old version of ml_dtypes lacks some
            return dtype
    raise ShapeError(f"{name} is {code}, which is no element type")


def element_number(name: str) -> int:
    """ONNX's number of the dtype with this name; 0 if there is none."""
    return _ELEMENT_TYPES.index(name) if name in _ELEMENT_TYPES else 0


def choice(attrs: Attrs, name: str, default: str, allowed: Iterable[str]) -> str:
    """A string attribute, which must be one of those allowed."""
    value: str | None = attrs.get(name)
    if value is None:
        value = default
    if value not in allowed:
        options = ", ".join(filter(None, allowed))
        raise ShapeError(f"{name} is {value!r}, which is none of {options}")
    return value


def one_element(x: np.ndarray, name: str) -> np.ndarray:
    """A tensor of one element, as one of rank 0."""
    if x.size != 1:
        raise ShapeError(f"{name} must be a scalar, not of shape {x.shape}")
    return x.reshape(())


def normalize_axis(axis: int, rank: int) -> int:
    """``axis`` as a non-negative number; a negative one counts from the last axis."""
    if not isinstance(axis, int | np.integer) or not -rank <= axis < rank:
        raise ShapeError(f"axis {axis} is out of range for rank {rank}")
    return axis % rank if rank else 0


def normalize_axes(axes: Iterable[int], rank: int) -> tuple[int, ...]:
    """``axes`` as non-negative numbers. Raises ``ShapeError`` for repeated ones."""
    result = tuple([normalize_axis(axis, rank) for axis in axes])
    if len(set(result)) != len(result):
        raise ShapeError(f"axes {result} name one axis twice")
    return result


def reduced_shape(dims: Shape, axes: Iterable[int], keepdims: bool) -> Shape:
    """``dims`` without ``axes``, or with 1 at these axes."""
    taken = normalize_axes(axes, len(dims))
    if keepdims:
        return tuple([1 if i in taken else dim for i, dim in enumerate(dims)])
    return tuple([dim for i, dim in enumerate(dims) if i not in taken])


def broadcast_dim(a: Dim, b: Dim) -> Dim:
    """The dim that ``a`` and ``b`` broadcast to, if known."""
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if isinstance(a, int) and isinstance(b, int):
        raise ShapeError(f"dims {a} and {b} do not broadcast")
    # A known dim other than 1 wins: the unknown one is either equal or 1.
    if isinstance(a, int):
        return a
    return b if isinstance(b, int) else None


def broadcast_shapes(shapes: Sequence[Shape | None]) -> Shape | None:
    """NumPy's broadcasting over partly known shapes; ``None`` if any rank is unknown."""
    result: list[Dim] = []
    for shape in shapes:
        if shape is None:
            return None
        if not result:
            result = [*shape]
            continue
        missing = len(shape) - len(result)
        if missing > 0:
            result[:0] = [1] * missing
        for i, dim in enumerate(shape, len(result) - len(shape)):
            if dim in (1, result[i]):
                continue
            try:
                result[i] = broadcast_dim(result[i], dim)
            except ShapeError:
                raise ShapeError(
                    f"shapes {' and '.join(map(str, shapes))} do not broadcast"
                ) from None
    return tuple(result)


def same_dim(a: Dim, b: Dim, what: str) -> Dim:
    """The common dim of ``a`` and ``b``, which must be equal, if known."""
    if isinstance(a, int) and isinstance(b, int) and a != b:
        raise ShapeError(f"{what} differ: {a} and {b}")
    return a if isinstance(a, int) or b is None else b


def fits(shape: Shape | None, wanted: Shape | None) -> bool:
    """Whether ``shape`` matches the expected one; unknown dims match any dim."""
    if shape is None or wanted is None or shape == wanted:
        return True
    return len(shape) == len(wanted) and False not in [
        a == b or not isinstance(a, int) or not isinstance(b, int)
        for a, b in zip(shape, wanted, strict=True)
    ]


def check_lengths(name: str, lengths: np.ndarray, positions: int) -> None:
    """Raise ``ShapeError`` unless each of what has ``positions`` has one of them at least."""
    if lengths.size and (lengths.min() < 1 or lengths.max() > positions):
        raise ShapeError(f"lengths of {name} must lie in 1 to {positions}, the positions in it")


def check_shape(name: str, shape: Shape | None, *wanted: Shape | None) -> None:
    """Raise ``ShapeError`` unless ``shape`` fits one of the expected ones."""
    if shape not in (None, *wanted) and True not in [fits(shape, each) for each in wanted]:
        either = " or ".join(dict.fromkeys(map(str, wanted)))
        raise ShapeError(f"{name} has shape {shape} where {either} is needed")


def check_broadcasts(name: str, shape: Shape | None, full: Shape | None) -> None:
    """Raise ``ShapeError`` unless ``shape`` broadcasts to ``full`` itself."""
    if shape is None or full is None or shape == full[len(full) - len(shape) :]:
        return
    pairs = zip(reversed(shape), reversed(full), strict=False)
    if len(shape) > len(full) or any(a != 1 and not fits((a,), (b,)) for a, b in pairs):
        raise ShapeError(f"{name} of shape {shape} does not broadcast to {full}")


def same_dtype(types: Types, indices: Iterable[int]) -> np.dtype | None:
    """The common dtype of the given inputs. Raises ``ShapeError`` where known ones differ.

    Args:
        types: The types of a node's inputs.
        indices: The positions of those to compare.
    """
    common: np.dtype | None = None
    for index in indices:
        type_ = types[index] if index < len(types) else None
        dtype = (type_ if isinstance(type_, TensorType) else tensor(types, index)).dtype
        if dtype is None:
            continue
        if common is not None and dtype != common:
            raise ShapeError(f"inputs have different dtypes, {common.name} and {dtype.name}")
        common = dtype
    return common


def dim_sum(dims: Iterable[Dim]) -> Dim:
    """The sum of dims; that of one symbolic dim and zeros is the symbolic dim."""
    dims = [dim for dim in dims if dim != 0]
    if all(isinstance(dim, int) for dim in dims):
        return sum(dims)  # type: ignore[arg-type]
    return dims[0] if len(dims) == 1 else None


def dim_product(dims: Iterable[Dim]) -> Dim:
    """The product of dims; that of one symbolic dim and ones is the symbolic dim."""
    constant, symbol = 1, None
    for dim in dims:
        if isinstance(dim, int):
            constant *= dim
        elif dim is None or symbol is not None:
            # No dim has an empty name: it stands for what one name cannot say.
            symbol = ""
        else:
            symbol = dim
    if constant == 0 or symbol is None:
        return constant
    return symbol if constant == 1 and symbol else None


def always(*outputs: Type) -> Infer:
    """``infer``: outputs of the same types whatever the inputs are."""
    return lambda types, attrs, consts: outputs


def same_type(types: Types, attrs: Attrs, consts: Consts) -> tuple[TensorType]:
    """``infer``: one output of the type of the first input.

    Args:
        types: The types of the inputs.
        attrs: The attributes.
        consts: Contents of constant inputs.
    """
    type_ = tensor(types, 0)
    return (type_ if type_.data is None else type_.without_data(),)


def same_shape(dtype: np.dtype | Callable[[Attrs], np.dtype | None], index: int = 0) -> Infer:
    """``infer``: one output with the shape of an input, and a dtype that is given or follows from
    the attributes."""
    if isinstance(dtype, np.dtype):
        return lambda types, attrs, consts: (TensorType(dtype, tensor(types, index).shape),)
    return lambda types, attrs, consts: (TensorType(dtype(attrs), tensor(types, index).shape),)


def broadcast_type(types: Types, attrs: Attrs, consts: Consts) -> tuple[TensorType]:
    """``infer``: one output of the inputs' common dtype and broadcast shape."""
    first = types[0]
    # Most often all inputs are of one type, which then need not be made again.
    if isinstance(first, TensorType) and first.data is None and types == [first] * len(types):
        return (first,)
    shapes: list[Shape | None] = []
    for i, type_ in enumerate(types):
        shapes.append((type_ if isinstance(type_, TensorType) else tensor(types, i)).shape)
    return (TensorType(same_dtype(types, range(len(types))), broadcast_shapes(shapes)),)


def broadcast_to(dtype: np.dtype) -> Callable[[Types, Attrs, Consts], tuple[TensorType]]:
    """``broadcast_type`` with an output of ``dtype``, e.g. for comparisons."""

    def infer(types: Types, attrs: Attrs, consts: Consts) -> tuple[TensorType]:
        (type_,) = broadcast_type(types, attrs, consts)
        return (TensorType(dtype, type_.shape),)

    return infer


def with_data(type_: TensorType, compute: Callable[[], tuple[Dim, ...] | None]) -> TensorType:
    """``type_`` with contents, if it is an integer tensor small enough for shape arithmetic. Truth
    values count as integers here: shape arithmetic compares and selects."""
    if type_.dtype is None or type_.dtype.kind not in "biu" or type_.shape is None:
        return type_
    if len(type_.shape) > 1:
        return type_
    data = compute()
    return type_ if data is None else TensorType(type_.dtype, type_.shape, data)


def match_dims(
    patterns: Mapping[str, Sequence[Any]],
    shapes: Sequence[Shape | None],
    sizes: Mapping[str, Dim] = MappingProxyType({}),
) -> dict[str, Dim]:
    """The sizes that ``patterns`` name, from the ``shapes`` of tensors, None where unknown, and
    known ``sizes``. A pattern has an entry for each dim: a number, the name of a size, or a factor
    and the name of a size. Raises ``ShapeError`` where two tensors disagree."""
    found = dict(sizes)
    for (name, pattern), shape in zip(patterns.items(), shapes, strict=False):
        if shape is None:
            continue
        if len(shape) != len(pattern):
            raise ShapeError(f"{name} must have rank {len(pattern)}, its shape is {shape}")
        for entry, dim in zip(pattern, shape, strict=True):
            factor, size = entry if isinstance(entry, tuple) else (1, entry)
            bound = found.get(size) if isinstance(size, str) else size
            if not isinstance(dim, int):
                if factor == 1 and bound is None:
                    found[size] = dim
            elif isinstance(bound, int):
                if factor * bound != dim:
                    raise ShapeError(f"{name} has a dim of {dim}, expected is {factor * bound}")
            elif dim % factor:
                raise ShapeError(f"{name} has shape {shape}: {dim} is no multiple of {factor}")
            else:
                found[size] = dim // factor
    return found
