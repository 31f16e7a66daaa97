"""Figures of the architecture: ``python tools/architecture.py`` prints them, and with the name of a
figure the places that it counts.

``tests/test_architecture.py`` uses the same functions and holds them to bounds. Imports are read
from the source, function bodies included, so that an import hidden in a function counts, and so do
imports by string (``tools/string_imports.py``). Imports under ``TYPE_CHECKING`` do not count where
folders are ordered (only annotations need them), but do where circles of modules are looked for.
What has a bound that falls with each change is counted in ``tools/ratchets.py``.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # where this file is run as a program

from tools.code_style import MEASURES, complexity, length
from tools.ratchets import FIGURES
from tools.source_tree import (
    PACKAGE,
    SOURCE,
    Function,
    functions,
    modules,
    statements,
    subfolder,
    top,
    tree,
    written,
)
from tools.string_imports import all_string_imports, string_imports

# In the order in which the data flows. Each name is a module at the top of the package or a folder;
# it imports from itself and from names above it. New files need no entry.
ORDER = (
    *("core", "algorithms"),
    *("host", "ir", "ops", "analysis", "textual", "artifact", "frontends", "build"),
    *("passes",),
    *("backends", "plan", "observers", "codegen", "executors", "inspect"),
    *("tuning", "compiler", "session", "quantizing"),
    *("cluster", "stepping", "generation", "serving", "compat", "peers", "extend", "testing"),
    *("__init__", "cli", "onnx_backend"),
)

# Sub-folders in their order, for folders whose sub-folders build on one another. Elsewhere
# sub-folders do not import their siblings at all.
SUBFOLDERS = {
    "ops": (
        *("common", "onnx", "onnx_ml", "microsoft", "tensorflow", "tflite", "penstock"),
        "internal",
    ),
    "frontends": ("common", "onnx", "tensorflow", "tflite", "nnpackage", "artifact", "weights"),
}


@cache
def imports(module: str, annotations: bool = False) -> list[tuple[str, int]]:
    """Dotted names that ``module`` imports, with the line; with ``annotations`` those under
    ``TYPE_CHECKING``, too."""
    names: list[tuple[str, int]] = []
    stack: list[ast.AST] = [tree(module)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend([*node.body, *node.orelse] if annotations else node.orelse)
            continue
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            # "from package import name" may mean a module of it, or something in its __init__.
            own = [n for n in full if n.removeprefix(f"{PACKAGE}.") in modules()]
            names += [(name, node.lineno) for name in own]
            if len(own) < len(full) and node.module:
                names.append((node.module, node.lineno))
        stack.extend(statements(node))
    return names


def own_imports(
    module: str, annotations: bool = False, tables: bool = True
) -> list[tuple[str, int]]:
    """The modules of the package that ``module`` imports, by dotted name below the package; with
    ``tables`` those of its tables of modules, too."""
    by_string = [s for s in string_imports(module) if tables or not s.in_table]
    names = [(s.target, s.line) for s in by_string if s.target is not None]
    for name, line in imports(module, annotations):
        if name == PACKAGE:
            names.append(("__init__", line))
        elif name.startswith(f"{PACKAGE}."):
            names.append((name.removeprefix(f"{PACKAGE}."), line))
    return names


def upward(module: str) -> Iterator[tuple[str, int]]:
    """Imports of ``module`` from folders that come later in ``ORDER``."""
    for imported, line in own_imports(module):
        if ORDER.index(top(imported)) > ORDER.index(top(module)):
            yield imported, line


def sideways(module: str) -> Iterator[tuple[str, int]]:
    """Imports of ``module`` from sub-folders beside its own that do not come before it."""
    order = SUBFOLDERS.get(top(module), ())
    own = subfolder(module)
    for imported, line in own_imports(module):
        other = subfolder(imported)
        if own is None or top(imported) != top(module) or other in (None, own):
            continue
        if not (own in order and other in order and order.index(other) < order.index(own)):
            yield imported, line


def circles(annotations: bool) -> list[list[str]]:
    """Sets of two or more modules that import one another, with ``annotations`` also by imports
    under ``TYPE_CHECKING``. Tables of modules are left out: they are there so that a registry can
    import what registers itself."""
    edges = {
        module: {name for name, _ in own_imports(module, annotations, tables=False)} & {*modules()}
        for module in modules()
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:  # Tarjan's algorithm
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in edges[module]:
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            position = stack.index(module)
            components.append(stack[position:])
            del stack[position:]

    for module in edges:
        if module not in index:
            visit(module)
    return [sorted(members) for members in components if len(members) > 1]


def levels() -> dict[str, int]:
    """The length of the longest path of imports above each folder or module at the top."""
    above: dict[str, set[str]] = {name: set() for name in ORDER}
    for module in modules():
        above[top(module)] |= {top(i) for i, _ in own_imports(module)} - {top(module)}
    height: dict[str, int] = {}
    for name in ORDER:
        height[name] = 1 + max((height.get(other, 0) for other in above[name]), default=0)
    return height


def shared_names() -> dict[str, list[str]]:
    """Public classes and functions whose name another module has as well, by name.

    Functions that are registered as the implementation of an operation are left out, since an
    operation has one name on every side: those that a call decorates (``@operator("Add")``), and
    all in modules that are tables of them (``IMPLEMENTATIONS``). What ``compat`` has bears the
    names of other runtimes.
    """
    homes: dict[str, dict[str, None]] = defaultdict(dict)
    for module in written():
        if top(module) == "compat":
            continue
        for node in tree(module).body:
            if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
                continue
            if isinstance(node, Function) and _is_implementation(module, node):
                continue
            homes[node.name][module] = None
    return {name: list(where) for name, where in sorted(homes.items()) if len(where) > 1}


# Modules whose functions are the entries of a table by operation.
IMPLEMENTATIONS = (
    "frontends.tensorflow.rules",
    "frontends.tflite.rules",
    "frontends.onnx.upgrades",
)


def _is_implementation(module: str, function: Function) -> bool:
    decorated = any(isinstance(decorator, ast.Call) for decorator in function.decorator_list)
    return decorated or module.startswith(IMPLEMENTATIONS)


def _named(chosen: Iterable[tuple[str, Function]]) -> list[str]:
    return [f"{module}.{function.name}, line {function.lineno}" for module, function in chosen]


STRUCTURE: dict[str, Callable[[], list[str]]] = {
    "top_modules": lambda: sorted(path.name for path in SOURCE.glob("*.py")),
    "levels": lambda: [
        " ".join(name for name, height in levels().items() if height == level)
        for level in range(1, max(levels().values()) + 1)
    ],
    "upward_imports": lambda: [
        f"{module}, line {line}: {imported}"
        for module in modules()
        for imported, line in upward(module)
    ],
    "sideways_imports": lambda: [
        f"{module}, line {line}: {imported}"
        for module in modules()
        for imported, line in sideways(module)
    ],
    "circles": lambda: [" <-> ".join(members) for members in circles(annotations=True)],
    "faulty_string_imports": lambda: [
        f"{s.module}, line {s.line}: {s.path}: {s.fault}" for s in all_string_imports() if s.fault
    ],
    "functions_over_60_lines": lambda: _named(f for f in functions() if length(f[1]) > 60),
    "functions_of_complexity_over_25": lambda: _named(
        f for f in functions() if complexity(f[1]) > 25
    ),
    "public_names_in_several_modules": lambda: [
        f"{name}: {', '.join(homes)}" for name, homes in shared_names().items()
    ],
}
"""The functions that list the places of the figures of this module, by their names"""


def report() -> Iterator[str]:
    """The figures, a line each, by the names that ``listing`` takes."""
    for name, places in (STRUCTURE | FIGURES).items():
        yield f"{name}: {len(places())}"
    for name, measure in MEASURES.items():
        yield f"{name}: {measure()}"


def listing(name: str) -> list[str]:
    """The places of a figure. Raises ``SystemExit`` for an unknown name."""
    figures = STRUCTURE | FIGURES
    if name not in figures:
        raise SystemExit(f"no figure is named {name!r}; these are: {', '.join(figures)}")
    return figures[name]()


if __name__ == "__main__":
    names = sys.argv[1:]
    print(*([place for name in names for place in listing(name)] if names else report()), sep="\n")
