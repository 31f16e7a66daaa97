"""Shape, Size, Reshape, Squeeze, Transpose and other operations on the shapes of tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.types import ANY, INT64, MAX_DATA, Dim, Shape, ShapeError, TensorType, Type
from penstock.host.native import contiguous
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel, returning
from penstock.ir.op import Attrs, Consts, Types
from penstock.ops.common import shape_rules as rules
from penstock.ops.registry import ArrayFunction, operator

_LARGE = 2**14  # elements above which a copy costs more than testing whether it is needed


def view_kernel(view: ArrayFunction) -> Kernel:
    """The kernel of a function that returns a view."""
    return returning(view, view=True)


def _refill(x: np.ndarray, out: np.ndarray) -> None:
    """Copy the elements of ``x`` in row-major order to ``out``, which has another shape."""
    # For a non-contiguous output, ``reshape`` would copy, and the writes would be lost.
    if out.flags.c_contiguous:
        out.reshape(x.shape)[...] = x
    else:
        out[...] = x.reshape(out.shape)


def _carried(type_: TensorType, source: TensorType) -> TensorType:
    """``type_`` with the known contents of ``source``, which has the same elements in order."""
    return type_ if source.data is None else rules.with_data(type_, lambda: source.data)


def unknown_shape(types: Types, index: int) -> Shape | None:
    """The shape, of unknown dims, that a 1-D shape input of known length describes."""
    spelled = rules.tensor(types, index).shape
    if spelled is None or len(spelled) != 1 or not isinstance(spelled[0], int):
        return None
    if spelled[0] > rules.MAX_WHOLE_NUMBERS:
        raise ShapeError(f"input {index} has {spelled[0]} elements, too many dims or axes")
    return (None,) * spelled[0]


def _infer_shape(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    shape = rules.tensor(types, 0).shape
    if shape is None:
        return (TensorType(INT64, (None,)),)
    taken = shape[attrs.get("start") or 0 : attrs.get("end")]
    return (TensorType(INT64, (len(taken),), taken),)


@operator("Shape", infer=_infer_shape, strings=True, traits={"total"})
def shape(node: Node, types: Types) -> Kernel:
    # Python slices clamp as the specification requires.
    taken = slice(node.attrs.get("start") or 0, node.attrs.get("end"))

    def into(x: np.ndarray, out: np.ndarray) -> None:
        out[...] = x.shape[taken]

    return Kernel(lambda x: np.array(x.shape[taken], np.int64), into)


def _infer_size(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    dims = rules.tensor(types, 0).shape
    return (TensorType(INT64, (), None if dims is None else (rules.dim_product(dims),)),)


@operator("Size", infer=_infer_size, strings=True, traits={"total"})
def size(node: Node, types: Types) -> Kernel:
    def into(x: np.ndarray, out: np.ndarray) -> None:
        out[...] = x.size

    return Kernel(lambda x: np.array(x.size, np.int64), into)


def _quotient(dims: Sequence[Dim], others: Sequence[Dim]) -> Dim:
    """The product of ``dims`` divided by the product of ``others``, or None if unknown. Equal
    symbolic dims cancel. Raises ``ShapeError`` if the quotient cannot be an integer."""
    if None in dims or None in others:
        return None
    known, known_others = rules.all_known(dims), rules.all_known(others)
    if known is not None and known_others is not None:
        whole, divisor = math.prod(known), math.prod(known_others)
        if divisor == 0 or whole % divisor:
            raise ShapeError(
                f"{whole} elements cannot be divided by {divisor}, the product of the other dims"
            )
        return whole // divisor
    names, divisors = (Counter(d for d in side if isinstance(d, str)) for side in (dims, others))
    whole, divisor = (math.prod(d for d in side if isinstance(d, int)) for side in (dims, others))
    cancelled = (names & divisors).total()
    names, divisors = names - divisors, divisors - names
    if divisors:
        return None
    if names:
        return next(iter(names)) if names.total() == 1 and whole == divisor != 0 else None
    if divisor != 0 and whole % divisor == 0:
        return whole // divisor
    if cancelled:  # if a cancelled dim is 0, any quotient is possible
        return None
    raise ShapeError(f"{whole} elements cannot be divided by {divisor}, the other dims' product")


def reshaped_dims(
    dims: Shape | None, target: Sequence[Dim], allowzero: bool, *, skip_zeros: bool = False
) -> Shape:
    """The output shape of Reshape for an input of shape ``dims``, as far as known. Dims copied by
    0 are excluded when -1 is inferred, so that an empty batch keeps its other dims. With
    ``skip_zeros``, as in TensorFlow, all dims of 0 are, on both sides."""
    # Loops and sets for speed: this runs several times per Reshape.
    least = min([0, *[d for d in target if isinstance(d, int)]])
    if least < -1 or target.count(-1) > 1:
        raise ShapeError(
            f"shape {list(target)} is invalid: dims must be at least -1, and at most one may be -1"
        )
    skipped = skip_zeros and 0 in target and -1 in target
    if allowzero and 0 in target and -1 in target and not skip_zeros:
        raise ShapeError(f"with allowzero=1, shape {list(target)} must not contain both 0 and -1")
    copied: set[int] = set()
    if 0 in target and not allowzero:
        copied = {i for i, d in enumerate(target) if d == 0}
    if dims is None:
        return tuple([None if d == -1 or i in copied else d for i, d in enumerate(target)])
    rest: Sequence[Dim] = dims
    spelled: Sequence[Dim] = target
    if copied:
        if max(copied) >= len(dims):
            raise ShapeError(f"a 0 in shape {list(target)} copies a dim that {list(dims)} lacks")
        rest, spelled = [[d for i, d in enumerate(ds) if i not in copied] for ds in (dims, target)]
    if skipped:
        rest, spelled = [[d for d in ds if d != 0] for ds in (dims, target)]
        # A named dim may be one of those that are skipped.
        rest = rest if rules.all_known(rest) is not None and 0 in dims else [None]
    # If a copied dim is 0, both shapes are empty whatever the other dims are.
    empty = copied and -1 not in target and any(dims[i] == 0 for i in copied)
    try:
        inferred = None if empty else _missing_dim(rest, spelled)
    except ShapeError as error:
        raise ShapeError(f"cannot reshape {list(dims)} to {list(target)}: {error}") from None
    known = [inferred if d in (None, -1) else d for d in target]
    return tuple([dims[i] if i in copied else d for i, d in enumerate(known)] if copied else known)


def _missing_dim(dims: Sequence[Dim], target: Sequence[Dim]) -> Dim:
    """The inferred value of the only unknown dim of ``target``, given the elements of ``dims``.
    Whether an unknown entry is a dim, 0 or -1, the resulting dim is the same, unless it is empty
    anyway."""
    others = [d for d in target if d not in (None, -1)]
    if 0 in dims and 0 in others and -1 not in target:
        return None  # which may be any dim
    if len(others) < len(target):
        return _quotient(dims, others) if len(others) == len(target) - 1 else None
    before, after = rules.all_known(dims), rules.all_known(others)
    if before is not None and after is not None and math.prod(before) != math.prod(after):
        raise ShapeError(f"they have {math.prod(before)} and {math.prod(after)} elements")
    return None


def zeros_of(attrs: Attrs) -> dict[str, bool]:
    return {name: bool(attrs.get(name)) for name in ("allowzero", "skip_zeros")}


def _infer_reshape(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    target = rules.ints(types, consts, 1)
    if target is None:
        return (TensorType(x.dtype, unknown_shape(types, 1)),)
    dims = reshaped_dims(x.shape, target, **zeros_of(attrs))
    return (_carried(TensorType(x.dtype, dims), x),)


@operator("Reshape", since=5, infer=_infer_reshape, strings=True, traits={"reshapes"})
def reshape(node: Node, types: Types) -> Kernel:
    zeros = zeros_of(node.attrs)
    target = rules.known_ints(node, types, 1)
    dims = rules.all_known(rules.tensor(types, 0).shape)

    def resolved(x: np.ndarray, spelled: Sequence[int]) -> np.ndarray:
        shape: Any = reshaped_dims(x.shape, spelled, **zeros)
        return x.reshape(shape)

    def into(x: np.ndarray, _: np.ndarray, out: np.ndarray) -> None:
        _refill(x, out)

    if target is None:
        return Kernel(lambda x, shape: resolved(x, shape.tolist()), into, view=True)
    fixed: Any = target if dims is None else reshaped_dims(dims, target, **zeros)
    # Which dims are copied is only known at run time.
    if dims is None and 0 in target and (zeros["skip_zeros"] or not zeros["allowzero"]):
        return Kernel(lambda x, _: resolved(x, fixed), into, view=True)

    def run_fixed(x: np.ndarray, _: np.ndarray) -> np.ndarray:
        try:
            return x.reshape(fixed)
        except ValueError:
            # NumPy's message lacks the shapes.
            return resolved(x, fixed)

    def run_large(x: np.ndarray, _: np.ndarray) -> np.ndarray:
        try:
            return x.reshape(fixed, copy=False)
        except ValueError:  # compiled code copies faster than NumPy if the result cannot be a view
            return resolved(contiguous()(x), fixed)

    large = dims is not None and math.prod(dims) >= _LARGE
    return Kernel(run_large if large else run_fixed, into, view=True)


def _infer_flatten(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    if x.shape is None:
        return (TensorType(x.dtype, (None, None)),)
    axis = flatten_axis(attrs, len(x.shape))
    rows, columns = x.shape[:axis], x.shape[axis:]
    return (TensorType(x.dtype, (rules.dim_product(rows), rules.dim_product(columns))),)


def flatten_axis(attrs: Attrs, rank: int) -> int:
    axis = attrs.get("axis", 1)  # may be one past the last axis
    return rank if axis == rank else rules.normalize_axis(axis, rank)


@operator("Flatten", infer=_infer_flatten, strings=True, traits={"reshapes"})
def flatten(node: Node, types: Types) -> Kernel:
    def target(dims: Sequence[int]) -> tuple[int, int]:
        axis = flatten_axis(node.attrs, len(dims))
        return math.prod(dims[:axis]), math.prod(dims[axis:])

    dims = rules.all_known(rules.tensor(types, 0).shape)
    by_rows = node.attrs.get("axis", 1) == 1
    if dims is None:
        return Kernel(
            lambda x: x if by_rows and x.ndim == 2 else x.reshape(target(x.shape)),
            _refill,
            view=True,
        )
    fixed = target(dims)
    return Kernel(lambda x: x.reshape(fixed), _refill, view=True)


def _infer_squeeze(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    if x.shape is None:
        return (TensorType(x.dtype),)
    rank = len(x.shape)
    if not rules.given(types, 1):
        if rules.all_known(x.shape) is None:  # an unknown dim may be 1
            return (TensorType(x.dtype),)
        dropped = {i for i, dim in enumerate(x.shape) if dim == 1}
    else:
        axes = rules.all_known(rules.ints(types, consts, 1))
        if axes is None:
            spelled = unknown_shape(types, 1)
            unknown: Shape | None = None if spelled is None else (None,) * (rank - len(spelled))
            return (_carried(TensorType(x.dtype, unknown), x),)
        dropped = set(rules.normalize_axes(axes, rank))
        for axis in dropped:
            if isinstance(x.shape[axis], int) and x.shape[axis] != 1:
                raise ShapeError(f"axis {axis} of shape {list(x.shape)} must be 1 to be removed")
    kept = tuple([dim for i, dim in enumerate(x.shape) if i not in dropped])
    return (_carried(TensorType(x.dtype, kept), x),)


@operator("Squeeze", since=13, infer=_infer_squeeze, strings=True, traits={"reshapes"})
def squeeze(node: Node, types: Types) -> Kernel:
    if not rules.given(node.inputs, 1):
        return view_kernel(lambda x, _=None: x.squeeze())
    axes = rules.known_ints(node, types, 1)
    if axes is not None:
        return view_kernel(lambda x, _: x.squeeze(axes))
    return view_kernel(lambda x, spelled: x.squeeze(tuple(spelled.reshape(-1).tolist())))


def _infer_unsqueeze(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    spelled = rules.ints(types, consts, 1) or unknown_shape(types, 1)
    if x.shape is None or spelled is None:
        return (TensorType(x.dtype),)
    axes, rank = rules.all_known(spelled), len(x.shape) + len(spelled)
    if axes is None:
        return (_carried(TensorType(x.dtype, (None,) * rank), x),)
    added = rules.normalize_axes(axes, rank)
    dims = iter(x.shape)
    shape = tuple([1 if i in added else next(dims) for i in range(rank)])
    return (_carried(TensorType(x.dtype, shape), x),)


@operator("Unsqueeze", since=13, infer=_infer_unsqueeze, strings=True, traits={"reshapes"})
def unsqueeze(node: Node, types: Types) -> Kernel:
    def index(axes: Sequence[int], rank: int) -> rules.Index:
        added = rules.normalize_axes(axes, rank + len(axes))
        # The ellipsis keeps a 0-d array from becoming a scalar.
        return (*[None if i in added else slice(None) for i in range(rank + len(axes))], ...)

    axes, known_rank = rules.known_ints(node, types, 1), rules.tensor(types, 0).rank
    if axes is not None and known_rank is not None:
        fixed = index(axes, known_rank)
        return view_kernel(lambda x, _: x[fixed])

    return view_kernel(lambda x, spelled: x[index(spelled.reshape(-1).tolist(), x.ndim)])


def _infer_transpose(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    perm = attrs.get("perm")
    if x.shape is None:
        return (TensorType(x.dtype, None if perm is None else (None,) * len(perm)),)
    if perm is None:
        perm = range(len(x.shape))[::-1]
    elif sorted(perm) != list(range(len(x.shape))):
        raise ShapeError(
            f"perm {list(perm)} is not a permutation of the axes of shape {list(x.shape)}"
        )
    return (_carried(TensorType(x.dtype, tuple([x.shape[i] for i in perm])), x),)


@operator(
    "Transpose",
    infer=_infer_transpose,
    moves=True,
    view=True,
    strings=True,
    traits={"total", "selects"},
)
def transpose(node: Node, types: Types) -> Kernel:
    perm = node.attrs.get("perm")
    if perm is None:
        return view_kernel(lambda x: x.T)
    axes = tuple(perm)

    def run(x: np.ndarray) -> np.ndarray:
        try:
            return x.transpose(axes)
        except ValueError:
            raise ShapeError(f"perm {list(axes)} is not a permutation of {x.ndim} axes") from None

    return view_kernel(run)


def _infer_expand(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    x = rules.tensor(types, 0)
    target = rules.ints(types, consts, 1)
    if target is None:
        target = unknown_shape(types, 1)
    elif any(isinstance(d, int) and d < 0 for d in target):
        raise ShapeError(f"shape {list(target)} must not have negative dims")
    type_ = TensorType(x.dtype, rules.broadcast_shapes([x.shape, target]))
    return (rules.with_data(type_, lambda: repeated(x, type_)),)


def repeated(x: TensorType, result: TensorType) -> tuple[Dim, ...] | None:
    """The known contents of ``x``, broadcast to the shape of ``result``."""
    dims = rules.all_known(result.shape)
    count = 1 if not dims else dims[0]
    if dims is None or not x.data or count > MAX_DATA:
        return None
    return x.data * (count // len(x.data))


@operator("Expand", since=8, infer=_infer_expand, moves=True, strings=True, traits={"selects"})
def expand(node: Node, types: Types) -> Kernel:
    target = rules.known_ints(node, types, 1)
    dims = rules.all_known(rules.tensor(types, 0).shape)
    fixed: Any = None
    if target is not None and dims is not None:
        fixed = rules.broadcast_shapes([dims, target])
        if fixed == dims:
            return view_kernel(lambda x, _: x)

    def run(x: np.ndarray, spelled: np.ndarray) -> np.ndarray:
        if fixed is not None:
            return np.broadcast_to(x, fixed)
        shape = tuple(spelled.tolist() if target is None else target)
        return np.broadcast_to(x, np.broadcast_shapes(x.shape, shape))

    def into(x: np.ndarray, spelled: np.ndarray, out: np.ndarray) -> None:
        out[...] = x if fixed is not None else run(x, spelled)

    return Kernel(run, into, view=True)


@operator(
    "Identity",
    infer=lambda types, a, c: (types[0] if types and types[0] is not None else ANY,),
    strings=True,
    traits={"total", "reshapes", "forwards handle"},
)
def identity(node: Node, types: Types) -> Kernel:
    if isinstance(types[0], TensorType):
        return view_kernel(lambda x: x)
    return Kernel(lambda x: x, view=True)
