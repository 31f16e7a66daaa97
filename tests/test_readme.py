"""The documents: their Python runs and prints what they say, their links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
END = "\x1e"  # printed after each block, to tell their outputs apart


def blocks(path: Path) -> list[tuple[str, str]]:
    """Language and contents of the code blocks of a document."""
    return BLOCK.findall(path.read_text())


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


RUNNABLE = [path for path in DOCUMENTS if any(kind == "python" for kind, _ in blocks(path))]


@pytest.mark.parametrize("path", RUNNABLE, ids=name)
def test_documented_python_blocks_run_in_order(path, tmp_path):
    """In a process and a folder of their own. A text block after one is what that prints."""
    found = blocks(path)
    program = tmp_path / "program.py"
    program.write_text("".join(f"{t}\nprint({END!r})\n" for kind, t in found if kind == "python"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", program.name]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = iter(done.stdout.split(END))
    latest = ""
    for kind, text in found:
        if kind == "python":
            latest = next(printed)
        elif kind == "text":
            assert plain(latest) == plain(text)


def plain(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_documented_links_lead_to_files(path):
    for target in LINK.findall(path.read_text()):
        if "://" not in target:
            assert path.parent.joinpath(target).exists(), target


def test_layout_has_a_row_for_every_module():
    """By name: a name that several folders have is there as often."""
    written = Counter(re.findall(r"`(?:\w+/)*(\w+\.py)`", (ROOT / "docs/layout.md").read_text()))
    source = ROOT / "src" / "penstock"
    modules = [p for p in source.rglob("*.py") if p.name != "__init__.py" or p.parent == source]
    missing = Counter(path.name for path in modules) - written
    assert not missing, "add them to docs/layout.md, in the order in which the data passes through"


def test_layout_has_rows_of_files_alone():
    rows = re.findall(r"^\| (`.+?`) \|", (ROOT / "docs/layout.md").read_text(), re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`(.+?)`", row)]
    assert len(paths) > 300
    for path in paths:
        assert any(folder.joinpath(path).exists() for folder in (ROOT, ROOT / "src/penstock")), path
