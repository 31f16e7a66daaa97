"""Figures of the architecture: ``python tools/architecture.py`` prints them.

``tests/test_architecture.py`` uses the same functions and holds them to bounds. Imports are read
from the source, function bodies included, so that an import hidden in a function counts. Imports
under ``TYPE_CHECKING`` do not count where folders are ordered (only annotations need them), but do
where circles of modules are looked for.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PACKAGE = "penstock"
SOURCE = Path(__file__).parent.parent / "src" / PACKAGE
GENERATED = ("_pb2.py", "_dnnl.py")

# In the order in which the data flows. Each name is a module at the top of the package or a folder;
# it imports from itself and from names above it. New files need no entry.
ORDER = (
    *("core", "algorithms"),
    *("host", "ir", "ops", "analysis", "textual", "artifact", "frontends", "build"),
    *("passes",),
    *("backends", "plan", "observers", "codegen", "executors", "inspect"),
    *("tuning", "compiler", "session"),
    *("cluster", "serving", "compat", "extend", "testing"),
    *("__init__", "cli", "onnx_backend"),
)

# Sub-folders in their order, for folders whose sub-folders build on one another. Elsewhere
# sub-folders do not import their siblings at all.
SUBFOLDERS = {
    "ops": (
        *("common", "onnx", "onnx_ml", "microsoft", "tensorflow", "tflite", "penstock"),
        "internal",
    ),
    "frontends": ("common", "onnx", "tensorflow", "tflite", "nnpackage", "artifact"),
}


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
def tree(module: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(modules()[module].read_text())


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """What ``node`` consists of, less the expressions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child


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
        stack.extend(_statements(node))
    return names


def own_imports(module: str, annotations: bool = False) -> list[tuple[str, int]]:
    """The modules of the package that ``module`` imports, by dotted name below the package."""
    names = []
    for name, line in imports(module, annotations):
        if name == PACKAGE:
            names.append(("__init__", line))
        elif name.startswith(f"{PACKAGE}."):
            names.append((name.removeprefix(f"{PACKAGE}."), line))
    return names


def top(module: str) -> str:
    """The folder or top-level module that ``module`` belongs to."""
    return module.split(".")[0]


def subfolder(module: str) -> str | None:
    """The sub-folder of its folder in which a module stands, if in any."""
    parts = module.split(".")
    path = SOURCE.joinpath(*parts[:2])
    return parts[1] if len(parts) > 1 and path.is_dir() else None


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
    under ``TYPE_CHECKING``."""
    edges = {
        module: {name for name, _ in own_imports(module, annotations) if name in modules()}
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


def lines() -> int:
    """Lines of all modules but generated ones."""
    paths = [path for path in modules().values() if not path.name.endswith(GENERATED)]
    return sum(len(path.read_text().splitlines()) for path in paths)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Function]]:
    """Every function of every module that is not generated, nested ones too."""
    for module, path in modules().items():
        stack: list[ast.AST] = [] if path.name.endswith(GENERATED) else [tree(module)]
        while stack:
            node = stack.pop()
            if isinstance(node, Function):
                yield module, node
            stack.extend(_statements(node))


def length(function: Function) -> int:
    """Lines of a function, its decorators and its docstring not counted."""
    body = function.body
    if ast.get_docstring(function) is not None and len(body) > 1:
        return 1 + (function.end_lineno or 0) - body[1].lineno + body[0].lineno - function.lineno
    return 1 + (function.end_lineno or 0) - function.lineno


_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.Assert)


def complexity(function: Function) -> int:
    """The cyclomatic complexity (McCabe 1976): one more than the decisions, those of nested
    functions not counted."""
    count = 1
    stack: list[ast.AST] = list(function.body)
    while stack:
        node = stack.pop()
        if isinstance(node, Function | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, _BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, ast.match_case):
            count += 1
        stack.extend(ast.iter_child_nodes(node))
    return count


def shared_names() -> dict[str, list[str]]:
    """Public classes and functions whose name another module has as well, by name.

    Functions that are registered as the implementation of an operation are left out, since an
    operation has one name on every side: those that a call decorates (``@operator("Add")``), and
    all in modules that are tables of them (``IMPLEMENTATIONS``). What ``compat`` has bears the
    names of other runtimes.
    """
    homes: dict[str, dict[str, None]] = defaultdict(dict)
    for module, path in modules().items():
        if path.name.endswith(GENERATED) or top(module) == "compat":
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
    "backends.onednn.",
)


def _is_implementation(module: str, function: Function) -> bool:
    decorated = any(isinstance(decorator, ast.Call) for decorator in function.decorator_list)
    return decorated or module.startswith(IMPLEMENTATIONS)


def report() -> Iterator[str]:
    """The figures, a line each."""
    heights = levels()
    names = shared_names()
    long = [(m, f) for m, f in functions() if length(f) > 60]
    intricate = [(m, f) for m, f in functions() if complexity(f) > 25]
    yield f"modules at the top of the package: {len(list(SOURCE.glob('*.py')))}"
    yield f"levels of imports between folders: {max(heights.values())}"
    yield f"imports that run upward: {sum(len(list(upward(m))) for m in modules())}"
    yield f"imports between sibling folders: {sum(len(list(sideways(m))) for m in modules())}"
    yield from _listed("circles of modules", (" <-> ".join(c) for c in circles(annotations=True)))
    yield f"lines: {lines()}"
    yield from _listed(
        "functions over 60 lines", (f"{m}.{f.name}: {length(f)} lines" for m, f in long)
    )
    yield from _listed(
        "functions of complexity over 25", (f"{m}.{f.name}: {complexity(f)}" for m, f in intricate)
    )
    yield from _listed(
        "public names in several modules", (f"{n}: {', '.join(w)}" for n, w in names.items())
    )


def _listed(title: str, rows: Iterable[str]) -> Iterator[str]:
    rows = list(rows)
    yield f"{title}: {len(rows)}"
    yield from (f"    {row}" for row in rows)


if __name__ == "__main__":
    print("\n".join(report()))
