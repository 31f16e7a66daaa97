"""Kernels made of primitives: compiled for the strides that tensors turn out to have."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.backends.onednn.library import DnnlError, Library
from penstock.backends.onednn.primitive import (
    SCRATCHPAD,
    Descriptor,
    Primitive,
    Weights,
    address,
    memory,
)
from penstock.ops.base import Kernel
from penstock.ops.shared import shared
from penstock.types import TensorType

# Primitives of one kernel that are kept, for so many sets of strides.
_MOST_PRIMITIVES = 16

Tensors = Sequence[TensorType | None]
Strides = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """A primitive, and what it is called with: for each of its arguments the number of the node's
    tensor (inputs, then outputs), or memory that is always the same, such as weights, with what
    must be ``held`` for it to stay."""

    primitive: Primitive
    tensors: dict[int, int]
    fixed: dict[int, Any]
    held: tuple[Any, ...] = ()


def with_weights(
    library: Library,
    primitive: Primitive,
    tensors: dict[int, int],
    constants: dict[int, tuple[np.ndarray, tuple[int, ...]]],
) -> Made:
    """A primitive some of whose arguments are constants, each seen with a shape of its own, in the
    layouts that it asks for."""
    fixed, held = {}, []
    for argument, (constant, shape) in constants.items():
        weights = shared(("onednn", shape), Weights, constant)
        held.append(weights)
        descriptor = primitive.query_argument(argument)
        fixed[argument] = weights.value.memory(library, constant.reshape(shape), descriptor)
    return Made(primitive, tensors, fixed, tuple(held))


class Recipe:
    """How a node becomes a primitive: ``make(descriptors)`` for descriptors of its tensors, inputs
    and then outputs, None for those left out. Raises ``DnnlError`` where there is none.

    Tensors are static. What is made is kept for each set of strides.
    """

    def __init__(
        self,
        library: Library,
        inputs: Tensors,
        outputs: Tensors,
        make: Callable[[Sequence[Descriptor | None]], Made],
    ) -> None:
        self.library = library
        self.tensors = (*inputs, *outputs)
        self.outputs = tuple(outputs)
        self._make = make
        self._made: OrderedDict[Strides, Made] = OrderedDict()
        self._lock = threading.Lock()

    def made(self, strides: Strides) -> Made:
        """The primitive for tensors of these strides (in bytes)."""
        with self._lock:
            found = self._made.get(strides)
            if found is None:
                descriptors = [
                    None if kind is None or steps is None else self._descriptor(kind, steps)
                    for kind, steps in zip(self.tensors, strides, strict=True)
                ]
                found = self._made[strides] = self._make(descriptors)
                while len(self._made) > _MOST_PRIMITIVES:
                    self._made.popitem(last=False)
            else:
                self._made.move_to_end(strides)
        return found

    def _descriptor(self, kind: TensorType, strides: Sequence[int]) -> Descriptor:
        assert kind.dtype is not None
        return Descriptor(self.library, kind.dims, kind.dtype, strides)

    @property
    def contiguous(self) -> Strides:
        """The strides of tensors without gaps, the last dim first."""
        return tuple([None if kind is None else steps_of(kind) for kind in self.tensors])

    def call(
        self, tensors: Sequence[Any], scratch: np.ndarray | None
    ) -> tuple[Any, tuple[Any, ...]]:
        """The function and the arguments that run the node on ``tensors``, inputs and then outputs.

        What is no array stands for one that is known only during the run.
        """
        library = self.library
        strides = tuple(
            [
                None if kind is None else x.strides if isinstance(x, np.ndarray) else steps_of(kind)
                for kind, x in zip(self.tensors, tensors, strict=True)
            ]
        )
        made = self.made(strides)
        primitive, lib = made.primitive, library.lib
        memories = dict(made.fixed)
        late: list[tuple[Any, Any, bool]] = []
        count = len(self.tensors) - len(self.outputs)
        for argument, i in made.tensors.items():
            x, kind = tensors[i], self.tensors[i]
            assert kind is not None and kind.dtype is not None
            descriptor = primitive.query_argument(argument)
            known = isinstance(x, np.ndarray)
            memories[argument] = memory(library, descriptor, x if known else None)
            if not known:
                late.append((memories[argument], x, i < count))
        if primitive.scratchpad:
            if scratch is None or scratch.nbytes < primitive.scratchpad:
                scratch = np.empty(primitive.scratchpad, np.uint8)
            md = primitive.query(lib.dnnl_query_scratchpad_md)
            memories[SCRATCHPAD] = memory(library, md, scratch)
        function, arguments = primitive.call(memories)
        if not late:
            return function, arguments
        run = _with_handles(library, function, arguments, [(m, read) for m, _, read in late])
        return run, tuple([x for _, x, _ in late])


def steps_of(kind: TensorType) -> tuple[int, ...]:
    """The strides of a tensor without gaps, in bytes."""
    assert kind.dtype is not None
    steps, step = [], kind.dtype.itemsize
    for dim in reversed(kind.dims):
        steps.append(step)
        step *= dim
    return tuple(reversed(steps))


def _with_handles(
    library: Library,
    function: Any,
    arguments: tuple[Any, ...],
    memories: Sequence[tuple[Any, bool]],
) -> Callable[..., None]:
    """The call, told each time where some tensors lie, of which it may copy those it reads."""
    handle, cast = library.lib.dnnl_memory_set_data_handle, library.ffi.cast

    def run(*arrays: np.ndarray) -> None:
        used = []
        for (each, read), x in zip(memories, arrays, strict=True):
            if not x.flags.c_contiguous:
                assert read, "memory set aside for a result is not contiguous"
                x = np.ascontiguousarray(x)
            used.append(x)  # copies stay until the call is over
            handle(each, cast("void *", address(x)))
        library.check(function(*arguments))

    return run


class DnnlKernel(Kernel):
    """A node on oneDNN. ``workspace`` is what the primitive for contiguous tensors needs."""

    __slots__ = ("recipe",)

    recipe: Recipe

    @classmethod
    def of(cls, recipe: Recipe, layout: tuple[int, ...] = ()) -> DnnlKernel | None:
        """The kernel of a recipe, whose output had best lie in ``layout``; None if oneDNN has no
        primitive for it."""
        try:
            made = recipe.made(recipe.contiguous)
        except DnnlError:
            return None
        count = len(recipe.tensors) - len(recipe.outputs)

        def function(*inputs: Any) -> Any:
            outputs = [
                None if kind is None else np.empty(kind.dims, kind.dtype) for kind in recipe.outputs
            ]
            into(*inputs, *outputs)
            return outputs[0] if len(outputs) == 1 else tuple(outputs)

        def into(*tensors: Any) -> None:
            run, arguments = recipe.call(tensors[: count + len(recipe.outputs)], None)
            recipe.library.check(run(*arguments))

        kernel = cls(function, into, workspace=made.primitive.scratchpad, layout=layout)
        object.__setattr__(kernel, "recipe", recipe)
        return kernel

    def bind(
        self, inputs: Sequence[Any], outputs: Sequence[Any], workspace: np.ndarray | None
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.recipe.call((*inputs, *outputs), workspace)
