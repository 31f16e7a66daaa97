"""The map from changed files to tests: each module has some, and names lead to the right ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import changed_tests
from tools.changed_tests import ROOT, mapped_tests, named_tests
from tools.source_tree import modules


def test_every_module_has_tests_and_those_that_it_names_exist():
    files = [str(path.relative_to(ROOT)) for path in modules().values()]
    assert [file for file in files if not mapped_tests(file)] == []
    named = {test: file for file in files for test in named_tests(file)}
    assert {t: f for t, f in named.items() if not ROOT.joinpath(t).is_file()} == {}


def test_every_file_in_c_has_tests():
    sources = [*ROOT.glob("src/**/*.c"), *ROOT.glob("src/**/*.h")]
    assert [path for path in sources if not mapped_tests(str(path.relative_to(ROOT)))] == []


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("src/penstock/passes/optimize/fold_affine.py", {"passes/optimize/test_fold_affine.py"}),
        ("src/penstock/ir/graph.py", {"ir/test_graph.py"}),
        ("src/penstock/backends/native/c/attention/rotary.c", {"backends/native/test_rotary.py", "ops/onnx/test_rotary.py"}),
        ("tests/ir/test_graph.py", {"ir/test_graph.py"}),
        ("tools/layout.py", {"tools/test_layout.py"}),
        ("docs/layout.md", {"test_readme.py"}),
        ("src/penstock/py.typed", None),
        ("LICENSE", set()),
    ],
)  # fmt: skip
def test_changed_file_leads_to_its_tests(file, tests):
    if tests is None:
        assert mapped_tests(file)
    else:
        assert mapped_tests(file) == {f"tests/{name}" for name in tests}


def test_operation_leads_to_its_family_on_every_side():
    tests = mapped_tests("src/penstock/ops/onnx/softmax.py")
    assert {"tests/ops/onnx/test_softmax.py", "tests/backends/native/test_softmax.py"} <= tests
    assert {Path(test).name for test in tests} == {"test_softmax.py"}
    assert tests == mapped_tests("src/penstock/backends/native/c/rows/softmax.c")


def test_helper_of_tests_leads_to_all_that_import_it():
    tests = mapped_tests("tests/support/tflite_cases.py")
    assert "tests/frontends/tflite/test_conformance.py" in tests
    assert "tests/ops/onnx/test_softmax.py" not in tests
    # torch_kernels is imported by tests, and imports nothing of flows.
    assert mapped_tests("tests/support/flows.py").isdisjoint(
        mapped_tests("tests/support/torch_kernels.py")
    )


def test_comment_in_a_module_names_its_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(changed_tests, "ROOT", tmp_path)
    # What is read below this root is not kept for the tests that follow.
    monkeypatch.setattr(changed_tests, "_test_files", frozenset)
    file = tmp_path / "src" / "penstock" / "a.py"
    file.parent.mkdir(parents=True)
    file.write_text('"""A module."""\n# tests: tests/b/test_c.py tests/d/test_e.py\n')
    assert named_tests("src/penstock/a.py") == {"tests/b/test_c.py", "tests/d/test_e.py"}


def test_module_of_the_package_adds_the_rules_for_all():
    tests = changed_tests.changed_tests(["src/penstock/ir/graph.py", "LICENSE"])
    assert tests == ["tests/ir/test_graph.py", "tests/test_architecture.py", "tests/tools/test_layout.py"]  # fmt: skip
    assert changed_tests.changed_tests([]) == []
