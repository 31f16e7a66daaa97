"""Kernels that are specialized for the shapes of their inputs.

Convolutions, pooling, matrix products and normalizations choose strategy, blocks and scratch memory
by shapes. A family defines that once (``Make``), and ``specialized`` makes both forms of a kernel
from it: ``into`` for the types known at compile time, and ``function`` for any types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial, wraps
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.core.records import NamedTuple
from penstock.core.types import FLOAT32, RunValue, ShapeError, TensorType
from penstock.host.current_run import reserve
from penstock.ir.graph import Node
from penstock.ir.kernel import NO_LAYOUT_HINTS, Kernel, LayoutHints
from penstock.ir.layout import ALIGNMENT
from penstock.ir.op import Consts, Types
from penstock.ops.common.constant_cache import Shared, shared
from penstock.ops.common.dtypes import is_half
from penstock.ops.registry import Compile

Tensors: TypeAlias = Sequence[TensorType | None]


class Routine(NamedTuple):
    """One node's code for inputs of known shapes.

    ``into(*inputs, *outputs)`` writes the outputs, with one more argument where ``workspace`` bytes
    are needed (see ``Kernel``). The inputs in ``prepared`` are not read: they are constants, which
    were prepared when the routine was made.
    """

    into: Callable[..., RunValue]
    workspace: int = 0
    prepared: tuple[int, ...] = ()
    kept: Any = None
    """objects that must live as long as the routine"""


Make: TypeAlias = Callable[[Tensors, Tensors, Consts], Routine]
"""``make(inputs, outputs, consts)``: static types, ``None`` for optional values left out."""


class Field(NamedTuple):
    """An array at a fixed place in a workspace; call it with the workspace to get the array."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int

    def __call__(self, workspace: np.ndarray) -> np.ndarray:
        return np.ndarray(self.shape, self.dtype, workspace, self.offset)

    def reshaped(self, *shape: int) -> Field:
        """Another shape, of no more elements, at the same place."""
        return Field(shape, self.dtype, self.offset)


class Scratch:
    """Arrays laid out one after the other in a workspace of ``size`` bytes."""

    def __init__(self) -> None:
        self.size = 0

    def field(self, shape: Sequence[int], dtype: np.dtype | None) -> Field:
        assert dtype is not None
        if dtype.hasobject:  # uninitialized bytes would be read as objects
            raise ShapeError("the operation takes numbers, not strings")
        field = Field(tuple(shape), dtype, self.size)
        count = dtype.itemsize * math.prod(shape)
        # At least one unit: with a size of 0 a routine would get no workspace to find its empty
        # fields in.
        self.size += max(-(-count // ALIGNMENT), 1) * ALIGNMENT
        return field


if TYPE_CHECKING:  # one is expensive to define
    from typing import TypedDict, Unpack

    class _Options(TypedDict, total=False):
        """Properties of the kernels of routines.

        ``arity``: how many inputs and outputs ``make`` and its routines take at least; optional
        ones at the end that the node leaves out are ``None``. ``widen``: whether float16 and
        bfloat16 are converted to float32 and back around the routine, as by default. ``values``:
        small integer inputs whose contents the output shapes depend on. ``inplace`` and
        ``contiguous`` are those of ``Kernel`` and its layout.
        """

        arity: tuple[int, int]
        inplace: tuple[int, ...]
        contiguous: bool
        widen: bool
        values: tuple[int, ...]


def specialized(node: Node, types: Types, make: Make, **options: Unpack[_Options]) -> Kernel:
    """Return the kernel of a node whose routines ``make`` builds."""
    given = [None if v is None else v.const for v in node.inputs]
    arity, values = options.get("arity", (0, 0)), options.get("values", ())
    complete = partial(_widened, make) if options.get("widen", True) else make

    # Bounded, since shapes that runs bring may be other ones each time.
    @lru_cache(maxsize=128)
    def build(inputs: tuple[TensorType | None, ...]) -> tuple[Routine, list[TensorType | None]]:
        consts = list(given)
        for i in values:
            type_ = inputs[i] if i < len(inputs) else None
            if type_ is not None and type_.data is not None:
                consts[i] = np.array(type_.data, type_.dtype).reshape(type_.dims)
        outputs = _output_types(node, inputs, consts)
        if len(inputs) < arity[0] or len(outputs) < arity[1]:
            return _padded(complete, arity, inputs, outputs, consts), outputs
        return complete(inputs, outputs, consts), outputs

    def function(*inputs: RunValue) -> RunValue:
        key = [None if x is None else TensorType(x.dtype, x.shape) for x in inputs]
        for i in values:
            if i < len(inputs) and inputs[i] is not None:
                x = inputs[i]
                key[i] = TensorType(x.dtype, x.shape, tuple(x.reshape(-1).tolist()))
        # Types without contents are hashable keys: a shape that returns costs no inference.
        routine, output_types = build(tuple(key))
        reserve(routine.workspace)
        outputs = [None if t is None else np.empty(t.dims, t.dtype) for t in output_types]
        if routine.workspace:
            routine.into(*inputs, *outputs, np.empty(routine.workspace, np.uint8))
        else:
            routine.into(*inputs, *outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    static = _static(types, given, values)
    if static is None:
        return Kernel(function)
    routine, _ = build(static)
    return Kernel(
        function,
        routine.into,
        inplace=options.get("inplace", ()),
        workspace=routine.workspace,
        layout=LayoutHints(contiguous=True) if options.get("contiguous") else NO_LAYOUT_HINTS,
    )


def by_shape(
    **options: Any,
) -> Callable[[Callable[[Node, Tensors, Tensors, Consts], Routine]], Compile]:
    """Turn ``make(node, inputs, outputs, consts)`` into a compile function; see ``specialized``. An
    option may be a function of the node."""

    by_node = {key: option for key, option in options.items() if callable(option)}

    def decorate(make: Callable[[Node, Tensors, Tensors, Consts], Routine]) -> Compile:
        @wraps(make)
        def compile(node: Node, types: Types) -> Kernel:
            own = options | {k: of(node) for k, of in by_node.items()} if by_node else options
            return specialized(node, types, partial(make, node), **own)

        return compile

    return decorate


def static_type(types: Tensors, index: int) -> tuple[tuple[int, ...], np.dtype]:
    """The dims and the dtype of a value that is given."""
    type_ = types[index]
    assert type_ is not None and type_.dtype is not None
    return type_.dims, type_.dtype


def _output_types(node: Node, inputs: Tensors, consts: Consts) -> list[TensorType | None]:
    inferred = node.op.infer(inputs, node.attrs, consts)
    outputs: list[TensorType | None] = []
    for i, value in enumerate(node.outputs):
        type_ = inferred[i] if i < len(inferred) else None
        if value is None:
            outputs.append(None)
        elif isinstance(type_, TensorType) and type_.static:
            outputs.append(type_)
        else:
            raise ShapeError(f"the shape of {value.name!r} ({type_}) cannot be inferred")
    return outputs


def _padded(
    make: Make, arity: tuple[int, int], inputs: Tensors, outputs: Tensors, consts: Consts
) -> Routine:
    """The routine without the inputs and outputs at the end that a node leaves out."""
    before, after = ((None,) * (n - len(t)) for n, t in zip(arity, (inputs, outputs), strict=True))
    first, last = len(inputs), len(inputs) + len(outputs)
    routine = make([*inputs, *before], [*outputs, *after], [*consts, *before])
    inner = routine.into

    def into(*arrays: RunValue) -> None:
        inner(*arrays[:first], *before, *arrays[first:last], *after, *arrays[last:])

    return routine._replace(into=into)


def _static(
    types: Types, given: Consts, values: tuple[int, ...]
) -> tuple[TensorType | None, ...] | None:
    """``types`` without contents if all shapes, and the contents in ``values``, are known."""
    static: list[TensorType | None] = []
    for i, type_ in enumerate(types):
        if type_ is None:
            static.append(None)
            continue
        if not isinstance(type_, TensorType) or not type_.static:
            return None
        # Contents of other inputs would make different keys for the same routine.
        if i not in values:
            static.append(type_.without_data())
        elif given[i] is not None:
            data = tuple(np.asarray(given[i]).reshape(-1).tolist())
            static.append(TensorType(type_.dtype, type_.shape, data))
        elif type_.data is not None and all(isinstance(x, int) for x in type_.data):
            static.append(type_)
        else:
            return None
    return tuple(static)


def _wide(type_: TensorType | None) -> TensorType | None:
    if type_ is None or not is_half(type_.dtype):
        return type_
    return TensorType(FLOAT32, type_.shape)


def _widened(make: Make, inputs: Tensors, outputs: Tensors, consts: Consts) -> Routine:
    """The routine in float32, with conversions around it where dtypes are narrower."""
    wide_inputs = [_wide(t) for t in inputs]
    wide_outputs = [_wide(t) for t in outputs]
    wide_consts = _WideConsts(consts)
    inner = make(wide_inputs, wide_outputs, wide_consts)
    # Results of routines on converted constants are found again by the identity of these.
    if inner.prepared:
        inner = inner._replace(kept=wide_consts.shares)
    if wide_inputs == list(inputs) and wide_outputs == list(outputs):
        return inner
    layout = Scratch()
    scratch = layout.field((inner.workspace,), np.dtype(np.uint8)) if inner.workspace else None

    def fields(narrow: Tensors, wide: Tensors, skip: Sequence[int]) -> list[tuple[int, Field]]:
        return [
            (i, layout.field(w.dims, FLOAT32))
            for i, (n, w) in enumerate(zip(narrow, wide, strict=True))
            if w is not None and w != n and i not in skip
        ]

    converted = fields(inputs, wide_inputs, inner.prepared)
    results = fields(outputs, wide_outputs, ())
    start = len(inputs)

    def into(*arguments: RunValue) -> None:
        *arrays, workspace = arguments
        for i, field in converted:
            wide = field(workspace)
            np.copyto(wide, arrays[i])
            arrays[i] = wide
        for i, field in results:
            arrays[start + i] = field(workspace)
        if scratch is not None:
            arrays.append(scratch(workspace))
        inner.into(*arrays)
        for i, _ in results:
            np.copyto(arguments[start + i], arrays[start + i], casting="unsafe")

    return Routine(into, layout.size, inner.prepared)


class _WideConsts(list[np.ndarray | None]):
    """Constants in float32, converted on access. They are shared, because values that routines
    compute from them are shared by identity."""

    def __init__(self, consts: Consts) -> None:
        super().__init__(consts)
        self.shares: list[Shared[np.ndarray]] = []

    def __getitem__(self, index: Any) -> Any:
        const = super().__getitem__(index)
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if const is None or not is_half(const.dtype):
            return const
        share = shared("float32", lambda: const.astype(np.float32), const)
        self.shares.append(share)
        return share.value

    def __iter__(self) -> Iterator[np.ndarray | None]:
        return (self[i] for i in range(len(self)))
