"""Operations and kernels.

An ``Op`` is the meaning of nodes: how their types follow from those of their inputs, how NumPy
computes them, and the properties that passes, planner and executors ask for. A ``Kernel`` is the
code of one node on one backend. Operations are registered in ``penstock.ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any, Protocol

import numpy as np

from penstock.core.checkpoints import WAKE_S
from penstock.core.records import dataclass, field
from penstock.core.types import Type

Types = Sequence[Type | None]
Attrs = Mapping[str, Any]
Consts = Sequence[np.ndarray | None]
Infer = Callable[[Types, Attrs, Consts], Sequence[Type]]
Arity = tuple[int | None, int | None]
Dims = Sequence[tuple[int, ...] | None]
Work = Callable[[Attrs, Dims, tuple[int, ...]], int]


class Binder(Protocol):
    """The part of a kernel that is compiled for the memory of its arguments."""

    @property
    def implementation(self) -> str:
        """The library's name of the code that it chose."""

    def bind(
        self, inputs: Sequence[Any], outputs: Sequence[Any], workspace: np.ndarray | None
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """As ``Kernel.bind``."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The code of one node on one backend.

    ``function(*inputs)`` takes one argument for each of the node's inputs (``None`` for one left
    out) and returns new outputs: an array if the node has one output, else a tuple with an entry
    for each. It works for all shapes that the node allows. An output of rank 0 may be a NumPy
    scalar (``array_of``).

    ``into(*inputs, *outputs)`` writes to the given arrays instead, one argument for each of the
    node's outputs, followed by a uint8 array of ``workspace`` bytes, aligned to 64, if that is not
    0. Output arrays may be strided unless ``contiguous`` is set, and overlap no input except as
    ``inplace`` allows. Without ``into`` the outputs are allocated during the run.

    Without ``into``, ``workspace`` is for kernels on devices: ``function`` takes memory of that
    size as ``workspace=``, that of the stream on which it is called, or a tuple of that of each if
    it names several ``devices``. Other kernels on the stream use it before and afterwards. Outside
    of streams the kernel gets none.

    ``view``: outputs are views of input 0 where its strides allow it; nothing is computed.

    ``dims_order``: the order of the dims of output 0 in memory, the outermost first, if its memory
    is planned; empty if any order will do. The steps that read it find the strides to match.
    ``contiguous_inputs``: the inputs that must have no gaps, and their dims in the order of the
    output's. ``any_layout``: the output may as well have any other order that its reader prefers.

    ``check``: called with the result of a bound call if that is true; raises. For libraries that
    return a status.

    ``binder``: binds the kernel to its arguments ahead of the run, in place of ``into``.
    ``prefer_bound``: a call of ``function`` is slow, and what ``bind`` returns is not. Even an
    output that leaves the run is then written to planned memory, and copied out.

    ``compiled_call``: given what ``bind`` has returned, what compiled code calls in its place
    (``backends.sequence``); None if that is a function of Python after all.

    ``devices``: the devices of its backend that a call puts work on, if that is not
    ``Backend.device`` alone. The call goes through a stream of each of them; all of these have
    waited for its inputs, and what reads its outputs waits for all of them.

    ``members``: the backends among which the values of the node are spread, if not all of them are
    in the memory of its own: input i and output i are in that of the i-th.

    ``host_inputs``: the inputs that the kernel reads on the host, as NumPy arrays, though other
    values of its backend are elsewhere: shapes, axes, conditions. ``host_outputs``: its outputs
    are there, and made without waiting for a device, as the shape of a tensor is.

    ``settle``: given an output that is on a device, waits for it on the host, outside of streams;
    None if calls return when their work is done.

    ``begin``: the non-blocking form of an asynchronous kernel (``asynchronous``).

    ``inplace``: inputs whose memory output 0 may reuse if their type is the same and no later step
    reads them. A value that is several inputs of the node may be reused only if all of them are
    listed: other inputs are read while the output is written.

    ``absorbed``: constant inputs that neither ``bind`` nor ``function`` looks at, as the kernel has
    them in an order of its own: None may stand for them. ``release()`` makes it hold them in that
    order alone, and returns functions that give them back, by input.

    ``reserves``: ``function`` asks the budget of the run before it allocates what is large
    (``host.current_run``). ``capacity_bytes()``: bytes of the growable buffers that hold outputs
    it has returned, which live as long as these.

    ``operands``: the dtype to which it rounds the operands of products, "" if it does not.

    ``code_bytes``: about what it keeps in memory of a native library, such as generated code;
    ``cached_bytes()``: what it has come to keep during runs. ``runtime_flops``: about how many
    floating-point operations it has, if only runs know its shapes.
    """

    function: Callable[..., Any]
    into: Callable[..., Any] | None = None
    view: bool = False
    inplace: tuple[int, ...] = ()
    workspace: int = 0
    contiguous: bool = False
    dims_order: tuple[int, ...] = ()
    contiguous_inputs: tuple[int, ...] = ()
    any_layout: bool = False
    prefer_bound: bool = False
    binder: Binder | None = None
    compiled_call: Callable[[Callable[..., Any], tuple[Any, ...]], Any] | None = None
    check: Callable[[Any], object] | None = None
    devices: tuple[Any, ...] = ()
    members: tuple[Any, ...] = ()
    host_inputs: tuple[int, ...] = ()
    host_outputs: bool = False
    settle: Callable[[Any], object] | None = None
    begin: Callable[..., Callable[[], object] | None] | None = None
    operands: str = ""
    code_bytes: int = 0
    cached_bytes: Callable[[], int] | None = None
    runtime_flops: int = 0
    reserves: bool = False
    capacity_bytes: Callable[[], int] | None = None
    absorbed: tuple[int, ...] = ()
    release: Callable[[], Mapping[int, Callable[[], np.ndarray]]] | None = None

    def __call__(self, *inputs: Any) -> Any:
        return self.function(*inputs)

    @property
    def prepares(self) -> bool:
        """Whether ``bind`` prepares arguments of its own; else a program calls ``into`` itself."""
        return self.binder is not None or type(self).bind is not Kernel.bind

    def bind(
        self, inputs: Sequence[Any], outputs: Sequence[Any], workspace: np.ndarray | None
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
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


def returning(function: Callable[..., Any], *, view: bool = False) -> Kernel:
    """Return the kernel of a function with one result, which ``into`` copies.

    Args:
        function: Takes the inputs, returns the result.
        view: Whether the result may share memory with the first input.
    """

    def into(*arrays: Any) -> None:
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

    def function(*inputs: Any) -> Any:
        return Outcome(begin, inputs).wait()

    return Kernel(function, begin=begin)


class Outcome:
    """What comes of an asynchronous kernel, for whatever waits for it."""

    def __init__(self, begin: Callable[..., Any], inputs: Sequence[Any]) -> None:
        from concurrent.futures import Future

        self._future: Future[Any] = Future()
        self._cancel: Callable[[], object] | None = None
        self._done = _Done(self)
        self._cancel = begin(self._done, *inputs)

    def end(self, outputs: Any = None, error: BaseException | None = None) -> None:
        """The work has ended with ``outputs``, or failed with ``error``."""
        from concurrent.futures import InvalidStateError

        with suppress(InvalidStateError):  # only the first call counts
            if error is None:
                self._future.set_result(outputs)
            else:
                self._future.set_exception(error)

    def stop(self, error: BaseException) -> None:
        """Wake what waits with ``error``, and cancel the work."""
        self._done.outcome = None
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

    def wait(self) -> Any:
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

    def __call__(self, outputs: Any = None, error: BaseException | None = None) -> None:
        outcome, self.outcome = self.outcome, None
        if outcome is not None:
            outcome.end(outputs, error)


def array_of(value: Any) -> Any:
    """Return a kernel's result as a run-time value: NumPy may return a scalar for rank 0."""
    if isinstance(value, np.generic):
        return np.asarray(value)
    return np.array(value, object) if isinstance(value, str) else value


class Role(Enum):
    """What an operation does to the order in which nodes run.

    Tokens travel through graphs with frames: a ``SWITCH`` kills one of its outputs, a ``MERGE``
    fires on the first live input, an ``ENTER`` and an ``EXIT`` move a token into and out of a
    frame, a ``NEXT_ITERATION`` moves it to the frame's next iteration, which a ``LOOP_COND``
    decides on, and a ``CONTROL_TRIGGER`` fires on dead tokens too. ``SEND`` and ``RECV`` move a
    token from one part of a graph to another, a ``CALL`` runs a function of the model. ``IF``,
    ``LOOP``, ``SCAN`` and ``SEQUENCE_MAP`` run the graphs that they have as attributes, and so does
    a ``FRAME``, whose graph is one frame.
    """

    SWITCH = auto()
    MERGE = auto()
    ENTER = auto()
    EXIT = auto()
    NEXT_ITERATION = auto()
    LOOP_COND = auto()
    CONTROL_TRIGGER = auto()
    SEND = auto()
    RECV = auto()
    CALL = auto()
    FRAME = auto()
    IF = auto()
    LOOP = auto()
    SCAN = auto()
    SEQUENCE_MAP = auto()

    __hash__ = object.__hash__  # Enum's own is a function in Python


PRIMITIVES = frozenset(
    {
        *(Role.SWITCH, Role.MERGE, Role.ENTER, Role.EXIT, Role.NEXT_ITERATION),
        *(Role.LOOP_COND, Role.CONTROL_TRIGGER),
    }
)
"""The roles of TensorFlow's primitives of control flow"""
FRAMED = PRIMITIVES | {Role.CALL}
"""The roles of nodes that only the frames executor runs"""


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An operation; all nodes of one operation share the object.

    ``since`` to ``version`` are the versions of the domain's schema that mean exactly this.
    ``compile(node, types)`` returns the NumPy kernel of a node for inputs of these types.
    ``pure`` operations give equal outputs for equal inputs and have no effects; others are neither
    folded, nor merged, nor dropped in favour of one another.

    ``role``: what the operation does to the order in which nodes run; None for most. ``arity``: the
    number of inputs and of outputs of a node, None for any number, for operations without a schema
    that is checked elsewhere.

    ``elementwise``: an element of output 0 depends on those at its place in the inputs, which
    broadcast, so that the operation commutes with a transposition of all of them. ``moves``: only
    moves elements, and computes nothing. ``view``: output 0 has all elements of input 0, each once
    and unchanged, in another shape or order.

    ``work(attrs, inputs, output)``: the floating-point operations for inputs of these dims (None
    where not known) and output 0; by default one for each element.
    """

    name: str
    domain: str
    since: int
    version: int
    infer: Infer
    compile: Callable[..., Kernel]
    pure: bool = True
    role: Role | None = None
    arity: Arity | None = None
    elementwise: bool = False
    moves: bool = False
    view: bool = False
    work: Work | None = None

    full_name: str = field(init=False)

    def __post_init__(self) -> None:
        full_name = f"{self.domain}.{self.name}" if self.domain else self.name
        object.__setattr__(self, "full_name", full_name)

    def __repr__(self) -> str:
        return f"{self.full_name}-{self.version}"
