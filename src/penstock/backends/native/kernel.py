"""Compiled kernels: the arguments of a call, and their binding to arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, TypeAlias

import numpy as np

from penstock.backends.numpy import run_node
from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InternalError
from penstock.core.records import dataclass, field, replace
from penstock.core.types import INT64, RunValue, RunValues, TensorType, Type
from penstock.host.native import NativeLibrary
from penstock.ir.graph import Contents, Node, Value
from penstock.ir.kernel import (
    NO_PACKED_CONSTANTS,
    WORTH_PACKING,
    Binder,
    BoundCall,
    CompiledCall,
    FunctionParts,
    Kernel,
    LayoutHints,
    PackedConstants,
)
from penstock.ir.layout import RuntimeArray, order_in_memory, strides_of
from penstock.ops.common.constant_cache import ConstantRef, Reordered, weights_of


@dataclass(frozen=True, slots=True)
class Tensor:
    """An argument of a call: tensor ``index`` of a node, counting inputs, then outputs.
    ``own_order``: row-major, whatever ``NativeCall.dims_order`` is; ``any_order``: the kernel reads
    any order of dims equally fast."""

    index: int
    own_order: bool = False
    any_order: bool = False


class _Workspace:
    """An argument of a call: the kernel's workspace."""


WORKSPACE = _Workspace()

ROUNDED = "rounded_"
"""name prefix of kernels that round operands to bfloat16"""
_MOST_ORDERED = 15  # dims, with four bits each
_OWN_ORDERS: Mapping[int, int] = {}
_RESULTS = 4  # the place of the outputs to allocate among the arguments of a call

Word: TypeAlias = int | float | np.ndarray | Tensor | _Workspace | None
"""An argument of a compiled kernel: a number, an array created at compile time, a tensor of the
node, the workspace, or a null pointer."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A node as kernel families see it: the static types of its inputs, then of its outputs (None
    for omitted ones). ``inputs``: its input values, None for those that the kernel does not read.
    ``rounds``: operands of products may be rounded to bfloat16. ``ordered``: the summation order
    must not depend on the number of rows (``reproducible=True``). ``exact``: operands are not
    rounded, even where the model allows it (``precision="strict"``)."""

    library: NativeLibrary
    node: Node
    tensors: tuple[TensorType | None, ...]
    inputs: Sequence[Value | None]
    rounds: bool = False
    ordered: bool = False
    exact: bool = False

    def input(self, i: int) -> TensorType | None:
        """Return the type of an input; None if it is omitted."""
        return self.tensors[i] if i < len(self.node.inputs) else None

    def tensor(self, i: int) -> TensorType:
        """As ``input``. Raises ``UnsupportedError`` if it is omitted."""
        type_ = self.tensors[i] if i < len(self.node.inputs) else None
        # Only for what a schema lets be omitted: the backend takes it for a node without a kernel.
        if type_ is None:
            raise UnsupportedError
        return type_

    @property
    def constants(self) -> Contents:
        """The arrays of constant inputs."""
        return Contents(self.inputs)

    def constant(self, i: int) -> np.ndarray | None:
        """Return an input, if it is a constant."""
        value = self.inputs[i] if i < len(self.inputs) else None
        return None if value is None else value.const

    def weights(self, i: int) -> ConstantRef | None:
        """Return an input, if it is a constant, for ``reordered``."""
        return weights_of(self.node.inputs[i] if i < len(self.node.inputs) else None)

    def output(self, i: int = 0) -> TensorType:
        """Return the type of an output that is not omitted."""
        type_ = self.tensors[len(self.node.inputs) + i]
        assert type_ is not None
        return type_

    def result(self, i: int = 0) -> Tensor:
        """Return output ``i`` as an argument of a call."""
        return Tensor(len(self.node.inputs) + i)

    def attr(self, name: str, default: Any) -> Any:
        """Return an attribute of the node."""
        return self.node.attrs.get(name, default)


@dataclass(frozen=True, slots=True, eq=False)
class NativeCall:
    """A compiled kernel with its arguments, in the order of its struct in ``c/``.

    ``items`` is the number of independent work items; ``item_ns``, the approximate time of one,
    determines the number of threads. Threads can share an item that has ``stages``: their number,
    and the number of independent pieces of each. ``workspace`` and ``inplace`` are as for
    ``Kernel``. A kernel that ``can_fail`` reports invalid inputs, and the NumPy kernel raises the
    error. ``restrided(strides)``, if given, returns the call for tensors with these strides (in
    elements; None for contiguous ones), or raises ``UnsupportedError``: memory in any order of dims
    is then read and written in place, preferably in ``dims_order``, or, with ``any_layout``, the
    output in the order that its reader prefers. A call with ``dims_order`` must be restrided even
    for contiguous tensors.

    ``finish`` computes the outputs from intermediate results of the kernel. ``keep`` is kept alive
    with the call, such as owners of its arrays. ``reordered`` are constant inputs that need not be
    kept, as arrays of the call have their elements in packed order.
    """

    kernel: str
    words: tuple[Word, ...]
    items: int
    item_ns: float
    workspace: int = 0
    stages: tuple[int, int] = (0, 0)
    inplace: tuple[int, ...] = ()
    can_fail: bool = False
    finish: Finish | None = None
    keep: Any = None
    reordered: Mapping[int, Reordered] = field(default_factory=dict)
    dims_order: tuple[int, ...] = ()
    any_layout: bool = False
    restrided: Callable[[Sequence[tuple[int, ...] | None]], NativeCall] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Finish:
    """A ``function`` applied to the tensors that a kernel ``writes``: it maps indices to strings,
    or cuts outputs of data-dependent shapes from arrays of maximum size."""

    writes: tuple[TensorType, ...]
    function: Callable[..., RunValue]


def texts_of(site: Site, texts: np.ndarray | None) -> Finish | None:
    """Return the step that maps indices (int64) to ``texts`` in output 0; None without texts."""
    if texts is None:
        return None
    others = [type_ for type_ in site.tensors[len(site.node.inputs) + 1 :] if type_ is not None]

    def function(results: Any) -> Any:
        if isinstance(results, tuple):
            return texts.take(results[0]), *results[1:]
        return texts.take(results)

    return Finish((TensorType(INT64, site.output().dims), *others), function)


class UnsupportedError(Exception):
    """No compiled kernel is available for a case."""


def site_of(
    library: NativeLibrary,
    node: Node,
    types: Sequence[Type | None],
    *,
    data_dependent: bool = False,
) -> Site | None:
    """Return the site of a node with these input types; None if a shape is unknown, or a value is
    no tensor. Outputs of ``data_dependent`` shapes are omitted."""
    every = [*types]
    for value in node.outputs:
        type_ = None if value is None else value.type
        is_static = isinstance(type_, TensorType) and type_.static
        every.append(None if data_dependent and not is_static else type_)
    for type_ in every:
        if type_ is not None and not (isinstance(type_, TensorType) and type_.static):
            return None
    tensors: Any = tuple(every)
    return Site(library, node, tensors, node.inputs)


def open_site(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Site:
    """Return the site of a node whose shapes may be unknown; types are None for non-tensors."""
    outputs = [None if value is None else value.type for value in node.outputs]
    tensors = [t if isinstance(t, TensorType) else None for t in (*types, *outputs)]
    return Site(library, node, tuple(tensors), node.inputs)


def native_kernel(site: Site, call: NativeCall) -> Kernel:
    """Return the kernel that makes ``call``."""
    if call.finish is not None:
        return _finished_kernel(site, call, call.finish)
    node, tensors = site.node, site.tensors
    packed = NO_PACKED_CONSTANTS
    if call.reordered:
        worthwhile = _worth_packing(site, call)
        if len(worthwhile) < len(call.reordered):
            call = replace(call, reordered=worthwhile)
        if worthwhile:
            # The call holds packed copies of these: a site that kept the originals would hold both
            # in memory.
            others = [*node.inputs]
            for i in worthwhile:
                others[i] = None
            site = replace(site, inputs=others)
            packed = PackedConstants(tuple(worthwhile), partial(_released, worthwhile))
    binder = _CallBinder(site, call)
    dense = _dense_inputs(site, call)
    order, any_layout = call.dims_order, call.any_layout
    if any_layout and not order:
        order = tuple(range(len(site.output().dims)))
    inplace = call.inplace
    if inplace:
        inplace = tuple([i for i in inplace if tensors[i] == tensors[len(node.inputs)]])
    kernel = Kernel(
        _run_once,
        partial(_run_once, binder),
        binder=binder,
        workspace=call.workspace,
        operand_dtype="bfloat16" if call.kernel.startswith(ROUNDED) else "",
        inplace=inplace,
        layout=LayoutHints(
            contiguous=call.restrided is None,
            dims_order=order,
            contiguous_inputs=dense,
            any_layout=any_layout,
            # The function is passed the unpacked weights, allocates workspace, and returns
            # row-major results, all of which takes time.
            prefer_bound=bool(call.reordered or call.workspace or call.dims_order),
        ),
        packed=packed,
    )
    object.__delattr__(kernel, "function")  # created by the binder on first access
    return kernel


def _dense_inputs(site: Site, call: NativeCall) -> tuple[int, ...]:
    """Return the inputs that a call reads without gaps, with their dims in its order."""
    if call.restrided is not None and not call.dims_order:
        return ()
    # A tensor may be several words, of which one takes any order.
    read: dict[int, bool] = {}
    for word in call.words:
        if word.__class__ is Tensor:
            in_order = not (word.own_order or word.any_order)
            read[word.index] = in_order and read.get(word.index, True)
    values = enumerate(site.node.inputs)
    return tuple([i for i, v in values if read.get(i) and (v is None or not v.is_constant)])


def _run_once(binder: _CallBinder, *arrays: np.ndarray | None) -> None:
    """Make a call on run-time arrays of any strides, with a workspace."""
    count, end = len(binder.site.node.inputs), len(binder.site.tensors)
    nbytes = binder.native.workspace
    work = arrays[end] if len(arrays) > end else np.empty(nbytes, np.uint8) if nbytes else None
    run, runtime = binder.bind(arrays[:count], arrays[count:end], work)
    run(*runtime)


_Result: TypeAlias = tuple[np.dtype | None, tuple[int, ...], tuple[int, ...]]
"""dtype and dims of an output in memory, and the axes by which it is transposed"""


def _function_of(
    library: NativeLibrary,
    arguments: tuple[Any, ...],
    results: tuple[_Result | None, ...],
    workspace: int,
) -> Callable[..., RunValue]:
    """Return the function of a call with these arguments, which allocates its outputs, None for
    omitted ones."""
    call = library.call(*arguments)
    made: Callable[..., RunValue] = call.make
    if arguments[_RESULTS]:
        return made
    # No closures, whose cells the garbage collector would traverse while plans live.
    if len(results) == 1 and results[0] is not None:
        return partial(_run_in_order, call.run, *results[0], workspace)
    return partial(_run_into_new, call.run, results, workspace)


def _run_in_order(
    run: Callable[..., None],
    dtype: np.dtype | None,
    dims: tuple[int, ...],
    axes: tuple[int, ...],
    workspace: int,
    *inputs: np.ndarray | None,
) -> np.ndarray:
    """Allocate an output of ``dims`` in memory, of which the call sees the transpose by ``axes``,
    and a workspace."""
    result = np.empty(dims, dtype).transpose(axes)
    if workspace:
        run(*inputs, result, np.empty(workspace, np.uint8))
    else:
        run(*inputs, result)
    return result


def _run_into_new(
    run: Callable[..., None],
    results: tuple[_Result | None, ...],
    workspace: int,
    *inputs: np.ndarray | None,
) -> Any:
    """As ``_run_in_order``, for several outputs in C order."""
    outputs = [None if own is None else np.empty(own[1], own[0]) for own in results]
    run(*inputs, *outputs, *[np.empty(workspace, np.uint8)] * (workspace > 0))
    return tuple(outputs)


def _released(reordered: Mapping[int, Reordered]) -> dict[int, Callable[[], np.ndarray]]:
    return {i: held.release() for i, held in reordered.items()}


def _worth_packing(site: Site, call: NativeCall) -> Mapping[int, Reordered]:
    """Return the large packed constants. A kernel with any is called with planned memory only."""
    worthwhile = {}
    for i, held in call.reordered.items():
        type_ = site.tensors[i]
        if type_ is not None and type_.nbytes >= WORTH_PACKING:
            worthwhile[i] = held
    return worthwhile


def _finished_kernel(site: Site, call: NativeCall, finish: Finish) -> Kernel:
    """Return the kernel of a call whose results ``finish`` turns into the outputs."""
    tensors = (*site.tensors[: len(site.node.inputs)], *finish.writes)
    written, make = replace(call, finish=None), finish.function
    kernel = native_kernel(replace(site, tensors=tensors), written)
    function = kernel.function
    return Kernel(lambda *inputs: make(function(*inputs)), packed=kernel.packed)


class _Runtime:
    """Placeholder of an array that is passed at run time."""


_RUNTIME = _Runtime()


@dataclass(frozen=True, slots=True, eq=False)
class _CallBinder(Binder):
    """Binds a call to arrays."""

    site: Site
    native: NativeCall

    @property
    def implementation(self) -> str:
        """Return the name of the compiled kernel, and the instruction set."""
        return f"{self.native.kernel}:{self.site.library.level}"

    @property
    def compiled_call(self) -> CompiledCall:
        return self.site.library.call_of

    @property
    def divided_s(self) -> float:
        native = self.native
        # Threads share items, and the pieces of a stage of a call with a single item. The call
        # itself decides by the same estimate whether it is divided.
        return self.estimated_s if native.items > 1 or native.stages[0] else 0.0

    @property
    def estimated_s(self) -> float:
        return self.native.items * self.native.item_ns * 1e-9

    @property
    def reads_turned(self) -> bool:
        return self.native.restrided is not None and not self.native.can_fail

    def plain(self) -> NativeCall:
        """Return the call for contiguous tensors."""
        native = self.native
        if native.restrided is None or not native.dims_order:
            return native
        return native.restrided([None] * len(self.site.tensors))

    def function(self) -> Callable[..., RunValue]:
        """Return the function of the kernel."""
        native = self.plain()
        return _function_of(self.site.library, *_CallBinder(self.site, native).allocating())

    def function_parts(self, inputs: RunValues, fallback: Callable[..., RunValue]) -> FunctionParts:
        binder, orders, order = self.ordered(inputs)
        return partial(_function_of, self.site.library), binder.allocating(orders, order, fallback)

    def ordered(
        self, inputs: RunValues
    ) -> tuple[_CallBinder, Sequence[tuple[int, ...]], tuple[int, ...]]:
        """Return the binder for inputs whose dims are in memory in the orders of ``inputs``; these
        orders, () for C's; and that of the output, which the kernel prefers. Inputs in other orders
        are copied by each call."""
        native, tensors, count = self.native, self.site.tensors, len(self.site.node.inputs)
        plain = (), ()
        if native.restrided is None or len(tensors) != count + 1 or tensors[count] is None:
            return _CallBinder(self.site, self.plain()), *plain
        # Inputs that are not dense in any order are copied by each call.
        orders = [order_in_memory(x) for x in inputs]
        orders = [own if len(own) <= _MOST_ORDERED else () for own in orders]
        if native.dims_order:
            order = native.dims_order
            # A copy into this order and a call took 3 ms for 96 channels of 48 by 152, where the
            # call alone, which gathers rows of other orders, took 8.
            for i in _dense_inputs(self.site, native):
                type_ = tensors[i]
                orders[i] = order if type_ is not None and len(type_.dims) == len(order) else ()
        else:  # that of its first image
            rank = len(self.site.output().dims)
            order = next((own for own in orders if len(own) == rank), ())
        strides = [
            None if type_ is None or not own else strides_of(type_.dims, 1, own)
            for type_, own in zip(tensors, (*orders, order), strict=True)
        ]
        try:
            # The call's words hold the strides; C copies an array whose dims have another order.
            if any(strides):  # else C allocates the output, which is faster
                return _CallBinder(self.site, native.restrided(strides)), orders, order
        except UnsupportedError:
            pass
        return _CallBinder(self.site, self.plain()), *plain

    def allocating(
        self,
        orders: Sequence[tuple[int, ...]] = (),
        order: tuple[int, ...] = (),
        fallback: Callable[..., RunValue] | None = None,
    ) -> tuple[tuple[Any, ...], tuple[_Result | None, ...], int]:
        """Return the arguments of ``_function_of`` for inputs and an output with these orders of
        dims in memory; ``fallback``, by default NumPy's kernel, raises errors."""
        native, tensors = self.native, self.site.tensors
        work = _RUNTIME if native.workspace else None
        words = _OWN_ORDERS
        if orders:  # most are made without
            words = {i: _order_word(own) for i, own in enumerate((*orders, order)) if own}
        runtime: RunValues = [_RUNTIME] * len(tensors)
        arguments = self.arguments(runtime, work, orders=words, every=True, fallback=fallback)
        results: list[_Result | None] = []
        for type_ in tensors[len(self.site.node.inputs) :]:
            if type_ is None:
                results.append(None)
            elif not order:
                results.append((type_.dtype, type_.dims, tuple(range(len(type_.dims)))))
            else:
                back = tuple([order.index(axis) for axis in range(len(order))])
                results.append((type_.dtype, tuple([type_.dims[axis] for axis in order]), back))
        return arguments, tuple(results), native.workspace

    def bind(
        self, inputs: RunValues, outputs: RunValues, workspace: np.ndarray | None
    ) -> BoundCall:
        arrays = (*inputs, *outputs)
        native = self.native
        orders: dict[int, int] = {}
        # Other arrays are arguments of each call, which checks them, and copies inputs with
        # unsupported strides.
        fixed = [
            isinstance(x, np.ndarray)
            and x.flags.c_contiguous
            and x.flags.aligned
            and x.dtype.isnative
            for x in arrays
        ]
        strides: list[tuple[int, ...] | None] = [None] * len(arrays)
        if native.restrided is not None:
            for i, is_fixed in enumerate(fixed):
                strides[i] = None if is_fixed else _strides(arrays[i], self.site.tensors[i])
        if any(strides):
            try:
                assert native.restrided is not None
                native = native.restrided(strides)
                late = [(i, x) for i, x in enumerate(arrays) if isinstance(x, RuntimeArray)]
                orders = {i: 0 if x.turned else _order_word(x.order) for i, x in late}
            except UnsupportedError:
                return self._bind_copy(inputs, outputs, workspace)
            # Kernels with stride arguments only require aligned elements.
            fixed = [
                is_fixed or (own is not None and x.__class__ is not RuntimeArray)
                for is_fixed, own, x in zip(fixed, strides, arrays, strict=True)
            ]
        else:
            native = self.plain()
        runtime: list[int] = []
        if False in fixed:
            read = _read(native)
            runtime = [i for i, is_fixed in enumerate(fixed) if not is_fixed and i in read]
        own = _CallBinder(self.site, native).arguments(arrays, workspace, runtime, orders)
        return self.site.library.call(*own).run, tuple([arrays[i] for i in runtime])

    def _bind_copy(
        self, inputs: RunValues, outputs: RunValues, workspace: np.ndarray | None
    ) -> BoundCall:
        """As ``bind``, for strides that the kernel does not support: inputs are copied at each
        call, and outputs are computed contiguously, then copied."""
        dense = [np.empty_like(y, order="C") if isinstance(y, np.ndarray) else y for y in outputs]
        plain = _CallBinder(self.site, replace(self.plain(), restrided=None))
        call, runtime = plain.bind(inputs, dense, workspace)
        turns = [_turn(array) for array in runtime]

        def run(*arrays: RunValue) -> None:
            call(*[turn(array) for turn, array in zip(turns, arrays, strict=True)])
            for y, result in zip(outputs, dense, strict=True):
                if result is not y:
                    np.copyto(y, result)

        return run, runtime

    def arguments(
        self,
        arrays: RunValues,
        workspace: Any,
        runtime: Sequence[int] = (),
        orders: Mapping[int, int] = _OWN_ORDERS,
        *,
        every: bool = False,
        fallback: Callable[..., RunValue] | None = None,
    ) -> tuple[Any, ...]:
        """Return the arguments of a call on ``arrays``, inputs then outputs, of which those at
        ``runtime``, with these ``orders`` of dims in memory, are given to each run; with ``every``,
        all arrays and the workspace are, or it allocates the outputs, in C order.
        ``fallback``, by default NumPy's kernel, raises errors."""
        native, site = self.native, self.site
        count, behind = len(site.node.inputs), len(arrays)
        words: list[Any] = list(native.words)
        given = range(behind + (1 if native.workspace else 0)) if every else runtime
        # Several argument words may be one tensor, as a node may read an input twice; C sets them
        # together.
        places: dict[int, int] = {}  # bit mask of the words of a tensor
        of_call: RunValues = native.words
        for place, word in enumerate(of_call):
            if word.__class__ is Tensor:
                index = word.index
            elif word is WORKSPACE:
                index = behind
            else:
                continue
            if index in given:
                places[index] = places.get(index, 0) | 1 << place
                words[place] = None
            else:
                words[place] = workspace if index == behind else arrays[index]
        of_run: list[tuple[int, int, bool, int]] = []
        for i in given:
            type_ = site.tensors[i] if i < behind else None
            size = native.workspace if type_ is None else type_.nbytes
            of_run.append((places.get(i, 0), size, i >= count, orders.get(i, 0)))
        outputs = site.tensors[count:]
        failed = None
        # Not NumPy's kernel itself, as most calls never fail, and its site may have traced dims.
        if native.can_fail:
            fallback = fallback or partial(run_node, site.node, site.tensors[:count])
            failed = _Failed(native.kernel, fallback, count, tuple(arrays), tuple(given))
        # C allocates plain outputs faster than calls of NumPy; those in other orders it does not.
        makes = every and not native.workspace and None not in outputs and not orders
        return (
            native.kernel,
            tuple(words),
            (native.keep, *native.reordered.values()) if native.reordered else native.keep,
            tuple(of_run),
            tuple([(t.dtype, t.dims) for t in outputs if t is not None]) if makes else (),
            native.items,
            native.item_ns,
            *native.stages,
            failed,
            checkpoint,
        )


def _turn(array: RunValue) -> Callable[[RunValue], RunValue]:
    """Return a function from a run-time array to the array that the kernel reads."""
    if not isinstance(array, RuntimeArray) or not array.turned:
        return _itself
    return methodcaller("transpose", array.turned)


def _itself(x: RunValue) -> RunValue:
    return x


def _read(call: NativeCall) -> set[int]:
    """Return the tensors among the arguments of a call."""
    return {word.index for word in call.words if isinstance(word, Tensor)}


def _order_word(order: Sequence[int] | None) -> int:
    """Return the order of an array's dims in memory as a word of ``host/c/call.h``: 0 for
    row-major."""
    if order is None:
        return 0
    if len(order) > _MOST_ORDERED:
        raise UnsupportedError
    return sum([len(order) << 60, *[dim << 4 * k for k, dim in enumerate(order)]])


def _strides(x: Any, type_: TensorType | None) -> tuple[int, ...] | None:
    """Return the strides, in elements, of a strided array, or those expected of a run-time array;
    None if it must be copied before it is read."""
    if isinstance(x, RuntimeArray):
        size = 0 if type_ is None or type_.dtype is None else type_.dtype.itemsize
        return tuple([stride // size for stride in x.strides]) if size and x.strides else None
    if not isinstance(x, np.ndarray) or not (x.flags.aligned and x.dtype.isnative):
        return None
    size, remainders = x.itemsize, False
    strides = []
    for stride in x.strides:
        whole, rest = divmod(stride, size)
        strides.append(whole)
        remainders |= rest != 0
    return None if remainders else tuple(strides)


@dataclass(frozen=True, slots=True, eq=False)
class _Failed:
    """Raises the NumPy kernel's error for a call with invalid inputs."""

    kernel: str
    fallback: Callable[..., RunValue]
    count: int
    """of inputs"""
    arrays: tuple[Any, ...]
    places: tuple[int, ...]
    """of the arrays that are given to each run"""

    def __call__(self, status: int, runtime: tuple[np.ndarray, ...]) -> None:
        arrays = [*self.arrays, None]  # the last word is the workspace
        for i, array in zip(self.places, runtime, strict=True):
            arrays[i] = array
        # C only reports a status. The NumPy kernel finds the fault again, and raises an error with
        # a message.
        self.fallback(*arrays[: self.count])
        raise InternalError(
            f"{self.kernel} reports status {status} for inputs that NumPy's kernel takes"
        )
