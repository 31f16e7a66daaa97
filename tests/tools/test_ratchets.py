"""Each figure counts what its docstring says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.conftest import Sources
from tools import ratchets

_BACKEND = "class Backend(Protocol):\n    def kernel(self): ...\n"


def _names(places: list[str]) -> list[str]:
    return [place.rpartition(": ")[2] for place in places]


def test_backend_members_are_counted_once_and_their_lookups_each(sources: Sources) -> None:
    program = (
        "def narrow(b: Backend): return getattr(b, 'narrow', False) or hasattr(b, 'arena')\n"
        "def takes(backends): return [x for x in backends if getattr(x, 'arena', None)]\n"
        "def other(value, b: Backend): return getattr(value, 'shape', b), getattr(b, 'kernel')\n"
    )
    sources({"backends/base.py": _BACKEND, "session/granted.py": program})
    assert [row.split(":")[0] for row in ratchets.backend_members()] == ["arena", "narrow"]
    assert sorted(_names(ratchets.backend_lookups())) == ["arena", "arena", "narrow"]


def test_backend_members_of_variables_taken_from_backends_count(sources: Sources) -> None:
    program = "own = context.backends[0]\nowned = [b for b in backends if b.mine]\n"
    program += "getattr(own, 'leaving', None)\n[getattr(c, 'openmp', 0) for c in owned]\n"
    sources({"backends/base.py": _BACKEND, "host/share.py": program})
    assert sorted(_names(ratchets.backend_lookups())) == ["leaving", "openmp"]


def test_fields_are_found_by_the_name_of_the_class(sources: Sources) -> None:
    record = (
        "class Kernel:\n    given: ClassVar[int] = 1\n    function: int\n    view: bool = False\n"
    )
    sources({"ir/anywhere.py": record})
    assert _names(ratchets.fields("Kernel")) == ["function", "view"]
    with pytest.raises(LookupError, match="0 classes are named Plan"):
        ratchets.fields("Plan")


def test_name_tables_have_three_names_of_operations(sources: Sources) -> None:
    program = (
        "_VIEWS = frozenset({'Reshape', 'ai.onnx.ml.Scaler', f'{DOMAIN}.Fused'})\n"
        "_RULES = {'Add': 1, 'Mul': 2, 'Reshape': 3}\n"
        "_WORDS = frozenset('Add Mul Reshape'.split())\n"
        "_TWO = ('Add', 'Mul')\n"
        "_OTHERS = ('Add', 'Mul', 'Scaler', 'a', 'b', 'c', 'd')\n"
        "def local(): return ('Add', 'Mul', 'Scaler')\n"
    )
    families = "onnx.math: Add Mul\nonnx.shape: Reshape\nml.x ai.onnx.ml: Scaler\n"
    sources(
        {
            "ops/families.txt": families,
            "ops/internal/fused.py": 'FUSED = Op("Fused", "penstock")',
            "passes/fuse.py": program,
            "plan/plan.py": "_TABLE = ['Add', 'Mul', 'Scaler']",
        }
    )
    assert _names(ratchets.name_tables_in_passes()) == [
        "_VIEWS, 3 names",
        "_RULES, 3 names",
        "_WORDS, 3 names",
    ]
    assert len(ratchets.name_tables()) == 4


def test_time_constants_are_numbers_with_a_unit_of_time(sources: Sources) -> None:
    program = (
        "_CALL_S, _BYTES_PER_S, _ROWS = 1e-6, 20e9, 4\n"
        "_NS = {'exp': 0.17}\n"
        "_STEP_US: float = 3\n"
        "ALIAS_S = other\n"
        "FLAGS = 1\n"
        "class Tuner:\n    _WAIT_MS = 2\n"
    )
    sources({"backends/costs.py": program, "plan.py": "X = 1"})
    expected = ["_CALL_S", "_BYTES_PER_S", "_NS", "_STEP_US", "_WAIT_MS"]
    assert _names(ratchets.time_constants()) == expected
    assert ratchets.files_of_time_constants() == ["backends.costs"]


def test_seconds_functions_are_those_of_backends(sources: Sources) -> None:
    program = "def dense_seconds(): ...\ndef seconds_of(): ...\n"
    sources({"backends/dense.py": program, "plan.py": program})
    assert _names(ratchets.seconds_functions()) == ["dense_seconds"]


def test_passes_outside_pipeline_are_calls_of_transforming_functions(sources: Sources) -> None:
    passes = (
        "def prune(graph: Graph) -> bool: ...\n"
        "def optimize(graph: Graph) -> bool: ...\n"
        "def is_switch(node: Node) -> bool: ...\n"
    )
    program = (
        "from penstock.passes.dead_code import prune, optimize, is_switch, Fold\n"
        "prune(graph), optimize(graph), is_switch(node), run_passes((Fold(),), graph)\n"
        "Fold().run(graph)\n"
        'late = imported("penstock.passes.dead_code.prune")\n'
        "infer_types(graph)\n"
    )
    sources({"passes/dead_code.py": passes, "compiler/frames.py": program, "cli/run.py": program})
    assert _names(ratchets.passes_outside_pipeline()) == [
        "prune",
        "Fold().run",
        "penstock.passes.dead_code.prune",
    ]
    assert ratchets.calls_of_infer_types() == ["compiler.frames, line 5"]


def test_untested_modules_have_no_test_of_their_name(sources: Sources, tmp_path: Path) -> None:
    tests = tmp_path / "tests" / "ops"
    tests.mkdir(parents=True)
    (tests / "test_add.py").touch()
    sources({"ops/__init__.py": "", "ops/add.py": "", "ops/mul.py": "", "cli/__main__.py": ""})
    assert ratchets.untested_modules() == ["ops.mul"]


def test_session_members_are_public(sources: Sources) -> None:
    session = (
        "class Session:\n    def run(self): ...\n    def _end(self): ...\n    show = imported(x)\n"
    )
    sources({"session/session.py": session})
    assert _names(ratchets.session_members()) == ["run", "show"]


def test_environment_variables_count_once_each(sources: Sources) -> None:
    program = 'A = "PENSTOCK_TRACE"\nB = "PENSTOCK_TRACE"\nC = "set PENSTOCK_CACHE"\n'
    sources({"session/environment.py": program})
    assert _names(ratchets.environment_variables()) == ["PENSTOCK_TRACE"]


def test_command_lists_the_places_of_a_figure() -> None:
    program = Path(__file__).parents[2] / "tools" / "architecture.py"
    command = [sys.executable, str(program), "kernel_fields"]
    result = subprocess.run(command, timeout=60, check=True, capture_output=True, text=True)
    assert result.stdout.splitlines() == ratchets.FIGURES["kernel_fields"]()
    unknown = subprocess.run([*command, "none"], timeout=60, capture_output=True, text=True)
    assert unknown.returncode == 1
    assert "no figure is named 'none'" in unknown.stderr
