"""The documents: their Python runs and prints what they say, their links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "CHANGELOG.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def blocks(path: Path) -> list[tuple[str, str]]:
    """Language and contents of the code blocks of a document."""
    return BLOCK.findall(path.read_text())


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


RUNNABLE = [path for path in DOCUMENTS if any(kind == "python" for kind, _ in blocks(path))]


@pytest.mark.parametrize("path", RUNNABLE, ids=name)
def test_python_blocks_run_in_order(path, tmp_path, monkeypatch):
    """A text block after a Python block is what that prints."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    printed = ""
    for kind, text in blocks(path):
        if kind == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(text, name(path), "exec"), namespace)
            printed = output.getvalue()
        elif kind == "text":
            assert plain(printed) == plain(text)


def plain(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_lead_to_files(path):
    for target in LINK.findall(path.read_text()):
        if "://" not in target:
            assert path.parent.joinpath(target).exists(), target
