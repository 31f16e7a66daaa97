"""Test files of what has changed: ``python -m tools.changed_tests`` prints them, a line each.

What has changed is what differs from the last commit that the branch shares with ``main``, in
commits and in the working tree. A file is mapped to tests by its name:

====================================  =============================================================
changed                               tests
====================================  =============================================================
``src/penstock/a/b.py``               ``tests/a/test_b.py``; under ``ops`` and ``backends``, where
                                      one name is one family on every side, all ``test_b.py`` there
``src/penstock/backends/a/c/x/b.c``   as ``src/penstock/backends/a/b.py``, and all ``test_b_*.py``
a test file                           itself
another file of ``tests``             the test files that import it; those of its folder for a
                                      ``conftest.py``
``tools/b.py``, ``bench/b.py``        as for a module, and the test files that import it
a page of the documentation           ``tests/test_readme.py``, which runs its code
====================================  =============================================================

A module that is tested in a file of another name says so in a comment among its first lines::

    # tests: tests/session/test_artifact.py tests/session/test_hostile_artifacts.py

If nothing of this exists, all tests in the folder that mirrors the file's own, or the next above it
that has some, are taken.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAMILIES = ("ops", "backends")
"""folders of the package in which one file name is one family of operations"""
_COMMENT = re.compile(r"^# tests: (.+)$", re.MULTILINE)


def changed_files(base: str = "main") -> list[str]:
    """Files that differ from the merge base with ``base``, or from the last commit if there is no
    such branch; untracked ones too."""
    fork = _git("merge-base", "HEAD", base) or ["HEAD"]
    return _git("diff", "--name-only", fork[0]) + _git("ls-files", "--others", "--exclude-standard")


def _git(*args: str) -> list[str]:
    result = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.split()


def mapped_tests(file: str) -> set[str]:
    """The test files of a file, both relative to the root of the repository."""
    path = Path(file)
    if path.parts[0] == "tests":
        if path.name == "conftest.py":
            return _in_folder(path.parent)
        return {file} & _test_files() if path.stem.startswith("test_") else _importers(path)
    if path.parts[0] == "src":
        return named_tests(file) or _nearest(Path("tests", *path.parts[2:-1]))
    if path.suffix == ".md":
        return {"tests/test_readme.py"}
    mirrored = {f"tests/{path.parent}/test_{path.name}"} & _test_files()
    return mirrored | _importers(path) if path.suffix == ".py" else set()


def named_tests(file: str) -> set[str]:
    """The test files that bear the name of a source file, and those that it names itself."""
    path = Path(file)
    folder = Path("tests", *path.parts[2:-1])
    stem = path.parent.name if path.stem == "__init__" else path.stem.lstrip("_")
    if "c" in folder.parts:
        folder = Path(*folder.parts[: folder.parts.index("c")])
    pattern = rf"test_{stem}(_\w+)?\.py" if path.suffix in (".c", ".h") else rf"test_{stem}\.py"
    prefix = re.escape(f"{folder}/")
    tests = {t for t in _test_files() if re.fullmatch(prefix + pattern, t)}
    if len(path.parts) > 3 and path.parts[2] in FAMILIES:
        families = tuple(f"tests/{name}/" for name in FAMILIES)
        name = f"/test_{stem}.py"
        tests |= {t for t in _test_files() if t.startswith(families) and t.endswith(name)}
    if ROOT.joinpath(file).exists():
        for names in _COMMENT.findall(ROOT.joinpath(file).read_text()[:3000]):
            tests.update(names.split())
    return tests


def _nearest(folder: Path) -> set[str]:
    while not (tests := _in_folder(folder)) and folder != folder.parent:
        folder = folder.parent
    return tests


def _in_folder(folder: Path) -> set[str]:
    """The test files of a folder and those below it."""
    prefix = f"{folder}/"
    return {test for test in _test_files() if test.startswith(prefix)}


def _importers(path: Path) -> set[str]:
    """The test files that import a file, or import what imports it."""
    found: set[str] = set()
    pending = [path.with_suffix("")]
    while pending:
        module = pending.pop()
        package = re.escape(".".join(module.parent.parts))
        imported = re.compile(rf"{package}(\.| import .*\b){module.name}\b")
        for other, text in _texts().items():
            if other not in found and module.name in text and imported.search(text):
                found.add(other)
                pending.append(Path(other).with_suffix(""))
    return found & _test_files()


@cache
def _texts() -> dict[str, str]:
    return {str(p.relative_to(ROOT)): p.read_text() for p in ROOT.joinpath("tests").rglob("*.py")}


@cache
def _test_files() -> frozenset[str]:
    return frozenset(file for file in _texts() if Path(file).name.startswith("test_"))


def changed_tests(files: Iterable[str]) -> list[str]:
    """The test files of some files, each once; with those that check every module of the package if
    one of these has changed."""
    files = list(files)
    tests = set().union(*map(mapped_tests, files))
    if any(file.startswith("src/") for file in files):
        tests |= {"tests/test_architecture.py", "tests/tools/test_layout.py"}
    return sorted(tests)


if __name__ == "__main__":
    print(*changed_tests(changed_files()), sep="\n")
