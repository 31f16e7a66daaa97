"""Specifications from which oneDNN primitives are created."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from penstock.backends.onednn.layouts import (
    ITEM,
    canonical_strides,
    padded,
    regrouped_strides,
    with_leading_strides,
)
from penstock.backends.onednn.library import Library
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive import DST, SRC, Descriptor, Primitive, Weights
from penstock.backends.onednn.quant_attrs import SIGNED, Scaling
from penstock.ir.layout import packed_strides
from penstock.ops.common.constant_cache import Shared, shared
from penstock.ops.common.dtypes import INT8, INT32
from penstock.types import FLOAT32, TensorType

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

Strides = Sequence[tuple[int, ...] | None]
"""the strides of the tensors of an ``OpDesc``, in bytes; None for tensors left out"""
Constants = Mapping[int, tuple[np.ndarray, tuple[int, ...]]]


class Converted(NamedTuple):
    """A tensor that a primitive takes in another dtype: the descriptors of the tensor itself and of
    its converted copy, and the scaling between them."""

    own: Any
    taken: Any
    scaling: Scaling = Scaling()


class BoundPrimitive:
    """A primitive and its arguments.

    ``tensors`` maps arguments to tensors of the ``OpDesc``, by index; ``fixed`` maps others to
    memory that is always the same, and ``constants`` to arrays with the shapes in which the
    primitive sees them, which are brought into the layout that it asks for. ``dropped`` are outputs
    that no step reads. ``converted`` are the tensors that it takes in another dtype.
    """

    __slots__ = ("_constants", "_fixed", "_held", "converted", "dropped", "primitive", "tensors")

    def __init__(
        self,
        primitive: Primitive,
        tensors: dict[int, int],
        fixed: dict[int, Any],
        constants: Constants,
        dropped: tuple[int, ...] = (),
        converted: Mapping[int, Converted] | None = None,
    ) -> None:
        self.converted = converted or {}
        self.primitive = primitive
        self.tensors = tensors
        self.dropped = dropped
        self._fixed = fixed
        self._constants = constants
        self._held: list[Any] = []

    def fixed(self) -> dict[int, Any]:
        """The fixed memory by argument; the first call brings constants into their layouts."""
        library = self.primitive.library
        for argument, (constant, shape) in self._constants.items():
            weights = shared(("onednn", shape), Weights, constant)
            self._held.append(weights)
            descriptor = self.primitive.query_argument(argument)
            seen = constant.reshape(shape)
            self._fixed[argument] = weights.value.memory(library, seen, descriptor)
        self._constants = {}
        return dict(self._fixed)


class SpecContext:
    """The means to create the primitive of a specification for tensors of these ``strides``.

    ``summed``: the first operand of the post-ops lies where the result is written, so that it is
    added there. ``narrow``: operands may be rounded to bfloat16.
    """

    def __init__(
        self,
        library: Library,
        desc: OpDesc,
        strides: Strides,
        dims_order: Sequence[int] = (),
        summed: bool = False,
        narrow: bool = False,
    ) -> None:
        self.library = library
        self.dims_order = tuple(dims_order)
        self.narrow = narrow
        self.converted: dict[int, Converted] = {}
        self.ffi, self.lib = library.ffi, library.lib
        self.desc = desc
        self.strides = strides
        self.summed = summed

    def descriptor(
        self, tensor: int, dims: Sequence[int] | None = None, axes: Sequence[int] = ()
    ) -> Any:
        """The descriptor of a tensor with its axes in the order ``axes``, and then viewed with
        other ``dims``, if these are given."""
        seen, strides = self._seen(tensor, dims, axes)
        own = Descriptor(self.library, seen, self._dtype(tensor), strides).handle
        if self.desc.scaling is None or tensor not in self.desc.scaling.signed:
            return own
        taken = Descriptor(self.library, seen, INT8, strides).handle
        self.converted[tensor] = Converted(own, taken, SIGNED)
        return taken

    def _dtype(self, tensor: int) -> np.dtype:
        type_ = self.desc.tensors[tensor]
        assert type_ is not None and type_.dtype is not None
        return type_.dtype

    def _seen(
        self, tensor: int, dims: Sequence[int] | None, axes: Sequence[int] = ()
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Dims and strides of a tensor as ``descriptor`` has them."""
        type_, strides = self.desc.tensors[tensor], self.strides[tensor]
        assert type_ is not None and strides is not None
        own = type_.dims
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
        strides = self.strides[tensor]
        assert strides is not None
        return sorted(range(len(strides)), key=lambda axis: -strides[axis])

    @property
    def source(self) -> Any:
        """The descriptor of the first input."""
        return self.descriptor(self.desc.inputs[0])

    @property
    def target(self) -> Any:
        """The descriptor of the first output."""
        return self.descriptor(self.desc.outputs[0])

    @property
    def ends(self) -> dict[int, int]:
        """The arguments of a primitive with one source and one result."""
        return {SRC: self.desc.inputs[0], DST: self.desc.outputs[0]}

    def any(self, dims: Sequence[int]) -> Any:
        """A descriptor that leaves the layout to the primitive."""
        return Descriptor(self.library, dims, FLOAT32).handle

    def operand(self, tensor: int, dims: Sequence[int]) -> Any:
        """As ``descriptor``, of an operand of a product; in bfloat16 if ``narrow``."""
        own = self.descriptor(tensor, dims)
        if not self.narrow:
            return own
        _, strides = self._seen(tensor, dims)
        taken = Descriptor(self.library, dims, BFLOAT16, [step // 2 for step in strides]).handle
        self.converted[tensor] = Converted(own, taken)
        return taken

    def weights(self, dims: Sequence[int]) -> Any:
        """A descriptor of constant weights, whose layout is left to the primitive."""
        if self.desc.scaling is not None:
            return Descriptor(self.library, dims, INT8).handle
        return Descriptor(self.library, dims, BFLOAT16 if self.narrow else FLOAT32).handle

    def packed(self, dims: Sequence[int], order: Sequence[int] = ()) -> Any:
        """The descriptor of a tensor without gaps, its dims in ``order`` in memory."""
        return Descriptor(self.library, dims, FLOAT32, packed_strides(dims, ITEM, order)).handle

    def of(self, array: np.ndarray | None) -> Any:
        """The descriptor of an array as it lies in memory; NULL for None."""
        return self.ffi.NULL if array is None else Descriptor.of(self.library, array).handle

    def dims(self, numbers: Sequence[int]) -> Any:
        """``numbers`` as a C array of dims."""
        return self.ffi.new("dnnl_dim_t[]", list(numbers))

    def primitive(
        self,
        create: Callable[..., int],
        arguments: Sequence[Any],
        tensors: dict[int, int],
        constants: Constants | None = None,
        *,
        view: Callable[[Sequence[int]], Sequence[int]] = tuple,
        dropped: tuple[int, ...] = (),
    ) -> BoundPrimitive:
        """The primitive of ``create(desc, engine, *arguments, attr)`` with the post-ops of the
        ``OpDesc``.

        ``tensors``, ``constants`` and ``dropped`` are those of ``BoundPrimitive``. ``view`` maps
        the dims of the result, and of tensors that broadcast to it, to those that the primitive
        sees.
        """
        desc, library = self.desc, self.library
        added = desc.post_ops.attributes(library, view, desc.tensors, self.strides, self.summed)
        if desc.scaling is not None:
            added.fixed.update(desc.scaling.arguments(library, added.attributes))
            for argument, tensor in desc.scaling.late.items():
                added.tensors[argument] = tensor
                one, step = self._dtype(tensor), self._dtype(tensor).itemsize
                own = Descriptor(library, [1], one, [step]).handle
                taken = Descriptor(library, [1], INT32, [INT32.itemsize]).handle
                self.converted[tensor] = Converted(own, taken)
        primitive = Primitive(library, create, *arguments, attr=added.attributes)
        return BoundPrimitive(
            primitive,
            tensors | added.tensors,
            added.fixed,
            constants or {},
            dropped,
            self.converted,
        )


@dataclass(frozen=True, slots=True)
class PrimitiveSpec:
    """How an ``OpDesc`` becomes a primitive.

    ``create(context)`` raises ``DnnlError`` if oneDNN has none. ``dims_order``: the order of the
    dims of the result in memory; empty if any will do. ``contiguous_inputs``: tensors that must
    have no gaps and be in the order of the result. ``any_layout``: the result may be written in any
    order, at no cost. ``inplace``: tensors whose memory the result may take over; so it may that of
    ``summed``, to which it is then added. ``accept_reference``: oneDNN calls this code "ref", and
    it is fast all the same. ``narrow``: operands may be rounded to bfloat16. ``held`` is computed
    once for all plans, and lives as long as one of them.
    """

    desc: OpDesc
    create: Callable[[SpecContext], BoundPrimitive]
    dims_order: tuple[int, ...] = ()
    contiguous_inputs: tuple[int, ...] = ()
    any_layout: bool = False
    inplace: tuple[int, ...] = ()
    summed: int = -1
    accept_reference: bool = False
    narrow: bool = False
    held: Shared[Any] | None = None

    def order_of(self, type_: TensorType) -> tuple[int, ...]:
        """The order in memory of a tensor without gaps: that of the result, if it has as many
        dims."""
        return self.dims_order if len(type_.dims) == len(self.dims_order) else ()
