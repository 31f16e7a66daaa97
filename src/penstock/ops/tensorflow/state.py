"""Variables: what a session remembers from one run to the next.

The node of a variable has its ``store`` among its attributes, which all nodes of a model share and
each session has for itself (``own_stores``). A handle is the ``_Variable``; the arrays in it are
never changed, only replaced, so that who has read one may keep it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.ir.graph import Graph, Node, clone
from penstock.ir.op import Attrs, Consts, Kernel, Types
from penstock.ops.registry import TENSORFLOW, operator
from penstock.ops.tensorflow.arrays import named_dtype
from penstock.types import ANY, BOOL, ShapeError, TensorType, Type, accepts, dtypes, type_of

VARIABLES = frozenset({"VarHandleOp", "VariableV2"})


class _Variable:
    """One variable; ``value`` is None until somebody assigns one."""

    __slots__ = ("kind", "lock", "name", "value")

    def __init__(self, name: str, type_: Type, value: np.ndarray | None = None) -> None:
        self.name = name
        self.kind = type_
        self.value = value
        self.lock = threading.Lock()

    def read(self) -> np.ndarray:
        """The value. Raises ``ShapeError`` while there is none."""
        value = self.value
        if value is None:
            raise ShapeError(
                f"variable {self.name!r} is read before anything was assigned to it; run what "
                "initialises it first, as a target"
            )
        return value

    def assign(self, value: np.ndarray, *, checked: bool = True) -> None:
        """Replace the value by a copy of ``value``, which the run may write over."""
        if checked and not accepts(self.kind, type_of(value)):
            raise ShapeError(f"variable {self.name!r} is {self.kind}, not {type_of(value)}")
        self.value = _kept(value)

    def update(self, function: Callable[..., Any], value: np.ndarray) -> np.ndarray:
        """Replace the value by what ``function`` makes of it and of ``value``."""
        with self.lock:
            old = self.read()
            if old.shape != value.shape:
                raise ShapeError(f"variable {self.name!r} has shape {old.shape}, not {value.shape}")
            self.value = _kept(function(old, value))
            return self.value


def _kept(value: Any) -> np.ndarray:
    array = np.array(value)
    array.flags.writeable = False
    return array


class Store:
    """Variables by name. ``initial``: what those have from the start that were saved."""

    def __init__(self, initial: Mapping[str, np.ndarray] | None = None) -> None:
        self.initial = dict(initial or {})
        self._variables: dict[str, _Variable] = {}
        self._lock = threading.Lock()

    def variable(self, name: str, type_: Type) -> _Variable:
        """The variable of that name, the same for all who ask."""
        with self._lock:
            own = self._variables.get(name)
            if own is None:
                own = _Variable(name, type_, self.initial.get(name))
                self._variables[name] = own
            return own

    def __repr__(self) -> str:
        return f"Store({len(self._variables)} variables)"


def own_stores(graphs: Mapping[str, Graph]) -> dict[str, Graph]:
    """The graphs by name, those with variables as copies with variables of their own."""
    fresh: dict[Store, Store] = {}
    own = {}
    for name, graph in graphs.items():
        if any(isinstance(node.attrs.get("store"), Store) for node in graph.walk()):
            graph = clone(graph)
        for node in graph.walk():
            store = node.attrs.get("store")
            if isinstance(store, Store):
                node.attrs["store"] = fresh.setdefault(store, Store(store.initial))
        own[name] = graph
    return own


# Handles.


def _declared(attrs: Attrs) -> TensorType:
    dtype = dtypes().get(attrs.get("dtype", ""))
    dims = attrs.get("shape")
    shape = None if dims is None else tuple([None if d < 0 else d for d in dims])
    return TensorType(dtype, shape)


@operator("VarHandleOp", domain=TENSORFLOW)
@operator("VariableV2", domain=TENSORFLOW)
def handle(node: Node, types: Types) -> Kernel:
    """Nothing happens to a variable because somebody can name it."""
    attrs = node.attrs
    name = "/".join(filter(None, (attrs.get("container"), attrs.get("shared_name") or node.name)))
    variable = attrs["store"].variable(name, _declared(attrs))
    return Kernel(lambda: variable)


def _infer_read(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    type_ = _declared(attrs)
    return (ANY if type_.dtype is None else type_,)


@operator("ReadVariableOp", domain=TENSORFLOW, infer=_infer_read, pure=False)
def read(node: Node, types: Types) -> Kernel:
    """A copy: what leaves a run is the caller's own."""
    return Kernel(lambda variable: _variable(variable).read().copy())


def _variable(value: Any) -> _Variable:
    if not isinstance(value, _Variable):
        raise ShapeError(f"a handle of a variable is needed, not a {type(value).__name__}")
    return value


@operator(
    "VarIsInitializedOp",
    domain=TENSORFLOW,
    infer=lambda types, attrs, consts: (TensorType(BOOL, ()),),
    pure=False,
)
@operator(
    "IsVariableInitialized",
    domain=TENSORFLOW,
    infer=lambda types, attrs, consts: (TensorType(BOOL, ()),),
    pure=False,
)
def is_initialized(node: Node, types: Types) -> Kernel:
    return Kernel(lambda variable: np.array(_variable(variable).value is not None))


@operator("VariableShape", domain=TENSORFLOW, pure=False)
def variable_shape(node: Node, types: Types) -> Kernel:
    dtype = named_dtype(node.attrs, "out_type", "int32")
    return Kernel(lambda variable: np.array(_variable(variable).read().shape, dtype))


# Assignments: those of handles give nothing, those of references the reference.


@operator("AssignVariableOp", domain=TENSORFLOW, pure=False)
def assign_variable(node: Node, types: Types) -> Kernel:
    return Kernel(lambda variable, value: _variable(variable).assign(value))


@operator("Assign", domain=TENSORFLOW, pure=False)
def assign(node: Node, types: Types) -> Kernel:
    checked = bool(node.attrs.get("validate_shape", True))

    def function(variable: Any, value: np.ndarray) -> _Variable:
        state = _variable(variable)
        state.assign(value, checked=checked)
        return state

    return Kernel(function)


def _updating(name: str, update: Callable[..., Any], *, gives: bool) -> None:
    @operator(name, domain=TENSORFLOW, pure=False)
    def compile(node: Node, types: Types) -> Kernel:
        def function(variable: Any, value: np.ndarray) -> _Variable | None:
            state = _variable(variable)
            state.update(update, value)
            return state if gives else None

        return Kernel(function)


_updating("AssignAddVariableOp", np.add, gives=False)
_updating("AssignSubVariableOp", np.subtract, gives=False)
_updating("AssignAdd", np.add, gives=True)
_updating("AssignSub", np.subtract, gives=True)


@operator("DestroyResourceOp", domain=TENSORFLOW, pure=False)
def destroy(node: Node, types: Types) -> Kernel:
    def function(variable: Any) -> None:
        _variable(variable).value = None

    return Kernel(function)
