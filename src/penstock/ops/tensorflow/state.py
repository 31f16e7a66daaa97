"""Variables, the state of a session between runs.

All nodes of variables of a model share one ``store``, an attribute; each session replaces it by its
own (``own_stores``). A handle is the ``_Variable`` itself. Its array is replaced rather than
modified, so that readers may keep it; compiled assignments overwrite only an array without other
references.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import numpy as np

from penstock.core.records import dataclass, field
from penstock.core.types import (
    ANY,
    BOOL,
    RunValue,
    ShapeError,
    TensorType,
    Type,
    accepts,
    find_dtype,
    type_of,
)
from penstock.ir.graph import Graph, Node, clone
from penstock.ir.kernel import Kernel
from penstock.ir.op import Attrs, Consts, Trait, Types
from penstock.ops.common.shape_rules import always
from penstock.ops.registry import ArrayFunction
from penstock.ops.tensorflow.common import OUT_TYPE, array_operator, dims_of, handle, operator

VARIABLES = frozenset({"VarHandleOp", "VariableV2"})
NAMED = frozenset({"ReadVariableOp", "AssignVariableOp"})
"""operations that take a variable as input, or name it in their attributes"""


@dataclass(slots=True, eq=False)
class _Variable:
    """One variable; ``value`` is None until it is initialized. ``accepted`` is the (dtype, shape)
    that last matched ``type``."""

    name: str
    type: Type
    value: np.ndarray | None = None
    accepted: tuple[np.dtype, tuple[int, ...]] | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def read(self) -> np.ndarray:
        """Return the value. Raises ``ShapeError`` if the variable is not initialized."""
        value = self.value
        if value is None:
            raise ShapeError(
                f"variable {self.name!r} is read before it is initialized; run its initializer "
                "first, as a target"
            )
        return value

    def assign(self, value: np.ndarray, *, checked: bool = True) -> None:
        """Replace the value by a copy of ``value``, whose memory the run may reuse."""
        given = value.dtype, value.shape
        if checked and given != self.accepted:
            if not accepts(self.type, type_of(value)):
                raise ShapeError(
                    f"variable {self.name!r} has type {self.type}, but {type_of(value)} is "
                    "assigned to it"
                )
            self.accepted = given
        self.value = _kept(value)

    def update(self, function: ArrayFunction, value: np.ndarray) -> None:
        """Replace the value by ``function`` of it and ``value``."""
        # Several nodes may update the variable concurrently: no update may be lost.
        with self.lock:
            old = self.read()
            if old.shape != value.shape:
                raise ShapeError(
                    f"variable {self.name!r} has shape {old.shape}, but is updated by {value.shape}"
                )
            self.value = _kept(function(old, value))


def _kept(value: RunValue) -> np.ndarray:
    array = np.array(value)
    # Readers may keep the array: it must not be modified.
    array.setflags(write=False)
    return array


class Store:
    """Variables by name. ``initial``: the saved values, with which variables start; ``model``: for
    the store of a session, the store of its model; ``constant``: whether no node assigns to the
    variables, so that their values can be constants of the graphs."""

    def __init__(
        self,
        initial: Mapping[str, np.ndarray] | None = None,
        model: Store | None = None,
        *,
        constant: bool = False,
    ) -> None:
        self.initial = dict(initial or {})
        self.constant = constant
        self._model = model
        self._variables: dict[str, _Variable] = {}
        self._lock = threading.RLock()

    @property
    def model(self) -> Store:
        """The store of the model, which may be this one."""
        return self._model or self

    def variable(self, name: str, type_: Type) -> _Variable:
        """Return the variable of a name, creating it on the first call. Raises ``ShapeError`` if
        its saved value or another node has an incompatible type.
        """
        with self._lock:
            if name not in self._variables:
                initial = self.initial.get(name)
                if initial is not None and not accepts(type_, type_of(initial)):
                    saved = type_of(initial)
                    raise ShapeError(
                        f"variable {name!r} has type {type_} in the graph, but {saved} in the "
                        "checkpoint"
                    )
                self._variables[name] = _Variable(name, type_, initial)
            variable = self._variables[name]
            if not accepts(variable.type, type_) and not accepts(type_, variable.type):
                raise ShapeError(f"variable {name!r} is declared as {variable.type} and {type_}")
            return variable

    def own(self) -> Store:
        """A store with the same variables, reset to their initial values."""
        return Store(self.initial, self.model, constant=self.constant)

    def as_now(self) -> Store:
        """A store with copies of the same variables, with their current values."""
        with self._lock:
            values = {name: variable.value for name, variable in self._variables.items()}
        known = {n: value for n, value in {**self.initial, **values}.items() if value is not None}
        return Store(known, self.model, constant=self.constant)

    def join(self, other: Store) -> None:
        """Add the initial values of ``other`` for variables that this store lacks."""
        with self._lock:
            for name, value in other.initial.items():
                if name not in self._variables:
                    self.initial.setdefault(name, value)

    def __repr__(self) -> str:
        return f"Store({len(self._variables)} variables)"


def own_stores(graphs: Mapping[str, Graph], own: dict[Store, Store]) -> dict[str, Graph]:
    """Copy graphs with variables so that they use a session's stores; return all graphs by name.
    ``own`` maps stores of the model to those of the session, and is extended as needed."""
    copies = {}
    for name, graph in graphs.items():
        if any(isinstance(node.attrs.get("store"), Store) for node in graph.walk()):
            graph = clone(graph)
        for node in graph.walk():
            store = node.attrs.get("store")
            if isinstance(store, Store):
                node.attrs["store"] = own.setdefault(store, store.own())
        copies[name] = graph
    return copies


def apart(graph: Graph) -> Graph:
    """A copy of a graph with its own copies of variables and their current values, for runs without
    side effects. Returns the graph itself if it has no variables."""
    given = {node.attrs.get("store") for node in graph.walk()}
    stores = {store: store.as_now() for store in given if isinstance(store, Store)}
    return own_stores({"": graph}, stores)[""]


def declared_variables(graphs: Iterable[Graph]) -> dict[Store, dict[str, list[TensorType]]]:
    """The variables that nodes declare, by the stores of the model, with their types, the most
    specific first."""
    stores: dict[Store, dict[str, list[TensorType]]] = {}
    for graph in graphs:
        for node in graph.walk():
            store = node.attrs.get("store")
            if isinstance(store, Store):
                name, type_ = variable_name(node.attrs, node.name), _declared(node.attrs)
                types = stores.setdefault(store.model, {}).setdefault(name, [])
                types.insert(0 if type_.static else len(types), type_)
    return stores


# Handles.


def _declared(attrs: Attrs) -> TensorType:
    return TensorType(find_dtype(attrs.get("dtype", "")), dims_of(attrs.get("shape")))


def variable_name(attrs: Attrs, node_name: str) -> str:
    """The name, in its store, of the variable that a node with these attributes declares."""
    # As in TensorFlow, a variable without shared_name is named after its node.
    return "/".join(filter(None, (attrs.get("container"), attrs.get("shared_name") or node_name)))


def variable_of(attrs: Attrs, node_name: str) -> _Variable:
    """The variable that a node with these attributes declares. Raises ``ShapeError``."""
    name = variable_name(attrs, node_name)
    variable: _Variable = attrs["store"].variable(name, _declared(attrs))
    return variable


@operator("VarHandleOp", traits={"makes handle"})
@operator("VariableV2", traits={"makes handle"})
def variable_handle(node: Node, types: Types) -> Kernel:
    """Pure: the handle of a variable does not depend on its value."""
    variable = variable_of(node.attrs, node.name)
    return Kernel(lambda: variable)


_variable = handle(_Variable, "variable")


def exchange(handle: object, function: ArrayFunction) -> np.ndarray:
    """Replace the value of the variable of a handle by ``function`` of it; return the old one."""
    state = _variable(handle)
    with state.lock:
        old = state.read()
        state.assign(function(old))
    return old


def _infer_read(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    type_ = _declared(attrs)
    return (ANY if type_.dtype is None else type_,)


def named_variable(node: Node) -> _Variable | None:
    """The variable of a node whose handle is omitted, as bound in its attributes
    (``passes/lowering/bind_variables.py``); None if the node has a handle."""
    return variable_of(node.attrs, "") if node.inputs[0] is None else None


@operator("ReadVariableOp", infer=_infer_read, pure=False)
def read(node: Node, types: Types) -> Kernel:
    """Return a copy of the value, as outputs of a run belong to the caller. Raises ``ShapeError``
    if its type differs from the declared one, on which later kernels rely.
    """
    named, declared = named_variable(node), _declared(node.attrs)
    dims = declared.shape if declared.static else None

    def current(variable: object) -> np.ndarray:
        state = named or _variable(variable)
        value = state.read()
        same = value.shape == dims and value.dtype == declared.dtype
        if not (same or declared.dtype is None or accepts(declared, type_of(value))):
            raise ShapeError(
                f"variable {state.name!r} holds {type_of(value)}, but the node declares {declared}"
            )
        return value.copy()

    return Kernel(current)


@array_operator(
    *("VarIsInitializedOp", "IsVariableInitialized"), infer=always(TensorType(BOOL, ())), pure=False
)
def is_initialized(variable: object) -> np.ndarray:
    return np.array(_variable(variable).value is not None)


@array_operator("VariableShape", pure=False, prepared=OUT_TYPE)
def variable_shape(variable: object, *, out_type: np.dtype) -> np.ndarray:
    return np.array(_variable(variable).read().shape, out_type)


# Assignments by handle have no output, those by reference return the reference.


@operator("AssignVariableOp", pure=False, strings=True)
def assign_variable(node: Node, types: Types) -> Kernel:
    named = named_variable(node)
    return Kernel(lambda variable, value: (named or _variable(variable)).assign(value))


@array_operator("Assign", pure=False, strings=True, traits={"forwards handle"})
def assign(variable: object, value: np.ndarray, *, validate_shape: bool = True) -> _Variable:
    state = _variable(variable)
    # With validate_shape false, an assignment may change the shape.
    state.assign(value, checked=validate_shape)
    return state


def _updating(name: str, update: ArrayFunction, *, gives: bool) -> None:
    traits: frozenset[Trait] = frozenset({"forwards handle"} if gives else ())

    @array_operator(name, pure=False, traits=traits)
    def function(variable: object, value: np.ndarray) -> _Variable | None:
        state = _variable(variable)
        state.update(update, value)
        return state if gives else None


_updating("AssignAddVariableOp", np.add, gives=False)
_updating("AssignSubVariableOp", np.subtract, gives=False)
_updating("AssignAdd", np.add, gives=True)
_updating("AssignSub", np.subtract, gives=True)


# Optimizer steps: new values of a variable and its slots, from the old ones and a gradient.

_Arrays: TypeAlias = Sequence[np.ndarray]


def _applying(name: str, count: int, gradient: int, step: ArrayFunction) -> None:
    """Register an optimizer step. The first ``count`` inputs are variables, which are set to the
    results of ``step(*values, *other inputs)``. Input ``gradient`` has their shape; the others are
    scalars."""

    @array_operator(name, pure=False)
    def apply(*inputs: RunValue, use_nesterov: bool = False) -> None:
        variables = [_variable(x) for x in inputs[:count]]
        for i, x in enumerate(inputs[count:], count):
            if i != gradient and x.ndim:
                raise ShapeError(f"input {i} of {name} must be a scalar, but has shape {x.shape}")
        with ExitStack() as locks:
            # Acquire locks in a fixed order to avoid deadlock.
            for variable in sorted(variables, key=lambda variable: variable.name):
                locks.enter_context(variable.lock)
            values = [variable.read() for variable in variables]
            shapes = [value.shape for value in values]
            if shapes != [inputs[gradient].shape] * count:
                raise ShapeError(
                    f"variable {variables[0].name!r} and its slots have shapes {shapes}, but the "
                    f"gradient has {inputs[gradient].shape}"
                )
            results = step(*values, *inputs[count:], use_nesterov)
            for variable, result in zip(variables, results, strict=True):
                variable.value = _kept(result)


def _momentum(x: np.ndarray, slot: np.ndarray, *rest: RunValue) -> _Arrays:
    rate, dx, factor, ahead = rest
    slot = slot * factor + dx
    return x - (dx + slot * factor if ahead else slot) * rate, slot


def _keras_momentum(x: np.ndarray, slot: np.ndarray, *rest: RunValue) -> _Arrays:
    """Momentum whose slot accumulates steps that include the learning rate."""
    rate, dx, factor, ahead = rest
    slot = slot * factor - dx * rate
    return x + (slot * factor - dx * rate if ahead else slot), slot


def _adam(x: np.ndarray, m: np.ndarray, v: np.ndarray, *rest: RunValue) -> _Arrays:
    power1, power2, rate, beta1, beta2, epsilon, dx, ahead = rest
    rate = rate * np.sqrt(1 - power2) / (1 - power1)
    m, v = m + (dx - m) * (1 - beta1), v + (dx * dx - v) * (1 - beta2)
    way = dx * (1 - beta1) + m * beta1 if ahead else m
    return x - way * rate / (np.sqrt(v) + epsilon), m, v


def _rms_prop(x: np.ndarray, square: np.ndarray, slot: np.ndarray, *rest: RunValue) -> _Arrays:
    rate, rho, factor, epsilon, dx, _ = rest
    square = square + (dx * dx - square) * (1 - rho)
    slot = slot * factor + dx * rate / np.sqrt(square + epsilon)
    return x - slot, square, slot


_applying("ResourceApplyGradientDescent", 1, 2, lambda x, rate, dx, _: [x - dx * rate])
_applying("ResourceApplyMomentum", 2, 3, _momentum)
_applying("ResourceApplyKerasMomentum", 2, 3, _keras_momentum)
_applying("ResourceApplyAdam", 3, 9, _adam)
_applying("ResourceApplyRMSProp", 3, 7, _rms_prop)


@array_operator("DestroyResourceOp", pure=False)
def destroy(variable: object) -> None:
    _variable(variable).value = None
