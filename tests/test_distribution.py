"""The name of the distribution: on the package index ``penstock`` belongs to others, so that whoever
installed that by our documents would run a stranger's code."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import yaml

import penstock as ps
from penstock.cli import main

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
        assert re.fullmatch(rf"{NAME}\[[a-z,-]+\]", text)
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


def test_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == project["version"] == ps.__version__
    assert citation["license"] == project["license"]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in project["authors"]
    ]


def test_image_starts_the_server_with_options_that_there_are() -> None:
    """Docker itself needs a daemon, so that the image is not built here."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    instructions = dict(line.split(maxsplit=1) for line in lines if line[:1].isupper())
    program, command, *options = json.loads(instructions["ENTRYPOINT"])
    assert program == "penstock"
    known = {name for option in main.get_command(None, command).params for name in option.opts}
    assert {*options[::2]} <= known
    assert options[options.index("--port") + 1] == instructions["EXPOSE"]
    paths = (ROOT / "src/penstock/serving/app.py").read_text()
    (path,) = re.findall(r"127\.0\.0\.1:\d+(/[^']+)'", instructions["HEALTHCHECK"])
    assert f'"{path}"' in paths


def test_image_has_a_python_that_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stages = re.findall(r"^FROM python:(\d\.\d+)-", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert len({*stages}) == 1
    assert f"Programming Language :: Python :: {stages[0]}" in project["classifiers"]
