"""Figures of the form of the code count what their docstrings say."""

from __future__ import annotations

import ast

import pytest

from tests.tools.conftest import Sources
from tools import code_style


def _names(places: list[str]) -> list[str]:
    return [place.rpartition(": ")[2] for place in places]


def test_length_leaves_out_docstring_and_decorators() -> None:
    (function,) = ast.parse('@cached\ndef f():\n    """Doc.\n\n    More."""\n    return 1\n').body
    assert isinstance(function, ast.FunctionDef)
    assert code_style.length(function) == 2 + 1 - 1


def test_complexity_is_one_more_than_the_decisions() -> None:
    (function,) = ast.parse("def f(a, b):\n    return [x for x in a if x] if a and b else 0\n").body
    assert isinstance(function, ast.FunctionDef)
    assert code_style.complexity(function) == 5


def test_tuple_splats_of_names_assigned_in_the_function(sources: Sources) -> None:
    program = (
        "pair = 1, 2\n"
        "def f(given):\n"
        "    parts = plan, limits\n"
        "    rows = [1, 2]\n"
        "    write(*parts), write(*given), write(*rows), write(*pair), write(*(plan, limits))\n"
        "    def inner(): return write(*parts)\n"
        "class Writer:\n"
        "    def write(self):\n"
        "        a, b = (1, 2), 3\n"
        "        return f(*a, *b)\n"
    )
    sources({"codegen/writer.py": program})
    assert _names(code_style.tuple_splats()) == ["*parts", "*parts", "*a"]


def test_any_in_signatures_counts_annotations(sources: Sources) -> None:
    sources({"a.py": "def f(x: Any, *y: list[Any], z: int = 0) -> Any:\n    local: Any = x\n"})
    assert len(code_style.any_in_signatures()) == 3


def test_functions_over_6_parameters_leave_out_self(sources: Sources) -> None:
    program = "class A:\n    def f(self, a, b, c, d, e, f): ...\n    def g(self, a, b, c, d, e, *f, **g): ...\n"
    sources({"a.py": program})
    assert _names(code_style.functions_over_6_parameters()) == ["g(), 7 parameters"]


def test_classes_over_20_attributes_count_what_methods_assign(sources: Sources) -> None:
    names = ", ".join(f"self.x{i}" for i in range(21))
    sources({"a.py": f"class A:\n    def __init__(self, z):\n        {names} = z\nclass B: ...\n"})
    assert _names(code_style.classes_over_20_attributes()) == ["A, 21 attributes"]


def test_comments_are_counted_beside_code(sources: Sources) -> None:
    program = (
        '"""Docs # of this."""\n'
        "\n"
        "# why\n"
        'x = "# text"  # and why\n'
        "y = 1  # type: ignore\n"
        "z = 2  # noqa: E501\n"
    )
    sources({"a.py": program, "b.py": "x = 1\n"})
    assert code_style.comments("a") == (2, 3)
    assert code_style.comment_percent() == 50.0


def test_hard_files_are_found_by_the_ends_of_their_paths(sources: Sources) -> None:
    files = {f"anywhere/{name}": "x = 1\n" for name in code_style.HARD_FILES}
    sources(files)
    assert len(code_style.hard_modules()) == 10
    sources({"elsewhere/stages.py": ""})
    with pytest.raises(LookupError, match=r"2 modules are stages\.py"):
        code_style.hard_modules()


def test_lines_of_python_and_c(sources: Sources) -> None:
    sources(
        {
            "a.py": "x = 1\n  # why\ny = 2\n",
            "x_pb2.py": "z = 3\n",
            "c/a.c": "int a;\n",
            "c/a.h": "\n",
        }
    )
    assert (code_style.python_lines(), code_style.c_lines()) == (2, 2)
