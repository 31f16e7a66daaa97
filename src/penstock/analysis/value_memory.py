"""The places of the values of a graph in memory, decided from its nodes and their kernels.

A value is in one of these places:

========  ==========================================================================================
arena     in memory planned before the run, with the order of dims in memory that its kernel chose
result    in memory that the program allocates before its kernel writes it: for a large value that
          leaves the run
view      a fixed view of a value in the arena: a Reshape, a Slice or a Transpose costs nothing
dynamic   allocated during the run: it leaves the run, or its shape is known only then
========  ==========================================================================================

Nothing here is changed or allocated. The pass that inserts copies between layouts and the planner
that assigns slots to values both call this, and so agree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import LimitExceeded
from penstock.core.records import dataclass, field
from penstock.core.types import RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Graph, Node, Value, readers_of
from penstock.ir.kernel import Kernel
from penstock.ir.layout import address, channels_last, is_plannable, packed_strides
from penstock.ops.onnx.control_flow import is_control, loop_carried

# Copying results of at least this many bytes costs more than calling a kernel that is bound late.
_LARGE = 1 << 16

Order = tuple[int, ...]
"""the dims of a tensor in their order in memory, outermost first; empty for their logical order"""


@dataclass(frozen=True, eq=False, slots=True)
class View:
    """A fixed view of ``base``, a value in the arena, with ``offset`` and ``strides`` in bytes.
    ``type`` is at least as precise as the type of the value."""

    base: Value
    offset: int
    strides: tuple[int, ...]
    type: TensorType


@dataclass(frozen=True, eq=False)
class ValueMemory:
    """The places of values, nested graphs included; values without an entry are dynamic.

    ``strides``: of each value in the arena, in bytes; empty for C order. ``orders``: the order of
    the output dims of each node whose kernel writes into the arena. ``alternating``: updated values
    of loops that may be written directly into a buffer of the loop, with the body's input that owns
    the buffers. ``expected``: the order of dims of Transposes of dynamic values, assuming that
    these are in C order. ``copied``: nodes that would be views but whose kernel must copy for these
    strides. ``invalid``: nodes whose kernel rejects the shapes of its inputs, with the error.
    ``escapes``: values that outlive the run, the iteration or the branch. ``results``: the large
    ones among these, which the program allocates for kernels to write.
    """

    escapes: Set[Value]
    alternating: Mapping[Value, Value]
    strides: dict[Value, tuple[int, ...]] = field(default_factory=dict)
    views: dict[Value, View] = field(default_factory=dict)
    orders: dict[Node, Order] = field(default_factory=dict)
    expected: dict[Value, Order] = field(default_factory=dict)
    copied: set[Node] = field(default_factory=set)
    invalid: dict[Node, Exception] = field(default_factory=dict)
    results: set[Value] = field(default_factory=set)

    def has_order(self, value: Value, order: Order) -> bool:
        """Whether the dims of a value are known to be in memory in ``order``, without gaps. True
        for constants and values of unknown shape, which kernels copy themselves."""
        view = self.views.get(value)
        type_ = value.type if view is None else view.type
        if value.is_constant or not is_plannable(type_):
            return True
        if view is None and value not in self.strides:
            expected = dense_strides(type_, self.expected.get(value, ()))
            return _matches(type_, expected, order)
        return _matches(type_, self.strides_of(value), order)

    def strides_of(self, value: Value) -> tuple[int, ...]:
        view = self.views.get(value)
        return self.strides.get(value, ()) if view is None else view.strides


def value_memory(
    graph: Graph,
    kernels: Mapping[Node, Kernel],
    away: Set[Node] = frozenset(),
    remote: Set[Node] = frozenset(),
    *,
    planned: bool = True,
) -> ValueMemory:
    """Decide where the values of a sorted graph with inferred types are.

    ``kernels`` has the kernel of each node except control flow; the outputs of a node without a
    kernel are dynamic. So are those of nodes ``away`` from the host, unless the nodes are
    ``remote``: these write into an arena of their own memory, in C order. Unless ``planned``, there
    is no arena. Raises ``LimitExceeded`` if a value cannot be allocated at all.
    """
    escapes = escaping_values(graph, kernels, planned=planned, remote=remote)
    memory = ValueMemory(escapes, alternating_values(graph) if planned else {})
    transposed, unread = transposed_values(graph), unread_outputs(graph)
    _Annotator(kernels, away, remote, planned, transposed, unread, memory).graph(graph)
    return memory


def dense_strides(type_: Type, order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in bytes, of a tensor without gaps with dims in memory in ``order``."""
    assert isinstance(type_, TensorType) and type_.dtype is not None
    return packed_strides(type_.dims, type_.dtype.itemsize, order)


# Annotations that do not depend on others.


def escaping_values(
    graph: Graph,
    kernels: Mapping[Node, Kernel],
    *,
    planned: bool = True,
    remote: Set[Node] = frozenset(),
) -> set[Value]:
    """Return the values that must not be in the arena because they outlive the run, the iteration
    or the branch: outputs of ``graph``, values that loops collect, and the values they view."""
    escapes = set(graph.outputs)
    for inner in graph.graphs():  # a graph precedes those nested in it
        own = set(inner.nodes)
        # Readers first: a view that escapes makes its source escape.
        for node in with_checkpoints(inner.nodes[::-1]):
            kernel = kernels.get(node)
            if kernel is not None and kernel.view and not escapes.isdisjoint(node.outputs):
                # A view of memory that escapes together with its source need not be copied.
                source = node.inputs[0]
                if source is not None and source.producer in own:
                    escapes.add(source)
        for node in inner.nodes:
            if node.nests and is_control(node):
                escapes.update(_escaping_results(node, escapes, planned, remote))
    return escapes


def _escaping_results(
    node: Node, escapes: Collection[Value], planned: bool, remote: Set[Node]
) -> Iterator[Value]:
    """Return the values computed in the graphs of an If or a loop that escape from these graphs."""
    if node.op.name == "If":
        for _, branch in node.graphs:
            pairs = zip(node.outputs, branch.outputs, strict=False)
            yield from _computed(branch, [inner for value, inner in pairs if value in escapes])
        return
    body: Graph = node.attrs["body"]
    escaping = body.outputs[loop_carried(node)[1].stop :]
    for inside, updated in _carried(node):
        buffered = planned and is_plannable(inside.type)
        if updated.producer in remote:
            buffered = False  # loops have buffers only on the host
        if updated is not inside and not buffered:
            escaping.append(updated)
    yield from _computed(body, escaping)


def _computed(graph: Graph, values: Sequence[Value]) -> list[Value]:
    """Return the ``values`` that nodes of ``graph`` itself compute, not those of its subgraphs."""
    own = set(graph.nodes)
    return [value for value in values if value.producer in own]


def alternating_values(graph: Graph) -> dict[Value, Value]:
    """Return updated values of loops that fit into the loop's buffers, with the body's input."""
    alternating: dict[Value, Value] = {}
    for node in graph.walk():
        if node.nests and is_control(node) and node.op.name != "If":
            computed = set(_computed(node.attrs["body"], node.attrs["body"].outputs))
            for inside, updated in _carried(node):
                fits = has_buffers(inside, updated) and _same_type(updated.type, inside.type)
                if fits and updated in computed:
                    alternating.setdefault(updated, inside)
    return alternating


def has_buffers(inside: Value, updated: Value) -> bool:
    """Whether a carried value alternates between two buffers: its type is fixed, and it changes."""
    return updated is not inside and is_plannable(inside.type)


def _carried(node: Node) -> Iterator[tuple[Value, Value]]:
    body: Graph = node.attrs["body"]
    entering, leaving = loop_carried(node)
    return zip(body.inputs[entering], body.outputs[leaving], strict=True)


def transposed_values(graph: Graph) -> dict[Value, Order]:
    """Return the values whose only reader is a Transpose, each with the order of its dims for which
    the Transpose's result is in C order."""
    transposes = [node for node in graph.walk() if node.op.name == "Transpose"]
    readers = readers_of(graph) if transposes else {}
    orders = {}
    for node in transposes:
        value = node.inputs[0]
        if value is not None and isinstance(value.type, TensorType):
            others = [reader for reader in readers[value] if reader not in (None, node)]
            if not others:
                perm = node.attrs.get("perm") or reversed(range(value.type.rank or 0))
                orders[value] = tuple(perm)
    return orders


def unread_outputs(graph: Graph) -> Set[Value]:
    """Return the outputs that no node reads and that wait for others, as those of a graph with
    variables do."""
    if not [node for node in graph.nodes if node.control_inputs]:
        return frozenset()
    readers = readers_of(graph)
    return {value for value in graph.outputs if readers[value] == [None]}


# Annotations that depend on those of earlier values.


@dataclass
class _Annotator:
    kernels: Mapping[Node, Kernel]
    away: Set[Node]
    remote: Set[Node]
    planned: bool
    transposed: Mapping[Value, Order]
    unread: Set[Value]
    memory: ValueMemory
    _dummies: dict[Value, np.ndarray] = field(default_factory=dict)

    def graph(self, graph: Graph) -> None:
        for node in with_checkpoints(graph.nodes):
            kernel = self.kernels.get(node)
            if kernel is None:
                for _, inner in node.graphs:
                    self.graph(inner)
            elif kernel.view:
                self._view(node, kernel)
            elif self.planned and kernel.into is not None:
                self._write(node, kernel)

    def _write(self, node: Node, kernel: Kernel) -> None:
        """Let a kernel write its outputs into given memory, if all of them may be there."""
        memory, nbytes = self.memory, 0
        values = [value for value in node.outputs if value is not None]
        for value in values:
            if not is_plannable(value.type):
                return
            nbytes += value.type.nbytes
        stay, carried = memory.escapes.isdisjoint(values), memory.alternating.keys()
        if node in self.remote:  # it writes into the arena of a device, in C order
            if values and stay and carried.isdisjoint(values):
                memory.orders[node] = ()
                memory.strides.update(dict.fromkeys(values, ()))
            return
        if node in self.away or not values:
            return
        order = self._order(node, kernel)
        # Large outputs of a node that leave the run.
        leave = not stay and carried.isdisjoint(values) and memory.escapes >= {*values}
        if leave and nbytes >= _LARGE and list(order) == sorted(order):
            memory.orders[node] = ()
            memory.results.update(values)
        # A kernel that must bring its inputs into C order is slow, too.
        elif (
            stay
            or kernel.layout.prefer_bound
            or (order and kernel.binder is not None)
            or carried >= {*values}
        ):
            memory.orders[node] = order
            plain = list(order) == sorted(order)
            for value in values:
                if value not in carried:
                    in_order = plain or len(order) != value.rank
                    memory.strides[value] = () if in_order else dense_strides(value.type, order)

    def _order(self, node: Node, kernel: Kernel) -> Order:
        """Return the order of dims that a kernel writes: its own choice, or that of its inputs."""
        layout = kernel.layout
        first = node.outputs[0]
        if layout.any_layout and first is not None:
            # An output that leaves the run would be copied to C order.
            own = () if first in self.memory.escapes else layout.dims_order
            return self.transposed.get(first, own)
        if layout.dims_order or layout.contiguous:
            return layout.dims_order
        for value in node.inputs:
            if value is not None and (order := self._order_of(value)):
                return order
        return ()

    def _order_of(self, value: Value) -> Order:
        """Return the order of a value's dims in memory if it is not C order and has no gaps, or the
        expected order of a dynamic value."""
        if value in self.memory.expected:
            return self.memory.expected[value]
        view, strides = self.memory.views.get(value), self.memory.strides_of(value)
        type_ = value.type if view is None else view.type
        if not strides:
            return ()
        assert isinstance(type_, TensorType)
        # The stride of a dim of 1 has no effect, so several orders may match.
        rank = len(type_.dims)
        if _matches(type_, strides, ()):
            return ()
        by_stride = tuple(sorted(range(rank), key=strides.__getitem__, reverse=True))
        for order in (channels_last(rank), by_stride):
            if order and _matches(type_, strides, order):
                return order
        return ()

    def _view(self, node: Node, kernel: Kernel) -> None:
        """Place a view of a value in the arena; views of other values are dynamic."""
        source, *rest = node.inputs
        dummy = self._dummy(source)
        if dummy is None or source is None or not self._is_fixed(node):
            self._dynamic_view(node, kernel)
            return
        function = kernel.function
        if node in self.remote:  # its view has the same elements as that of the dummies on NumPy
            types = [None if v is None else v.type for v in node.inputs]
            function = node.op.compile(node, types).function
        try:
            arrays = function(dummy, *[None if v is None else v.const for v in rest])
        except Exception as error:
            # The constants belong to the model, so a run would raise the same error.
            rejected = isinstance(error, IndexError | TypeError | ValueError)
            self.memory.invalid[node] = ShapeError(str(error)) if rejected else error
            return
        arrays = arrays if len(node.outputs) != 1 else (arrays,)
        # NumPy copies if no strides present the elements in the requested order.
        if False in [array.size == 0 or np.may_share_memory(array, dummy) for array in arrays]:
            if node not in self.remote:
                self._copy(node)
            return
        for value, array in zip(node.outputs, arrays, strict=False):
            if value is not None:
                self._place_view(value, array, source, dummy)

    def _dynamic_view(self, node: Node, kernel: Kernel) -> None:
        """Expect an order of a Transpose, and that a view which this order does not allow copies:
        patches of an image that is fed, for instance."""
        (value, *_), perm, (source, *rest) = node.outputs, node.attrs.get("perm"), node.inputs
        if node.op.full_name == "Transpose" and value is not None and is_plannable(value.type):
            self.memory.expected[value] = tuple(np.argsort(perm).tolist()) if perm else ()
            return
        order = () if source is None else self.memory.expected.get(source, ())
        on_host = node not in self.away and node not in self.remote and self.planned
        if order and on_host and source is not None and self._is_fixed(node):
            dummy = _untouched(source, dense_strides(source.type, order))
            with suppress(IndexError, TypeError, ValueError):  # as a run would raise
                array = kernel.function(dummy, *[None if v is None else v.const for v in rest])
                if dummy.size and len(node.outputs) == 1 and not np.may_share_memory(array, dummy):
                    self._copy(node)

    def _is_fixed(self, node: Node) -> bool:
        """Whether a view needs no step. Those that read what waits for other nodes need one; those
        that wait for the view then wait for what it waits for."""
        if node.control_inputs and not self.unread >= {*node.outputs}:
            return False
        return False not in [value is None or value.is_constant for value in node.inputs[1:]]

    def _place_view(self, value: Value, array: np.ndarray, source: Value, dummy: RunValue) -> None:
        around = self.memory.views.get(source)
        base, offset = (source, 0) if around is None else (around.base, around.offset)
        # The address of an array without elements has no meaning.
        if array.size:
            offset += address(array) - address(dummy)
        # The view's type may be more precise than the inferred one.
        type_ = value.type if is_plannable(value.type) else TensorType(array.dtype, array.shape)
        assert isinstance(type_, TensorType)
        self.memory.views[value] = View(base, offset, array.strides, type_)
        self._dummies[value] = array

    def _copy(self, node: Node) -> None:
        """Handle a view that its source's strides do not allow: a single output is copied."""
        self.memory.copied.add(node)
        value = node.outputs[0]
        if len(node.outputs) == 1 and value is not None:
            stays = value not in self.memory.escapes and is_plannable(value.type)
            if value in self.memory.alternating or stays:
                self.memory.orders[node] = ()
                if value not in self.memory.alternating:
                    self.memory.strides[value] = ()

    def _dummy(self, value: Value | None) -> np.ndarray | None:
        """Return an array with the strides of a value in the arena, to evaluate views, or None."""
        if value is None or (value not in self.memory.strides and value not in self.memory.views):
            return None
        dummy = self._dummies.get(value)
        if dummy is None:
            dummy = self._dummies[value] = _untouched(value, self.memory.strides[value] or None)
        return dummy if dummy.size else None


def _untouched(value: Value, strides: tuple[int, ...] | None) -> np.ndarray:
    """Return an array for a value of static dims, of which no page is touched, and none thus takes
    memory. Raises ``LimitExceeded``."""
    assert isinstance(value.type, TensorType)
    try:
        array = np.empty(value.type.dims, value.type.dtype)
        return np.ndarray(array.shape, array.dtype, array, 0, strides)
    except (MemoryError, ValueError) as error:
        raise LimitExceeded(
            f"value {value.name!r} of type {value.type} does not fit into memory"
        ) from error


def _matches(type_: Type, strides: tuple[int, ...], order: Order) -> bool:
    """Whether these strides (empty: C order) belong to dims in ``order``, without gaps."""
    assert isinstance(type_, TensorType)
    if not strides and (not order or list(order) == sorted(order)):
        return True
    wanted = dense_strides(type_, order if len(order) == len(type_.dims) else ())
    dims = zip(type_.dims, strides or dense_strides(type_, ()), wanted, strict=True)
    return False not in [n <= 1 or a == b for n, a, b in dims]


def _same_type(a: Type, b: Type) -> bool:
    both = isinstance(a, TensorType) and isinstance(b, TensorType)
    return both and a.without_data() == b.without_data()  # type: ignore[union-attr]
