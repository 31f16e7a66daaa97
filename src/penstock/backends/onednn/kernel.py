"""Kernels of single primitives, which are created for the strides that tensors turn out to have."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
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
    new_memory,
    pointer,
    reorder_primitive,
)
from penstock.backends.onednn.spec import BoundPrimitive, PrimitiveSpec, SpecContext, Strides
from penstock.core.records import NamedTuple, dataclass
from penstock.core.types import RunValue, RunValues, TensorType
from penstock.ir.kernel import (
    Binder,
    CompiledCall,
    Kernel,
    LayoutHints,
    MemoryUse,
    PackedConstants,
    StatusCheck,
)
from penstock.ir.layout import RuntimeArray, address, packed_strides

# Arrays of a call whose addresses compiled code sets, as in native/c/sequence.c.
_MOST_HANDLES = 4

# Primitives that one kernel keeps, for different strides and numbers of threads.
_MOST_PRIMITIVES = 16

Call = tuple[Callable[..., RunValue], tuple[RunValue, ...]]


def kernel_of(library: Library, spec: PrimitiveSpec) -> Kernel:
    """The kernel of a specification; raises ``DnnlError`` if oneDNN has no primitive for it."""
    desc = spec.desc
    primitives = PrimitiveCache(library, spec)
    unbound = _UnboundCalls(primitives)
    inplace = (*spec.inplace, *([spec.summed] if spec.summed >= 0 else ()))
    return Kernel(
        partial(_UnboundCalls.function, unbound),
        partial(_UnboundCalls.into, unbound),
        workspace=primitives.packed.primitive.scratchpad,
        binder=primitives,
        inplace=tuple([i for i in inplace if desc.tensors[i] == desc.output]),
        layout=LayoutHints(
            dims_order=spec.dims_order,
            contiguous_inputs=spec.contiguous_inputs,
            any_layout=spec.any_layout,
            prefer_bound=True,
        ),
        packed=PackedConstants(tuple(spec.weights), partial(PrimitiveCache.release, primitives)),
        memory=MemoryUse(code_bytes=primitives.packed.primitive.code_bytes),
    )


class _UnboundCalls:
    """The calls of a kernel whose tensors are given each time. Partial functions of its methods
    stand for closures, whose cells Python's collector would walk for as long as plans live."""

    __slots__ = ("_count", "_idle", "_primitives", "_results", "_threads")

    def __init__(self, primitives: PrimitiveCache) -> None:
        desc = primitives.spec.desc
        self._primitives = primitives
        self._count = len(desc.tensors) - len(desc.outputs)
        types = desc.tensors[self._count :]
        self._results = [None if t is None else (t.dims, t.dtype) for t in types]
        # By the number of threads. A call serves one thread at a time.
        self._idle: dict[int, deque[Call]] = {}
        self._threads = primitives.library.lib.omp_get_max_threads

    def function(self, *inputs: RunValue) -> RunValue:
        """The outputs, in new memory."""
        outputs = [None if result is None else np.empty(*result) for result in self._results]
        self._call((*inputs, *outputs))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def into(self, *arrays: RunValue) -> None:
        """Write into the last of ``arrays``."""
        tensors = arrays[: self._count + len(self._results)]
        if all(x is None or x.flags.c_contiguous for x in tensors[self._count :]):
            self._call(tensors)
        else:
            run, arguments = self._primitives.call(tensors, None)
            self._primitives.check(run(*arguments) or 0)

    def _call(self, tensors: tuple[Any, ...]) -> None:
        count = self._threads()
        # A primitive is compiled for a number of threads, which a run may change between two calls.
        calls = self._idle.get(count)
        if calls is None:
            calls = self._idle.setdefault(count, deque())
        try:
            idle = calls.pop()
        except IndexError:
            # The indices of the tensors stand for the arrays.
            idle = self._primitives.call(range(self._count + len(self._results)), None)
        run, indices = idle
        run(*[tensors[i] for i in indices])
        calls.append(idle)


class _CallBinder(Binder):
    """What bound calls of oneDNN have in common."""

    def __init__(self, library: Library) -> None:
        self.library = library

    @property
    def check(self) -> StatusCheck:
        return self.library.check

    @property
    def compiled_call(self) -> CompiledCall:
        return partial(_compiled_call, self.library)


class PrimitiveCache(_CallBinder):
    """The primitives of one specification, by the strides of the tensors and the number of threads.
    ``packed`` is the primitive for tensors without gaps, ``packed_strides`` are their strides, in
    bytes. Raises ``DnnlError`` if oneDNN has none."""

    def __init__(self, library: Library, spec: PrimitiveSpec) -> None:
        super().__init__(library)
        self.spec = spec
        self.packed_strides: Strides = tuple(
            [
                t if t is None else packed_strides(t.dims, _itemsize(t), spec.order_of(t))
                for t in spec.desc.tensors
            ]
        )
        self._primitives: OrderedDict[Any, BoundPrimitive] = OrderedDict()
        self._lock = threading.RLock()
        self.packed = self._first()

    def _first(self) -> BoundPrimitive:
        """The primitive for tensors without gaps: where a sum may be written over its addend, as
        it then most often is, the one for that, if there is one."""
        if self.spec.summed >= 0:
            with suppress(DnnlError):
                return self.get(self.packed_strides, True)
        return self.get(self.packed_strides, False)

    @property
    def implementation(self) -> str:
        """oneDNN's name of the code that it chose for tensors without gaps."""
        return self.packed.primitive.implementation

    def bind(self, inputs: RunValues, outputs: RunValues, workspace: np.ndarray | None) -> Call:
        return self.call((*inputs, *outputs), workspace)

    def release(self) -> dict[int, Callable[[], np.ndarray]]:
        """Hold weights in the layouts of primitives alone: what gives them back, by input."""
        if not all(weights.is_copied for weights in self.spec.weights.values()):
            self.packed.fixed()  # no call has needed them yet
        functions = {i: weights.release() for i, weights in self.spec.weights.items()}
        return {i: function for i, function in functions.items() if function is not None}

    def get(self, strides: Strides, summed: bool) -> BoundPrimitive:
        """The primitive for tensors of these strides (in bytes), and the number of threads that
        kernels of the calling thread have now."""
        spec, library = self.spec, self.library
        key = (strides, summed, library.threads)
        with self._lock:
            bound = self._primitives.get(key)
            if bound is not None:
                self._primitives.move_to_end(key)
                return bound
        # Without the lock, which a thread that is interrupted meanwhile would keep from others.
        bound = spec.create(
            SpecContext(
                library,
                spec.desc,
                strides,
                spec.dims_order,
                summed=summed,
                narrow=spec.narrow,
                releasable=spec.releasable,
            )
        )
        # For another number of threads than that of the first primitive, oneDNN may have only a
        # reference implementation even for tensors without gaps.
        again = bool(self._primitives) and strides == self.packed_strides and not summed
        if bound.is_reference_impl and not again:
            raise DnnlError(UNIMPLEMENTED)
        with self._lock:
            # Another thread may have made the same one meanwhile, and may have bound it already.
            bound = self._primitives.setdefault(key, bound)
            # Bound calls keep theirs alive: only what is looked up again must be made again.
            if len(self._primitives) > _MOST_PRIMITIVES:
                self._primitives.popitem(last=False)
        return bound

    def call(self, tensors: RunValues, workspace: np.ndarray | None) -> Call:
        """The function and the arguments that run the node on ``tensors``, inputs and then outputs.
        Anything that is no array stands for an array that is given during the run."""
        strides: list[tuple[int, ...] | None] = []
        for i, (type_, x) in enumerate(zip(self.spec.desc.tensors, tensors, strict=True)):
            if type_ is None:
                strides.append(None)
                continue
            dims, itemsize, order = type_.dims, _itemsize(type_), self.spec.dims_order
            if i in self.spec.weights:
                # However the constant lies, weights are read from a copy in the primitive's own
                # layout.
                strides.append(self.packed_strides[i])
            elif isinstance(x, np.ndarray) or (isinstance(x, RuntimeArray) and x.strides):
                strides.append(canonical_strides(dims, x.strides, order, itemsize))
            else:
                strides.append(packed_strides(dims, itemsize))
        try:
            bound = self.get(tuple(strides), self._is_sum(tensors))
        except DnnlError:
            # For some strides there is reference code at best, beside which copies take no time.
            return self._call_on_copies(tensors, workspace)
        return self._call(bound, tensors, workspace)

    def _call(
        self, bound: BoundPrimitive, tensors: RunValues, workspace: np.ndarray | None
    ) -> Call:
        """The call of the primitives that were created for these tensors."""
        # The arrays that are given during the run, each with what sets its address.
        late: list[tuple[Any, _Handle]] = []
        calls: list[Call] = []
        each: BoundPrimitive | None = bound
        while each is not None:
            calls += self._calls(each, tensors, workspace, late)
            each = each.then
        call = (_in_turn(calls), ()) if len(calls) > 1 else calls[0]
        if not late:
            return call
        function, arguments = call
        run = _HandleCall(self.library, function, arguments, [handle for _, handle in late])
        return run, tuple([x for x, _ in late])

    def _calls(
        self,
        bound: BoundPrimitive,
        tensors: RunValues,
        workspace: np.ndarray | None,
        late: list[tuple[Any, _Handle]],
    ) -> list[Call]:
        """The calls of one primitive, which add what is given during the run to ``late``."""
        library, primitive = self.library, bound.primitive
        memories = bound.fixed()
        calls: list[Call] = []
        for argument, i in bound.tensors.items():
            x = tensors[i]
            array = x if isinstance(x, np.ndarray) else None
            if i not in bound.converted:
                own = primitive.query_argument(argument)
                memories[argument] = own_memory = memory(library, own, array)
            else:
                own, taken, scaling = bound.converted[i]
                own_memory = memory(library, own, array)
                target = memories[argument] = new_memory(library, taken)
                attr = attributes(library)
                arguments = {SRC: own_memory, DST: target, **scaling.arguments(library, attr)}
                calls.append(reorder_primitive(library, own, taken, attr).call(arguments))
            if array is None:
                is_read = i not in self.spec.desc.outputs
                order = x.order if isinstance(x, RuntimeArray) else None
                rank = len(self.packed_strides[i] or ())
                late.append((x, _Handle(own_memory, is_read, order, rank)))
        # Given even where none is needed, so that calls with other threads have as many arguments.
        memories[SCRATCHPAD] = primitive.scratch_memory(workspace)
        return [*calls, primitive.call(memories)]

    def _call_on_copies(self, tensors: RunValues, workspace: np.ndarray | None) -> Call:
        """As ``call``, on copies without gaps, where oneDNN has no primitive for the tensors."""
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
            if (
                type_ is None
                or i in self.spec.weights
                or (is_array and x.strides == strides and i not in desc.outputs)
            ):
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

        def run(*arrays: RunValue) -> None:
            for copy, x in before:
                np.copyto(copy, arrays[x] if isinstance(x, int) else x)
            check(function(*arguments) or 0)
            for copy, x in after:
                np.copyto(arrays[x] if isinstance(x, int) else x, copy)

        return run, tuple(late)

    def _is_sum(self, tensors: RunValues) -> bool:
        """Whether the tensor that is added to the result lies where the result is written."""
        summed = self.spec.summed
        if summed < 0:
            return False
        addend, output = tensors[summed], tensors[self.spec.desc.outputs[0]]
        # What is given during the run may be anywhere.
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


class _Handle(NamedTuple):
    """A memory object whose address is set at each call. Its dims are in memory in ``order``, None
    if that is their own; there are ``rank``."""

    memory: Any
    is_read: bool
    order: tuple[int, ...] | None
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class _HandleCall:
    """A call with some addresses set each time; of tensors that are read, also of copies."""

    library: Library
    function: Callable[..., RunValue]
    arguments: tuple[RunValue, ...]
    handles: Sequence[_Handle]

    def __call__(self, *arrays: np.ndarray) -> None:
        library = self.library
        set_handle, from_buffer = library.lib.dnnl_memory_set_data_handle, library.ffi.from_buffer
        try:
            for (target, _, order, _), x in zip(self.handles, arrays, strict=True):
                set_handle(target, from_buffer(x.transpose(order) if order else x))
        except ValueError:  # an array with gaps, or without a buffer
            self.run_on_copies(*arrays)
        else:
            library.check(self.function(*self.arguments))

    def run_on_copies(self, *arrays: np.ndarray) -> None:
        library, used = self.library, []
        for (target, is_read, order, _), x in zip(self.handles, arrays, strict=True):
            x = x.transpose(order) if order else x
            if not x.flags.c_contiguous:
                assert is_read, "memory set aside for a result is not contiguous"
                x = np.ascontiguousarray(x)
            used.append(x)  # copies live until the call is over
            library.lib.dnnl_memory_set_data_handle(target, pointer(library, x))
        library.check(self.function(*self.arguments))


def _compiled_call(
    library: Library, function: Callable[..., RunValue], arguments: tuple[RunValue, ...]
) -> tuple[RunValue, ...] | None:
    """The addresses of ``dnnl_primitive_execute`` and its arguments, if that is ``function``, or
    what that calls with handles set: of each, the addresses of what sets it and of the memory, and
    the order of the array's dims in memory."""
    ffi, lib = library.ffi, library.lib
    handles: Sequence[_Handle] = ()
    if isinstance(function, _HandleCall):
        call = function
        handles, function, arguments = call.handles, call.function, call.arguments
    if function is not lib.dnnl_primitive_execute or len(handles) > _MOST_HANDLES:
        return None

    def address_of(pointer: Any) -> int:
        return int(ffi.cast("intptr_t", pointer))

    execute, set_handle = (
        address_of(ffi.addressof(lib, "dnnl_primitive_execute")),
        address_of(ffi.addressof(lib, "dnnl_memory_set_data_handle")),
    )
    late = [(set_handle, address_of(x.memory), x.order or tuple(range(x.rank))) for x in handles]
    primitive, stream, count, pairs = arguments
    pointers = [address_of(x) for x in (primitive, stream, pairs)]
    return execute, *pointers[:2], count, pointers[2], tuple(late)
