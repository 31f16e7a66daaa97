"""The modules of the package and their syntax trees, which the figures of the architecture are
counted in. Each file is read and parsed once."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = "penstock"
SOURCE = Path(__file__).parent.parent / "src" / PACKAGE
GENERATED = ("_pb2.py",)

Function = ast.FunctionDef | ast.AsyncFunctionDef

Places = list[str]
"""where in the source something is, a line of text each"""


@cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name below the package; a package by that of its folder."""
    paths = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        paths[".".join(parts)] = path
    return paths


@cache
def written() -> tuple[str, ...]:
    """The names of the modules that are not generated."""
    return tuple(m for m, path in modules().items() if not path.name.endswith(GENERATED))


@cache
def text(module: str) -> str:
    """The source of a module."""
    return modules()[module].read_text()


@cache
def tree(module: str) -> ast.Module:
    """The syntax tree of a module."""
    parsed = ast.parse(text(module))
    # All trees are a million objects, which stay: to walk them for garbage takes longer than to
    # parse.
    gc.freeze()
    return parsed


@cache
def nodes(module: str) -> tuple[ast.AST, ...]:
    """Every node of the syntax tree of a module, expressions included, in the source's order."""
    ordered: list[ast.AST] = []
    stack: list[ast.AST] = [tree(module)]
    while stack:
        node = stack.pop()
        ordered.append(node)
        stack.extend(reversed([*ast.iter_child_nodes(node)]))
    return tuple(ordered)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of ``node`` that are statements, and the clauses that hold some."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child


@cache
def functions() -> tuple[tuple[str, Function], ...]:
    """Every function of every module that is not generated, nested ones too."""
    pairs = []
    for module in written():
        stack: list[ast.AST] = [tree(module)]
        while stack:
            node = stack.pop()
            if isinstance(node, Function):
                pairs.append((module, node))
            stack.extend(statements(node))
    return tuple(pairs)


def assignments(body: list[ast.stmt]) -> Iterator[tuple[ast.Name, ast.expr]]:
    """The names that ``body`` assigns, each with its value. ``a, b = 1, 2`` is two pairs."""
    pairs: list[tuple[ast.expr, ast.expr]]
    for statement in body:
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            pairs = [(statement.target, statement.value)]
        elif isinstance(statement, ast.Assign):
            pairs = []
            for target in statement.targets:
                value = statement.value
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs += zip(target.elts, value.elts, strict=False)
                else:
                    pairs.append((target, value))
        else:
            continue
        yield from ((target, value) for target, value in pairs if isinstance(target, ast.Name))


def class_of_name(name: str) -> tuple[str, ast.ClassDef]:
    """The class of a name, with its module, wherever in the package it is defined. Raises
    ``LookupError`` unless there is exactly one."""
    homes = [
        (module, node)
        for module in written()
        if f"class {name}" in text(module)
        for node in tree(module).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    if len(homes) != 1:
        places = ", ".join(module for module, _ in homes)
        raise LookupError(f"{len(homes)} classes are named {name}: {places}")
    return homes[0]


def top(module: str) -> str:
    """The folder or top-level module that ``module`` belongs to."""
    return module.split(".")[0]


def subfolder(module: str) -> str | None:
    """The sub-folder of its folder in which a module stands, if in any."""
    parts = module.split(".")
    path = SOURCE.joinpath(*parts[:2])
    return parts[1] if len(parts) > 1 and path.is_dir() else None


def place(module: str, node: ast.AST, what: str = "") -> str:
    """Where a node is, and what is there."""
    return f"{module}, line {getattr(node, 'lineno', 0)}" + (f": {what}" if what else "")
