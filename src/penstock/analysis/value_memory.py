"""The places of the values of a graph in memory, decided from its nodes and their kernels.

A value is in one of these places:

========  ==========================================================================================
arena     in memory planned before the run, with the order of dims in memory that its kernel chose
result    in memory that the program allocates before its kernel writes it: it is large, and leaves
          the run
view      a fixed view of a value in the arena: a Reshape, a Slice or a Transpose costs nothing
dynamic   allocated during the run: it leaves the run, or its shape is known only then
========  ==========================================================================================

Nothing here is changed or allocated: the pass that inserts copies between layouts and the planner
that gives values their slots both ask, and get the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.errors import LimitExceeded
from penstock.core.records import dataclass, field
from penstock.core.types import RunValue, ShapeError, TensorType, Type
from penstock.ir.graph import Graph, Node, Value, readers_of
from penstock.ir.kernel import Kernel
from penstock.ir.layout import address, channels_last, is_plannable, packed_strides
from penstock.ops.onnx.control_flow import is_control, loop_carried

# Bytes of results from which on a copy takes longer than the call of a kernel that is bound late.
_LARGE = 1 << 16

Order = tuple[int, ...]
"""The dims of a tensor as they are in memory, the outermost first; empty for their own order."""


@dataclass(frozen=True, eq=False, slots=True)
class View:
    """A fixed view of ``base``, a value in the arena: ``offset`` and ``strides`` in bytes. ``type``
    is at least as precise as that of the value."""

    base: Value
    offset: int
    strides: tuple[int, ...]
    type: TensorType


@dataclass(frozen=True, eq=False)
class ValueMemory:
    """The places of values, nested graphs included; values without an entry are dynamic.

    ``strides``: of each value in the arena, in bytes; empty for C order. ``orders``: of each node
    whose kernel writes into the arena, the order of its outputs' dims. ``alternating``: the
    updated values of loops that may be written straight into a buffer of the loop, each with the
    body's input whose buffers these are. ``expected``: the order of dims of Transposes of dynamic
    values, which are assumed to have their dims in their own. ``copied``: nodes that view only what
    their kernel cannot view in these strides. ``invalid``: nodes whose kernel rejects the shapes of
    its inputs, with the error. ``escapes``: values that outlive the run, the iteration or the
    branch; of these, ``results`` are large: the program allocates them, and a kernel writes into
    them.
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
        """Whether the dims of a value are known to be in memory in ``order``, without gaps.
        Constants and values of unknown shape count as such: kernels copy these themselves."""
        view = self.views.get(value)
        type_ = value.type if view is None else view.type
        if value.const is not None or not is_plannable(type_):
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
    on_host: Callable[[Node], bool] = lambda node: True,
    *,
    planned: bool = True,
    remote: Callable[[Node], bool] = lambda node: False,
) -> ValueMemory:
    """Decide where the values of a sorted graph with inferred types are.

    ``kernels`` has the kernel of each node but those of control flow; the outputs of a node that is
    missing are dynamic. Only nodes ``on_host`` write into the arena, and those ``remote`` into one
    of their own memory, in C order. Without ``planned`` there is none. Raises ``LimitExceeded`` if
    a value cannot be allocated at all.
    """
    escapes = escaping_values(graph, kernels, planned=planned, remote=remote)
    memory = ValueMemory(escapes, alternating_values(graph) if planned else {})
    transposed = dict(transposed_values(graph))
    _Annotator(kernels, on_host, remote, planned, transposed, memory).graph(graph)
    return memory


def dense_strides(type_: Type, order: Sequence[int]) -> tuple[int, ...]:
    """The strides, in bytes, of a tensor without gaps whose dims are in memory in ``order``."""
    assert isinstance(type_, TensorType) and type_.dtype is not None
    return packed_strides(type_.dims, type_.dtype.itemsize, order)


# Annotations that need no other.


def escaping_values(
    graph: Graph,
    kernels: Mapping[Node, Kernel],
    *,
    planned: bool = True,
    remote: Callable[[Node], bool] = lambda node: False,
) -> set[Value]:
    """The values that must not be in the arena, because they outlive the run, the iteration or the
    branch: the outputs of ``graph``, what loops collect, and what these are views of."""
    escapes = set(graph.outputs)
    for inner in graph.graphs():  # a graph before those nested in it
        own = set(inner.nodes)
        # Readers first: a view that escapes makes its source escape.
        for node in with_checkpoints(inner.nodes[::-1]):
            kernel = kernels.get(node)
            if kernel is not None and kernel.view and not escapes.isdisjoint(node.outputs):
                # A view of memory that escapes with it need not be copied.
                source = node.inputs[0]
                if source is not None and source.producer in own:
                    escapes.add(source)
        for node in inner.nodes:
            if is_control(node):
                escapes.update(_escaping_results(node, escapes, planned, remote))
    return escapes


def _escaping_results(
    node: Node, escapes: Collection[Value], planned: bool, remote: Callable[[Node], bool]
) -> Iterator[Value]:
    """The values computed in the graphs of an If or a loop that escape from these graphs."""
    if node.op.name == "If":
        for _, branch in node.graphs:
            pairs = zip(node.outputs, branch.outputs, strict=False)
            yield from _computed(branch, [inner for value, inner in pairs if value in escapes])
        return
    body: Graph = node.attrs["body"]
    escaping = body.outputs[loop_carried(node)[1].stop :]
    for inside, updated in _carried(node):
        buffered = planned and is_plannable(inside.type)
        if updated.producer is not None and remote(updated.producer):
            buffered = False  # loops have buffers on the host alone
        if updated is not inside and not buffered:
            escaping.append(updated)
    yield from _computed(body, escaping)


def _computed(graph: Graph, values: Sequence[Value]) -> list[Value]:
    """Those of ``values`` that nodes of ``graph`` itself compute."""
    own = set(graph.nodes)
    return [value for value in values if value.producer in own]


def alternating_values(graph: Graph) -> dict[Value, Value]:
    """The updated values of loops that fit into the buffers of the loop, with the body's input."""
    alternating: dict[Value, Value] = {}
    for node in graph.walk():
        if is_control(node) and node.op.name != "If":
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


def transposed_values(graph: Graph) -> Iterator[tuple[Value, Order]]:
    """The values that only one node reads, a Transpose, each with the order of its dims that gives
    the Transpose's result C order."""
    for value, readers in readers_of(graph).items():
        nodes = [node for node in readers if node is not None]
        if len(nodes) != 1 or nodes[0].op.name != "Transpose":
            continue
        if isinstance(value.type, TensorType):
            yield value, tuple(nodes[0].attrs.get("perm") or reversed(range(value.type.rank or 0)))


# Annotations that follow from those of the values before.


@dataclass
class _Annotator:
    kernels: Mapping[Node, Kernel]
    on_host: Callable[[Node], bool]
    remote: Callable[[Node], bool]
    planned: bool
    transposed: Mapping[Value, Order]
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
            elif self.remote(node):
                self._write_away(node, kernel)
            elif self._can_write(node, kernel):
                order = self._order(node, kernel)
                values = [value for value in node.outputs if value is not None]
                if self._are_results(values, order):
                    self.memory.orders[node] = ()
                    self.memory.results.update(values)
                # A function that must bring its inputs into their own order is slow, too.
                elif (
                    kernel.layout.prefer_bound
                    or (order and kernel.binder is not None)
                    or self._may_be_planned(values)
                ):
                    self.memory.orders[node] = order
                    for value in values:
                        self._place(value, order)

    def _write_away(self, node: Node, kernel: Kernel) -> None:
        """Let the kernel of a device write into the arena there, if all its outputs may be."""
        values = [value for value in node.outputs if value is not None]
        plannable = self.planned and kernel.into is not None and bool(values)
        if plannable and all(is_plannable(value.type) for value in values):
            kept = self.memory.escapes.isdisjoint(values)
            if kept and self.memory.alternating.keys().isdisjoint(values):
                self.memory.orders[node] = ()
                for value in values:
                    self._place(value)

    def _place(self, value: Value, order: Order = ()) -> None:
        if value not in self.memory.alternating:
            plain = len(order) != value.rank or list(order) == sorted(order)
            self.memory.strides[value] = () if plain else dense_strides(value.type, order)

    def _can_write(self, node: Node, kernel: Kernel) -> bool:
        """Whether a kernel can write its outputs into memory that is given."""
        values = [value for value in node.outputs if value is not None]
        return (
            self.planned
            and kernel.into is not None
            and self.on_host(node)
            and bool(values)
            and all(is_plannable(value.type) for value in values)
        )

    def _may_be_planned(self, values: Sequence[Value]) -> bool:
        memory = self.memory
        return memory.escapes.isdisjoint(values) or all(v in memory.alternating for v in values)

    def _are_results(self, values: Sequence[Value], order: Order) -> bool:
        """Whether outputs of one node, written in this order, leave the run, and are large."""
        memory = self.memory
        return (
            all(v in memory.escapes and v not in memory.alternating for v in values)
            and list(order) == sorted(order)
            and sum(v.type.nbytes for v in values if isinstance(v.type, TensorType)) >= _LARGE
        )

    def _order(self, node: Node, kernel: Kernel) -> Order:
        """The order of dims that a kernel writes: its own, or else that of its inputs."""
        layout = kernel.layout
        if layout.any_layout:
            first = node.outputs[0]
            return (first is not None and self.transposed.get(first)) or layout.dims_order
        if layout.dims_order or layout.contiguous:
            return layout.dims_order
        orders = (self._order_of(value) for value in node.inputs if value is not None)
        return next((order for order in orders if order), ())

    def _order_of(self, value: Value) -> Order:
        """The order of a value's dims in memory if it is not their own, and without gaps; that
        which is expected of a dynamic value."""
        if value in self.memory.expected:
            return self.memory.expected[value]
        view, strides = self.memory.views.get(value), self.memory.strides_of(value)
        type_ = value.type if view is None else view.type
        if not strides:
            return ()
        assert isinstance(type_, TensorType)
        own = tuple(range(len(type_.dims)))
        # The stride of a dim of 1 means nothing, so that several orders may match.
        by_stride = tuple(sorted(own, key=lambda axis: -strides[axis]))
        for order in (own, channels_last(len(own)) or own, by_stride):
            if _matches(type_, strides, order):
                return () if order == own else order
        return ()

    def _view(self, node: Node, kernel: Kernel) -> None:
        """Place the views of a value in the arena; views of other values are dynamic."""
        source, *rest = node.inputs
        dummy = self._dummy(source)
        fixed = all(value is None or value.const is not None for value in rest)
        # A node with control inputs needs a step: others may wait for it.
        if dummy is None or source is None or not fixed or node.control_inputs:
            (value, *_), perm = node.outputs, node.attrs.get("perm")
            if node.op.full_name == "Transpose" and value is not None and is_plannable(value.type):
                self.memory.expected[value] = tuple(np.argsort(perm).tolist()) if perm else ()
            return
        function = kernel.function
        if self.remote(node):  # the same elements as NumPy's, which the dummies are of
            types = [None if v is None else v.type for v in node.inputs]
            function = node.op.compile(node, types).function
        try:
            arrays = function(dummy, *[None if v is None else v.const for v in rest])
        except Exception as error:
            # The constants are the model's: a run would raise the same error.
            rejected = isinstance(error, IndexError | TypeError | ValueError)
            self.memory.invalid[node] = ShapeError(str(error)) if rejected else error
            return
        arrays = arrays if len(node.outputs) != 1 else (arrays,)
        # NumPy copies where no strides have the elements in the order that is asked for.
        if not all(array.size == 0 or np.may_share_memory(array, dummy) for array in arrays):
            if not self.remote(node):
                self._copy(node)
            return
        for value, array in zip(node.outputs, arrays, strict=False):
            if value is not None:
                self._place_view(value, array, source, dummy)

    def _place_view(self, value: Value, array: np.ndarray, source: Value, dummy: RunValue) -> None:
        around = self.memory.views.get(source)
        base, offset = (source, 0) if around is None else (around.base, around.offset)
        # The address of an array without elements means nothing.
        if array.size:
            offset += address(array) - address(dummy)
        # The view may be more precise than type inference.
        type_ = value.type if is_plannable(value.type) else TensorType(array.dtype, array.shape)
        assert isinstance(type_, TensorType)
        self.memory.views[value] = View(base, offset, array.strides, type_)
        self._dummies[value] = array

    def _copy(self, node: Node) -> None:
        """A view that the strides of its source do not allow: a single output is copied."""
        self.memory.copied.add(node)
        value = node.outputs[0]
        if len(node.outputs) == 1 and value is not None:
            stays = value not in self.memory.escapes and is_plannable(value.type)
            if value in self.memory.alternating or stays:
                self.memory.orders[node] = ()
                self._place(value)

    def _dummy(self, value: Value | None) -> np.ndarray | None:
        """An array with the strides of a value in the arena, to evaluate views; else None."""
        if value is None or (value not in self.memory.strides and value not in self.memory.views):
            return None
        dummy = self._dummies.get(value)
        if dummy is None:
            assert isinstance(value.type, TensorType)
            strides = self.memory.strides[value] or None
            try:
                dummy = np.empty(value.type.dims, value.type.dtype)
                # Untouched pages take no memory.
                dummy = np.ndarray(dummy.shape, dummy.dtype, dummy, 0, strides)
            except (MemoryError, ValueError) as error:
                raise LimitExceeded(
                    f"value {value.name!r} of type {value.type} does not fit into memory"
                ) from error
            self._dummies[value] = dummy
        return dummy if dummy.size else None


def _matches(type_: Type, strides: tuple[int, ...], order: Order) -> bool:
    """Whether these strides (empty: C order) are those of dims in ``order``, without gaps."""
    assert isinstance(type_, TensorType)
    if not strides and (not order or list(order) == sorted(order)):
        return True
    own = dense_strides(type_, range(len(type_.dims)))
    wanted = dense_strides(type_, order) if len(order) == len(type_.dims) else own
    dims = zip(type_.dims, strides or own, wanted, strict=True)
    return all(a == b for n, a, b in dims if n > 1)


def _same_type(a: Type, b: Type) -> bool:
    both = isinstance(a, TensorType) and isinstance(b, TensorType)
    return both and a.without_data() == b.without_data()  # type: ignore[union-attr]
