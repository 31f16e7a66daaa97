"""Specifications from which oneDNN primitives are created."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.backends.onednn.layouts import (
    ITEM,
    canonical_strides,
    padded,
    regrouped_strides,
    with_leading_strides,
)
from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError, Library
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.post_ops import PRELU
from penstock.backends.onednn.primitive import (
    DST,
    SRC,
    SRC_1,
    WEIGHTS,
    Primitive,
    append_post_ops,
    attributes,
    descriptor,
    descriptor_of,
    memory,
    post_argument,
)
from penstock.backends.onednn.quant_attrs import SIGNED, ZERO_POINTS, Scaling
from penstock.backends.onednn.weights import Weights
from penstock.core.records import NamedTuple, dataclass, field, replace
from penstock.core.types import FLOAT32, TensorType, dtype_named
from penstock.ir.layout import channels_last, packed_strides
from penstock.ops.common.dtypes import INT8, INT32

Strides = Sequence[tuple[int, ...] | None]
"""the strides of the tensors of an ``OpDesc``, in bytes; None for tensors left out"""
Constants = dict[int, Weights]
"""constants by argument of a primitive"""

# Bytes of weights from which on they are not held in the file's order as well.
_WORTH_ABSORBING = 16 << 10


class Converted(NamedTuple):
    """A tensor that a primitive takes in another dtype: the descriptors of the tensor itself and of
    its converted copy, and the scaling between them."""

    own: Any
    taken: Any
    scaling: Scaling = Scaling()


@dataclass(slots=True, eq=False)
class BoundPrimitive:
    """A primitive and its arguments.

    ``tensors`` maps arguments to tensors of the ``OpDesc``, by index; ``always`` maps others to
    memory that is always the same. ``constants`` are brought into the layouts that the primitive
    asks for, perhaps ``rounded``. ``converted`` are tensors that the primitive takes in another
    dtype. ``then``: what runs behind it, on its result.
    """

    primitive: Primitive
    tensors: dict[int, int]
    always: dict[int, Any]
    constants: Constants
    converted: Mapping[int, Converted]
    rounded: bool
    then: BoundPrimitive | None = None
    _held: list[Any] = field(default_factory=list)

    @property
    def is_reference_impl(self) -> bool:
        """Whether one of the primitives is slow, see ``Primitive``."""
        later = self.then is not None and self.then.is_reference_impl
        return later or self.primitive.is_reference_impl

    def fixed(self) -> dict[int, Any]:
        """The fixed memory by argument; the first call brings constants into their layouts."""
        library = self.primitive.library
        for argument, weights in self.constants.items():
            self._held.append(weights)
            layout = self.primitive.query_argument(argument)
            self.always[argument] = weights.memory(
                library, layout, self.rounded, self._reader if weights.is_signed else ""
            )
        # Bound calls after the first find the memory in `always`.
        self.constants = {}
        return dict(self.always)

    @property
    def _reader(self) -> str:
        """What decides about the sums that oneDNN puts behind weights of int8: its code, and the
        dtype and zero points of what is multiplied by them."""
        has_zeros = ZERO_POINTS | SRC in {*self.always, *self.tensors}
        return f"{self.primitive.implementation} {self.primitive.dtype_of(SRC)} {has_zeros}"


@dataclass(slots=True, eq=False)
class SpecContext:
    """The means to create the primitive of a specification for tensors of these ``strides``.

    ``summed``: the first operand of the post-ops lies where the result is written, so that it is
    added there. ``narrow``: operands may be rounded to bfloat16. ``releasable``: as of
    ``Primitive``.
    """

    library: Library
    desc: OpDesc
    strides: Strides
    dims_order: tuple[int, ...] = ()
    summed: bool = False
    narrow: bool = False
    releasable: bool = False
    converted: dict[int, Converted] = field(default_factory=dict)

    def descriptor(
        self, tensor: int, dims: Sequence[int] | None = None, axes: Sequence[int] = ()
    ) -> Any:
        """The descriptor of a tensor with its axes in the order ``axes``, and then viewed with
        other ``dims``, if these are given."""
        seen, strides = self._seen(tensor, dims, axes)
        own = descriptor(self.library, seen, self._dtype(tensor), strides)
        if self.desc.scaling is None or tensor not in self.desc.scaling.signed:
            return own
        # oneDNN takes int8 alone as the second operand; less 128, codes and zero point keep their
        # difference.
        taken = descriptor(self.library, seen, INT8, strides)
        self.converted[tensor] = Converted(own, taken, SIGNED)
        return taken

    def _dtype(self, tensor: int) -> np.dtype:
        type_ = self.desc.tensors[tensor]
        assert type_ is not None and type_.dtype is not None
        return type_.dtype

    def _strides(self, tensor: int) -> tuple[int, ...]:
        strides = self.strides[tensor]
        assert strides is not None
        return strides

    def _seen(
        self, tensor: int, dims: Sequence[int] | None, axes: Sequence[int] = ()
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Dims and strides of a tensor as ``descriptor`` has them."""
        own, strides = self.desc.dims(tensor), self._strides(tensor)
        if axes:
            own, strides = tuple([own[i] for i in axes]), tuple([strides[i] for i in axes])
        if dims is None:
            return own, strides
        itemsize = self._dtype(tensor).itemsize
        longer = with_leading_strides(strides, len(dims))
        regrouped = regrouped_strides(padded(own, len(longer)), longer, dims, itemsize)
        return dims, canonical_strides(dims, regrouped, self.dims_order, itemsize)

    def order(self, tensor: int) -> list[int]:
        """The axes of a tensor, the outermost in memory first."""
        strides = self._strides(tensor)
        return sorted(range(len(strides)), key=lambda axis: -strides[axis])

    @property
    def source(self) -> Any:
        """The descriptor of the first input."""
        return self.descriptor(self.desc.inputs[0])

    @property
    def target(self) -> Any:
        """The descriptor of the first output."""
        return self.descriptor(self.desc.outputs[0])

    def operand(self, tensor: int, dims: Sequence[int]) -> Any:
        """As ``descriptor``, of an operand of a product; in bfloat16 if ``narrow``."""
        own = self.descriptor(tensor, dims)
        if not self.narrow:
            return own
        _, strides = self._seen(tensor, dims)
        # Strides are in bytes, and bfloat16 has half of those of float32.
        taken = descriptor(
            self.library, dims, dtype_named("bfloat16"), [step // 2 for step in strides]
        )
        self.converted[tensor] = Converted(own, taken)
        return taken

    def any(self, dims: Sequence[int], dtype: np.dtype = FLOAT32) -> Any:
        """A descriptor that leaves the layout to the primitive."""
        return descriptor(self.library, dims, dtype)

    def weights(self, dims: Sequence[int]) -> Any:
        """As ``any``, for constant weights, in the dtype in which the primitive reads them."""
        if self.desc.scaling is not None:
            return self.any(dims, INT8)
        return self.any(dims, dtype_named("bfloat16") if self.narrow else FLOAT32)

    def packed(self, dims: Sequence[int], order: Sequence[int] = ()) -> Any:
        """The descriptor of a tensor without gaps, its dims in ``order`` in memory."""
        return descriptor(self.library, dims, FLOAT32, packed_strides(dims, ITEM, order))

    def of(self, array: np.ndarray | None) -> Any:
        """The descriptor of an array as it lies in memory; None for None."""
        return None if array is None else descriptor_of(self.library, array)

    def primitive(
        self,
        name: str,
        arguments: Sequence[Any],
        tensors: dict[int, int] | None = None,
        constants: Constants | None = None,
        *,
        view: Callable[[Sequence[int]], Sequence[int]] = tuple,
    ) -> BoundPrimitive:
        """The primitive of this ``name`` and ``arguments`` (see ``Primitive``) with the post-ops of
        the ``OpDesc``.

        ``tensors``, by default the first input and the first output, and ``constants``
        are those of ``BoundPrimitive``. ``view`` maps the dims of the result, and of tensors that
        broadcast to it, to those that the primitive sees.
        """
        desc, library = self.desc, self.library
        if tensors is None:
            tensors = {SRC: desc.inputs[0], DST: desc.outputs[0]}
        attr, operands, fixed = self._attributes(view)
        tensors = tensors | operands
        if desc.scaling is not None:
            fixed.update(desc.scaling.arguments(library, attr))
            for argument, tensor in desc.scaling.late.items():
                tensors[argument] = tensor
                dtype = self._dtype(tensor)
                own = descriptor(library, [1], dtype, [dtype.itemsize])
                taken = descriptor(library, [1], INT32, [INT32.itemsize])
                self.converted[tensor] = Converted(own, taken)
        primitive = Primitive(library, name, arguments, attr, releasable=self.releasable)
        return BoundPrimitive(
            primitive, tensors, fixed, constants or {}, self.converted, self.narrow
        )

    def _attributes(
        self, view: Callable[[Sequence[int]], Sequence[int]]
    ) -> tuple[Any, dict[int, int], dict[int, Any]]:
        """The attributes of a primitive that sees the result with the dims ``view(dims)``, and the
        operands of post-ops likewise; and its further arguments: tensors by index, and constant
        memory."""
        library, indices, fixed = self.library, {}, {}
        calls: list[tuple[Any, ...]] = []
        for i, op in enumerate(self.desc.post_ops):
            if op.eltwise is not None:
                calls.append(op.eltwise.call(library))
            elif self.summed and i == 0:
                # The result then needs no memory beside that of the tensor that it is added to.
                calls.append(("sum", 1.0, 0, library.lib.dnnl_data_type_undef))
            else:
                constant, dims, steps = self._operand(op.tensor, view)
                layout = descriptor(library, dims, FLOAT32, steps)
                argument = post_argument(i, WEIGHTS if op.binary == PRELU else SRC_1)
                if op.binary == PRELU:
                    calls.append((PRELU, sum(1 << axis for axis, n in enumerate(dims) if n > 1)))
                else:
                    calls.append(("binary", library.constant(f"binary_{op.binary}"), layout))
                if constant is None:
                    indices[argument] = op.tensor
                else:
                    fixed[argument] = memory(library, layout, constant)
        attr = attributes(library)
        if calls:
            append_post_ops(library, attr, calls)
        return attr, indices, fixed

    def _operand(
        self, tensor: int, view: Callable[[Sequence[int]], Sequence[int]]
    ) -> tuple[np.ndarray | None, Sequence[int], Sequence[int]]:
        """A binary post-op's operand if constant, and its dims and strides in the primitive."""
        desc, constant, result = self.desc, self.desc.constants[tensor], self.desc.output.dims
        if constant is None:
            strides = self._strides(tensor)
        else:
            constant = _in_order_of(constant, result, self.strides[-1])
            strides = constant.strides
        dims = padded(desc.dims(tensor), len(result))
        if dims != result and desc.repeats(tensor) and not _is_usual(result, self.strides[-1]):
            # In other layouts, oneDNN 3.2 reads the wrong elements, or some beyond the last.
            raise DnnlError(UNIMPLEMENTED)
        seen = view(dims)
        if any(n not in (1, whole) for n, whole in zip(seen, view(result), strict=True)):
            # A period of the axes that a product sees as one; of slopes oneDNN does not notice.
            raise DnnlError(UNIMPLEMENTED)
        longer = with_leading_strides(strides, len(dims))
        return constant, seen, regrouped_strides(dims, longer, seen)


def _is_usual(dims: Sequence[int], strides: Sequence[int] | None) -> bool:
    """Whether a tensor has its dims in their own order in memory, or its channels last."""
    layouts = [packed_strides(dims, ITEM), packed_strides(dims, ITEM, channels_last(len(dims)))]
    return strides is None or canonical_strides(dims, strides) in layouts


def _in_order_of(
    constant: np.ndarray, dims: Sequence[int], strides: Sequence[int] | None
) -> np.ndarray:
    """A constant with its dims in memory in the order of those of the result."""
    if strides is None or constant.ndim != len(dims):
        return np.ascontiguousarray(constant)
    order = sorted(range(len(dims)), key=lambda axis: -strides[axis])
    return np.ascontiguousarray(constant.transpose(order)).transpose(np.argsort(order))


@dataclass(frozen=True, slots=True)
class PrimitiveSpec:
    """How an ``OpDesc`` becomes a primitive.

    ``create(context)`` raises ``DnnlError`` if oneDNN has none. ``dims_order``: the order of the
    dims of the result in memory; empty if any will do. ``contiguous_inputs``: tensors that must
    have no gaps and be in the order of the result. ``any_layout``: the result may be written in any
    order, at no cost. ``inplace``: tensors whose memory the result may take over, as it may that of
    ``summed``, to which it is then added. ``narrow`` and ``releasable``: as of ``SpecContext``.
    ``weights`` are tensors that are read in the primitive's layout alone, ``desc`` has no contents
    of them."""

    desc: OpDesc
    create: Callable[[SpecContext], BoundPrimitive]
    dims_order: tuple[int, ...] = ()
    contiguous_inputs: tuple[int, ...] = ()
    any_layout: bool = False
    inplace: tuple[int, ...] = ()
    summed: int = -1
    narrow: bool = False
    releasable: bool = False
    weights: Mapping[int, Weights] = field(default_factory=dict)

    def order_of(self, type_: TensorType) -> tuple[int, ...]:
        """The order in memory of a tensor without gaps: that of the result, if it has as many
        dims."""
        return self.dims_order if len(type_.dims) == len(self.dims_order) else ()


def absorb(
    desc: OpDesc, weights: Mapping[int, Weights | None]
) -> tuple[OpDesc, Mapping[int, Weights]]:
    """Leave the contents of inputs to ``weights``: the ``OpDesc`` without them, and the weights by
    tensor. Small ones, and those that are read elsewhere too, stay."""
    absorbed: dict[int, Weights] = {}
    for place, held in weights.items():
        tensor, constant = desc.index(place), desc.constant(place)
        if constant is None or held is None:
            continue
        if constant.nbytes < _WORTH_ABSORBING or any(o.tensor == tensor for o in desc.post_ops):
            continue
        desc = desc.without_contents(tensor)
        if desc.scaling is not None:  # whose function holds the contents, too
            desc = replace(desc, scaling=replace(desc.scaling, weights=None))
        absorbed[tensor] = held
    return desc, absorbed
