"""What the prose of the documents names exists: files, functions, options, flags, targets of make.

Blocks of code are run by ``test_readme``; here are the pieces of code within sentences and tables.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

import penstock as ps
from penstock.cli import main
from penstock.cli.commands import COMMANDS
from penstock.session.session import Session
from tests.support.onnx_text import compile_text

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(p for p in ROOT.glob("docs/**/*.md") if p.parent.name != "decisions"),
]
FOLDERS = (ROOT, ROOT / "src/penstock", ROOT / "tests", ROOT / "examples")
EXAMPLES = {  # which pages write
    "passes/optimize/cancel_negations.py",
    *("backends/native/outer.py", "backends/native/c/products/outer.c"),
    "tests/backends/native/test_outer.py",
}
GROUPS = {"penstock.operations", "penstock.backends"}  # of entry points
SPANS = re.compile(r"penstock\.(run|compile|request|batch|graph|executor|inputs|priority|rows)$")
FOREIGN = re.compile(r"^docs/(coming-from|how-to/migrate-).*")  # tables with names of others
CALLED = {
    "compile": ps.compile,
    "open": ps.open,
    "load": ps.load,
    "run": Session.run,
    "submit": Session.submit,
    **{
        name: getattr(ps, name)
        for name in ("Limits", "Cluster", "SimulatedCluster", "Replicas", "NanGuard", "Stream")
    },
}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def pieces(path: Path) -> Iterator[str]:
    """The inline code of a page; of tables with names of others, that of Penstock's column."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for paragraph in text.split("\n\n"):
        for line in paragraph.splitlines() if paragraph.startswith("|") else [paragraph]:
            if line.startswith("|") and FOREIGN.match(name(path)):
                line = "|".join(line.split("|")[2:3])
            yield from (re.sub(r"\s+", " ", code) for code in re.findall(r"`([^`]+)`", line))


@pytest.fixture(scope="module")
def codes() -> list[tuple[str, str]]:
    """All pieces of code, with their pages. A rule is one test, which names all that break it."""
    return [(name(path), code) for path in PAGES for code in pieces(path)]


def test_files_in_prose_exist(codes):
    missing = []
    for page, code in codes:
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/[\w.-]*\.(py|md|toml|c|js|txt|json)", code):
            if code not in EXAMPLES and not any((f / code).exists() for f in FOLDERS):
                missing.append((page, code))
        elif re.fullmatch(r"(\w+/)+", code) and not any((f / code).is_dir() for f in FOLDERS):
            missing.append((page, code))
    assert missing == []


def resolve(dotted: str) -> Any:
    """What a dotted name stands for; raises ``AttributeError`` or ``ImportError``."""
    parts = dotted.split(".")
    found: Any = import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            import_module(".".join(parts[:i]))
        found = getattr(found, part)
    return found


def test_dotted_names_in_prose_exist(codes):
    missing = []
    for page, code in codes:
        for dotted in re.findall(r"(?<![\w.\"'/-])((?:penstock|ps)(?:\.[A-Za-z_]\w*)+)", code):
            if dotted not in GROUPS and not SPANS.match(dotted):
                try:
                    resolve(re.sub(r"^ps\b", "penstock", dotted))
                except (AttributeError, ImportError) as error:
                    missing.append((page, dotted, str(error)))
    assert missing == []


def test_members_of_sessions_in_prose_exist(codes):
    # Some members are attributes, which the class does not have.
    session = compile_text("g (float[2] x) => (float[2] y) { y = Neg(x) }")
    missing = [
        (page, code)
        for page, code in codes
        for own, member in re.findall(r"\b(session|Session)\.([a-z_]\w*)", code)
        if not hasattr(session if own == "session" else Session, member)
        and not (own == "session" and member in ("py", "pool", "md"))
    ]
    assert missing == []


def keywords(code: str) -> Iterator[tuple[str, str]]:
    """Functions of ``CALLED`` in a piece of code, with the keywords they are called with."""
    for match in re.finditer(r"(?<!\w)(\w+)\(", code):
        depth, end = 1, match.end()
        while end < len(code) and depth:
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(code[end], 0)
            end += 1
        inside = re.sub(r"[\[({].*?[\])}]|\"[^\"]*\"", "", code[match.end() : end - 1])
        yield from ((match[1], word) for word in re.findall(r"(?<![\w.])(\w+)=", inside))


def test_keywords_of_calls_in_prose_are_options(codes):
    unknown = []
    for page, code in codes:
        for function, keyword in keywords(code):
            if function in CALLED:
                parameters = inspect.signature(CALLED[function]).parameters
                allowed = {*parameters}
                if function in ("Replicas", "Cluster", "open"):
                    allowed |= {*inspect.signature(ps.compile).parameters}
                if keyword not in allowed:
                    unknown.append((page, code))
    assert unknown == []


@cache
def flags() -> dict[str, set[str]]:
    """The options of each command."""
    context = click.Context(main)
    commands = {command: main.get_command(context, command) for command in COMMANDS}
    return {
        title: {flag for parameter in command.params for flag in parameter.opts}
        for title, command in commands.items()
        if command is not None
    }


def test_flags_in_prose_are_options_of_a_command(codes):
    known = set().union(*flags().values(), {"--help", "--version"})
    unknown = []
    for page, code in codes:
        given = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", code))
        if code.startswith(("--", "penstock")) and not given <= known:
            unknown.append((page, code))
        command = re.match(r"penstock ([a-z]+)\b", code)
        if command is not None and not given <= flags().get(command[1], set()) | {"--help"}:
            unknown.append((page, code))
    assert unknown == []


def test_commands_in_prose_exist(codes):
    commands = [(page, re.match(r"penstock ([a-z]+)\b", code), code) for page, code in codes]
    assert [(p, code) for p, m, code in commands if m and m[1] not in COMMANDS] == []


def test_targets_of_make_in_prose_exist(codes):
    makefile = (ROOT / "Makefile").read_text()
    missing = [
        (page, code)
        for page, code in codes
        for target in re.findall(r"^make ([a-z][\w-]*)", code)
        if not re.search(rf"^{target}:", makefile, re.MULTILINE)
    ]
    assert missing == []
