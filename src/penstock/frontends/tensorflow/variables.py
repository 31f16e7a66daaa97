"""The variables of a model: the store that holds them, and their types and values if constant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.core.types import TensorType, Type, accepts, dtype_name, type_of
from penstock.frontends.common.inferred_types import source_of
from penstock.frontends.tensorflow.tensors import declared_type
from penstock.ir.graph import Value
from penstock.ir.op import AttrDict
from penstock.ops.tensorflow.state import Store


class VariableFacts:
    """Facts about variables by handle, or by Identity of a handle.

    ``store`` holds the variables of a session. ``frozen`` has the values of those that nothing
    assigns to, by the name of the node that makes the handle: they are constants.
    """

    def __init__(self, store: Store, frozen: Mapping[str, np.ndarray]) -> None:
        self.store = store
        self._frozen_by_node = frozen
        self._frozen: dict[Value, np.ndarray] = {}
        self._types: dict[Value, TensorType] = {}

    def declare(self, node: str, handle: Value, type_: Type) -> None:
        """Note the first output of ``node``. ``type_`` is that of the variable if it makes one,
        else ``ANY``. Raises ``ValueError`` if the saved value has another."""
        if isinstance(type_, TensorType):
            self._types[handle] = type_
        value = self._frozen_by_node.get(node)
        if value is not None:
            self._frozen[handle] = value
            if not accepts(type_, type_of(value)):
                raise ValueError(f"it is {type_}, but {type_of(value)} in the checkpoint")

    def constant(self, handle: Value) -> np.ndarray | None:
        """The value of a variable that nothing assigns to."""
        return self._frozen.get(source_of(handle))

    def read_attrs(self, handle: Value, dtype: str | None) -> tuple[AttrDict, Type]:
        """The attributes of a node that reads a variable, and the type of its output."""
        type_ = self._types.get(source_of(handle))
        attrs: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        if type_ is None:
            return attrs, declared_type(dtype)
        if type_.shape is not None:
            attrs["shape"] = [dim if isinstance(dim, int) else -1 for dim in type_.shape]
        if type_.dtype is not None:
            attrs["dtype"] = dtype_name(type_.dtype)
        return attrs, type_
