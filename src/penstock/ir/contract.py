"""The rules for kernels, checked for user-defined backends and operations.

A *guard* replaces a kernel's function in a program until its first result has passed. Then it
restores the function, so that later calls cost nothing. Penstock's own kernels have no guards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import unwrap
from itertools import chain, repeat
from typing import Any, NoReturn, Protocol

import numpy as np

from penstock.core.errors import ExtensionError
from penstock.core.records import dataclass, replace
from penstock.core.types import (
    ANY,
    STRING,
    AnyType,
    MapType,
    OptionalType,
    RunValue,
    SequenceType,
    TensorType,
    Type,
    accepts,
    is_dtype,
    type_of,
)
from penstock.ir.graph import Node
from penstock.ir.kernel import Binder, Kernel, array_of


class Named(Protocol):
    """A backend, which messages name."""

    @property
    def name(self) -> str: ...


@lru_cache(maxsize=4096)
def is_own(code: Callable[..., object]) -> bool:
    """Whether a class or function belongs to Penstock."""
    code = unwrap(code)  # functions of users may have decorators of Penstock's
    module: str = getattr(getattr(code, "func", code), "__module__", None) or ""
    return module.partition(".")[0] == "penstock"


@dataclass(frozen=True, eq=False, slots=True)
class Contract:
    """The rules that the kernel of ``node`` on a backend must keep. ``types`` are those of its
    outputs as far as known, or None if these are in the backend's own memory."""

    node: Node
    backend: str
    types: tuple[Type | None, ...] | None

    def check(self, result: RunValue) -> None:
        """Raise ``ExtensionError`` if ``result`` is not allowed for the kernel's function."""
        results: Any = (result,)
        count = len(self.node.outputs)
        if count != 1:
            results = () if result is None else result
            if not isinstance(results, tuple | list) or len(results) != count:
                size = f" of {len(result)}" if isinstance(result, tuple | list) else ""
                self.fail(
                    f"returned a {type(result).__name__}{size} for {count} outputs; a kernel "
                    "returns a tuple with an entry for each"
                )
        if self.types is None:
            return
        for value, output, wanted in zip(self.node.outputs, results, self.types, strict=True):
            if value is not None and wanted is not None and not _fits(wanted, output):
                held = type_of(array_of(output))
                actual = type(output).__name__ if held is ANY else str(held)
                self.fail(
                    f"computed a {actual} as {value.name!r}, which is {wanted} by the operation's "
                    "infer"
                )

    def check_bound(self, bound: object) -> None:
        """Raise ``ExtensionError`` if ``bound`` is not allowed for the kernel's ``bind``."""
        if not isinstance(bound, tuple) or len(bound) != 2 or not callable(bound[0]):
            self.fail(f"bound a {type(bound).__name__}; bind returns a function and its arguments")

    def fail(self, breach: str) -> NoReturn:
        """Raise ``ExtensionError`` for a rule that the kernel broke."""
        node = f"{self.node.op.name} ({self.node.label})"
        raise ExtensionError(f"{node} {breach}. Correct its kernel on the backend {self.backend}")


def contract_of(
    node: Node,
    backend: Named | None = None,
    *,
    types: Sequence[Type] | None = None,
    on_host: bool = True,
) -> Contract | None:
    """Return the contract of a node's kernel on a backend, by default NumPy's; None if both backend
    and operation are Penstock's own. ``types`` are those of the outputs if these are not inferred
    yet; ``on_host``: whether the outputs are in the host's memory."""
    if (backend is None or is_own(backend.__class__)) and is_own(node.op.compile):
        return None
    if types is None:
        types = [ANY if value is None else value.type for value in node.outputs]
    known = chain(types, repeat(ANY))
    pairs = zip(node.outputs, known, strict=False)
    wanted = tuple([None if value is None else type_ for value, type_ in pairs])
    name = "numpy" if backend is None else backend.name
    return Contract(node, name, wanted if on_host else None)


def checked_kernel(node: Node, kernel: object, backend: Named) -> Kernel | None:
    """Return the answer of a backend for ``node``, checked. Raises ``ExtensionError``."""
    if kernel is None or (is_own(backend.__class__) and isinstance(kernel, Kernel)):
        return kernel
    contract = Contract(node, backend.name, None)
    if not isinstance(kernel, Kernel):
        contract.fail(
            f"has a {type(kernel).__name__} as its kernel; a backend returns a Kernel, or None"
        )
    functions = (kernel.into, kernel.begin)
    if not callable(kernel.function) or not all(f is None or callable(f) for f in functions):
        contract.fail("has a kernel with a function, into or begin that cannot be called")
    if not isinstance(kernel.binder, Binder | None):
        contract.fail(
            f"has a kernel with a {type(kernel.binder).__name__} as its binder; derive binders "
            "from Binder"
        )
    count = len(node.inputs)
    if not all(i in range(count) for i in (*kernel.inplace, *kernel.layout.contiguous_inputs)):
        contract.fail(
            f"has a kernel whose inplace or contiguous_inputs are none of its {count} inputs"
        )
    if not isinstance(kernel.workspace, int) or kernel.workspace < 0:
        contract.fail(f"has a kernel with a workspace of {kernel.workspace!r} bytes")
    return kernel


class Guard:
    """Replaces the ``function`` of a kernel, or the ``begin`` of an ``asynchronous`` one, and calls
    ``replace``, if set, with itself once a result has passed."""

    __slots__ = ("_asynchronous", "_contract", "function", "replace")

    def __init__(
        self, contract: Contract, function: Callable[..., RunValue], asynchronous: bool
    ) -> None:
        self.function = function
        self.replace: Callable[[Guard], object] | None = None
        self._contract = contract
        self._asynchronous = asynchronous

    def __call__(self, *arguments: RunValue) -> RunValue:
        if self._asynchronous:
            return self._begin(*arguments)
        result = self.function(*arguments)
        self._pass(result)
        return result

    def _begin(self, done: Callable[..., object], *inputs: RunValue) -> RunValue:
        def checked(outputs: RunValue = None, error: BaseException | None = None) -> None:
            if error is None:
                try:
                    self._pass(outputs)
                except ExtensionError as broken:
                    done(error=broken)
                    return
            done(outputs, error)

        return self.function(checked, *inputs)

    def _pass(self, result: RunValue) -> None:
        self._contract.check(result)
        if self.replace is not None:
            self.replace(self)


def guarded(contract: Contract, kernel: Kernel) -> Kernel:
    """Return ``kernel`` with a guard in place of its function or ``begin``."""
    if kernel.begin is not None:
        return replace(kernel, begin=Guard(contract, kernel.begin, asynchronous=True))
    return replace(kernel, function=Guard(contract, kernel.function, asynchronous=False))


def _fits(wanted: Type, value: RunValue) -> bool:
    """Whether ``value`` is a run-time value of a type."""
    if isinstance(value, np.ndarray | np.generic):
        held = TensorType(value.dtype, value.shape)
        return is_dtype(value.dtype) and accepts(wanted, held)
    if isinstance(value, str):  # a string tensor of rank 0
        return accepts(wanted, TensorType(STRING, ()))
    while isinstance(wanted, OptionalType):
        if value is None:
            return True
        wanted = wanted.element
    if isinstance(value, list) and isinstance(wanted, SequenceType | AnyType):
        element = wanted.element if isinstance(wanted, SequenceType) else ANY
        return all(_fits(element, x) for x in value)
    if isinstance(wanted, MapType):
        return isinstance(value, dict)
    numbers = bool | int | float | complex | bytes | tuple
    return isinstance(wanted, AnyType) and not isinstance(value, numbers)
