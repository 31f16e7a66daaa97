"""Variables: what a session remembers from one run to the next.

The node of a variable has its ``store`` among its attributes, which all nodes of a model share and
each session has for itself (``own_stores``). A handle is the ``_Variable``; the arrays in it are
replaced rather than changed, so that a reader may keep one; only an array that nothing else holds
is written over by compiled assignments.
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
"""operations that take a variable, or name one in their attributes"""


@dataclass(slots=True, eq=False)
class _Variable:
    """One variable; ``value`` is None until one is assigned. ``accepted``: the element type and the
    shape that were last found to be those of ``type``."""

    name: str
    type: Type
    value: np.ndarray | None = None
    accepted: tuple[np.dtype, tuple[int, ...]] | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def read(self) -> np.ndarray:
        """The value. Raises ``ShapeError`` while there is none."""
        value = self.value
        if value is None:
            raise ShapeError(
                f"variable {self.name!r} is read before anything was assigned to it; run "
                "its initializer first, as a target"
            )
        return value

    def assign(self, value: np.ndarray, *, checked: bool = True) -> None:
        """Replace the value by a copy of ``value``, which the run may write over."""
        given = value.dtype, value.shape
        if checked and given != self.accepted:
            if not accepts(self.type, type_of(value)):
                raise ShapeError(f"variable {self.name!r} is {self.type}, not {type_of(value)}")
            self.accepted = given
        self.value = _kept(value)

    def update(self, function: ArrayFunction, value: np.ndarray) -> None:
        """Replace the value by ``function`` of it and ``value``."""
        # Several nodes may update it at a time, of which none may get lost.
        with self.lock:
            old = self.read()
            if old.shape != value.shape:
                raise ShapeError(f"variable {self.name!r} has shape {old.shape}, not {value.shape}")
            self.value = _kept(function(old, value))


def _kept(value: RunValue) -> np.ndarray:
    array = np.array(value)
    # Readers may keep the array: nobody may change it.
    array.setflags(write=False)
    return array


class Store:
    """Variables by name. ``initial``: the saved values, which variables start with; ``model``: the
    store of the model that this one is a session's own of, if it is; ``constant``: whether nothing
    assigns to the variables, so that graphs may have their values as constants."""

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
        """The store of the model."""
        return self._model or self

    def variable(self, name: str, type_: Type) -> _Variable:
        """The variable of that name, the same on every call. Raises ``ShapeError`` if its saved
        value or another node declares another type."""
        with self._lock:
            if name not in self._variables:
                initial = self.initial.get(name)
                if initial is not None and not accepts(type_, type_of(initial)):
                    saved = type_of(initial)
                    raise ShapeError(f"variable {name!r} is {type_}, but {saved} in the checkpoint")
                self._variables[name] = _Variable(name, type_, initial)
            variable = self._variables[name]
            if not accepts(variable.type, type_) and not accepts(type_, variable.type):
                raise ShapeError(f"variable {name!r} is both {variable.type} and {type_}")
            return variable

    def own(self) -> Store:
        """A store with the same variables, which begin with their first values."""
        return Store(self.initial, self.model, constant=self.constant)

    def as_now(self) -> Store:
        """A store with the same variables, which begin with the values that they have now."""
        with self._lock:
            values = {name: variable.value for name, variable in self._variables.items()}
        known = {n: value for n, value in {**self.initial, **values}.items() if value is not None}
        return Store(known, self.model, constant=self.constant)

    def join(self, other: Store) -> None:
        """Let variables that are not here yet start with the values of ``other``."""
        with self._lock:
            for name, value in other.initial.items():
                if name not in self._variables:
                    self.initial.setdefault(name, value)

    def __repr__(self) -> str:
        return f"Store({len(self._variables)} variables)"


def own_stores(graphs: Mapping[str, Graph], own: dict[Store, Store]) -> dict[str, Graph]:
    """The graphs by name, those with variables as copies with the variables of a session: ``own``
    has them by the stores of the model, and gets those that it lacks."""
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
    """A copy of a graph that reads and assigns variables of its own, with the values of now: for
    runs that must leave no trace. The graph itself if it has none."""
    given = {node.attrs.get("store") for node in graph.walk()}
    stores = {store: store.as_now() for store in given if isinstance(store, Store)}
    return own_stores({"": graph}, stores)[""]


def declared_variables(graphs: Iterable[Graph]) -> dict[Store, dict[str, list[TensorType]]]:
    """The variables that nodes name, by the stores of the model, with the types that they declare,
    the most specific first."""
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
    """The name, in its store, of the variable that a node with these attributes names."""
    # TensorFlow's rule: without a shared name a variable has that of its node.
    return "/".join(filter(None, (attrs.get("container"), attrs.get("shared_name") or node_name)))


def variable_of(attrs: Attrs, node_name: str) -> _Variable:
    """The variable that a node with these attributes names. Raises ``ShapeError``."""
    name = variable_name(attrs, node_name)
    variable: _Variable = attrs["store"].variable(name, _declared(attrs))
    return variable


@operator("VarHandleOp", traits={"makes handle"})
@operator("VariableV2", traits={"makes handle"})
def variable_handle(node: Node, types: Types) -> Kernel:
    """Pure: naming a variable does not change it."""
    variable = variable_of(node.attrs, node.name)
    return Kernel(lambda: variable)


_variable = handle(_Variable, "variable")


def _infer_read(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    type_ = _declared(attrs)
    return (ANY if type_.dtype is None else type_,)


def named_variable(node: Node) -> _Variable | None:
    """The variable of a node whose handle is left out, as its attributes name it
    (``passes/lowering/bind_variables.py``); None if it is given one."""
    return variable_of(node.attrs, "") if node.inputs[0] is None else None


@operator("ReadVariableOp", infer=_infer_read, pure=False)
def read(node: Node, types: Types) -> Kernel:
    """A copy: what leaves a run is the caller's own. Raises ``ShapeError`` for a value of another
    type than the node declares: kernels behind it rely on that."""
    named, declared = named_variable(node), _declared(node.attrs)
    dims = declared.shape if declared.static else None

    def current(variable: object) -> np.ndarray:
        state = named or _variable(variable)
        value = state.read()
        same = value.shape == dims and value.dtype == declared.dtype
        if not (same or declared.dtype is None or accepts(declared, type_of(value))):
            raise ShapeError(f"variable {state.name!r} is {type_of(value)}, not {declared}")
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


# Assignments: those of handles have no output, those of references the reference.


@operator("AssignVariableOp", pure=False)
def assign_variable(node: Node, types: Types) -> Kernel:
    named = named_variable(node)
    return Kernel(lambda variable, value: (named or _variable(variable)).assign(value))


@array_operator("Assign", pure=False, traits={"forwards handle"})
def assign(variable: object, value: np.ndarray, *, validate_shape: bool = True) -> _Variable:
    state = _variable(variable)
    # Without the check, an assignment may give the variable another shape.
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


# Steps of training: new values of a variable and of its slots, from them and a gradient.

_Arrays: TypeAlias = Sequence[np.ndarray]


def _applying(name: str, count: int, gradient: int, step: ArrayFunction) -> None:
    """Register the operation whose first ``count`` inputs are variables, which take what ``step``
    gives for their values and the other inputs. Input ``gradient`` has their shape, the others are
    scalars."""

    @array_operator(name, pure=False)
    def apply(*inputs: RunValue, use_nesterov: bool = False) -> None:
        variables = [_variable(x) for x in inputs[:count]]
        for i, x in enumerate(inputs[count:], count):
            if i != gradient and x.ndim:
                raise ShapeError(f"input {i} of {name} must be a scalar, not of shape {x.shape}")
        with ExitStack() as locks:
            # In one order, so that no two nodes wait for each other.
            for variable in sorted(variables, key=lambda variable: variable.name):
                locks.enter_context(variable.lock)
            values = [variable.read() for variable in variables]
            shapes = [value.shape for value in values]
            if shapes != [inputs[gradient].shape] * count:
                raise ShapeError(
                    f"variable {variables[0].name!r} and its slots have shapes {shapes}, and the "
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
    """The slot holds steps, which the rate is a part of."""
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
