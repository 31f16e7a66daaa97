"""Penstock's own compiled kernels, and the registry of their families.

A family is the kernels of some operations, and registers itself in its file::

    @family("Hardmax", "LogSoftmax", "Softmax", seconds=by_memory)
    def softmax_call(site: Site) -> NativeCall | None: ...

The file is imported when one of its operations is first looked up. ``families.txt`` says which it
is: ``make kernels`` writes that from what the files register. No file of this folder may have the
name of something here, which it would replace.

Its kernels are for known shapes, bound once to arrays in the arena (``family``); for arrays of any
shapes, in any layout (``of_any_shape``); or tried ahead of those for known shapes that a run has
made so far (``ahead_of_cache``; ``backends/dynamic_shapes.py``).
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
AnyShapeCall: TypeAlias = tuple[Callable[..., Any], object]
"""a compiled function that takes another function, a checkpoint, settings and arrays of any shapes;
and the settings"""
AheadOfCache: TypeAlias = Callable[[Site], AnyShapeCall | None]
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
    """The kernels of an operation. ``static`` returns the call of a compiled kernel for a node of
    known shapes; with ``data_dependent`` those of outputs follow from data, and are left out.
    ``any_shape`` returns a kernel for arrays of any shapes. ``ahead_of_cache`` gets a site whose
    shapes may be unknown; its compiled function calls the other for what it has no code for. Each
    returns None if it has no kernel for the node. ``seconds`` estimates the time of a call."""

    seconds: Seconds
    static: Static | None = None
    any_shape: AnyShape | None = None
    ahead_of_cache: AheadOfCache | None = None
    data_dependent: bool = False


REGISTERED: dict[str, Family] = {}
"""what the modules register that were imported, by full names of operations"""
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
    """Register a function as ``Family.static`` of the operations of these full names."""
    options = {"seconds": seconds, "data_dependent": data_dependent}
    return lambda choose: _register(names, "static", choose, options)


def of_any_shape(*names: str, seconds: Seconds | None = None) -> Callable[[Chooser], Chooser]:
    """Register a function as ``Family.any_shape``; with an estimate where there is no other."""
    options = {} if seconds is None else {"seconds": seconds}
    return lambda choose: _register(names, "any_shape", choose, options)


def ahead_of_cache(*names: str) -> Callable[[Chooser], Chooser]:
    """Register a function as ``Family.ahead_of_cache``."""
    return lambda choose: _register(names, "ahead_of_cache", choose, {})


def _register(
    names: Sequence[str], form: str, choose: Chooser, options: Mapping[str, Any]
) -> Chooser:
    changes: dict[str, Any] = {form: choose, **options}
    for name in names:
        known = REGISTERED.get(name)
        if known is None:
            REGISTERED[name] = Family(**{"seconds": below_numpy, **changes})
        elif getattr(known, form) is not None:
            raise InternalError(f"two native families register {name} as {form}")
        else:
            REGISTERED[name] = replace(known, **changes)
    return choose


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
        complete = REGISTERED.get(name)
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
