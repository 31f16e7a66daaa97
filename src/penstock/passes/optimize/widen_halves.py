"""Widening of float16 and bfloat16 computation to float32, with Casts at the boundaries.

::

    x: float16                          x: float16
    a = MatMul(x, w)                    x' = Cast(x, to=float32)
    y = Softmax(a)          becomes     a' = MatMul(x', w')        w' is w in float32
                                        y' = Softmax(a')
                                        y  = Cast(y', to=float16)

Graph inputs and outputs keep their types, and so do loop-carried values and branch results. Between
widened nodes no value is rounded, except for discontinuous operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import numpy as np

from penstock.core.checkpoints import with_checkpoints
from penstock.core.records import cached_property, replace
from penstock.core.types import FLOAT32, ShapeError, TensorType, Type
from penstock.ir.graph import Graph, Node, Value
from penstock.ops.common.dtypes import is_half
from penstock.ops.common.shape_rules import element_number
from penstock.ops.registry import standard
from penstock.passes.context import Pass, PassContext
from penstock.passes.rewrite import names_of, new_name

_OF_TYPES = frozenset({"Shape", "Size"})
"""operations that read no elements of their input"""
_BY_TYPE = frozenset({"tflite.Segment", "tflite.ViewAs"})
"""operations whose results depend on the dtype, such as the least element for empty segments"""
_CAST = standard("Cast")
_TO_FLOAT32 = {"to": element_number("float32")}


class WidenHalves(Pass):
    """Compute float16 and bfloat16 in float32. Data-movement nodes are widened if their input is
    computed in float32 and their result is not a graph output."""

    def run(self, graph: Graph, context: PassContext) -> bool:
        walk = _Widening(graph, context.weights.widened)
        return walk.run(graph, walk.outermost)


class _Widening:
    """State of the walk over a graph and its nested graphs. By 16-bit value: ``inside`` has the
    unrounded float32 value, ``loaded`` the conversion to float32, ``constants`` the converted
    constants, for several graphs; ``home`` the nodes so far of the value's graph. ``declared`` are
    values that the model itself rounds, by a Cast from float32."""

    def __init__(self, whole: Graph, constants: dict[Value, Value]) -> None:
        self.whole, self.constants = whole, constants
        self.inside: dict[Value, Value] = {}
        self.loaded: dict[Value, Value] = {}
        # An input that is not fed belongs to the outermost graph.
        self.outermost: list[Node] = []
        self.home: dict[Value | None, list[Node]] = {}
        self.declared: set[Value] = set()

    @cached_property
    def taken(self) -> Counter[str]:
        """Names of values: a model with widened nodes may be compiled again."""
        return names_of(self.whole)

    def run(self, graph: Graph, nodes: list[Node]) -> bool:
        """Widen the nodes of ``graph`` into ``nodes``; return whether any changed."""
        self.home.update(dict.fromkeys(graph.inputs, nodes))
        outputs, changed = set(graph.outputs), False
        for node in with_checkpoints(graph.nodes):
            for _, inner in node.graphs:
                changed |= self.run(inner, [])
            self.home.update(dict.fromkeys(node.outputs, nodes))
            if node.op.full_name == "Cast":
                changed |= self.cast(node, nodes)
            elif self.is_wider(node, outputs):
                changed = True
                # Results of other dtypes, such as of comparisons, count as discontinuous, too.
                jumps = "jumps" in node.op.traits or not any(map(_is_half, node.outputs))
                rounded = jumps and node.op.name not in _OF_TYPES
                node.inputs = [self.load(value, rounded) for value in node.inputs]
                nodes += (node, *self.store(node))
                continue
            nodes.append(node)
        graph.nodes = nodes
        return changed

    def cast(self, node: Node, nodes: list[Node]) -> bool:
        """Let a Cast to float32 read the unrounded value, unless the model itself rounds it."""
        before, after = node.inputs[0], node.outputs[0]
        if before is None or after is None or node.control_inputs:
            return False
        # A Cast in the model is an explicit rounding.
        if _is_half(after) and before.dtype == FLOAT32:
            self.inside[after] = before
            self.declared.add(after)
        if not _is_half(before) or after.dtype is None or after.dtype != FLOAT32:
            return False
        if before.const is not None:
            node.inputs[0] = self.constant(before)
        elif before in self.inside and before not in self.declared:
            node.inputs[0] = self.inside[before]
        else:
            # A conversion in a nested graph is not visible in outer graphs.
            if self.home.get(before, self.outermost) is nodes:
                self.loaded.setdefault(before, after)
            return False
        return True

    def is_wider(self, node: Node, outputs: AbstractSet[Value | None]) -> bool:
        """Whether ``node`` should and can be computed in float32: its 16-bit outputs become
        float32, and its other outputs keep their types."""
        if not any(map(_is_half, (*node.inputs, *node.outputs))):
            return False
        if node.graphs or node.op.role is not None or not node.op.pure:
            return False
        if node.op.full_name in _BY_TYPE:
            return False
        if node.op.moves or node.op.name in _OF_TYPES:
            stored = not outputs.isdisjoint(node.outputs)
            if stored or self.inside.keys().isdisjoint(node.inputs):
                return False
        types = [None if value is None else _in_float32(value) for value in node.inputs]
        consts = [None if v is None or _is_half(v) else v.const for v in node.inputs]
        try:
            results = node.op.infer(types, node.attrs, consts)
        except ShapeError:
            return False
        wanted = [None if value is None else _in_float32(value) for value in node.outputs]
        return len(results) >= len(wanted) and all(map(_are_alike, wanted, results))

    def load(self, value: Value | None, rounded: bool) -> Value | None:
        """Return ``value`` in float32: unrounded, unless the ``rounded`` one is needed."""
        if value is None or not _is_half(value):
            return value
        if value in self.constants or value.const is not None:
            return self.constant(value)
        if value in self.inside and not rounded:
            return self.inside[value]
        if value not in self.loaded:
            name = f"{value.name}/{'rounded' if value in self.inside else 'float32'}"
            wide = Value(new_name(name, self.taken), _in_float32(value))
            self.loaded[value] = wide
            node = Node(_CAST, [value], [wide], _TO_FLOAT32, name=wide.name)
            self.home.get(value, self.outermost).append(node)
        return self.loaded[value]

    def store(self, node: Node) -> list[Node]:
        """Let ``node`` produce float32; return the Casts of its outputs to 16 bits."""
        casts = []
        for i, value in enumerate(node.outputs):
            if value is not None and _is_half(value):
                name = new_name(f"{value.name}/float32", self.taken)
                wide = Value(name, _in_float32(value), node)
                node.outputs[i] = self.inside[value] = wide
                to = {"to": element_number(str(value.dtype))}
                casts.append(node.derived([wide], [value], to, op=_CAST, name=value.name))
        return casts

    def constant(self, value: Value) -> Value:
        """Return a constant in float32, stored once: 16-bit readers get it converted back."""
        wide = self.constants.get(value)
        if wide is None:
            assert value.const is not None
            const = _converted(value.const, FLOAT32)
            wide = self.constants[value] = Value(f"{value.name}/float32", const=const)
        value.release(partial(_give_back, wide, value.dtype))
        return wide


def _converted(array: np.ndarray, dtype: np.dtype | None) -> np.ndarray:
    """Return ``array`` in another dtype. Broadcast elements (stride 0) are converted once."""
    index: Any = (..., *[slice(None if stride else 1) for stride in array.strides])
    converted = array[index].astype(dtype)
    same = converted.shape == array.shape
    return converted if same else np.broadcast_to(converted, array.shape)


def _give_back(wide: Value, dtype: np.dtype | None) -> np.ndarray:
    assert wide.const is not None
    return _converted(wide.const, dtype)


def _is_half(value: Value | None) -> bool:
    return value is not None and is_half(value.dtype)


def _in_float32(value: Value) -> Type:
    """Return the type of ``value``, with float32 instead of 16-bit floats."""
    type_ = value.type
    if not _is_half(value) or not isinstance(type_, TensorType):
        return type_
    return replace(type_, dtype=FLOAT32)


def _are_alike(wanted: Type | None, result: Type) -> bool:
    """Whether two types have the same known dtype, or none is ``wanted``."""
    if wanted is None:
        return True
    if not isinstance(wanted, TensorType) or not isinstance(result, TensorType):
        return False
    dtypes = (wanted.dtype, result.dtype)
    return None not in dtypes and dtypes[0] == dtypes[1]
