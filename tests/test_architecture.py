"""The floors of the design: a module imports from its own floor or from below, never upward.

Read off the source, function bodies included, so that an import which hides in a function counts.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "penstock"
SOURCE = Path(__file__).parent.parent / "src" / PACKAGE

# From the ground up. A name stands for a module or a package and all in it that is not
# named itself. text, parse and verify stand above the operations although they speak of graphs
# only: to read "Add" back, the parser needs the table of operations. backends.base is what a plan
# asks of a backend, and so stands with the plan.
FLOORS = (
    (
        "errors",
        "types",
        "limits",
        "devices",
        "rendezvous",
        "fork",
        "threads",
        "garbage",
        "heap",
        "pace",
    ),
    ("ir",),
    ("ops",),
    ("interpret", "verify", "text", "parse"),
    ("frontends", "loading"),
    ("passes",),
    (
        "plan",
        "tasks",
        "grouping",
        "streaming",
        "tokens",
        "flow",
        "calls",
        "liveness",
        "binding",
        "codegen",
        "arenas",
        "observe",
        "explain",
        "gantt",
        "backends.base",
    ),
    ("backends",),
    ("executors",),
    (
        "signatures",
        "session",
        "running",
        "stream",
        "compiling",
        "placement",
        "forecast",
        "measuring",
        "profile",
        "costs",
        "feeds",
        "trace",
        "timeline",
        "watch",
    ),
    ("cli", "__init__", "__main__", "onnx_backend"),
)

# Pure functions over plain integers, for everybody's use: below all floors.
POLICY = ("dag", "order", "memory", "chains", "streams", "heft", "minsum", "cluster")

# Third-party packages that only some modules may import.
CONFINED = {
    "onnx": ("frontends.onnx*", "ops.reference", "onnx_backend"),
    "onnxruntime": (),
    "tensorflow": (),
    "google": ("frontends.onnx_file", "frontends.graphdef*"),
}


@cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name below the package; a package by that of its folder."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


@cache
def imports(module: str) -> list[tuple[str, int]]:
    """Dotted names that ``module`` imports, with the line; not those for type checkers only."""
    tree = ast.parse(modules()[module].read_text())
    found: list[tuple[str, int]] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: write imports from the root"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            # "from package import name" may mean a module of it, or something in its __init__.
            known = [n for n in names if n.removeprefix(f"{PACKAGE}.") in modules()]
            rest = len(known) < len(names)
            found += [(name, node.lineno) for name in known]
            found += [(node.module, node.lineno)] if rest and node.module else []
        stack.extend(ast.iter_child_nodes(node))
    return found


def own_imports(module: str) -> list[tuple[str, int]]:
    """The modules of ours that ``module`` imports, by dotted name below the package."""
    found = []
    for name, line in imports(module):
        if name == PACKAGE:
            found.append(("__init__", line))
        elif name.startswith(f"{PACKAGE}."):
            found.append((name.removeprefix(f"{PACKAGE}."), line))
    return found


def top(module: str) -> str:
    return module.split(".")[0]


def floor(module: str) -> int:
    """How high a module stands; policy modules stand at -1."""
    if top(module) in POLICY:
        return -1
    for name in (module, top(module)):
        for height, names in enumerate(FLOORS):
            if name in names:
                return height
    raise AssertionError(
        f"{module} stands on no floor: add it to FLOORS or POLICY in {Path(__file__).name}, on the "
        "lowest floor that has all it imports below it, and to docs/layout.md"
    )


@pytest.mark.parametrize("module", modules())
def test_nobody_imports_upward(module: str) -> None:
    height = floor(module)
    for imported, line in own_imports(module):
        assert floor(imported) <= height, (
            f"{module}, line {line}, imports {imported}, which stands above it. Move what both "
            "need to a floor below, pass it in as an argument, or import it under TYPE_CHECKING "
            "if only annotations need it"
        )


@pytest.mark.parametrize("module", [m for m in modules() if top(m) in POLICY])
def test_policy_knows_nothing_of_graphs(module: str) -> None:
    for imported, line in own_imports(module):
        assert top(imported) in POLICY, (
            f"{module}, line {line}, imports {imported}. Policy is pure functions over plain "
            "integers: let the caller turn graphs into these"
        )


@pytest.mark.parametrize("module", [m for m in modules() if top(m) == "executors"])
def test_executors_know_only_what_they_share(module: str) -> None:
    allowed = {"executors.base", "executors.loop", "executors.barrier", "executors.frames_run"}
    allowed |= {"backends.base", "backends", "executors"}
    apart = ("executors", "backends", "frontends", "passes")
    for imported, line in own_imports(module):
        assert top(imported) not in apart or imported in allowed or imported == module, (
            f"{module}, line {line}, imports {imported}. An executor is built from a plan and "
            "imports no front end, pass, concrete backend or other executor: move what they share "
            "to executors.base or executors.loop, or let the session pass it in"
        )


@pytest.mark.parametrize("module", modules())
def test_third_parties_stay_where_they_belong(module: str) -> None:
    for imported, line in imports(module):
        package = imported.split(".")[0]
        places = CONFINED.get(package)
        assert places is None or any(fnmatch(module, place) for place in places), (
            f"{module}, line {line}, imports {package}, which only "
            f"{', '.join(places) or 'tests and benchmarks'} may: go through one of these"
        )


@pytest.mark.parametrize("package", CONFINED)
def test_importing_penstock_is_light(package: str) -> None:
    """Third-party parsers are imported when a file of their kind is loaded."""
    program = f"import penstock, sys; sys.exit({package!r} in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert result.returncode == 0, (
        f"'import penstock' imports {package}: import it inside the function that needs it, or "
        "import the module that needs it lazily"
    )
