"""The order of the folders: a folder imports only from folders above it.

Imports are read from the source, function bodies included, so that an import hidden in a function
counts. Imports under ``TYPE_CHECKING`` do not: only annotations need them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "penstock"
SOURCE = Path(__file__).parent.parent / "src" / PACKAGE

# In the order in which the data flows. Each name is a module at the top of the package or a folder;
# it imports from itself and from names above it. New files need no entry.
ORDER = (
    *("types", "errors", "limits"),
    *("host", "algorithms", "ir", "ops", "analysis", "textual", "frontends", "passes"),
    *("backends", "plan", "observers", "codegen", "executors", "inspect", "tuning", "session"),
    *("__init__", "cli", "onnx_backend"),
)

# Sub-folders in their order, for folders whose sub-folders build on one another. Elsewhere
# sub-folders do not import their siblings at all.
SUBFOLDERS = {
    "ops": ("common", "onnx", "onnx_ml", "microsoft", "tensorflow", "internal"),
    "frontends": ("common", "onnx", "tensorflow"),
}

# What stands at the top of the package beside the folders.
MOST_TOP_MODULES = 8
MOST_LEVELS = 12

# Third-party packages that only some modules may import.
CONFINED = {
    "onnx": ("frontends.onnx.*", "ops.common.reference", "onnx_backend"),
    "onnxruntime": (),
    "tensorflow": (),
    "google": ("frontends.onnx.file", "frontends.tensorflow.*"),
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
def imports(module: str) -> list[tuple[str, int]]:
    """Dotted names that ``module`` imports, with the line; not those for type checkers only."""
    tree = ast.parse(modules()[module].read_text())
    names: list[tuple[str, int]] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: write imports from the root"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            # "from package import name" may mean a module of it, or something in its __init__.
            known = [n for n in full if n.removeprefix(f"{PACKAGE}.") in modules()]
            names += [(name, node.lineno) for name in known]
            if len(known) < len(full) and node.module:
                names.append((node.module, node.lineno))
        stack.extend(ast.iter_child_nodes(node))
    return names


def own_imports(module: str) -> list[tuple[str, int]]:
    """The modules of the package that ``module`` imports, by dotted name below the package."""
    names = []
    for name, line in imports(module):
        if name == PACKAGE:
            names.append(("__init__", line))
        elif name.startswith(f"{PACKAGE}."):
            names.append((name.removeprefix(f"{PACKAGE}."), line))
    return names


def top(module: str) -> str:
    return module.split(".")[0]


def subfolder(module: str) -> str | None:
    """The sub-folder of its folder in which a module stands, if in any."""
    parts = module.split(".")
    path = SOURCE.joinpath(*parts[:2])
    return parts[1] if len(parts) > 1 and path.is_dir() else None


def circles() -> Iterator[list[str]]:
    """Sets of modules that import one another, by Tarjan's algorithm."""
    edges = {m: {i for i, _ in own_imports(m) if i in modules() and i != m} for m in modules()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in edges[module]:
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            position = stack.index(module)
            found.append(stack[position:])
            del stack[position:]

    for module in edges:
        if module not in index:
            visit(module)
    return (members for members in found if len(members) > 1)


def levels() -> dict[str, int]:
    """The length of the longest path of imports below each folder or module at the top."""
    below: dict[str, set[str]] = {name: set() for name in ORDER}
    for module in modules():
        below[top(module)] |= {top(i) for i, _ in own_imports(module)} - {top(module)}
    height: dict[str, int] = {}
    for name in ORDER:
        height[name] = 1 + max((height[other] for other in below[name]), default=0)
    return height


@pytest.mark.parametrize("module", modules())
def test_module_imports_only_from_folders_above(module: str) -> None:
    assert top(module) in ORDER, f"{module} stands in no folder of ORDER in {Path(__file__).name}"
    for imported, line in own_imports(module):
        assert ORDER.index(top(imported)) <= ORDER.index(top(module)), (
            f"{module}, line {line}, imports {imported}, which comes later in the flow of data. "
            "Move what both need to an earlier folder, pass it in as an argument, or import it "
            "under TYPE_CHECKING if only annotations need it"
        )


@pytest.mark.parametrize("module", [m for m in modules() if subfolder(m)])
def test_subfolders_do_not_import_one_another(module: str) -> None:
    order = SUBFOLDERS.get(top(module), ())
    own = subfolder(module)
    for imported, line in own_imports(module):
        other = subfolder(imported)
        if top(imported) != top(module) or other in (None, own):
            continue
        allowed = own in order and other in order and order.index(other) < order.index(own)
        assert allowed, f"{module}, line {line}, imports {imported}, of a sibling folder"


def test_no_module_imports_itself_through_others() -> None:
    assert list(circles()) == []


def test_top_of_the_package_has_few_modules() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= MOST_TOP_MODULES


def test_imports_of_the_top_have_few_levels() -> None:
    assert max(levels().values()) <= MOST_LEVELS, levels()


@pytest.mark.parametrize("module", [m for m in modules() if top(m) == "algorithms"])
def test_algorithms_import_nothing_of_graphs(module: str) -> None:
    for imported, line in own_imports(module):
        assert top(imported) == "algorithms", (
            f"{module}, line {line}, imports {imported}. Algorithms are pure functions over plain "
            "integers: let the caller turn graphs into these"
        )


@pytest.mark.parametrize("module", [m for m in modules() if top(m) == "executors"])
def test_executors_do_not_import_passes_or_concrete_backends(module: str) -> None:
    for imported, line in own_imports(module):
        assert top(imported) not in ("frontends", "passes"), f"{module}, line {line}: {imported}"
        assert top(imported) != "backends" or imported in ("backends", "backends.base"), (
            f"{module}, line {line}, imports {imported}: an executor is built from a plan; let the "
            "session pass in what else it needs"
        )


@pytest.mark.parametrize("module", modules())
def test_third_party_packages_stay_where_they_belong(module: str) -> None:
    for imported, line in imports(module):
        package = imported.split(".")[0]
        places = CONFINED.get(package)
        assert places is None or any(fnmatch(module, place) for place in places), (
            f"{module}, line {line}, imports {package}, which only "
            f"{', '.join(places) or 'tests and benchmarks'} may: go through one of these"
        )


@pytest.mark.parametrize("package", CONFINED)
def test_importing_penstock_imports_no_parser(package: str) -> None:
    """Third-party parsers are imported when a file of their kind is loaded."""
    program = f"import penstock, sys; sys.exit({package!r} in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert result.returncode == 0, (
        f"'import penstock' imports {package}: import it inside the function that needs it, or "
        "import the module that needs it lazily"
    )
