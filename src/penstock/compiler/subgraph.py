"""Subgraphs: the part of a model for one set of feeds, fetches and targets, and its fed values."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from penstock.core.errors import InvalidInput, LimitExceeded
from penstock.core.records import NamedTuple, cached_property, dataclass
from penstock.core.types import STRING, NamedValues, RunValues, TensorType, Type
from penstock.executors.base import Executor
from penstock.host import gc_pause
from penstock.host.native import library
from penstock.ir.graph import Graph, Value, is_framed
from penstock.ops.onnx.control_flow import collects_rows

if TYPE_CHECKING:
    from penstock.compiler.varying_shapes import VaryingShapes
    from penstock.ops.internal.transfer import Ports
    from penstock.passes.context import Unraised

_ndarray = np.ndarray
_NO_DTYPE = object()  # unequal to all dtypes
LEAST_MASK = 64
"""elements from which on an input that may be a mask is examined"""


@dataclass(frozen=True)
class Extract:
    """The names that select a part of a model: what ``fetches`` and ``targets`` need, given
    ``feeds``."""

    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    targets: tuple[str, ...] = ()


ExpectedFeeds: TypeAlias = tuple[tuple[str, str, np.dtype, tuple[int, ...], bool], ...]


class LatestPlan(NamedTuple):
    """The plan that was used last, and its key. ``expected``: two names, dtype and shape of each
    input, and whether it is a mask, if arrays of just these, and masks that hide nothing, need no
    further check before the plan runs, else None."""

    key: Hashable
    executor: Executor | None
    expected: ExpectedFeeds | None


NO_PLAN = LatestPlan(None, None, None)


class Subgraph:
    """The part of a model for one set of feeds, fetches and targets.

    ``graph`` has the feeds as inputs and the fetches as outputs; it is simplified as far as
    possible without shapes. It may instead be a function that returns the graph, with ``inputs``
    and ``results``: values with the names and types of the graph's inputs and outputs.
    ``unraised``: TensorFlow's primitives that structured control flow could not replace.
    ``extract``: the names that selected this part of its model, if they are known.
    """

    extract: Extract | None = None
    ports: Ports | None = None
    """the memories of inputs and outputs, if not all of them are in the host's memory"""
    packs = ""
    """which rows that a mask hides are left out, as ``PackRows`` says; empty for none"""
    least_mask = LEAST_MASK
    """elements of a mask below which all rows are computed; 0: rows are left out if any pads"""
    not_packed = ""
    """why all rows are computed although a mask hides some, after several attempts"""
    first: tuple[Any, ...] | None = None
    """the first shapes of its runs, apart from those of saved plans"""
    retired = False
    """whether its session runs another model instead, so that none of its plans are kept"""

    def __init__(
        self,
        graph: Graph | Callable[[], Graph],
        outputs: Iterable[str],
        unraised: Sequence[Unraised] = (),
        *,
        inputs: Sequence[Value] = (),
        results: Sequence[Value] = (),
    ) -> None:
        self._make_graph = graph
        if isinstance(graph, Graph):
            self.graph, inputs, results = graph, graph.inputs, graph.outputs
        self.inputs = inputs
        self.results = results
        self.unraised = unraised
        self.names = tuple([value.name for value in inputs])
        self.types = tuple([value.type for value in inputs])
        dtypes = [t.dtype if isinstance(t, TensorType) else None for t in self.types]
        # Arrays of these dtypes are fed unchanged; the elements of strings are checked. None
        # would equal float64.
        fed = [_NO_DTYPE if d is None or d == STRING else d for d in dtypes]
        self._ports = tuple(zip(self.names, self.types, fed, strict=True))
        # Whether a plan depends on the dtypes of the feeds in addition to their shapes.
        self.depends_on_dtypes = True in [dtype is None for dtype in dtypes]
        self.outputs = tuple(outputs)
        # Inputs that may be masks, beside other inputs.
        kinds = [
            d.kind if d is not None and len(getattr(t, "shape", None) or ()) > 1 else ""
            for d, t in zip(dtypes, self.types, strict=True)
        ]
        several = range(len(kinds) if len(kinds) > 1 else 0)
        self._numbers = tuple([i for i in several if kinds[i] and kinds[i] in "biuf"])
        # Variants for feeds and results on devices, and for batches without padding rows.
        self.variants: dict[Hashable, Subgraph] = {}
        # Both belong to the cache of plans: the thread that compiles holds the lock, and most
        # sessions see the same shapes again and again.
        self.lock = threading.RLock()
        self.last = NO_PLAN
        # Other names by which inputs have been fed.
        self.aliases: dict[str, str] = {}

    @cached_property
    def varying(self) -> VaryingShapes:
        """The shapes of its runs, apart from those of saved plans."""
        from penstock.compiler.varying_shapes import VaryingShapes

        return VaryingShapes(self.types, self.first)

    @cached_property
    def needs_dims(self) -> bool:
        """Whether no plan may leave dims open: a loop without iterations returns no rows, and only
        the plan knows the dims of these."""
        return any(map(collects_rows, self.graph.walk()))

    @cached_property
    def graph(self) -> Graph:
        """The graph, created by the function that stands for it if needed."""
        assert not isinstance(self._make_graph, Graph)
        return self._make_graph()

    @cached_property
    def framed(self) -> bool:
        """Whether the graph has TensorFlow's frames, which only the frames executor can run."""
        return is_framed(self.graph)

    @cached_property
    def masks(self) -> Sequence[int]:
        """The inputs that are masks (``compiler.padding``)."""
        if not self._numbers:
            return ()
        from penstock.analysis.masks import masks_of  # only some sessions need it

        return masks_of(self.graph, self._numbers)

    @property
    def base(self) -> Subgraph | None:
        """The subgraph of which this is a variant, or None."""
        return None

    @property
    def port_types(self) -> Sequence[tuple[str, Type, object]]:
        """For each input its name, type, and the dtype of arrays that are fed unchanged."""
        return self._ports

    def values(self, feeds: NamedValues) -> list[Any]:
        """Return the fed values in order, checked and converted. ``KeyError``: an unknown name."""
        values = []
        for name, input_type, dtype in self._ports:
            value = feeds[name]
            # Most dtypes are shared objects, whose identity is cheaper to compare than equality.
            if value.__class__ is not _ndarray or (
                value.dtype is not dtype and value.dtype != dtype
            ):
                from penstock.executors.feeds import convert  # not for feeds that fit unchanged

                try:
                    value = convert(name, value, input_type)
                except RecursionError as error:
                    raise InvalidInput(f"input {name!r} has lists nested too deeply") from error
            values.append(value)
        # The feeds contain other names, which the caller looks up in the whole model.
        if len(values) != len(feeds):
            raise KeyError
        return values

    def key(self, values: RunValues) -> tuple[Hashable, ...]:
        """Return the key of a plan for fed values: their shapes, and dtypes that are open."""
        if len(values) == 1 and values[0].__class__ is _ndarray and not self.depends_on_dtypes:
            return (values[0].shape,)  # the case of most models
        if self.depends_on_dtypes:
            return tuple([(x.shape, x.dtype) if x.__class__ is _ndarray else None for x in values])
        return tuple([x.shape if x.__class__ is _ndarray else None for x in values])

    def placeholders(self, values: RunValues) -> RunValues:
        """Return stand-ins for fed values while a plan is compiled: the values themselves, if they
        are arrays."""
        return values

    def use(self, key: Hashable, executor: Executor) -> None:
        """Remember the plan that was used last, and the key for which it was used."""
        self.last = LatestPlan(key, executor, self._expected(key))

    def _expected(self, key: Hashable) -> ExpectedFeeds | None:
        if library() is None or not isinstance(key, tuple):
            return None
        expected: list[Any] = []
        for i, ((name, type_, dtype), shape) in enumerate(zip(self._ports, key, strict=True)):
            if self.depends_on_dtypes and shape is not None:
                shape, dtype = shape
            if isinstance(type_, TensorType) and type_.dtype == STRING:
                dtype = STRING  # whose elements are checked with each feed
            elif dtype is _NO_DTYPE or dtype == STRING:
                return None
            if shape is None:
                return None
            # Whether its contents decide which plan is used.
            decides = not self.not_packed and i in self.masks
            decides = decides and math.prod(shape) >= self.least_mask
            expected.append((name, self.aliases.get(name, name), dtype, shape, decides))
        return tuple(expected)


class compile_guard(gc_pause.paused):  # noqa: N801
    """Pause garbage collection, and raise ``LimitExceeded`` for a model that exhausts memory."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, RecursionError):
            raise LimitExceeded("the model's graphs nest too deep to be compiled") from error
        if isinstance(error, MemoryError):
            message = f"there is not enough memory to compile the model: {error}"
            raise LimitExceeded(message) from error
