"""The rules of the architecture: a folder imports only from folders above it, and so on.

The order of the folders stands in ``tools/architecture.py``, which prints the figures, and with the
name of one its places. ``BOUNDS`` holds those that may only fall.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch

import pytest

from tools import architecture, ratchets
from tools.architecture import own_imports
from tools.code_style import MEASURES, complexity, length
from tools.source_tree import SOURCE, functions, modules, top, tree
from tools.string_imports import all_string_imports, unread

MAX_TOP_MODULES = 4
MAX_LEVELS = 15
MAX_FUNCTION_LINES = 60

# Today's figures of ``tools/ratchets.py``. A change that lowers one lowers its bound; none rises.
BOUNDS = {
    "string_imports": 29,
    "tabled_imports": 47,
    "backend_members": 0,
    "backend_lookups": 0,
    "kernel_fields": 8,
    "kernel_facets": 5,
    "native_call_fields": 14,
    "pass_context_fields": 10,
    "compile_context_fields": 6,
    "name_tables": 48,
    "name_tables_in_passes": 6,
    "time_constants": 20,
    "files_of_time_constants": 5,
    "seconds_functions": 3,
    "passes_outside_pipeline": 0,
    "calls_of_infer_types": 0,
    "tuple_splats": 0,
    "any_in_signatures": 465,
    "functions_over_6_parameters": 11,
    "classes_over_20_attributes": 0,
    "untested_modules": 40,
    "compile_options": 24,
    "session_members": 20,
    "environment_variables": 8,
}
MOST = {"python_lines": 144_644, "c_lines": 20_913}
LEAST = {"comment_percent": 5.0, "comment_percent_in_hard_files": 12.7}

# Third-party packages that only some modules may import.
CONFINED = {
    "onnx": ("onnx_backend",),
    "onnxruntime": ("peers.engines",),
    "openvino": ("peers.engines",),
    "ai_edge_litert": ("peers.engines",),
    "tensorflow": (),
    "google_crc32c": (),
    "ray": ("cluster.*", "serving.ray_serve"),
    "starlette": ("serving.app", "serving.error_answers", "serving.request_body"),
    "prometheus_client": ("serving.metrics",),
    "uvicorn": ("cli.serve", "serving.connection"),
    "httptools": ("serving.direct",),
    "tokenizers": ("generation.*",),
    "llguidance": ("generation.grammar",),
    "jinja2": ("generation.chat", "generation.chat_sandbox"),
    "google": ("frontends.onnx.file", "frontends.onnx.messages", "frontends.tensorflow.*"),
}


def test_every_module_stands_in_a_folder_of_the_order() -> None:
    assert [module for module in modules() if top(module) not in architecture.ORDER] == []


def test_modules_import_only_from_folders_above() -> None:
    assert architecture.listing("upward_imports") == [], (
        "these modules import what comes later in the flow of data. Move what both need to an "
        "earlier folder, pass it in as an argument, or import it under TYPE_CHECKING if only "
        "annotations need it"
    )


def test_subfolders_do_not_import_one_another() -> None:
    assert architecture.listing("sideways_imports") == [], "these import from a sibling folder"


def test_imports_by_string_name_what_exists() -> None:
    for name in all_string_imports():
        assert name.fault is None, f"{name.module}, line {name.line}: {name.path}: {name.fault}"


def test_all_imports_by_string_can_be_read() -> None:
    assert unread() == [], (
        "name modules in literals that tools/string_imports.py reads, or teach it to read these"
    )


@pytest.mark.parametrize("name", BOUNDS)
def test_figure_equals_its_bound(name: str) -> None:
    figure, bound = len(ratchets.FIGURES[name]()), BOUNDS[name]
    assert figure <= bound, (
        f"{name} rose from {bound} to {figure}; 'python tools/architecture.py {name}' lists them"
    )
    assert figure == bound, f"{name} fell: lower the bound to {figure}"


def test_every_figure_has_a_bound() -> None:
    assert BOUNDS.keys() == ratchets.FIGURES.keys()
    assert MOST.keys() | LEAST.keys() == MEASURES.keys()


@pytest.mark.parametrize("name", MOST)
def test_measure_is_at_most_its_bound(name: str) -> None:
    assert MEASURES[name]() <= MOST[name]


@pytest.mark.parametrize("name", LEAST)
def test_measure_is_at_least_its_bound(name: str) -> None:
    assert MEASURES[name]() >= LEAST[name]


def test_modules_have_no_circles_of_imports() -> None:
    assert architecture.circles(annotations=False) == []


def test_annotations_make_no_circle_of_modules() -> None:
    assert architecture.circles(annotations=True) == []


def test_public_classes_and_functions_have_names_of_their_own() -> None:
    assert architecture.shared_names() == {}


def test_functions_have_at_most_sixty_lines() -> None:
    long = [(m, f.name) for m, f in functions() if length(f) > MAX_FUNCTION_LINES]
    assert long == []


# Functions of a cyclomatic complexity over 25, with the reason.
INTRICATE = {
    ("ops.onnx.shape", "reshaped_dims"): "one case for each kind of dim, known or not",
    ("plan.tasks", "slots"): "four walks over the tasks, each of nested loops",
}


def test_few_functions_are_intricate() -> None:
    found = {(m, f.name) for m, f in functions() if complexity(f) > 25}
    assert found <= INTRICATE.keys(), "split them, or give the reason in INTRICATE"
    assert len(INTRICATE) <= 5


def test_top_of_the_package_has_few_modules() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= MAX_TOP_MODULES


def test_imports_of_folders_have_few_levels() -> None:
    assert max(architecture.levels().values()) <= MAX_LEVELS, architecture.levels()


def imports_of_folder(folder: str) -> list[tuple[str, str]]:
    """What modules of a folder import, and a text that says where."""
    return [
        (imported, f"{module}, line {line}: {imported}")
        for module in modules()
        if top(module) == folder
        for imported, line in own_imports(module)
    ]


def test_algorithms_import_nothing_of_graphs() -> None:
    imports = imports_of_folder("algorithms")
    assert [where for name, where in imports if top(name) not in ("core", "algorithms")] == [], (
        "algorithms are pure functions over plain integers: let the caller turn graphs into these"
    )


def test_executors_do_not_import_passes_or_concrete_backends() -> None:
    imports = imports_of_folder("executors")
    assert imports
    assert [where for name, where in imports if top(name) in ("frontends", "passes")] == []
    concrete = [x for x in imports if top(x[0]) == "backends"]
    assert [where for name, where in concrete if name not in ("backends", "backends.base")] == [], (
        "an executor is built from a plan; let the session pass in what else it needs"
    )


def test_third_party_packages_stay_where_they_belong() -> None:
    faults = []
    for module in modules():
        for imported, line in architecture.imports(module):
            package = imported.split(".")[0]
            places = CONFINED.get(package)
            if places is not None and not any(fnmatch(module, place) for place in places):
                allowed = ", ".join(places) or "tests and benchmarks"
                faults.append(f"{module}, line {line}: {package}, which only {allowed} may import")
    assert faults == [], "go through one of the modules that may"


@pytest.mark.parametrize("package", CONFINED)
def test_importing_penstock_imports_no_parser(package: str) -> None:
    """Third-party parsers are imported when a file of their kind is loaded."""
    program = f"import penstock, sys; sys.exit({package!r} in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert result.returncode == 0, (
        f"'import penstock' imports {package}: import it inside the function that needs it, or "
        "import the module that needs it lazily"
    )


def test_messages_with_fields_are_formatted() -> None:
    """No message is a plain string with a field such as "{shape}", which only an f-string fills in."""
    plain = []
    for module in modules():
        for node in ast.walk(tree(module)):
            if not isinstance(node, ast.Raise) or node.exc is None:
                continue
            formatted = {
                id(part)
                for text in ast.walk(node.exc)
                if isinstance(text, ast.JoinedStr)
                for part in ast.walk(text)
            }
            plain += [
                (module, part.value)
                for part in ast.walk(node.exc)
                if isinstance(part, ast.Constant) and id(part) not in formatted
                if re.search(r"\{[\w*\[]", str(part.value))
            ]
    assert plain == []


def test_modules_assign_each_name_once() -> None:
    """A function sees the last value of a name, whichever stands above it."""
    twice = []
    for module in modules():
        names = [
            target.id
            for statement in tree(module).body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        ]
        twice += [(module, name) for name in {*names} if names.count(name) > 1]
    assert twice == []


def test_what_reads_saved_sessions_asserts_nothing() -> None:
    """``python -O`` leaves assertions out, and the file may be made to do harm."""
    found = [
        (module, node.lineno)
        for module in modules()
        if module.startswith("artifact.")
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Assert)
    ]
    assert found == []
