"""The name of the distribution: on the package index ``penstock`` belongs to others, so that whoever
installed that by our documents would run a stranger's code."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAME = "penstock-runtime"
# ``pip install penstock``, and extras of it: penstock[serve].
OLD = re.compile(r"pip install\b[^\n`]*?['\" ]penstock(?![\w-])|(?<![\w.-])penstock\[[a-z]+\]")


def test_distribution_has_a_name_of_its_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == NAME
    extras = project["optional-dependencies"]
    own = [text for texts in extras.values() for text in texts if text.startswith("penstock")]
    assert own
    for text in own:
        assert re.fullmatch(rf"{NAME}\[[a-z,]+\]", text)
        assert {*text[len(NAME) + 1 : -1].split(",")} <= extras.keys()


def test_no_text_installs_the_distribution_of_others() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.toml", "*.txt", "*.yml", "Makefile", ".ci"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.split():
        path = ROOT / name
        if path.is_file() and path != Path(__file__):
            text = path.read_text(errors="replace")
            assert [found.group() for found in OLD.finditer(text)] == [], name


def test_old_forms_are_found() -> None:
    for text in ("pip install penstock", "pip install 'penstock[torch]'", "needs penstock[serve]"):
        assert OLD.search(text)
    for text in (f"pip install {NAME}", f"pip install '{NAME}[torch]'", "import penstock"):
        assert not OLD.search(text)
