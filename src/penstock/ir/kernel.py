"""Kernels: the code of one node on one backend, and its properties.

Properties that most kernels leave at their defaults are grouped in *facets*, separate records. A
kernel without one shares a record of the defaults, so that readers use ``kernel.layout.dims_order``
without a check::

    Kernel(function, into, layout=LayoutHints(dims_order=(0, 2, 3, 1)))

The planner and the program writer read them while a plan is compiled and bound, never during a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from penstock.core.checkpoints import WAKE_S
from penstock.core.records import dataclass
from penstock.core.types import RunValue

BoundCall = tuple[Callable[..., RunValue], tuple[RunValue, ...]]
"""a function and the arguments to call it with"""
FunctionParts = tuple[Callable[..., Callable[..., RunValue]], tuple[Any, ...]]
"""a function that makes a kernel's function for any dims, and arguments, which depend on these"""
CompiledCall = Callable[[Callable[..., RunValue], tuple[Any, ...]], Any]
"""a function that compiled code calls in place of a ``BoundCall``"""


class Binder:
    """The part of a kernel that is compiled for the memory of its arguments. A subclass must define
    ``bind`` and may define the rest."""

    __slots__ = ()

    @property
    def implementation(self) -> str:
        """The library's name of the implementation that it chose, for ``explain``."""
        return ""

    @property
    def compiled_call(self) -> CompiledCall | None:
        """A function that maps a result of ``bind`` to the call that compiled code makes instead,
        to join it with others (``codegen.sequences``), or to None for a Python function. None if
        calls must not be joined."""
        return None

    @property
    def divided_s(self) -> float:
        """The estimated seconds of a call with one thread, if it can be divided; 0 if not."""
        return 0.0

    @property
    def estimated_s(self) -> float:
        """The estimated seconds of a call with one thread; 0 if unknown."""
        return 0.0

    @property
    def reads_turned(self) -> bool:
        """Whether inputs may be ``RuntimeArray`` objects that are ``turned``."""
        return False

    def bind(
        self, inputs: Sequence[RunValue], outputs: Sequence[RunValue], workspace: np.ndarray | None
    ) -> BoundCall:
        """Implement ``Kernel.bind``.

        Args:
            inputs: The arrays to read.
            outputs: The arrays to write.
            workspace: Memory of ``Kernel.workspace`` bytes, None if the kernel needs none.
        """
        raise NotImplementedError

    def function(self) -> Callable[..., RunValue]:
        """Return the kernel's ``function``, created late since most kernels are only bound."""
        raise NotImplementedError

    def function_parts(
        self, inputs: Sequence[RunValue], fallback: Callable[..., RunValue]
    ) -> FunctionParts | None:
        """Return the parts of a function for inputs whose dims are in memory in given orders. It
        allocates its output in the order that the kernel prefers, and copies inputs in other
        orders. None if ``function`` is as good.

        Args:
            inputs: Arrays of these orders.
            fallback: Takes the inputs of any dims, and raises an error for invalid ones.
        """
        return None


@dataclass(frozen=True, slots=True)
class LayoutHints:
    """The layouts that a kernel reads and writes; by default any.

    ``contiguous``: the outputs must have no gaps, with their dims in C order.

    ``dims_order``: the order of the dims of output 0 in memory, outermost first, if its memory
    is planned; empty if any order will do. Steps that read it receive the strides to match.
    ``contiguous_inputs``: the inputs that must have no gaps, with their dims in the order of the
    output's. ``any_layout``: the output may have any other order that its reader prefers, and is in
    C order if it leaves the run; contiguous inputs have ``dims_order`` then.

    ``prefer_bound``: a call of ``function`` is slow, but a bound call is not. Even an output that
    leaves the run is then written to planned memory and copied out.
    """

    contiguous: bool = False
    dims_order: tuple[int, ...] = ()
    contiguous_inputs: tuple[int, ...] = ()
    any_layout: bool = False
    prefer_bound: bool = False


WORTH_PACKING = 16 << 10
"""bytes of a constant from which on it is not held in the file's order as well"""


@dataclass(frozen=True, slots=True)
class PackedConstants:
    """Constants that a kernel holds in packed order: neither ``bind`` nor ``function`` reads
    these ``inputs``, so None may be passed for them. ``release()`` makes the kernel hold them only
    in packed order, and returns functions that restore them, by input; inputs that it does not
    return stay as they are."""

    inputs: tuple[int, ...] = ()
    release: Callable[[], Mapping[int, Callable[[], np.ndarray]]] | None = None


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Where the work and the values of a kernel are, if not all on its backend's device.

    ``devices``: the devices of its backend on which a call enqueues work, if not only on
    ``Backend.device``. The call uses a stream of each of them; all of these have
    waited for its inputs, and steps that read its outputs wait for all of them.

    ``backends_of_values``: the backends whose memories hold the values of the node, if not all are
    in its own backend's memory: input i and output i are in that of the i-th.

    ``host_inputs``: the inputs that the kernel reads on the host as NumPy arrays, unlike other
    values of its backend: shapes, axes, conditions. ``host_outputs``: its outputs are on the host
    and computed without waiting for a device, such as the shape of a tensor.

    ``synchronize``: given an output on a device, waits for it on the host, outside of
    streams; None if calls return when their work is done. The planner sets it.
    """

    devices: tuple[Any, ...] = ()
    backends_of_values: tuple[RunValue, ...] = ()
    host_inputs: tuple[int, ...] = ()
    host_outputs: bool = False
    synchronize: Callable[[Any], object] | None = None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory that a kernel uses besides its outputs and its workspace.

    ``checks_budget``: ``function`` asks the budget of the run before a large allocation
    (``host.current_run``). ``capacity_bytes()``: bytes of the growable buffers of outputs that it
    has returned, which live as long as the outputs.
    """

    checks_budget: bool = False
    capacity_bytes: Callable[[], int] | None = None


@dataclass(frozen=True, slots=True)
class RuntimeShapes:
    """A kernel that selects other kernels by the shapes of a run: ``cached_bytes()`` returns the
    bytes of those it has cached, ``flops`` the approximate number of floating-point operations,
    which is known only in runs."""

    cached_bytes: Callable[[], int] | None = None
    flops: int = 0


NO_LAYOUT_HINTS = LayoutHints()
NO_PACKED_CONSTANTS = PackedConstants()
OWN_DEVICE = DeviceWork()
NO_MEMORY_USE = MemoryUse()
NO_RUNTIME_SHAPES = RuntimeShapes()


class _LateFunction:
    """Has the binder of a kernel without a ``function`` create it when it is first read."""

    __slots__ = ()
    binder: Binder | None

    def __getattr__(self, name: str) -> Callable[..., RunValue]:
        if name != "function" or self.binder is None:
            raise AttributeError(f"a Kernel has no attribute {name!r}")
        function = self.binder.function()
        object.__setattr__(self, name, function)
        return function


@dataclass(frozen=True, slots=True)
class Kernel(_LateFunction):
    """The code of one node on one backend.

    ``function(*inputs)`` takes one argument for each of the node's inputs (``None`` for one left
    out) and returns new outputs: an array if the node has one output, else a tuple with an entry
    for each. It works for all shapes that the node allows. An output of rank 0 may be a NumPy
    scalar (``array_of``).

    ``into(*inputs, *outputs)`` writes to the given arrays instead, one argument for each of the
    node's outputs, followed by a uint8 array of ``workspace`` bytes, aligned to 64, if that is not
    0. Output arrays may be strided unless ``layout.contiguous`` is set, and overlap no input except
    as ``inplace`` allows. Without ``into`` the outputs are allocated during the run.

    ``binder``: binds the kernel to its arguments before the run, in place of ``into``.

    ``inplace``: inputs whose memory output 0 may reuse if their type is the same and no later step
    reads them. A value that is several inputs of the node may be reused only if all of them are
    listed, since other inputs are read while the output is written.

    Without ``into``, ``workspace`` is for kernels on devices: ``function`` receives memory of that
    size as ``workspace=``, that of the stream on which it is called, or a tuple with that of each
    of its ``device.devices``. Other kernels on the stream use it before and afterwards.
    Outside of streams the kernel receives none.

    ``view``: outputs are views of input 0 where its strides allow it; nothing is computed.

    ``begin``: the non-blocking form of an asynchronous kernel (``asynchronous``).

    ``operand_dtype``: the dtype to which it rounds the operands of products, or "".
    """

    function: Callable[..., RunValue]
    into: Callable[..., RunValue] | None = None
    binder: Binder | None = None
    inplace: tuple[int, ...] = ()
    workspace: int = 0
    view: bool = False
    begin: Callable[..., Callable[[], object] | None] | None = None
    operand_dtype: str = ""
    layout: LayoutHints = NO_LAYOUT_HINTS
    packed: PackedConstants = NO_PACKED_CONSTANTS
    device: DeviceWork = OWN_DEVICE
    memory: MemoryUse = NO_MEMORY_USE
    shapes: RuntimeShapes = NO_RUNTIME_SHAPES

    def __call__(self, *inputs: RunValue) -> RunValue:
        return self.function(*inputs)

    def bind(
        self, inputs: Sequence[RunValue], outputs: Sequence[RunValue], workspace: np.ndarray | None
    ) -> BoundCall:
        """Return the function and the arguments that compute ``outputs`` from ``inputs``.
        Placeholders may stand for arrays that are known only during the run: they are passed on as
        arguments, and not inspected.

        Args:
            inputs: The arrays to read.
            outputs: The arrays to write.
            workspace: Memory of ``workspace`` bytes, None if the kernel needs none.
        """
        if self.binder is not None:
            return self.binder.bind(inputs, outputs, workspace)
        assert self.into is not None
        extra = () if workspace is None else (workspace,)
        return self.into, (*inputs, *outputs, *extra)


def returning(function: Callable[..., RunValue], *, view: bool = False) -> Kernel:
    """Return the kernel of a function with one result, which ``into`` copies.

    Args:
        function: Takes the inputs, returns the result.
        view: Whether the result may share memory with the first input.
    """

    def into(*arrays: np.ndarray) -> None:
        arrays[-1][...] = function(*arrays[:-1])

    return Kernel(function, into, view=view)


def asynchronous(begin: Callable[..., Callable[[], object] | None]) -> Kernel:
    """Return the kernel of work that is done elsewhere, e.g. by a timer or a server.

    ``begin`` starts the work and returns. When the work is complete, it calls ``done(outputs)``,
    with what a kernel's function returns, or ``done(error=...)``, on any thread, perhaps before
    ``begin`` returns; further calls have no effect. ``begin`` may return a function without
    arguments that cancels the work. A run that is stopped or fails calls it, on any thread, without
    waiting; later results are dropped. If ``done`` is never called, the run continues until it is
    stopped.

    Executors run other nodes meanwhile, and no thread waits for the work; ``function`` blocks until
    it is complete.

    Args:
        begin: Starts the work: ``begin(done, *inputs)``.
    """

    def function(*inputs: RunValue) -> RunValue:
        return Outcome(begin, inputs).wait()

    return Kernel(function, begin=begin)


class Outcome:
    """The outcome of an asynchronous kernel, for the code that waits for it."""

    def __init__(self, begin: Callable[..., RunValue], inputs: Sequence[RunValue]) -> None:
        from concurrent.futures import Future

        self._future: Future[Any] = Future()
        self._cancel: Callable[[], object] | None = None
        self._done = _Done(self)
        self._cancel = begin(self._done, *inputs)  # may call done at once, on this thread

    def end(self, outputs: RunValue = None, error: BaseException | None = None) -> None:
        """Record that the work has ended with ``outputs``, or failed with ``error``."""
        from concurrent.futures import InvalidStateError

        with suppress(InvalidStateError):  # only the first call counts
            if error is None:
                self._future.set_result(outputs)
            else:
                self._future.set_exception(error)

    def stop(self, error: BaseException) -> None:
        """Wake waiting code with ``error``, and cancel the work."""
        self._done.outcome = None  # late results are dropped, and keep nothing alive
        if not self._future.done():
            self.end(error=error)
            if self._cancel is not None:
                self._cancel()

    def query(self) -> bool:
        """Whether the work has ended."""
        return self._future.done()

    def notify(self, function: Callable[[], object]) -> None:
        """Call ``function`` once the work has ended: now, or on the thread that ends it."""
        pending = [function]  # the future would hold the function as long as it lives
        self._future.add_done_callback(lambda _: pending.pop()())

    def wait(self) -> RunValue:
        """Wait for the outputs; raise the error if the work failed."""
        try:
            while not self._future.done():
                with suppress(TimeoutError):
                    self._future.exception(WAKE_S)
        except BaseException:  # such as KeyboardInterrupt
            if self._cancel is not None:
                self._cancel()
            raise
        return self._future.result()


class _Done:
    """The ``done`` of an asynchronous kernel. It refers to the outcome, and so to the run, only
    until it is called or the run is stopped, since the kernel may keep it for longer."""

    __slots__ = ("outcome",)

    def __init__(self, outcome: Outcome) -> None:
        self.outcome: Outcome | None = outcome

    def __call__(self, outputs: RunValue = None, error: BaseException | None = None) -> None:
        outcome, self.outcome = self.outcome, None
        if outcome is not None:
            outcome.end(outputs, error)


def array_of(value: RunValue) -> RunValue:
    """Return a kernel's result as a run-time value: NumPy may return a scalar for rank 0."""
    if isinstance(value, np.generic):
        return np.asarray(value)
    return np.array(value, object) if isinstance(value, str) else value
