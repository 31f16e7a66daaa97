"""Kernels made of primitives: compiled for the strides that tensors turn out to have."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError, Library
from penstock.backends.onednn.primitive import (
    DST,
    SCRATCHPAD,
    SRC,
    Descriptor,
    Primitive,
    Weights,
    address,
    memory,
)
from penstock.backends.onednn.strides import longer_steps, padded, regrouped, steps_of, usual
from penstock.backends.onednn.work import Work
from penstock.ops.base import Kernel
from penstock.ops.shared import shared
from penstock.types import FLOAT32, TensorType

# Primitives of one kernel that are kept, for so many sets of strides and numbers of threads.
_MOST_PRIMITIVES = 16

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

Strides = Sequence[tuple[int, ...] | None]


Constants = Mapping[int, tuple[np.ndarray, tuple[int, ...]]]


class Made:
    """A primitive, and what it is called with: for each of its arguments the tensor of the work, by
    index, or memory that is always the same. ``constants`` maps arguments to arrays, each seen with
    a shape of its own, which are brought into the layout that the primitive asks for. ``dropped``
    are arguments that it writes and nobody reads. ``narrowed`` are tensors that it takes in
    bfloat16, with the descriptors of what they are in float32.
    """

    __slots__ = ("_constants", "_fixed", "_held", "dropped", "narrowed", "primitive", "tensors")

    def __init__(
        self,
        primitive: Primitive,
        tensors: dict[int, int],
        fixed: dict[int, Any],
        constants: Constants,
        dropped: tuple[int, ...] = (),
        narrowed: Mapping[int, Any] | None = None,
    ) -> None:
        self.narrowed = narrowed or {}
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


class Maker:
    """What a family has at hand to make a primitive for tensors of these ``strides`` (in bytes)."""

    def __init__(
        self,
        library: Library,
        work: Work,
        strides: Strides,
        layout: Sequence[int] = (),
        summed: bool = False,
        narrow: bool = False,
    ) -> None:
        self.library = library
        self.layout = tuple(layout)
        self.narrow = narrow
        self.narrowed: dict[int, Any] = {}
        self.ffi, self.lib = library.ffi, library.lib
        self.work = work
        self.strides = strides
        self.summed = summed

    def descriptor(
        self, tensor: int, dims: Sequence[int] | None = None, axes: Sequence[int] = ()
    ) -> Any:
        """The descriptor of a tensor of the work: its dims in the order ``axes``, and then seen as
        other ``dims``, if these are given."""
        kind, steps = self.work.tensors[tensor], self.strides[tensor]
        assert kind is not None and steps is not None
        own = kind.dims
        if axes:
            own, steps = tuple([own[i] for i in axes]), tuple([steps[i] for i in axes])
        if dims is not None:
            longer = longer_steps(steps, len(dims))
            steps = usual(dims, regrouped(padded(own, len(longer)), longer, dims), self.layout)
        return Descriptor(self.library, own if dims is None else dims, FLOAT32, steps).handle

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
        self.narrowed[tensor] = found
        kind, steps = self.work.tensors[tensor], self.strides[tensor]
        assert kind is not None and steps is not None
        longer = longer_steps(steps, len(dims))
        own = padded(kind.dims, len(longer))
        wide = usual(dims, regrouped(own, longer, dims), self.layout)
        halves = [step // 2 for step in wide]
        return Descriptor(self.library, dims, BFLOAT16, halves).handle

    def weights(self, dims: Sequence[int]) -> Any:
        """A descriptor of constant weights, whose layout is left to the primitive."""
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
    ) -> Made:
        """The primitive of ``create(desc, engine, *arguments, attr)`` with the work's post-ops.

        ``tensors`` maps its arguments to tensors of the work; ``constants`` maps others to arrays,
        each seen with a shape of its own, which are brought into the layout that it asks for.
        ``view`` says with what dims the primitive sees tensors of the shape of its result.
        """
        work, library = self.work, self.library
        added = work.posts.attributes(library, view, work.tensors, self.strides, self.summed)
        primitive = Primitive(library, create, *arguments, attr=added.attributes)
        found = tensors | added.tensors
        return Made(primitive, found, added.fixed, constants or {}, dropped, self.narrowed)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a work becomes a primitive: ``make(maker)``, which raises ``DnnlError`` where there is
    none.

    ``layout``: in which order the result has its dims in memory; empty, if in any. ``dense``:
    tensors of the work that must lie without gaps, in the order of the result. ``free``: the result
    may be written in any order, at no cost. ``inplace``: tensors that the result may take the
    place of; so it may of ``summed``, to which it is then added. ``reference``: that oneDNN calls
    the code "ref" means nothing here.
    """

    work: Work
    make: Callable[[Maker], Made]
    layout: tuple[int, ...] = ()
    dense: tuple[int, ...] = ()
    free: bool = False
    inplace: tuple[int, ...] = ()
    summed: int = -1
    reference: bool = False
    narrow: bool = False
    """whether operands may be rounded to bfloat16"""


class DnnlKernel(Kernel):
    """A node on oneDNN. ``workspace`` is what its primitive needs for tensors without gaps."""

    __slots__ = ("_lock", "_made", "implementation", "library", "recipe", "usual")

    library: Library
    recipe: Recipe
    implementation: str
    """what oneDNN calls the code that it chose for tensors without gaps"""
    usual: Strides
    """theirs, in bytes"""
    _made: OrderedDict[Any, Made]
    _lock: threading.Lock

    @classmethod
    def of(cls, library: Library, recipe: Recipe) -> DnnlKernel:
        """The kernel of a recipe; raises ``DnnlError`` if oneDNN has no primitive for it."""
        work = recipe.work
        count = len(work.tensors) - len(work.outputs)
        made: OrderedDict[Any, Made] = OrderedDict()
        strides = tuple(
            [
                None if kind is None else steps_of(kind.dims, _order(recipe, kind))
                for kind in work.tensors
            ]
        )
        first = _created(recipe, Maker(library, work, strides, recipe.layout, False, recipe.narrow))
        made[strides, False, library.threads] = first

        def function(*inputs: Any) -> Any:
            outputs = [
                None if kind is None else np.empty(kind.dims, FLOAT32)
                for kind in work.tensors[count:]
            ]
            into(*inputs, *outputs)
            return outputs[0] if len(outputs) == 1 else tuple(outputs)

        def into(*tensors: Any) -> None:
            run, arguments = kernel.call(tensors[: len(work.tensors)], None)
            library.check(run(*arguments))

        inplace = (*recipe.inplace, *([recipe.summed] if recipe.summed >= 0 else ()))
        kernel = cls(
            function,
            into,
            workspace=first.primitive.scratchpad,
            layout=recipe.layout,
            dense=recipe.dense,
            inplace=tuple([i for i in inplace if work.tensors[i] == work.output]),
            free=recipe.free,
            bound=True,
            check=library.check,
        )
        object.__setattr__(kernel, "library", library)
        object.__setattr__(kernel, "recipe", recipe)
        object.__setattr__(kernel, "usual", strides)
        object.__setattr__(kernel, "implementation", first.primitive.implementation)
        object.__setattr__(kernel, "_made", made)
        object.__setattr__(kernel, "_lock", threading.Lock())
        return kernel

    def bind(
        self, inputs: Sequence[Any], outputs: Sequence[Any], workspace: np.ndarray | None
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call((*inputs, *outputs), workspace)

    def made(self, strides: Strides, summed: bool) -> Made:
        """The primitive for tensors of these strides (in bytes), and as many threads as kernels now
        have."""
        key = (strides, summed, self.library.threads)
        with self._lock:
            found = self._made.get(key)
            if found is None:
                recipe = self.recipe
                maker = Maker(
                    self.library, recipe.work, strides, recipe.layout, summed, recipe.narrow
                )
                # With other threads, there may be nothing else even for what lies as is usual.
                slow = strides == self.usual and not summed
                found = self._made[key] = _created(self.recipe, maker, slow)
                while len(self._made) > _MOST_PRIMITIVES:
                    self._made.popitem(last=False)
            else:
                self._made.move_to_end(key)
        return found

    def call(
        self, tensors: Sequence[Any], scratch: np.ndarray | None
    ) -> tuple[Any, tuple[Any, ...]]:
        """The function and the arguments that run the node on ``tensors``, inputs and then outputs.

        What is no array stands for one that is known only during the run.
        """
        work, layout = self.recipe.work, self.recipe.layout
        strides: list[tuple[int, ...] | None] = []
        for kind, x in zip(work.tensors, tensors, strict=True):
            if kind is None:
                strides.append(None)
            elif isinstance(x, np.ndarray):
                strides.append(usual(kind.dims, x.strides, layout))
            else:
                strides.append(steps_of(kind.dims))
        try:
            made = self.made(tuple(strides), self._is_sum(tensors))
        except DnnlError:
            return self._repacked(tensors, scratch)
        return self._bound(made, tensors, scratch)

    def _bound(
        self, made: Made, tensors: Sequence[Any], scratch: np.ndarray | None
    ) -> tuple[Any, tuple[Any, ...]]:
        """The call of a primitive that is made for these tensors."""
        library, work = self.library, self.recipe.work
        primitive, lib = made.primitive, library.lib
        memories = made.fixed()
        late: list[tuple[Any, Any, bool]] = []
        before: list[tuple[Any, tuple[Any, ...]]] = []
        for argument, i in made.tensors.items():
            x = tensors[i]
            known = isinstance(x, np.ndarray)
            md = primitive.query_argument(argument)
            narrowed = made.narrowed.get(i)
            if narrowed is None:
                taken = memories[argument] = memory(library, md, x if known else None)
            else:
                taken = memory(library, narrowed, x if known else None)
                size = lib.dnnl_memory_desc_get_size(md)
                target = memories[argument] = memory(library, md, np.empty(size, np.uint8))
                before.append(_copying(library, narrowed, md).call({SRC: taken, DST: target}))
            if not known:
                late.append((taken, x, i not in work.outputs))
        for argument in made.dropped:
            md = primitive.query_argument(argument)
            size = lib.dnnl_memory_desc_get_size(md)
            memories[argument] = memory(library, md, np.empty(size, np.uint8))
        # Given even where there is none, so that calls with other threads have as many arguments.
        if scratch is None or scratch.nbytes < primitive.scratchpad:
            scratch = np.empty(primitive.scratchpad, np.uint8)
        md = primitive.query(lib.dnnl_query_scratchpad_md)
        memories[SCRATCHPAD] = memory(library, md, scratch if primitive.scratchpad else None)
        function, arguments = primitive.call(memories)
        if before:
            function, arguments = _in_turn([*before, (function, arguments)]), ()
        if not late:
            return function, arguments
        run = _with_handles(library, function, arguments, [(m, read) for m, _, read in late])
        return run, tuple([x for _, x, _ in late])

    def _repacked(
        self, tensors: Sequence[Any], scratch: np.ndarray | None
    ) -> tuple[Any, tuple[Any, ...]]:
        """As ``call``, with copies of the tensors that lie as the primitive wants them: there is
        none for them as they are."""
        work, strides = self.recipe.work, self.usual
        packed = list(tensors)
        late: list[Any] = []
        before: list[tuple[np.ndarray, Any]] = []
        after: list[tuple[np.ndarray, Any]] = []
        for i, (kind, steps, x) in enumerate(zip(work.tensors, strides, tensors, strict=True)):
            known = isinstance(x, np.ndarray)
            if kind is None or (known and x.strides == steps and i not in work.outputs):
                continue
            packed[i] = copy = np.ndarray(
                kind.dims, FLOAT32, np.empty(math.prod(kind.dims), FLOAT32), 0, steps
            )
            where = x
            if not known:
                where = len(late)
                late.append(x)
            (after if i in work.outputs else before).append((copy, where))
        function, arguments = self._bound(self.made(strides, False), packed, scratch)
        check = self.library.check

        def run(*given: Any) -> None:
            for copy, x in before:
                np.copyto(copy, given[x] if isinstance(x, int) else x)
            check(function(*arguments) or 0)
            for copy, x in after:
                np.copyto(given[x] if isinstance(x, int) else x, copy)

        return run, tuple(late)

    def _is_sum(self, tensors: Sequence[Any]) -> bool:
        """Whether what is added to the result lies where that is to be written."""
        summed = self.recipe.summed
        if summed < 0:
            return False
        one, other = tensors[summed], tensors[self.recipe.work.outputs[0]]
        known = isinstance(one, np.ndarray) and isinstance(other, np.ndarray)
        return known and address(one) == address(other) and one.shape == other.shape


def _created(recipe: Recipe, maker: Maker, slow: bool = False) -> Made:
    """What the recipe makes, unless that is ``slow`` code that only shows what is meant."""
    made = recipe.make(maker)
    if made.primitive.reference and not (recipe.reference or slow):
        raise DnnlError(UNIMPLEMENTED)
    return made


def _order(recipe: Recipe, kind: TensorType) -> tuple[int, ...]:
    return recipe.layout if len(kind.dims) == len(recipe.layout) else ()


def _copying(library: Library, source: Any, target: Any) -> Primitive:
    """A copy from one layout and dtype to another."""

    def create(desc: Any, engine: Any, attr: Any) -> int:
        return library.lib.dnnl_reorder_primitive_desc_create(
            desc, source, engine, target, engine, attr
        )

    return Primitive(library, create)


def _in_turn(calls: Sequence[tuple[Any, tuple[Any, ...]]]) -> Callable[[], int]:
    """Calls one after the other; the first status that is not 0, else 0."""

    def run() -> int:
        for function, arguments in calls:
            status: int = function(*arguments)
            if status:
                return status
        return 0

    return run


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
