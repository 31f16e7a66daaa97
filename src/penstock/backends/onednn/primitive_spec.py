"""How a family says what primitive a work becomes, and what it has at hand for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from penstock.backends.onednn.layouts import longer_steps, padded, regrouped, steps_of, usual
from penstock.backends.onednn.library import Library
from penstock.backends.onednn.op_desc import OpDesc
from penstock.backends.onednn.primitive import DST, SRC, Descriptor, Primitive, Weights
from penstock.backends.onednn.quant_attrs import SIGNED, Scaling
from penstock.ops.common.constant_cache import Shared, shared
from penstock.ops.common.dtypes import INT8, INT32
from penstock.types import FLOAT32

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

Strides = Sequence[tuple[int, ...] | None]
"""of the tensors of a work, in bytes"""
Constants = Mapping[int, tuple[np.ndarray, tuple[int, ...]]]


class Converted(NamedTuple):
    """Descriptors of what a tensor is and of what is taken, and how one becomes the other."""

    own: Any
    taken: Any
    scaling: Scaling = Scaling()


class BoundPrimitive:
    """A primitive, and what it is called with: for each of its arguments the tensor of the work, by
    index, or memory that is always the same. ``constants`` maps arguments to arrays, each seen with
    a shape of its own, which are brought into the layout that the primitive asks for. ``dropped``
    are arguments that it writes and nobody reads. ``converted`` are tensors that it takes in
    another dtype.
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
        """Memory that is always the same, by argument; constants are laid out at the first call."""
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
    """What a family has at hand to make a primitive for tensors of these ``strides`` (in bytes)."""

    def __init__(
        self,
        library: Library,
        work: OpDesc,
        strides: Strides,
        layout: Sequence[int] = (),
        summed: bool = False,
        narrow: bool = False,
    ) -> None:
        self.library = library
        self.layout = tuple(layout)
        self.narrow = narrow
        self.converted: dict[int, Converted] = {}
        self.ffi, self.lib = library.ffi, library.lib
        self.work = work
        self.strides = strides
        self.summed = summed

    def descriptor(
        self, tensor: int, dims: Sequence[int] | None = None, axes: Sequence[int] = ()
    ) -> Any:
        """The descriptor of a tensor of the work: its dims in the order ``axes``, and then seen as
        other ``dims``, if these are given."""
        seen, steps = self._seen(tensor, dims, axes)
        found = Descriptor(self.library, seen, self._dtype(tensor), steps).handle
        if self.work.scaling is None or tensor not in self.work.scaling.signed:
            return found
        taken = Descriptor(self.library, seen, INT8, steps).handle
        self.converted[tensor] = Converted(found, taken, SIGNED)
        return taken

    def _dtype(self, tensor: int) -> np.dtype:
        kind = self.work.tensors[tensor]
        assert kind is not None and kind.dtype is not None
        return kind.dtype

    def _seen(
        self, tensor: int, dims: Sequence[int] | None, axes: Sequence[int] = ()
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Dims and strides of a tensor, as ``descriptor`` has them."""
        kind, steps = self.work.tensors[tensor], self.strides[tensor]
        assert kind is not None and steps is not None
        own = kind.dims
        if axes:
            own, steps = tuple([own[i] for i in axes]), tuple([steps[i] for i in axes])
        if dims is None:
            return own, steps
        longer, item = longer_steps(steps, len(dims)), self._dtype(tensor).itemsize
        found = regrouped(padded(own, len(longer)), longer, dims, item)
        return dims, usual(dims, found, self.layout, item)

    def order(self, tensor: int) -> list[int]:
        """The axes of a tensor, the outermost in memory first."""
        steps = self.strides[tensor]
        assert steps is not None
        return sorted(range(len(steps)), key=lambda axis: -steps[axis])

    @property
    def source(self) -> Any:
        """The descriptor of the first input."""
        return self.descriptor(self.work.inputs[0])

    @property
    def target(self) -> Any:
        """The descriptor of the first output."""
        return self.descriptor(self.work.outputs[0])

    @property
    def ends(self) -> dict[int, int]:
        """The arguments of a primitive with one source and one result."""
        return {SRC: self.work.inputs[0], DST: self.work.outputs[0]}

    def any(self, dims: Sequence[int]) -> Any:
        """A descriptor that leaves the layout to the primitive."""
        return Descriptor(self.library, dims, FLOAT32).handle

    def operand(self, tensor: int, dims: Sequence[int]) -> Any:
        """As ``descriptor``, of what a product reads without gaps; in bfloat16, if it may be."""
        found = self.descriptor(tensor, dims)
        if not self.narrow:
            return found
        _, wide = self._seen(tensor, dims)
        taken = Descriptor(self.library, dims, BFLOAT16, [step // 2 for step in wide]).handle
        self.converted[tensor] = Converted(found, taken)
        return taken

    def weights(self, dims: Sequence[int]) -> Any:
        """A descriptor of constant weights, whose layout is left to the primitive."""
        if self.work.scaling is not None:
            return Descriptor(self.library, dims, INT8).handle
        return Descriptor(self.library, dims, BFLOAT16 if self.narrow else FLOAT32).handle

    def packed(self, dims: Sequence[int], order: Sequence[int] = ()) -> Any:
        """The descriptor of a tensor without gaps, its dims in ``order`` in memory."""
        return Descriptor(self.library, dims, FLOAT32, steps_of(dims, order)).handle

    def of(self, array: np.ndarray | None) -> Any:
        """The descriptor of an array as it lies in memory; NULL if there is none."""
        return self.ffi.NULL if array is None else Descriptor.of(self.library, array).handle

    def dims(self, numbers: Sequence[int]) -> Any:
        """``numbers`` as oneDNN takes them."""
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
        """The primitive of ``create(desc, engine, *arguments, attr)`` with the work's post-ops.

        ``tensors`` maps its arguments to tensors of the work; ``constants`` maps others to arrays,
        each seen with a shape of its own, which are brought into the layout that it asks for.
        ``view`` says with what dims the primitive sees tensors of the shape of its result.
        """
        work, library = self.work, self.library
        added = work.posts.attributes(library, view, work.tensors, self.strides, self.summed)
        if work.scaling is not None:
            added.fixed.update(work.scaling.arguments(library, added.attributes))
            for argument, tensor in work.scaling.late.items():
                added.tensors[argument] = tensor
                one, step = self._dtype(tensor), self._dtype(tensor).itemsize
                own = Descriptor(library, [1], one, [step]).handle
                taken = Descriptor(library, [1], INT32, [INT32.itemsize]).handle
                self.converted[tensor] = Converted(own, taken)
        primitive = Primitive(library, create, *arguments, attr=added.attributes)
        found = tensors | added.tensors
        return BoundPrimitive(
            primitive, found, added.fixed, constants or {}, dropped, self.converted
        )


@dataclass(frozen=True, slots=True)
class PrimitiveSpec:
    """How a work becomes a primitive: ``make(maker)``, which raises ``DnnlError`` where there is
    none.

    ``layout``: in which order the result has its dims in memory; empty, if in any. ``dense``:
    tensors of the work that must lie without gaps, in the order of the result. ``free``: the result
    may be written in any order, at no cost. ``inplace``: tensors that the result may take the
    place of; so it may of ``summed``, to which it is then added. ``reference``: that oneDNN calls
    the code "ref" means nothing here.
    """

    work: OpDesc
    make: Callable[[SpecContext], BoundPrimitive]
    layout: tuple[int, ...] = ()
    dense: tuple[int, ...] = ()
    free: bool = False
    inplace: tuple[int, ...] = ()
    summed: int = -1
    reference: bool = False
    narrow: bool = False
    """whether operands may be rounded to bfloat16"""
    held: Shared[Any] | None = None
    """what must live as long, so that it is made once for all plans"""
