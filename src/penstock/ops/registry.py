"""The table of all operations.

Each operation is registered once, in the file of its family, with all of its properties: the first
schema version that means the same, its ``infer`` function, its traits and its NumPy kernel::

    @operator("Neg", since=1, infer=same_type, elementwise=True)
    def neg(node, types):
        return elementwise(np.negative)

``infer(types, attrs, consts) -> types`` computes output types from input types. ``types[i]`` is
``None`` if optional input i is omitted and ``ANY`` if its type is unknown; ``consts[i]`` is the
array if input i is a constant. It may return fewer types than the node has outputs (the others are
unknown), and raises ``ShapeError`` for a node that cannot run.

The file is imported when the operation is first looked up; ``families.py`` has its name.

The decorated function *compiles* a node: from its attributes, constant inputs
(``node.inputs[i].const``) and known input types, it creates a ``Kernel``, whose function runs many
times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache, wraps
from importlib import import_module
from types import FunctionType, MappingProxyType
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

import numpy as np

from penstock.core.errors import ExtensionError, InternalError, shortened
from penstock.core.records import replace as replaced
from penstock.core.types import STRING, RunValue, ShapeError, Type
from penstock.ir.contract import is_own
from penstock.ir.graph import Node
from penstock.ir.kernel import Kernel, returning
from penstock.ir.op import Arity, Attrs, Consts, Infer, Op, Role, Trait, Types, Work
from penstock.ops.families import MODULES

MICROSOFT = "com.microsoft"  # the domain of ONNX Runtime's own operations
COMPUTING = frozenset({"Conv", "Gemm", "MatMul"})
"""operations that backends may have integer kernels for"""
TENSORFLOW = "tensorflow"  # the domain of TensorFlow's operations that ONNX lacks
TFLITE = "tflite"  # the domain of TFLite's operations that neither has, and of custom ones
_OWN_DOMAINS = frozenset({"", "ai.onnx.ml", MICROSOFT, TENSORFLOW})
NEWEST = 10**9  # stands for the newest version of a schema

Compile = Callable[[Node, Types], Kernel]
"""Returns the NumPy kernel of a node, for inputs of these types."""
Prepared = Mapping[str, Callable[[Node], Any]]
"""Computes values once, when a node is compiled, by the names of the parameters that take them."""
ATTRS: Prepared = {"attrs": lambda node: node.attrs}
OUTPUT_COUNT: Prepared = {"count": lambda node: len(node.outputs)}

ArrayFunction: TypeAlias = Callable[..., RunValue]
"""A function of arrays, the function or the ``into`` of kernels and parts of them."""
Function = TypeVar("Function", bound=ArrayFunction)

FORGET: list[Callable[[], None]] = []
"""functions that clear caches of operations, called when users register others"""

USER_OPERATIONS: set[str] = set()
"""the names of operations that users have registered"""

_REGISTRY: dict[tuple[str, str], list[Op]] = {}
_PENDING = dict(MODULES)  # without the operations that were looked up


def unknown_types(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
    """The ``infer`` of operations whose output types are unknown before the run."""
    return ()


def no_kernel(reason: str) -> Compile:
    """The compile function of operations that no backend runs."""

    def compile(node: Node, types: Types) -> Kernel:
        raise InternalError(f"{node.op.name} has no kernel: {reason}")

    return compile


def _numeric(compile: Compile) -> Compile:
    """``compile`` of an operation that takes no strings: reject them before they reach its kernel.

    NumPy computes with them as with any objects. Where it casts the results to another type, it
    reads uninitialized memory as objects, and crashes.
    """

    @wraps(compile)
    def checked(node: Node, types: Types) -> Kernel:
        dtypes = [getattr(type_, "dtype", None) for type_ in types if type_ is not None]
        if any(dtype is STRING for dtype in dtypes):
            raise ShapeError(f"{node.op.name} takes no strings")
        kernel = compile(node, types)
        if all(dtype is not None for dtype in dtypes):
            return kernel

        def guarded(function: ArrayFunction) -> ArrayFunction:
            def call(*arguments: RunValue) -> RunValue:
                for x in arguments:
                    if isinstance(x, np.ndarray) and x.dtype.hasobject:
                        raise ShapeError(f"{node.op.name} takes no strings")
                return function(*arguments)

            return call

        into = None if kernel.into is None else guarded(kernel.into)
        begin = None if kernel.begin is None else guarded(kernel.begin)
        return replaced(kernel, function=guarded(kernel.function), into=into, begin=begin)

    return checked


def _unchecked(function: ArrayFunction) -> ArrayFunction:
    """``infer`` or ``compile`` of an operation without a schema. The inputs and attributes that the
    code reads may be missing or of a wrong type."""

    @wraps(function)
    def checked(*arguments: RunValue) -> RunValue:
        try:
            return function(*arguments)
        except ShapeError:
            raise
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
            message = f"its inputs or attributes are not those of the operation: {error!r}"
            raise ShapeError(message) from error

    return checked


def _giving_types(name: str, infer: Infer) -> Infer:
    """The ``infer`` of a user's operation, with checked results."""

    @wraps(infer)
    def checked(types: Types, attrs: Attrs, consts: Consts) -> Sequence[Type]:
        result = infer(types, attrs, consts)
        if isinstance(result, list | tuple) and all(isinstance(type_, Type) for type_ in result):
            return result
        raise ExtensionError(
            f"the infer of the operation {name!r} returned {shortened(repr(result))}; it returns a "
            "list with the type of each output. Correct it"
        )

    return checked


class _Properties(TypedDict, total=False):
    """Properties of an operation: fields of ``Op``, which documents them."""

    role: Role
    arity: Arity
    elementwise: bool
    moves: bool
    view: bool
    work: Work
    traits: AbstractSet[Trait]


def operator(
    name: str,
    *,
    domain: str = "",
    since: int = 1,
    version: int | None = None,
    infer: Infer = unknown_types,
    pure: bool = True,
    strings: bool = False,
    replace: bool = False,
    **properties: Unpack[_Properties],
) -> Callable[[Compile], Compile]:
    """Register a compile function as an operation; stackable, for operations that share one. Raises
    ``ValueError`` if an operation of this name, domain and version exists.

    Args:
        name: The name of the operation in models.
        domain: Its domain; "" is ONNX's own.
        since: The first schema version with this meaning.
        version: The last one, by default the newest.
        infer: Computes the types of outputs from the types of inputs, the attributes, and constant
            inputs; by default they are unknown before the run.
        pure: Whether a node may be folded, merged with equal ones and removed; a field of ``Op``.
        strings: Whether it accepts tensors of strings; otherwise its kernels never get one.
        replace: Whether to replace a registered operation; models that were loaded before keep the
            old one.
        properties: Other fields of ``Op``.
    """

    def register(compile: Compile) -> Compile:
        last = NEWEST if version is None else version
        if "reshapes" in properties.get("traits", ()):
            properties["moves"] = properties["view"] = True
        if not is_own(compile):
            find(name, domain)  # imports what Penstock has of this name
            USER_OPERATIONS.add(name)
            for forget in FORGET:
                forget()
        entries = _REGISTRY.setdefault((domain, name), [])
        others = [e for e in entries if last >= e.since and since <= e.version]
        if others and not replace:
            of_domain = f" of the domain {domain!r}" if domain else ""
            raise ValueError(
                f"the operation {name!r}{of_domain} is registered already, from version "
                f"{others[0].since} on; register it with replace=True to replace it"
            )
        entries[:] = [e for e in entries if e not in others]
        checked = compile if strings else _numeric(compile)
        checked_infer = infer
        if domain in (MICROSOFT, TENSORFLOW, TFLITE):
            checked = _unchecked(checked)
            checked_infer = infer if infer is unknown_types else _unchecked(infer)
        if not is_own(infer):
            checked_infer = _giving_types(name, checked_infer)
        entries.append(Op(name, domain, since, last, checked_infer, checked, pure, **properties))
        return compile

    return register


def array_operator(
    *names: str,
    view: bool = False,
    copied: bool = False,
    fills: bool = False,
    prepared: Prepared = MappingProxyType({}),
    **properties: Any,
) -> Callable[[Function], Function]:
    """Register a function of a node's inputs as operations: it is the function of their kernels.

    Its keyword-only parameters are attributes of the node, without a default mandatory ones, or
    ``prepared`` values. ``copied``: results may be copied into planned memory (``returning``).
    ``fills``: the function has a last parameter ``out``, for memory to write to.
    """

    def register(function: Function) -> Function:
        def form(function: ArrayFunction) -> Kernel:
            if copied:
                return returning(function, view=view)
            return Kernel(function, function if fills else None, view=view)

        compile = array_kernel(function, prepared, form)
        for name in names:
            operator(name, **properties)(compile)
        return function

    return register


def array_kernel(
    function: ArrayFunction,
    prepared: Prepared = MappingProxyType({}),
    form: Callable[[ArrayFunction], Kernel] = Kernel,
) -> Compile:
    """The compile function of kernels, each a ``form`` of ``function`` with keyword-only parameters
    as in ``array_operator``."""

    def compile(node: Node, types: Types) -> Kernel:
        attrs = node.attrs
        if prepared:
            attrs = {**attrs, **{name: prepare(node) for name, prepare in prepared.items()}}
        return form(_with_attributes(function, attrs))

    return compile


def _with_attributes(function: ArrayFunction, attrs: Attrs) -> ArrayFunction:
    """Copy ``function``, with attributes as the defaults of its keyword-only parameters. A call of
    the copy is as fast as a call of ``function``; a call of a ``partial`` would be slower."""
    if not isinstance(function, FunctionType):
        return function
    code, defaults = function.__code__, function.__kwdefaults__ or {}
    names = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
    if not names:
        return function
    # Defaults of keyword-only parameters, since nothing is called between a run and the function.
    copy = FunctionType(
        code, function.__globals__, None, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = {n: attrs[n] if n in attrs else defaults[n] for n in names}
    return copy


def find(name: str, domain: str = "", version: int | None = None) -> Op | None:
    """Return the operation that ``name`` means in a schema version, by default the newest. One that
    is not known, of a domain that is not Penstock's own, may come with an installed package."""
    key = domain, name
    module = _PENDING.get(key)
    if module is not None:
        import_module(module)
        # Only now: another thread that looks it up meanwhile must wait for the import.
        _PENDING.pop(key, None)
    elif key not in _REGISTRY and domain not in _OWN_DOMAINS:
        load_operations()
    entries = _REGISTRY.get(key, ())
    if version is None:
        if len(entries) == 1:
            return entries[0]
        return max(entries, key=lambda op: op.version, default=None)
    for op in entries:
        if op.since <= version <= op.version:
            return op
    return None


def adopt_operations(operations: Iterable[Op]) -> None:
    """Register operations that users registered in another process; they replace operations of the
    same name, domain and versions."""
    for op in operations:
        entries = _REGISTRY.setdefault((op.domain, op.name), [])
        if op not in entries:
            entries[:] = [e for e in entries if op.version < e.since or e.version < op.since]
            entries.append(op)
            USER_OPERATIONS.add(op.name)
            for forget in FORGET:
                forget()


@cache
def load_operations() -> None:
    """Import the modules that installed packages name as ``penstock.operations``, once."""
    from importlib.metadata import entry_points

    for entry in entry_points(group="penstock.operations"):
        entry.load()


def standard(name: str, domain: str = "") -> Op:
    """Return the newest version of an operation that must exist, by default one of ONNX."""
    op = find(name, domain)
    assert op is not None, name
    return op


def registered() -> list[Op]:
    """Return all operations, sorted by domain and name."""
    for module in set(MODULES.values()):
        import_module(module)
    return [op for key in sorted(_REGISTRY) for op in _REGISTRY[key]]
