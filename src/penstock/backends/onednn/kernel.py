"""Kernels made of primitives: compiled for the strides that tensors turn out to have."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.backends.onednn.layouts import steps_of, usual
from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError, Library
from penstock.backends.onednn.primitive import (
    DST,
    SCRATCHPAD,
    SRC,
    address,
    attributes,
    copying,
    memory,
)
from penstock.backends.onednn.primitive_spec import (
    BoundPrimitive,
    PrimitiveSpec,
    SpecContext,
    Strides,
)
from penstock.ir.op import Kernel
from penstock.types import TensorType

# Primitives of one kernel that are kept, for so many sets of strides and numbers of threads.
_MOST_PRIMITIVES = 16


class DnnlKernel(Kernel):
    """A node on oneDNN. ``workspace`` is what its primitive needs for tensors without gaps."""

    __slots__ = ("_lock", "_made", "implementation", "library", "recipe", "usual")

    library: Library
    recipe: PrimitiveSpec
    implementation: str
    """what oneDNN calls the code that it chose for tensors without gaps"""
    usual: Strides
    """theirs, in bytes"""
    _made: OrderedDict[Any, BoundPrimitive]
    _lock: threading.Lock

    @classmethod
    def of(cls, library: Library, recipe: PrimitiveSpec) -> DnnlKernel:
        """The kernel of a recipe; raises ``DnnlError`` if oneDNN has no primitive for it."""
        work = recipe.work
        count = len(work.tensors) - len(work.outputs)
        made: OrderedDict[Any, BoundPrimitive] = OrderedDict()
        strides = tuple(
            [
                None if kind is None else steps_of(kind.dims, _order(recipe, kind), _item(kind))
                for kind in work.tensors
            ]
        )
        first = _created(
            recipe, SpecContext(library, work, strides, recipe.layout, False, recipe.narrow)
        )
        made[strides, False, library.threads] = first

        def function(*inputs: Any) -> Any:
            outputs = [
                None if kind is None else np.empty(kind.dims, kind.dtype)
                for kind in work.tensors[count:]
            ]
            into(*inputs, *outputs)
            return outputs[0] if len(outputs) == 1 else tuple(outputs)

        # Calls that are told where tensors lie; each is for one thread at a time.
        free: dict[int, deque[tuple[Any, tuple[int, ...]]]] = {}

        def into(*tensors: Any) -> None:
            outputs = [x for x in tensors[count : len(work.tensors)] if x is not None]
            if not all(x.flags.c_contiguous for x in outputs):
                run, arguments = kernel.call(tensors[: len(work.tensors)], None)
                library.check(run(*arguments) or 0)
                return
            calls = free.setdefault(library.threads, deque())
            try:
                call = calls.pop()
            except IndexError:
                # What stands for tensors that are known later is their index.
                call = kernel.call(range(len(work.tensors)), None)
            run, places = call
            run(*[tensors[i] for i in places])
            calls.append(call)

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

    def made(self, strides: Strides, summed: bool) -> BoundPrimitive:
        """The primitive for tensors of these strides (in bytes), and as many threads as kernels now
        have."""
        key = (strides, summed, self.library.threads)
        with self._lock:
            found = self._made.get(key)
            if found is None:
                recipe = self.recipe
                maker = SpecContext(
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
                strides.append(usual(kind.dims, x.strides, layout, _item(kind)))
            else:
                strides.append(steps_of(kind.dims, (), _item(kind)))
        try:
            made = self.made(tuple(strides), self._is_sum(tensors))
        except DnnlError:
            return self._repacked(tensors, scratch)
        return self._bound(made, tensors, scratch)

    def _bound(
        self, made: BoundPrimitive, tensors: Sequence[Any], scratch: np.ndarray | None
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
            if i not in made.converted:
                md = primitive.query_argument(argument)
                taken = memories[argument] = memory(library, md, x if known else None)
            else:
                own, md, scaling = made.converted[i]
                taken = memory(library, own, x if known else None)
                size = lib.dnnl_memory_desc_get_size(md)
                target = memories[argument] = memory(library, md, np.empty(size, np.uint8))
                attr = attributes(library)
                given = {SRC: taken, DST: target, **scaling.arguments(library, attr)}
                before.append(copying(library, own, md, attr).call(given))
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
                kind.dims, kind.dtype, np.empty(math.prod(kind.dims), kind.dtype), 0, steps
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


def _created(recipe: PrimitiveSpec, maker: SpecContext, slow: bool = False) -> BoundPrimitive:
    """What the recipe makes, unless that is ``slow`` code that only shows what is meant."""
    made = recipe.make(maker)
    if made.primitive.reference and not (recipe.reference or slow):
        raise DnnlError(UNIMPLEMENTED)
    return made


def _order(recipe: PrimitiveSpec, kind: TensorType) -> tuple[int, ...]:
    return recipe.layout if len(kind.dims) == len(recipe.layout) else ()


def _item(kind: TensorType) -> int:
    assert kind.dtype is not None
    return kind.dtype.itemsize


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
