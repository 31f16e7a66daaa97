"""Penstock's own compiled kernels, and the registry of their families.

A family is the kernels of some operations, and registers itself in its file::

    @family("Hardmax", "LogSoftmax", "Softmax", seconds=by_memory)
    def softmax_call(site: Site) -> NativeCall | None: ...

The file is imported when one of its operations is first looked up. ``families.txt`` says which it
is: ``make kernels`` writes that from what the files register. No file of this folder may have the
name of something here, which it would replace.

A family has up to three forms of kernels, each with a decorator:

===================  ==============================================================================
``family``           for known shapes: bound once, to arrays in the arena
``of_any_shape``     for arrays of any shapes, known or not, in any layout
``ahead_of_cache``   for arrays of shapes that only a run knows, tried before the kernels for known
                     shapes that the run has made so far (``backends/dynamic_shapes.py``)
===================  ==============================================================================
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

from penstock.backends.native.kernel import NativeCall, Site
from penstock.backends.numpy import NumpyBackend
from penstock.core.errors import InternalError
from penstock.core.records import dataclass, replace
from penstock.core.types import TensorType, Type
from penstock.host.native import NativeLibrary
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel
from penstock.ops.internal.fused import FUSED, parts

Seconds: TypeAlias = Callable[[Node], float]
Static: TypeAlias = Callable[[Site], NativeCall | None]
AnyShape: TypeAlias = Callable[[NativeLibrary, Node, Sequence[Type | None]], Kernel | None]
AheadOfCache: TypeAlias = Callable[
    [NativeLibrary, Node, Sequence[Type | None], Callable[..., Any]], Callable[..., Any] | None
]
Chooser = TypeVar("Chooser", bound=Callable[..., Any])

INDEX = os.path.join(os.path.dirname(__file__), "families.txt")

# Approximate costs on one core: of a call that does nothing, bytes a second in the cache, and an
# element of a result.
_CALL_S = 0.12e-6
_BYTES_PER_S, _GATHERED_PER_S = 60e9, 8e9
_ELEMENT_NS = 0.05

_NUMPY = NumpyBackend()


@dataclass(frozen=True, slots=True)
class Family:
    """The kernels of an operation. ``static`` returns the compiled function and its arguments for a
    node of known shapes; with ``data_dependent`` the shapes of outputs follow from data, and it is
    asked without them. ``any_shape`` returns a kernel for arrays of any shapes. ``ahead_of_cache``
    returns a function for arrays of any shapes, which calls another, its last argument, for those
    that it has no code for. Each returns None if it has no kernel for the node. ``seconds``
    estimates the time of a call."""

    seconds: Seconds
    static: Static | None = None
    any_shape: AnyShape | None = None
    ahead_of_cache: AheadOfCache | None = None
    data_dependent: bool = False


_REGISTERED: dict[str, Family] = {}
_COMPLETE: dict[str, Family] = {}  # of which all files are imported


def below_numpy(node: Node) -> float:
    """Half of NumPy's time: compiled kernels are there because they are faster."""
    return _NUMPY.seconds(node) / 2


def by_call(node: Node) -> float:
    """The time of a call alone, for views."""
    return _CALL_S


def by_memory(node: Node, element_ns: float = _ELEMENT_NS) -> float:
    """By what is read and written, and the elements of the result; infinite if a shape is
    unknown."""
    values = (*node.inputs, *node.outputs)
    types_ = [v.type for v in values if v is not None and not v.is_constant]
    tensors = [t for t in types_ if isinstance(t, TensorType) and t.static]
    if len(tensors) < len(types_):
        return math.inf
    moved = sum(t.nbytes for t in tensors)
    return _CALL_S + moved / _BYTES_PER_S + tensors[-1].elements * element_ns * 1e-9


def by_result(node: Node) -> float:
    """By the bytes of the result: of the rest, only some is read."""
    types_ = [v.type for v in node.outputs if v is not None]
    tensors = [t for t in types_ if isinstance(t, TensorType) and t.static]
    if len(tensors) < len(types_):
        return math.inf
    return _CALL_S + sum([t.nbytes for t in tensors]) / _GATHERED_PER_S


def family(
    *names: str, seconds: Seconds = below_numpy, data_dependent: bool = False
) -> Callable[[Chooser], Chooser]:
    """Register a function as ``Family.static`` of the operations of these full names, with an
    estimate of the time."""

    def register(choose: Chooser) -> Chooser:
        for name in names:
            _register(name, static=choose, seconds=seconds, data_dependent=data_dependent or None)
        return choose

    return register


def of_any_shape(*names: str, seconds: Seconds | None = None) -> Callable[[Chooser], Chooser]:
    """Register a function as ``Family.any_shape`` of operations. ``seconds``: where these have no
    ``static`` form."""

    def register(choose: Chooser) -> Chooser:
        for name in names:
            _register(name, any_shape=choose, seconds=seconds)
        return choose

    return register


def ahead_of_cache(*names: str) -> Callable[[Chooser], Chooser]:
    """Register a function as ``Family.ahead_of_cache`` of operations."""

    def register(choose: Chooser) -> Chooser:
        for name in names:
            _register(name, ahead_of_cache=choose)
        return choose

    return register


def _register(name: str, **form: Any) -> None:
    """Add a form of its kernels to the family of ``name``. Raises ``InternalError`` if another
    function is registered for that."""
    known = _REGISTERED.get(name, Family(below_numpy))
    changes = {field: value for field, value in form.items() if value is not None}
    for field in changes.keys() - {"seconds", "data_dependent"}:
        if getattr(known, field) is not None:
            raise InternalError(f"two native families register {name} as {field}")
    _REGISTERED[name] = replace(known, **changes)


def fused_with(first: str) -> str:
    """The name under which families register for fused nodes that begin with an operation, such as
    "MatMul"."""
    return f"{FUSED.full_name}({first})"


def family_of(node: Node) -> Family | None:
    """The family of a node's operation, and of a fused node by what it begins with; None if there
    are no kernels."""
    name = node.op.full_name
    if name != FUSED.full_name:
        return _family(name)
    names = [part.op.full_name for part in parts(node)]
    first = names[0]
    if first == "DequantizeLinear" and not _is_product_of_codes(names):
        return _family(name)
    return _family(fused_with(first)) or _family(name)


def _is_product_of_codes(names: Sequence[str]) -> bool:
    """Whether parts of a fused node that begin with DequantizeLinear compute codes from codes."""
    return names[-1] == "QuantizeLinear" and ("Conv" in names or "Gemm" in names)


def _family(name: str) -> Family | None:
    complete = _COMPLETE.get(name)
    if complete is None:
        for module in _index().get(name, ()):
            import_module(f"{__name__}.{module}")
        complete = _REGISTERED.get(name)
        if complete is not None:
            _COMPLETE[name] = complete
    return complete


@cache
def _index() -> Mapping[str, Sequence[str]]:
    """The modules of this folder that register a name."""
    modules: dict[str, list[str]] = {}
    module = ""
    with open(INDEX, encoding="ascii") as file:
        for word in file.read().split():
            if word.endswith(":"):
                module = word[:-1]
            else:
                modules.setdefault(word, []).append(module)
    return modules


def registered_families() -> Mapping[str, Family]:
    """The families of the modules that were imported, by the names."""
    return _REGISTERED
