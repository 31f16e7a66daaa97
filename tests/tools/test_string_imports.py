"""Imports by string are read in each of their forms, with what they name."""

from __future__ import annotations

from tests.tools.conftest import Sources
from tools.architecture import circles, own_imports, sideways, upward
from tools.string_imports import string_imports, unread

_SOFTMAX = {"backends/native/softmax.py": "def softmax_call(): ..."}


def _paths(module: str) -> list[tuple[str, str | None, str | None]]:
    return [(s.path, s.target, s.fault) for s in string_imports(module)]


def test_string_imports_of_a_function_name_its_module(sources: Sources) -> None:
    sources(
        {**_SOFTMAX, "plan.py": 'f = imported("penstock.backends.native.softmax.softmax_call")'}
    )
    path = "penstock.backends.native.softmax.softmax_call"
    assert _paths("plan") == [(path, "backends.native.softmax", None)]


def test_string_imports_resolve_constants_in_f_strings(sources: Sources) -> None:
    program = '_NATIVE = "penstock.backends.native"\nimport_module(f"{_NATIVE}.softmax")'
    sources({**_SOFTMAX, "plan.py": program})
    assert _paths("plan") == [("penstock.backends.native.softmax", "backends.native.softmax", None)]


def test_string_imports_through_a_function_of_the_module_have_its_prefix(sources: Sources) -> None:
    program = (
        "def _of(name): return imported(f'penstock.backends.native.{name}')\n"
        "FAMILIES = {'Softmax': _of('softmax.softmax_call')}\n"
    )
    sources({**_SOFTMAX, "backends/native/backend.py": program})
    assert [target for _, target, _ in _paths("backends.native.backend")] == [
        "backends.native.softmax"
    ]


def test_string_imports_through_a_class_are_read_in_other_modules(sources: Sources) -> None:
    definition = (
        "class ImportedPass:\n"
        "    def __init__(self, module):\n"
        "        self.module = f'penstock.passes.{module}'\n"
        "    def load(self): return import_module(self.module)\n"
    )
    sources(
        {
            "passes/imported.py": definition,
            "passes/pipeline.py": "PASSES = (ImportedPass('fuse', 'Add'),)",
            "passes/fuse.py": "",
        }
    )
    assert _paths("passes.pipeline") == [("penstock.passes.fuse", "passes.fuse", None)]


def test_string_imports_of_tables_are_marked(sources: Sources) -> None:
    program = "COMMANDS = {'run': ('run', 'Run a model once.')}"
    sources({"cli/commands.py": program, "cli/run.py": ""})
    (found,) = string_imports("cli.commands")
    assert (found.target, found.in_table) == ("cli.run", True)


def test_string_imports_of_what_is_missing_have_a_fault(sources: Sources) -> None:
    program = 'f = imported("penstock.backends.native.softmax.gone")\nimport_module("penstock.nowhere.at")'
    sources({**_SOFTMAX, "plan.py": program})
    assert [fault for *_, fault in _paths("plan")] == [
        "backends.native.softmax has no gone",
        "no such module",
    ]


def test_string_imports_leave_out_names_that_are_not_imported(sources: Sources) -> None:
    program = '_CELLS = ("penstock.LstmCell", "penstock.backends")\nentry_points(group=_CELLS[1])'
    sources({"plan.py": program, "backends/__init__.py": ""})
    assert _paths("plan") == []


def test_string_imports_that_run_upward_or_sideways_are_listed(sources: Sources) -> None:
    program = 'f = imported("penstock.session.run.f")\ng = imported("penstock.ops.tflite.add.g")'
    sources(
        {
            "ops/onnx/add.py": program,
            "ops/tflite/add.py": "def g(): ...",
            "session/run.py": "def f(): ...",
        }
    )
    assert own_imports("ops.onnx.add") == [("session.run", 1), ("ops.tflite.add", 2)]
    assert list(upward("ops.onnx.add")) == [("session.run", 1)]
    assert list(sideways("ops.onnx.add")) == [("ops.tflite.add", 2)]


def test_circles_include_string_imports_but_those_of_tables(sources: Sources) -> None:
    sources(
        {
            "plan/a.py": 'f = imported("penstock.plan.b.g")',
            "plan/b.py": "from penstock.plan.a import f\ndef g(): ...",
            "backends/registry.py": "BACKENDS = {'numpy': 'penstock.backends.numpy.NumpyBackend'}",
            "backends/numpy.py": "import penstock.backends.registry\nclass NumpyBackend: ...",
        }
    )
    assert circles(annotations=False) == [["plan.a", "plan.b"]]


def test_unread_lists_modules_that_import_by_computed_names(sources: Sources) -> None:
    sources({"plan.py": "def load(name): return import_module(name.lower())", "ops/add.py": ""})
    assert unread() == ["plan"]
