"""The documents: their Python runs and prints what they say, their links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

import pytest

from tools import architecture

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


def programs() -> list[list[Path]]:
    """The documents with code to run. The pages of the tutorial are one program: each goes on
    from the one before."""
    runnable = [p for p in DOCUMENTS if {kind for kind, _ in blocks(p)} & {"python", "console"}]
    tutorial = [p for p in runnable if p.parent.name == "tutorial"]
    return [*([p] for p in runnable if p not in tutorial), tutorial]


# Runs lines of a console, as the command line does, but in the process of the program.
CONSOLE = """
def _console(commands):
    import shlex
    from penstock.cli import main
    for command in commands:
        print("$ " + command)
        program, *arguments = shlex.split(command)
        assert program == "penstock", f"only penstock can be run in a console block: {command}"
        try:
            main(arguments)
        except SystemExit as end:
            assert not end.code, f"{command} ended with {end.code}"
"""


def code(kind: str, text: str) -> str:
    """A block as Python: of a console, the commands behind its prompts."""
    if kind == "console":
        return f"_console({re.findall(r'^[$] (.*)$', text, re.MULTILINE)})"
    return text


@pytest.mark.costly(share=1)
@pytest.mark.parametrize("paths", programs(), ids=lambda paths: name(paths[0]))
def test_documented_blocks_run_in_order(paths, tmp_path):
    """In a process and a folder of their own. A text block after Python is what that prints, a
    console block has commands and what they print."""
    found = [block for path in paths for block in blocks(path)]
    program = tmp_path / "program.py"
    runs = [code(kind, text) for kind, text in found if kind in ("python", "console")]
    consoles = CONSOLE if any(kind == "console" for kind, _ in found) else ""
    parts = [f"{text}\nprint({END!r}, flush=True)\n" for text in runs]
    program.write_text("".join([consoles, *parts]))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "COLUMNS": "100",
    }
    environment["PENSTOCK_CACHE"] = str(tmp_path / "cache")  # what pages measure is theirs alone
    command = [sys.executable, "-W", "error", program.name]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = iter(done.stdout.split(END))
    latest = ""
    for kind, text in found:
        if kind in ("python", "console"):
            latest = next(printed)
        if kind in ("text", "console"):
            assert matches(latest, text), "\n".join(difference(latest, text))


def plain(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()]


MEASURED = re.compile(r" *\b\d[\d.,]* ?(?:[num]?s|%|[KMG]?FLOP/s|[KMG]i?B/s)(?!\w)")


def comparable(text: str) -> list[str]:
    """The lines of an output without what differs from run to run: times, shares and rates."""
    return [MEASURED.sub(" <measured>", line) for line in plain(text)]


def matches(printed: str, documented: str) -> bool:
    """Whether a program printed what a document shows, in which ``...`` stands for any text."""
    parts = map(re.escape, "\n".join(comparable(documented)).split("..."))
    return re.fullmatch(".*".join(parts), "\n".join(comparable(printed)), re.DOTALL) is not None


def difference(printed: str, documented: str) -> Iterator[str]:
    lines = comparable(documented), comparable(printed)
    return unified_diff(*lines, "documented", "printed", lineterm="")


def test_documented_blocks_are_of_kinds_that_are_checked():
    """So that nothing is shown as a program that no test runs."""
    checked = {"python", "text", "console", "sh", "py"}  # "py" is run by the tests of clusters
    others = [
        f"{name(path)}: {kind}"
        for path in DOCUMENTS
        for kind, text in blocks(path)
        if (kind or "penstock " in text) and kind not in checked | {"", "toml", "json"}
    ]
    assert others == []


def shell_commands() -> list[tuple[str, str]]:
    """The lines of shell that call Penstock, with the document that shows them."""
    lines = []
    for path in DOCUMENTS:
        text = "\n".join(text for kind, text in blocks(path) if kind == "sh")
        text = text.replace("\\\n", " ")
        lines += [(name(path), x) for x in re.findall(r"^(penstock [^>\n]*)", text, re.MULTILINE)]
    return lines


@pytest.mark.parametrize(("page", "line"), shell_commands())
def test_documented_commands_have_arguments_that_exist(page, line):
    """Those that are shown without what they print, since they take long or need a server."""
    import click

    from penstock.cli import main

    command: click.Command = main
    context, arguments = click.Context(main, info_name="penstock"), shlex.split(line, comments=True)
    arguments = arguments[1:]
    while isinstance(command, click.Group):
        title, command, arguments = command.resolve_command(context, arguments)
        assert command is not None, f"{page}: {title}"
        context = click.Context(command, context, info_name=title)
    _, rest, _ = command.make_parser(context).parse_args(list(arguments))
    assert not rest, f"{page}: {line}"


def test_documented_links_lead_to_files():
    broken = []
    for path in DOCUMENTS:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)  # without code
        targets = [target for target in LINK.findall(text) if "://" not in target]
        broken += [f"{name(path)}: {t}" for t in targets if not path.parent.joinpath(t).exists()]
    assert broken == []


def test_layout_lists_the_folders_in_the_order_of_the_data():
    tree = (ROOT / "docs/layout.md").read_text().split("```")[1]
    names = [
        n
        for line in tree.splitlines()
        for n in re.findall(r"(?<![\w/])(\w+)(?:/ |\.py)", line[:24])
    ]
    assert names == [name for name in architecture.ORDER if name != "__init__"]


def test_layout_has_rows_of_files_alone():
    rows = re.findall(r"^\| (`.+?`) \|", (ROOT / "docs/layout.md").read_text(), re.MULTILINE)
    for path in [path for row in rows for path in re.findall(r"`(.+?)`", row)]:
        assert (ROOT / path).exists(), path
