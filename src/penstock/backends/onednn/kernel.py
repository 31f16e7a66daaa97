"""Kernels of single primitives, which are created for the strides that tensors turn out to have."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.backends.onednn.layouts import canonical_strides
from penstock.backends.onednn.library import UNIMPLEMENTED, DnnlError, Library
from penstock.backends.onednn.primitive import (
    DST,
    SCRATCHPAD,
    SRC,
    attributes,
    memory,
    pointer,
    reorder_primitive,
)
from penstock.backends.onednn.primitive_spec import (
    BoundPrimitive,
    PrimitiveSpec,
    SpecContext,
    Strides,
)
from penstock.ir.layout import address, packed_strides
from penstock.ir.op import Kernel
from penstock.types import TensorType

# Primitives that one kernel keeps, for different strides and numbers of threads.
_MOST_PRIMITIVES = 16

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def kernel_of(library: Library, spec: PrimitiveSpec) -> Kernel:
    """The kernel of a specification; raises ``DnnlError`` if oneDNN has no primitive for it."""
    desc = spec.desc
    primitives = PrimitiveCache(library, spec)
    count = len(desc.tensors) - len(desc.outputs)

    def function(*inputs: Any) -> Any:
        outputs = [
            None if type_ is None else np.empty(type_.dims, type_.dtype)
            for type_ in desc.tensors[count:]
        ]
        into(*inputs, *outputs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    # Calls whose tensors are given each time, by the number of threads. A call serves one thread at
    # a time.
    idle_calls: dict[int, deque[Call]] = {}

    def into(*arrays: Any) -> None:
        tensors = arrays[: len(desc.tensors)]
        outputs = [x for x in tensors[count:] if x is not None]
        if not all(x.flags.c_contiguous for x in outputs):
            run, arguments = primitives.call(tensors, None)
            library.check(run(*arguments) or 0)
            return
        calls = idle_calls.setdefault(library.threads, deque())
        try:
            call = calls.pop()
        except IndexError:
            # The indices of the tensors stand for the arrays.
            call = primitives.call(range(len(desc.tensors)), None)
        run, indices = call
        run(*[tensors[i] for i in indices])
        calls.append(call)

    inplace = (*spec.inplace, *([spec.summed] if spec.summed >= 0 else ()))
    return Kernel(
        function,
        into,
        workspace=primitives.packed.primitive.scratchpad,
        dims_order=spec.dims_order,
        contiguous_inputs=spec.contiguous_inputs,
        inplace=tuple([i for i in inplace if desc.tensors[i] == desc.output]),
        any_layout=spec.any_layout,
        prefer_bound=True,
        binder=primitives,
        check=library.check,
    )


class PrimitiveCache:
    """The primitives of one specification, by the strides of the tensors and the number of threads.

    ``packed`` is the primitive for tensors without gaps, ``packed_strides`` are their strides, in
    bytes. Raises ``DnnlError`` if oneDNN has none.
    """

    def __init__(self, library: Library, spec: PrimitiveSpec) -> None:
        self.library = library
        self.spec = spec
        self.packed_strides: Strides = tuple(
            [
                None
                if type_ is None
                else packed_strides(type_.dims, _itemsize(type_), spec.order_of(type_))
                for type_ in spec.desc.tensors
            ]
        )
        self.packed = self._create(self.packed_strides, False, spec.accept_reference)
        self._primitives: OrderedDict[Any, BoundPrimitive] = OrderedDict()
        self._primitives[self.packed_strides, False, library.threads] = self.packed
        self._lock = threading.Lock()

    @property
    def implementation(self) -> str:
        """oneDNN's name of the code that it chose for tensors without gaps."""
        return self.packed.primitive.implementation

    def bind(
        self, inputs: Sequence[Any], outputs: Sequence[Any], workspace: np.ndarray | None
    ) -> Call:
        return self.call((*inputs, *outputs), workspace)

    @property
    def thread_counts(self) -> set[int]:
        """The numbers of threads that primitives were created for."""
        return {threads for _, _, threads in self._primitives}

    def get(self, strides: Strides, summed: bool) -> BoundPrimitive:
        """The primitive for tensors of these strides (in bytes), and the number of threads that
        kernels of the calling thread have now."""
        key = (strides, summed, self.library.threads)
        with self._lock:
            bound = self._primitives.get(key)
            if bound is None:
                # For another number of threads, oneDNN may have only a reference implementation
                # even for tensors without gaps.
                accept = self.spec.accept_reference or (
                    strides == self.packed_strides and not summed
                )
                bound = self._primitives[key] = self._create(strides, summed, accept)
                while len(self._primitives) > _MOST_PRIMITIVES:
                    self._primitives.popitem(last=False)
            else:
                self._primitives.move_to_end(key)
        return bound

    def _create(self, strides: Strides, summed: bool, accept_reference: bool) -> BoundPrimitive:
        spec = self.spec
        bound = spec.create(
            SpecContext(self.library, spec.desc, strides, spec.dims_order, summed, spec.narrow)
        )
        if bound.primitive.is_reference_impl and not accept_reference:
            raise DnnlError(UNIMPLEMENTED)
        return bound

    def call(self, tensors: Sequence[Any], workspace: np.ndarray | None) -> Call:
        """The function and the arguments that run the node on ``tensors``, inputs and then outputs.
        Anything that is no array stands for an array that is given during the run."""
        spec = self.spec
        strides: list[tuple[int, ...] | None] = []
        for type_, x in zip(spec.desc.tensors, tensors, strict=True):
            if type_ is None:
                strides.append(None)
            elif isinstance(x, np.ndarray):
                strides.append(
                    canonical_strides(type_.dims, x.strides, spec.dims_order, _itemsize(type_))
                )
            else:
                strides.append(packed_strides(type_.dims, _itemsize(type_)))
        try:
            bound = self.get(tuple(strides), self._is_sum(tensors))
        except DnnlError:
            return self._call_on_copies(tensors, workspace)
        return self._call(bound, tensors, workspace)

    def _call(
        self, bound: BoundPrimitive, tensors: Sequence[Any], workspace: np.ndarray | None
    ) -> Call:
        """The call of a primitive that was created for these tensors."""
        library, desc = self.library, self.spec.desc
        primitive, lib = bound.primitive, library.lib
        memories = bound.fixed()
        # Memory objects of arrays that are given during the run, the array, and if it is read.
        late: list[tuple[Any, Any, bool]] = []
        conversions: list[Call] = []
        for argument, i in bound.tensors.items():
            x = tensors[i]
            array = x if isinstance(x, np.ndarray) else None
            if i not in bound.converted:
                md = primitive.query_argument(argument)
                memories[argument] = own_memory = memory(library, md, array)
            else:
                own, md, scaling = bound.converted[i]
                own_memory = memory(library, own, array)
                size = lib.dnnl_memory_desc_get_size(md)
                target = memories[argument] = memory(library, md, np.empty(size, np.uint8))
                attr = attributes(library)
                arguments = {SRC: own_memory, DST: target, **scaling.arguments(library, attr)}
                conversions.append(reorder_primitive(library, own, md, attr).call(arguments))
            if array is None:
                late.append((own_memory, x, i not in desc.outputs))
        for argument in bound.dropped:
            md = primitive.query_argument(argument)
            size = lib.dnnl_memory_desc_get_size(md)
            memories[argument] = memory(library, md, np.empty(size, np.uint8))
        # Given even where none is needed, so that calls with other threads have as many arguments.
        if workspace is None or workspace.nbytes < primitive.scratchpad:
            workspace = np.empty(primitive.scratchpad, np.uint8)
        md = primitive.query(lib.dnnl_query_scratchpad_md)
        memories[SCRATCHPAD] = memory(library, md, workspace if primitive.scratchpad else None)
        call = primitive.call(memories)
        if conversions:
            call = _in_turn([*conversions, call]), ()
        if not late:
            return call
        run = _with_handles(library, call, [(memory, is_read) for memory, _, is_read in late])
        return run, tuple([x for _, x, _ in late])

    def _call_on_copies(self, tensors: Sequence[Any], workspace: np.ndarray | None) -> Call:
        """As ``call``, on copies of the tensors without gaps: oneDNN has no primitive for the
        tensors as they are."""
        desc = self.spec.desc
        packed = list(tensors)
        late: list[Any] = []
        # The copies, and the arrays that they are of, or their indices among those given late.
        before: list[tuple[np.ndarray, Any]] = []
        after: list[tuple[np.ndarray, Any]] = []
        for i, (type_, strides, x) in enumerate(
            zip(desc.tensors, self.packed_strides, tensors, strict=True)
        ):
            is_array = isinstance(x, np.ndarray)
            if type_ is None or (is_array and x.strides == strides and i not in desc.outputs):
                continue
            buffer = np.empty(math.prod(type_.dims), type_.dtype)
            packed[i] = copy = np.ndarray(type_.dims, type_.dtype, buffer, 0, strides)
            original = x
            if not is_array:
                original = len(late)
                late.append(x)
            (after if i in desc.outputs else before).append((copy, original))
        bound = self.get(self.packed_strides, False)
        function, arguments = self._call(bound, packed, workspace)
        check = self.library.check

        def run(*arrays: Any) -> None:
            for copy, x in before:
                np.copyto(copy, arrays[x] if isinstance(x, int) else x)
            check(function(*arguments) or 0)
            for copy, x in after:
                np.copyto(arrays[x] if isinstance(x, int) else x, copy)

        return run, tuple(late)

    def _is_sum(self, tensors: Sequence[Any]) -> bool:
        """Whether the tensor that is added to the result lies where the result is written."""
        summed = self.spec.summed
        if summed < 0:
            return False
        addend, output = tensors[summed], tensors[self.spec.desc.outputs[0]]
        if not isinstance(addend, np.ndarray) or not isinstance(output, np.ndarray):
            return False
        return address(addend) == address(output) and addend.shape == output.shape


def _itemsize(type_: TensorType) -> int:
    assert type_.dtype is not None
    return type_.dtype.itemsize


def _in_turn(calls: Sequence[Call]) -> Callable[[], int]:
    """Make the calls one after the other; returns the first status that is not 0, else 0."""

    def run() -> int:
        for function, arguments in calls:
            status: int = function(*arguments)
            if status:
                return status
        return 0

    return run


def _with_handles(
    library: Library, call: Call, memories: Sequence[tuple[Any, bool]]
) -> Callable[..., None]:
    """The call, with the addresses of some of its tensors set each time. Of tensors that are only
    read (True) it may take a copy."""
    function, arguments = call
    set_handle = library.lib.dnnl_memory_set_data_handle

    def run(*arrays: np.ndarray) -> None:
        used = []
        for (tensor_memory, is_read), x in zip(memories, arrays, strict=True):
            if not x.flags.c_contiguous:
                assert is_read, "memory set aside for a result is not contiguous"
                x = np.ascontiguousarray(x)
            used.append(x)  # copies live until the call is over
            set_handle(tensor_memory, pointer(library, x))
        library.check(function(*arguments))

    return run
