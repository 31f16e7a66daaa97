"""The variables of a session: the state that its model keeps from one run to the next."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.errors import InvalidInput, shortened, wrong_type
from penstock.core.limits import DEFAULT_LIMITS, Limits
from penstock.core.types import (
    NamedValues,
    RunValue,
    ShapeError,
    TensorType,
    Type,
    accepts,
    type_of,
)
from penstock.executors.feeds import from_python
from penstock.ir.tables import DisplayTable, show_html, show_text
from penstock.ops.tensorflow.state import Store, declared_variables

if TYPE_CHECKING:
    from penstock.ir.graph import Model

_UNSET = "penstock.unset"
"""The key, in the metadata of a saved file, of the names of variables without a value."""


class Variables(Mapping[str, np.ndarray]):
    """The variables of a session by name. Other sessions of the same model share them if they are
    passed to ``penstock.compile`` as ``variables=``.

    ``variables["v"]`` returns a copy of the value; ``variables["v"] = array`` sets the value that
    later steps read. To read a variable without a value raises ``InvalidInput``, and so does an
    unknown name. If the model assigns no variables, they are constants and cannot be set.

    Reading one variable is atomic. During runs, the values of several variables may be from
    different moments.
    """

    def __init__(
        self, model: Model, own: dict[Store, Store], limits: Limits = DEFAULT_LIMITS
    ) -> None:
        self._own = own
        self._limits = limits
        self._places: dict[str, tuple[Store, str]] = {}
        stores = _stores(model)
        for number, (store, declared) in enumerate(stores.items()):
            own_store = own.setdefault(store, store.own())  # signatures share stores
            # Each file of a package has its own store; the same name may occur in several.
            prefix = f"{number}/" if len(stores) > 1 else ""
            for name, types in sorted(declared.items()):
                self._places[prefix + name] = own_store, name
                _declare(own_store, name, types)

    @property
    def types(self) -> dict[str, Type]:
        """The declared types of the variables, by name."""
        return {name: self._variable(name).type for name in self}

    @property
    def constant(self) -> bool:
        """Whether nothing in the model assigns to variables, so that they cannot be set."""
        return any(store.constant for store in self._own.values())

    def __getitem__(self, name: str) -> np.ndarray:
        value = self._variable(name).value
        if value is None:
            raise InvalidInput(
                f"variable {name!r} has no value yet: set it, or run its initializer as a target"
            )
        # The caller may write to its copy without changing the variable.
        return value.copy()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a copy of a value, or ``default`` for an unknown or unset variable."""
        return self[name] if name in self and self._variable(name).value is not None else default

    def __setitem__(self, name: str, value: RunValue) -> None:
        self.update({name: value})

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def update(self, values: NamedValues) -> None:
        """Set variables by name. If a value does not fit, sets none and raises ``InvalidInput``."""
        # All values are checked before the first is set.
        arrays = {name: self._array(name, value) for name, value in values.items()}
        for name, array in arrays.items():
            self._variable(name).assign(array)

    def reset(self, names: Iterable[str] | None = None) -> None:
        """Reset variables to their initial values.

        Args:
            names: The variables to reset, by default all.

        Raises ``InvalidInput`` for an unknown name.
        """
        for name in list(self) if names is None else names:
            variable = self._variable(name)
            store, own_name = self._places[name]
            variable.value = store.initial.get(own_name)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore all variables on exit, for runs that the user did not request."""
        values = [(variable, variable.value) for variable in map(self._variable, self)]
        try:
            yield
        finally:
            for variable, value in values:
                variable.value = value

    def save(self, path: str | Path) -> None:
        """Write the values to a file in the safetensors format, replacing an existing file.

        Raises ``InvalidInput`` for dtypes that the format does not support: strings, complex128,
        integers smaller than a byte. Raises ``OSError`` if the file cannot be written.
        """
        from penstock.artifact.tensor_file import save_arrays

        values = {name: self._variable(name).value for name in self}
        unset = [name for name, value in values.items() if value is None]
        arrays = {name: value for name, value in values.items() if value is not None}
        save_arrays(_path(path), arrays, {_UNSET: json.dumps(unset)} if unset else {})

    def restore(self, path: str | Path) -> None:
        """Set all variables to the values in a file. Variables saved without a value become unset.

        Raises ``InvalidInput``, and changes nothing, if the file is damaged or its variables are
        not those of the model. Raises ``OSError`` if the file cannot be read.
        """
        from penstock.artifact.tensor_file import load_arrays

        arrays, texts = load_arrays(_path(path), self._limits)
        unset = _names(texts.get(_UNSET, "[]"))
        names = {*arrays, *unset}
        missing, unknown = sorted({*self} - names), sorted(names - {*self})
        if missing or unknown:
            reasons = [
                f"{text} {shortened(', '.join(map(repr, several)))}"
                for text, several in (("lacks", missing), ("has further", unknown))
                if several
            ]
            raise InvalidInput(
                f"{str(path)!r} was saved for another model: it {', and '.join(reasons)}; to set "
                "some variables, use variables.update"
            )
        self.update(arrays)
        for name in unset:
            self._variable(name).value = None

    def of(self, model: Model) -> dict[Store, Store]:
        """Map the stores of another session's model to the stores of this session. Raises
        ``InvalidInput`` for a model with other variables."""
        stores = _stores(model)
        own = dict(self._own)
        if not stores.keys() <= own.keys():
            if len(stores) != 1 or len(own) != 1:
                raise InvalidInput(
                    "variables= takes those of a session of the same model, with the same files"
                )
            own = dict(zip(stores, own.values(), strict=True))
        for store, declared in stores.items():
            if store.constant != own[store].constant:
                raise InvalidInput(
                    "variables= takes the variables of a session of the same model; only one of "
                    "the two models assigns to its variables"
                )
            own[store].join(store)
            for name, types in declared.items():
                _declare(own[store], name, types)
        return own

    def state(self) -> dict[str, np.ndarray | None]:
        """The values of variables that have been set, by name; None for an unset variable."""
        changed = {}
        for name, (store, own_name) in self._places.items():
            value = self._variable(name).value
            # Compared by identity, not by element: an assigned value that equals the initial one
            # is included.
            if value is not store.initial.get(own_name):
                changed[name] = value
        return changed

    def set_state(self, state: Mapping[str, np.ndarray | None]) -> None:
        """Set the values that ``state`` returned."""
        for name, value in state.items():
            if value is None:
                self._variable(name).value = None
            else:
                self._variable(name).assign(value)

    def _variable(self, name: str) -> Any:
        place = self._places.get(name)
        if place is None:
            from difflib import get_close_matches

            names = get_close_matches(str(name), self._places, n=1) or [*self._places]
            hint = f"it has {shortened(', '.join(map(repr, names)))}" if names else "it has none"
            raise InvalidInput(f"the model has no variable {name!r}; {hint}")
        store, own_name = place
        return store.variable(own_name, TensorType())

    def _array(self, name: str, value: RunValue) -> np.ndarray:
        """Convert ``value`` to the type of a variable. Raises ``InvalidInput``."""
        declared = self._variable(name).type
        if self._places[name][0].constant:
            raise InvalidInput(
                f"variable {name!r} cannot be set: nothing in the model assigns to variables, so "
                "their values are constants in its plans"
            )
        try:
            if hasattr(value, "dtype") or declared.dtype is None:
                array = np.asarray(value)
            else:
                array = from_python(value, declared.dtype)
        except Exception as error:  # for example, from the value's ``__array__``
            type_name = type(value).__name__
            raise InvalidInput(
                f"variable {name!r} of {declared} cannot be converted from a {type_name}: {error}"
            ) from error
        if not accepts(declared, type_of(array)):
            raise InvalidInput(f"variable {name!r} is {declared}, not {type_of(array)}")
        return array

    _repr_html_ = show_html
    _repr_pretty_ = show_text

    def _as_table(self) -> DisplayTable:
        rows = []
        for name in self:
            value, type_ = self._variable(name).value, self._variable(name).type
            rows.append((name, str(type_), "no value yet" if value is None else value.nbytes))
        title = f"{len(self)} {'constants' if self.constant else 'variables'}"
        return DisplayTable(title, ("name", "type", "bytes"), rows)

    def __repr__(self) -> str:
        return f"Variables({shortened(', '.join(f'{n!r}: {t}' for n, t in self.types.items()))})"


def _stores(model: Model) -> dict[Store, dict[str, list[TensorType]]]:
    """The stores of a model, with the types that its nodes declare for each variable."""
    return declared_variables([*model.graphs.values(), *model.functions.values()])


def _declare(store: Store, name: str, types: list[TensorType]) -> None:
    """Declare a variable in a store. Raises ``InvalidInput`` for a contradicting declaration."""
    try:
        for type_ in types:
            store.variable(name, type_)
    except ShapeError as error:
        raise InvalidInput(f"{error}: these are variables of another model") from error


def _path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise wrong_type("path", path, "a path")
    return Path(path)


def _names(text: str) -> list[str]:
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidInput(
            f"the file's metadata {_UNSET!r} is not a list of names; save the variables again"
        )
    return names
