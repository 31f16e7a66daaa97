"""The table of all operations.

Each operation is registered once, in the file of its family, with everything there is to know about
it: since which version of its domain it means what it means here, its ``infer`` function, and its
NumPy kernel::

    @operator("Neg", since=1, infer=same_type, elementwise=True)
    def neg(node, types):
        return elementwise(np.negative)

``infer(types, attrs, consts) -> types``: output types from input types. ``types[i]`` is ``None``
where optional input i is left out and ``ANY`` where nothing is known of it; ``consts[i]`` is the
array where input i is a constant. It may return fewer types than the node has outputs (the rest is
unknown), and raises ``ShapeError`` for what can never run.

The decorated function *compiles*: it looks once at the node's attributes, the inputs that are
constants (``node.inputs[i].const``) and the input types (``types``, as far as known), and returns a
``Kernel`` whose function then runs many times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np

from penstock.ir.op import Arity, Attrs, Compile, Consts, Infer, Kernel, Op, Role, Types, Work
from penstock.types import STRING, ShapeError, TensorType, Type

if TYPE_CHECKING:
    from penstock.ir.graph import Node

MICROSOFT = "com.microsoft"  # the domain of what ONNX Runtime has beside ONNX
TENSORFLOW = "tensorflow"  # the domain of what TensorFlow has beside ONNX
NEWEST = 10**9  # stands for whatever the newest version of a schema is
_REGISTRY: dict[tuple[str, str], list[Op]] = {}


def unknown_types(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    """The ``infer`` of operations whose results cannot be known before the run."""
    return ()


def _numeric(compile: Compile) -> Compile:
    """``compile``, for an operation that takes no strings: they never reach its kernel.

    NumPy would compute with them as with any objects. Where results are cast to other types, it
    then takes memory that it has not written yet for objects, which crashes.
    """

    @wraps(compile)
    def checked(node: Node, types: Types) -> Kernel:
        given = [kind for kind in types if kind is not None]
        dtypes = [kind.dtype if isinstance(kind, TensorType) else None for kind in given]
        if any(dtype is not None and dtype == STRING for dtype in dtypes):
            raise ShapeError(f"{node.op.name} takes no strings")
        kernel = compile(node, types)
        if all(dtype is not None for dtype in dtypes):
            return kernel

        def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                for x in arguments:
                    if isinstance(x, np.ndarray) and x.dtype.hasobject:
                        raise ShapeError(f"{node.op.name} takes no strings")
                return function(*arguments)

            return call

        into = None if kernel.into is None else guarded(kernel.into)
        begin = None if kernel.begin is None else guarded(kernel.begin)
        return replace(kernel, function=guarded(kernel.function), into=into, begin=begin)

    return checked


def _unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """``infer`` or ``compile`` of an operation of which there is no schema.

    Nobody has checked that a node has as many inputs and the attributes that the code reads.
    """

    @wraps(function)
    def checked(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except ShapeError:
            raise
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            message = f"its inputs or attributes are not those of the operation: {error!r}"
            raise ShapeError(message) from error

    return checked


class _Traits(TypedDict, total=False):
    """Properties of an operation; the fields of ``Op`` of these names say what they mean."""

    role: Role
    arity: Arity
    elementwise: bool
    moves: bool
    view: bool
    work: Work


def operator(
    name: str,
    *,
    domain: str = "",
    since: int = 1,
    version: int | None = None,
    infer: Infer = unknown_types,
    pure: bool = True,
    strings: bool = False,
    **traits: Unpack[_Traits],
) -> Callable[[Compile], Compile]:
    """Register a compile function as an operation; stackable, for operations that share one.

    ``version`` is the last schema version with this meaning; left out, it is the newest there is.
    ``strings``: whether it takes tensors of strings; the kernels of others never see one. ``pure``
    and ``traits`` are fields of ``Op``.
    """

    def register(compile: Compile) -> Compile:
        last = NEWEST if version is None else version
        entries = _REGISTRY.setdefault((domain, name), [])
        assert all(last < e.since or since > e.version for e in entries), (name, since)
        made = compile if strings else _numeric(compile)
        found = infer
        if domain in (MICROSOFT, TENSORFLOW):
            made = _unchecked(made)
            found = infer if infer is unknown_types else _unchecked(infer)
        entries.append(Op(name, domain, since, last, found, made, pure, **traits))
        return compile

    return register


def find(name: str, domain: str = "", version: int | None = None) -> Op | None:
    """The operation that schema version ``version`` of ``name`` means, or the newest."""
    entries = _REGISTRY.get((domain, name), ())
    if version is None:
        return max(entries, key=lambda op: op.version, default=None)
    for op in entries:
        if op.since <= version <= op.version:
            return op
    return None


def registered() -> list[Op]:
    """All operations there are, by domain and name."""
    return [op for key in sorted(_REGISTRY) for op in _REGISTRY[key]]
