"""Kernels: the code of one node on one backend, and what it says of itself.

What most kernels leave unsaid is grouped in *facets*, records of their own. A kernel that gives
none has the shared one that says nothing, so that readers ask ``kernel.layout.dims_order`` without
a check::

    Kernel(function, into, layout=LayoutHints(dims_order=(0, 2, 3, 1)))

Planner and writer read them while a plan is compiled and bound; nothing reads them during a run.
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
CompiledCall = Callable[[Callable[..., RunValue], tuple[Any, ...]], Any]
"""a function that compiled code calls in the place of a ``BoundCall``"""


class Binder:
    """The part of a kernel that is compiled for the memory of its arguments: a base class, of which
    only ``bind`` must be given."""

    __slots__ = ()

    @property
    def implementation(self) -> str:
        """The library's name of the code that it chose, for ``explain``."""
        return ""

    @property
    def compiled_call(self) -> CompiledCall | None:
        """Given what ``bind`` has returned, what compiled code calls in its place, which joins it
        with others into one call (``codegen.sequences``); it returns None if that is a function of
        Python after all. None if calls are not to be joined."""
        return None

    @property
    def reads_turned(self) -> bool:
        """Whether inputs may be ``RuntimeArray`` s that are ``turned``."""
        return False

    def bind(
        self, inputs: Sequence[RunValue], outputs: Sequence[RunValue], workspace: np.ndarray | None
    ) -> BoundCall:
        """As ``Kernel.bind``.

        Args:
            inputs: The arrays to read.
            outputs: The arrays to write.
            workspace: Memory of ``Kernel.workspace`` bytes, None if the kernel needs none.
        """
        raise NotImplementedError

    def function(self) -> Callable[..., RunValue]:
        """The ``function`` of a kernel that was made without: most are bound, and never called."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class LayoutHints:
    """The layouts that a kernel reads and writes; by default any.

    ``contiguous``: the outputs must have no gaps, and their dims in their own order.

    ``dims_order``: the order of the dims of output 0 in memory, the outermost first, if its memory
    is planned; empty if any order will do. The steps that read it find the strides to match.
    ``contiguous_inputs``: the inputs that must have no gaps, and their dims in the order of the
    output's. ``any_layout``: the output may as well have any other order that its reader prefers,
    and has its own where it leaves the run; contiguous inputs have ``dims_order`` then.

    ``prefer_bound``: a call of ``function`` is slow, and what ``bind`` returns is not. Even an
    output that leaves the run is then written to planned memory, and copied out.
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
    """Constants that a kernel has in an order of its own: neither ``bind`` nor ``function`` looks
    at these ``inputs``, and None may stand for them. ``release()`` makes the kernel hold them in
    that order alone, and returns functions that give them back, by input; those that it does not
    name stay as they are."""

    inputs: tuple[int, ...] = ()
    release: Callable[[], Mapping[int, Callable[[], np.ndarray]]] | None = None


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """The places of the work and the values of a kernel, if not all on its backend's device.

    ``devices``: the devices of its backend that a call puts work on, if that is not
    ``Backend.device`` alone. The call goes through a stream of each of them; all of these have
    waited for its inputs, and what reads its outputs waits for all of them.

    ``backends_of_values``: the backends among which the values of the node are spread, if not all
    of them are in the memory of its own: input i and output i are in that of the i-th.

    ``host_inputs``: the inputs that the kernel reads on the host, as NumPy arrays, though other
    values of its backend are elsewhere: shapes, axes, conditions. ``host_outputs``: its outputs
    are there, and made without waiting for a device, as the shape of a tensor is.

    ``synchronize``: given an output that is on a device, waits for it on the host, outside of
    streams; None if calls return when their work is done. The planner sets it.
    """

    devices: tuple[Any, ...] = ()
    backends_of_values: tuple[RunValue, ...] = ()
    host_inputs: tuple[int, ...] = ()
    host_outputs: bool = False
    synchronize: Callable[[Any], object] | None = None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory that a kernel takes besides its outputs and its workspace.

    ``checks_budget``: ``function`` asks the budget of the run before it allocates what is large
    (``host.current_run``). ``capacity_bytes()``: bytes of the growable buffers that hold outputs
    it has returned, which live as long as these.
    """

    checks_budget: bool = False
    capacity_bytes: Callable[[], int] | None = None


@dataclass(frozen=True, slots=True)
class RuntimeShapes:
    """A kernel that chooses others by the shapes of a run: ``cached_bytes()`` is what it has come
    to keep of these, ``flops`` about how many floating-point operations it has, which only runs
    know."""

    cached_bytes: Callable[[], int] | None = None
    flops: int = 0


NO_LAYOUT_HINTS = LayoutHints()
NO_PACKED_CONSTANTS = PackedConstants()
OWN_DEVICE = DeviceWork()
NO_MEMORY_USE = MemoryUse()
NO_RUNTIME_SHAPES = RuntimeShapes()


class _LateFunction:
    """Has the binder of a kernel without a ``function`` make it when it is first read."""

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

    ``binder``: binds the kernel to its arguments ahead of the run, in place of ``into``.

    ``inplace``: inputs whose memory output 0 may reuse if their type is the same and no later step
    reads them. A value that is several inputs of the node may be reused only if all of them are
    listed: other inputs are read while the output is written.

    Without ``into``, ``workspace`` is for kernels on devices: ``function`` takes memory of that
    size as ``workspace=``, that of the stream on which it is called, or a tuple of that of each if
    it names several ``device.devices``. Other kernels on the stream use it before and afterwards.
    Outside of streams the kernel gets none.

    ``view``: outputs are views of input 0 where its strides allow it; nothing is computed.

    ``begin``: the non-blocking form of an asynchronous kernel (``asynchronous``).

    ``operand_dtype``: the dtype to which it rounds the operands of products, "" if it does not.
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
    waiting; later results are dropped. If ``done`` is never called, the run goes on until it is
    stopped.

    Executors run other nodes meanwhile, on no thread of its own; ``function`` blocks until the work
    is complete.

    Args:
        begin: Starts the work: ``begin(done, *inputs)``.
    """

    def function(*inputs: RunValue) -> RunValue:
        return Outcome(begin, inputs).wait()

    return Kernel(function, begin=begin)


class Outcome:
    """The outcome of an asynchronous kernel, for whatever waits for it."""

    def __init__(self, begin: Callable[..., RunValue], inputs: Sequence[RunValue]) -> None:
        from concurrent.futures import Future

        self._future: Future[Any] = Future()
        self._cancel: Callable[[], object] | None = None
        self._done = _Done(self)
        self._cancel = begin(self._done, *inputs)  # may call done at once, on this thread

    def end(self, outputs: RunValue = None, error: BaseException | None = None) -> None:
        """The work has ended with ``outputs``, or failed with ``error``."""
        from concurrent.futures import InvalidStateError

        with suppress(InvalidStateError):  # only the first call counts
            if error is None:
                self._future.set_result(outputs)
            else:
                self._future.set_exception(error)

    def stop(self, error: BaseException) -> None:
        """Wake what waits with ``error``, and cancel the work."""
        self._done.outcome = None  # a late result is dropped, and keeps nothing alive
        if not self._future.done():
            self.end(error=error)
            if self._cancel is not None:
                self._cancel()

    def query(self) -> bool:
        """Whether the work has ended."""
        return self._future.done()

    def notify(self, function: Callable[[], object]) -> None:
        """Call ``function`` once the work has ended: now, or on the thread that ends it."""
        pending = [function]  # which the future would hold for as long as it lives
        self._future.add_done_callback(lambda _: pending.pop()())

    def wait(self) -> RunValue:
        """Wait for the outputs; raise the error if the work failed."""
        try:
            while not self._future.done():
                with suppress(TimeoutError):
                    self._future.exception(WAKE_S)
        except BaseException:  # an interrupt
            if self._cancel is not None:
                self._cancel()
            raise
        return self._future.result()


class _Done:
    """The ``done`` of an asynchronous kernel. It refers to the outcome, and so to the run, until it
    is called or the run is stopped: the kernel may keep it for longer."""

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
