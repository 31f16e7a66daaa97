"""Imports by string: literals that name a module of the package, which is imported at run time.

They are read where they stand, of three forms:

1. calls of ``imported("penstock.a.b.function")`` and ``import_module("penstock.a.b")``;
2. calls of wrappers of these: functions and classes of which a parameter ends an f-string that
   begins with the package's name, such as ``_of("dense.dense_call")``;
3. tables of modules (``TABLES``).

What a module computes from anything else cannot be read; ``unread`` lists these modules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from tools.source_tree import PACKAGE, Function, assignments, modules, nodes, text, tree, written

# Assigned at the top of a module: what precedes each name in the values of a table, and which part
# of a value is a name.
TABLES = {
    "BACKENDS": ("", r"^(.+)$"),
    "COMMANDS": (f"{PACKAGE}.cli.", r"^([a-z_]+)$"),  # the others are help
    "_HOMES": ("", rf"^({PACKAGE}\..+)$"),
    "INTERNAL": (f"{PACKAGE}.ops.internal.", r"^([a-z_]+)$"),  # the others are operations
}

# Modules that import what users, other packages or the processor name.
OPEN = {
    "compat": "the modules of its folders, and TensorFlow",
    "backends.native": "the modules of families that its families.txt names",
    "host.native": "the compiled kernels of a level of instructions",
    "cli.options": "modules that --import names",
    "peers.process": "modules that --import names",
    "host.on_demand": "defines imported()",
    "ops.registry": "the modules of families that its families.txt names",
}

_IMPORTERS = ("imported", "import_module")


class StringImport(NamedTuple):
    """A literal of ``module`` that names ``path``; ``in_table`` if it is an entry of a table."""

    module: str
    line: int
    path: str
    in_table: bool

    @property
    def target(self) -> str | None:
        """The module that is imported, by dotted name below the package; None if there is none."""
        return _split(self.path)[0]

    @property
    def fault(self) -> str | None:
        """What of ``path`` does not exist; None if all of it does."""
        target, attribute = _split(self.path)
        if target is None:
            return "no such module"
        if attribute is None or attribute in _names(target):
            return None
        return f"{target} has no {attribute}"


@cache
def string_imports(module: str) -> tuple[StringImport, ...]:
    """The imports by string of ``module``, in order of their lines."""
    source = text(module)
    if not any(name in source for name in (*_IMPORTERS, *_wrappers(module), *TABLES)):
        return ()
    return tuple(sorted([*_called(module), *_tabled(module)], key=lambda s: (s.line, s.path)))


def all_string_imports() -> list[StringImport]:
    """The imports by string of all modules."""
    return [found for module in written() for found in string_imports(module)]


def unread() -> list[str]:
    """Modules that import by something that is not a literal, with no reason in ``OPEN`` and no
    table of ``TABLES``: their imports are missing in ``string_imports``."""
    return [
        module
        for module in written()
        if re.search(r"\b(import_module|__import__)\(", text(module))
        and module not in OPEN
        and not string_imports(module)
    ]


def _called(module: str) -> Iterator[StringImport]:
    constants = {
        target.id: value.value
        for target, value in assignments(tree(module).body)
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }
    wrappers = _wrappers(module)
    for node in nodes(module):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in wrappers and node.args:
            prefix, position = wrappers[name]
            if position < len(node.args) and (own := _string(node.args[position], constants)):
                yield StringImport(module, node.lineno, prefix + own, False)
        elif name in _IMPORTERS and node.args:
            path = _string(node.args[0], constants)
            if path is not None and path.startswith(f"{PACKAGE}."):
                yield StringImport(module, node.lineno, path, False)


def _string(node: ast.expr, constants: dict[str, str]) -> str | None:
    """The value of a literal, or of an f-string of ``constants``."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.FormattedValue):
        return _string(node.value, constants)
    if isinstance(node, ast.JoinedStr):
        parts = [_string(part, constants) for part in node.values]
        return None if None in parts else "".join(map(str, parts))
    return None


def _tabled(module: str) -> Iterator[StringImport]:
    for target, value in assignments(tree(module).body):
        if target.id not in TABLES or not isinstance(value, ast.Dict):
            continue
        prefix, pattern = TABLES[target.id]
        for literal in (x for entry in value.values for x in ast.walk(entry)):
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                for name in re.findall(pattern, literal.value):
                    yield StringImport(module, literal.lineno, prefix + name, True)


def _wrappers(module: str) -> dict[str, tuple[str, int]]:
    """The prefix and the position of the name in calls of each wrapper that ``module`` may call:
    its own, and public ones of others."""
    return _public_wrappers() | _own_wrappers(module)


@cache
def _public_wrappers() -> dict[str, tuple[str, int]]:
    wrappers = [item for module in written() for item in _own_wrappers(module).items()]
    return {name: how for name, how in wrappers if not name.startswith("_")}


@cache
def _own_wrappers(module: str) -> dict[str, tuple[str, int]]:
    if not re.search(r"\b(imported|import_module)\b", text(module)):
        return {}
    found = {}
    for node in tree(module).body:
        if isinstance(node, Function):
            found[node.name] = _wraps(node, 0)
        elif isinstance(node, ast.ClassDef):
            made = [f for f in node.body if isinstance(f, Function) and f.name == "__init__"]
            found[node.name] = _wraps(made[0], 1) if made else None
    return {name: how for name, how in found.items() if how is not None}


def _wraps(function: Function, skipped: int) -> tuple[str, int] | None:
    """The prefix that ``function`` puts before a parameter, and the position of that in calls,
    which omit the first ``skipped`` ones."""
    names = [argument.arg for argument in function.args.args[skipped:]]
    for node in ast.walk(function):
        if not isinstance(node, ast.JoinedStr) or len(node.values) != 2:
            continue
        prefix, last = node.values
        if isinstance(prefix, ast.Constant) and str(prefix.value).startswith(f"{PACKAGE}."):
            name = last.value if isinstance(last, ast.FormattedValue) else None
            if isinstance(name, ast.Name) and name.id in names:
                return str(prefix.value), names.index(name.id)
    return None


@cache
def _split(path: str) -> tuple[str | None, str | None]:
    """The module of the package that ``path`` names, and what it names of that."""
    parts = path.removeprefix(f"{PACKAGE}.").split(".")
    for count in (len(parts), len(parts) - 1):
        if (module := ".".join(parts[:count])) in modules():
            return module, ".".join(parts[count:]) or None
    return None, None


@cache
def _names(module: str) -> set[str]:
    """What ``module`` defines at its top, and what it imports there."""
    names = set()
    stack: list[ast.AST] = list(tree(module).body)
    while stack:
        node = stack.pop()
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            stack.extend(ast.iter_child_nodes(node))
    return names
