"""Kernels of compiled code: the arguments of a call, and their binding to arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, TypeAlias

import numpy as np

from penstock.core.checkpoints import checkpoint
from penstock.core.errors import InternalError
from penstock.core.records import dataclass, field, replace
from penstock.core.types import INT64, RunValue, RunValues, TensorType, Type
from penstock.host.native import NativeLibrary
from penstock.ir.graph import Contents, Node
from penstock.ir.kernel import (
    NO_PACKED_CONSTANTS,
    WORTH_PACKING,
    Binder,
    BoundCall,
    CompiledCall,
    Kernel,
    LayoutHints,
    PackedConstants,
)
from penstock.ir.layout import RuntimeArray
from penstock.ops.common.constant_cache import ConstantRef, Reordered, weights_of


@dataclass(frozen=True, slots=True)
class Tensor:
    """An argument of a call: tensor ``index`` of a node, its inputs first, then its outputs;
    ``own_order``: with its dims in their own order whatever ``NativeCall.dims_order`` is;
    ``any_order``: the kernel reads it as fast in any."""

    index: int
    own_order: bool = False
    any_order: bool = False


class _Workspace:
    """An argument of a call: the kernel's workspace."""


WORKSPACE = _Workspace()

ROUNDED = "rounded_"
"""the beginning of names of kernels that round operands to bfloat16"""
_MOST_ORDERED = 15  # dims, of four bits each
_OWN_ORDERS: Mapping[int, int] = {}

Word: TypeAlias = int | float | np.ndarray | Tensor | _Workspace | None
"""An argument of a compiled kernel: a number, an array made at compile time, a tensor of the node,
the workspace, or a null pointer."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A node as the families of kernels see it: the types of its inputs and then of its outputs, of
    known shapes (None for one left out), and the arrays of those that are constants. ``rounds``:
    operands of products may be rounded to bfloat16. ``ordered``: a sum is taken in one order,
    whatever the number of rows (``reproducible=True``). ``exact``: operands are taken as they are,
    even where the model allows otherwise (``precision="strict"``)."""

    library: NativeLibrary
    node: Node
    tensors: tuple[TensorType | None, ...]
    constants: Contents
    rounds: bool = False
    ordered: bool = False
    exact: bool = False

    def input(self, i: int) -> TensorType | None:
        """The type of an input; None if it is left out."""
        return self.tensors[i] if i < len(self.node.inputs) else None

    def constant(self, i: int) -> np.ndarray | None:
        """An input, if it is a constant."""
        return self.constants[i] if i < len(self.node.inputs) else None

    def weights(self, i: int) -> ConstantRef | None:
        """An input, if it is a constant, for ``reordered``."""
        return weights_of(self.node.inputs[i] if i < len(self.node.inputs) else None)

    def output(self, i: int = 0) -> TensorType:
        """The type of an output that is not left out."""
        type_ = self.tensors[len(self.node.inputs) + i]
        assert type_ is not None
        return type_

    def result(self, i: int = 0) -> Tensor:
        """Output ``i``, as an argument of a call."""
        return Tensor(len(self.node.inputs) + i)

    def attr(self, name: str, default: Any) -> Any:
        """An attribute of the node."""
        return self.node.attrs.get(name, default)


@dataclass(frozen=True, slots=True, eq=False)
class NativeCall:
    """A compiled kernel with its arguments, in the order of its struct in ``c/``.

    ``items`` is the number of independent parts of the work; ``item_ns``, roughly the time of one,
    decides about threads. Threads can share an item that has ``stages``: their number, and that of
    the independent pieces of each. ``workspace`` and ``inplace`` are as for ``Kernel``. A kernel
    that ``can_fail`` reports inputs that are at fault, and the NumPy kernel raises the error.
    ``restrided(strides)``, if given, returns the call for tensors that have these strides (in
    elements; None for those without gaps), or raises ``UnsupportedError``: memory in any order of
    dims is then read and written where it is, best in ``dims_order``, or, with ``any_layout``, the
    output in the order that its reader prefers. A call with ``dims_order`` must be restrided even
    if no tensor has gaps.

    ``finish`` computes the outputs from intermediate results of the kernel. ``keep`` is kept alive
    with the call, such as owners of its arrays. ``reordered`` are inputs that need not be held, as
    arrays of the call have the same elements in another order.
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
    """A ``function`` applied to the tensors that a kernel ``writes``: it makes strings of their
    indices, or outputs of data-dependent shapes from arrays that are large enough."""

    writes: tuple[TensorType, ...]
    function: Callable[..., RunValue]


def texts_of(site: Site, texts: np.ndarray | None) -> Finish | None:
    """Makes output 0 of indices (int64) of ``texts``; None without these."""
    if texts is None:
        return None
    others = [type_ for type_ in site.tensors[len(site.node.inputs) + 1 :] if type_ is not None]

    def function(results: Any) -> Any:
        if isinstance(results, tuple):
            return texts.take(results[0]), *results[1:]
        return texts.take(results)

    return Finish((TensorType(INT64, site.output().dims), *others), function)


class UnsupportedError(Exception):
    """There is no compiled kernel for this."""


def site_of(
    library: NativeLibrary,
    node: Node,
    types: Sequence[Type | None],
    *,
    data_dependent: bool = False,
) -> Site | None:
    """The site of a node with these types of inputs; None if a shape is unknown, or a value is no
    tensor. Outputs whose shapes are ``data_dependent`` are left out."""
    outputs = [None if value is None or data_dependent else value.type for value in node.outputs]
    tensors: list[TensorType | None] = []
    for type_ in (*types, *outputs):
        if type_ is None:
            tensors.append(None)
        elif isinstance(type_, TensorType) and type_.static and type_.dtype is not None:
            tensors.append(type_)
        else:
            return None
    return Site(library, node, tuple(tensors), Contents(node.inputs))


def open_site(library: NativeLibrary, node: Node, types: Sequence[Type | None]) -> Site:
    """The site of a node whose shapes may be unknown; None for values that are no tensors."""
    outputs = [None if value is None else value.type for value in node.outputs]
    tensors = [t if isinstance(t, TensorType) else None for t in (*types, *outputs)]
    return Site(library, node, tuple(tensors), Contents(node.inputs))


def native_kernel(site: Site, call: NativeCall) -> Kernel:
    """The kernel that makes ``call``."""
    if call.finish is not None:
        return _finished_kernel(site, call, call.finish)
    node, tensors = site.node, site.tensors
    if call.reordered:
        packed = _worth_packing(site, call)
        if len(packed) < len(call.reordered):
            call = replace(call, reordered=packed)
        # The call has these in an order of its own: a site that held them would keep both in
        # memory.
        others = [None if i in packed else v for i, v in enumerate(node.inputs)]
        site = replace(site, constants=Contents(others))
    binder = _CallBinder(site, call)
    dense: tuple[int, ...] = ()
    if call.restrided is None or call.dims_order:
        read = _read(call)
        given = [w for w in call.words if isinstance(w, Tensor)]
        read -= {w.index for w in given if w.own_order or w.any_order}
        inputs = enumerate(node.inputs)
        dense = tuple([i for i, v in inputs if i in read and (v is None or not v.is_constant)])
    kernel = Kernel(
        _run_once,
        partial(_run_once, binder),
        binder=binder,
        workspace=call.workspace,
        operand_dtype="bfloat16" if call.kernel.startswith(ROUNDED) else "",
        inplace=tuple([i for i in call.inplace if tensors[i] == tensors[len(node.inputs)]]),
        layout=LayoutHints(
            contiguous=call.restrided is None,
            dims_order=tuple(range(len(site.output().dims)))
            if call.any_layout and not call.dims_order
            else call.dims_order,
            contiguous_inputs=dense,
            any_layout=call.any_layout,
            # A call of the function is given the first, allocates the second, and has results in
            # their own order.
            prefer_bound=bool(call.reordered or call.workspace or call.dims_order),
        ),
        packed=PackedConstants(tuple(call.reordered), partial(_released, call.reordered))
        if call.reordered
        else NO_PACKED_CONSTANTS,
    )
    object.__delattr__(kernel, "function")  # which the binder makes, if it is read
    return kernel


def _run_given(binder: _CallBinder, call: Callable[..., None], *arrays: np.ndarray | None) -> None:
    """Make a call on arrays that are given each time, of any strides, and a workspace."""
    count, nbytes = len(binder.site.node.inputs), binder.native.workspace
    outputs = arrays[count : len(binder.site.tensors)]
    # Only plans set workspace aside.
    work = [np.empty(nbytes, np.uint8)] if nbytes and len(arrays) == count + len(outputs) else []
    if False in [y is None or y.flags.c_contiguous for y in outputs]:
        call = partial(_run_once, binder)
    call(*arrays, *work)


def _run_once(binder: _CallBinder, *arrays: np.ndarray | None) -> None:
    """As ``_run_given``, with a call that is made for these arrays."""
    count, end = len(binder.site.node.inputs), len(binder.site.tensors)
    nbytes = binder.native.workspace
    work = arrays[end] if len(arrays) > end else np.empty(nbytes, np.uint8) if nbytes else None
    run, runtime = binder.bind(arrays[:count], arrays[count:end], work)
    run(*runtime)


def _run_into_new(
    into: Callable[..., None], types: Sequence[TensorType | None], *inputs: np.ndarray | None
) -> Any:
    """The outputs of these types, in new memory."""
    results = [None if t is None else np.empty(t.dims, t.dtype) for t in types]
    into(*inputs, *results)
    return results[0] if len(results) == 1 else tuple(results)


def _released(reordered: Mapping[int, Reordered]) -> dict[int, Callable[[], np.ndarray]]:
    return {i: held.release() for i, held in reordered.items()}


def _worth_packing(site: Site, call: NativeCall) -> Mapping[int, Reordered]:
    """Constants of many bytes. A kernel that packs some is called with planned memory alone."""
    types = [(i, site.tensors[i]) for i in call.reordered]
    return {i: call.reordered[i] for i, type_ in types if type_ and type_.nbytes >= WORTH_PACKING}


def _finished_kernel(site: Site, call: NativeCall, finish: Finish) -> Kernel:
    """The kernel of a call whose results ``finish`` makes the outputs of."""
    tensors = (*site.tensors[: len(site.node.inputs)], *finish.writes)
    written, make = replace(call, finish=None), finish.function
    kernel = native_kernel(replace(site, tensors=tensors), written)
    function = kernel.function
    return Kernel(lambda *inputs: make(function(*inputs)), packed=kernel.packed)


class _Runtime:
    """Stands for an array that is given during the run."""


_RUNTIME = _Runtime()


@dataclass(frozen=True, slots=True, eq=False)
class _CallBinder(Binder):
    """Binds a call to arrays."""

    site: Site
    native: NativeCall

    @property
    def implementation(self) -> str:
        """The name of the compiled kernel, and the instruction set."""
        return f"{self.native.kernel}:{self.site.library.level}"

    @property
    def compiled_call(self) -> CompiledCall:
        return self.site.library.call_of

    @property
    def reads_turned(self) -> bool:
        return self.native.restrided is not None and not self.native.can_fail

    def plain(self) -> NativeCall:
        """The call for tensors without gaps."""
        native = self.native
        if native.restrided is None or not native.dims_order:
            return native
        return native.restrided([None] * len(self.site.tensors))

    def function(self) -> Callable[..., RunValue]:
        """The function of the kernel."""
        native, tensors = self.plain(), self.site.tensors
        work = _RUNTIME if native.workspace else None
        call = _CallBinder(self.site, native).call([_RUNTIME] * len(tensors), work, every=True)
        outputs, into, make = tensors[len(self.site.node.inputs) :], call.run, call.make
        if not native.workspace and None not in outputs:
            return make
        # No closures, whose cells Python's collector would walk for as long as plans live.
        if native.restrided is not None or native.workspace:
            into = partial(_run_given, self, into)
        return partial(_run_into_new, into, outputs)

    def bind(
        self, inputs: RunValues, outputs: RunValues, workspace: np.ndarray | None
    ) -> BoundCall:
        arrays = (*inputs, *outputs)
        native = self.native
        orders: dict[int, int] = {}
        # Others are arguments of each call, which looks at them, and copies inputs that it cannot
        # read.
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
            # Code with strides as arguments needs no more than whole elements at aligned addresses.
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
        run = _CallBinder(self.site, native).call(arrays, workspace, runtime, orders).run
        return run, tuple([arrays[i] for i in runtime])

    def _bind_copy(
        self, inputs: RunValues, outputs: RunValues, workspace: np.ndarray | None
    ) -> BoundCall:
        """As ``bind``, for strides that the kernel does not know: inputs are copied at each call,
        and outputs computed without gaps and then copied."""
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

    def call(
        self,
        arrays: RunValues,
        workspace: Any,
        runtime: Sequence[int] = (),
        orders: Mapping[int, int] = _OWN_ORDERS,
        *,
        every: bool = False,
    ) -> Any:
        """The call on ``arrays``, inputs and then outputs, of which it takes those at ``runtime``
        as arguments, their dims in memory in these ``orders``; with ``every``, it takes them all
        and the workspace, or makes the outputs."""
        native, site = self.native, self.site
        count, behind = len(site.node.inputs), len(arrays)
        words: list[Any] = list(native.words)
        given = range(behind + (1 if native.workspace else 0)) if every else runtime
        # Several words may be one tensor, which C then sets at once: a node may read an input
        # twice.
        places: dict[int, int] = {}  # bits of the words that a tensor is
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
        sizes = [native.workspace if t is None else t.nbytes for t in (*site.tensors, None)]
        outputs = site.tensors[count:]
        # C can make plain outputs itself, in less time than a call of NumPy's for each takes.
        makes = every and not native.workspace and None not in outputs
        return site.library.call(
            native.kernel,
            tuple(words),
            (native.keep, *native.reordered.values()) if native.reordered else native.keep,
            tuple([(places.get(i, 0), sizes[i], i >= count, orders.get(i, 0)) for i in given]),
            tuple([(t.dtype, t.dims) for t in outputs if t is not None]) if makes else (),
            native.items,
            float(native.item_ns),
            *native.stages,
            _Failed(site, native, tuple(arrays), tuple(given)) if native.can_fail else None,
            checkpoint,
        )


def _turn(array: RunValue) -> Callable[[RunValue], RunValue]:
    """Return what turns the array that a run gives into the one that a kernel reads."""
    if not isinstance(array, RuntimeArray) or not array.turned:
        return _itself
    return methodcaller("transpose", array.turned)


def _itself(x: RunValue) -> RunValue:
    return x


def _read(call: NativeCall) -> set[int]:
    """The tensors among the arguments of a call."""
    return {word.index for word in call.words if isinstance(word, Tensor)}


def _order_word(order: Sequence[int] | None) -> int:
    """The order of an array's dims in memory, as in ``host/c/call.h``: 0 for their own."""
    if order is None:
        return 0
    if len(order) > _MOST_ORDERED:
        raise UnsupportedError
    return sum([len(order) << 60, *[dim << 4 * k for k, dim in enumerate(order)]])


def _strides(x: Any, type_: TensorType | None) -> tuple[int, ...] | None:
    """The strides in elements of an array that is not dense, also those expected of one that is
    given during the run; None if it must be copied before it is read."""
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
    """Raises the error of a call whose inputs are at fault: that of the NumPy kernel."""

    site: Site
    native: NativeCall
    arrays: tuple[Any, ...]
    places: tuple[int, ...]

    def __call__(self, status: int, runtime: tuple[np.ndarray, ...]) -> None:
        arrays = [*self.arrays, None]  # the workspace is the last
        for i, array in zip(self.places, runtime, strict=True):
            arrays[i] = array
        node, count = self.site.node, len(self.site.node.inputs)
        inputs = arrays[:count]
        # The call has no array for these; the value gives the constant back.
        for i in self.native.reordered:
            value = node.inputs[i]
            assert value is not None
            inputs[i] = value.const
        # C reports a number only. The definition finds the fault again, and has words for it.
        node.op.compile(node, self.site.tensors[:count]).function(*inputs)
        raise InternalError(
            f"{self.native.kernel} reports status {status} for inputs that NumPy's kernel takes"
        )
