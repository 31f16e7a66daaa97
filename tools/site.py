"""What MkDocs is told of the documentation: see mkdocs.yml, which names this file twice.

As hooks of MkDocs, the functions ``on_*``:

* pages that lie outside of ``docs`` (benchmarks, the change log, how to contribute) are put into
  the site where ``ADDED`` says, and so are the page of the command line, which is generated from
  its help, and that of modules, generated from their docstrings (``tools/layout.py``);
* links of pages follow them there. A link to any other file of the repository is an error.

As an extension of Griffe, which reads the docstrings: a function that takes the options of
``penstock.compiler.options`` has each of them in its signature and its list of parameters, and a
method that is documented as "``run`` ..., with the same arguments" has the list of ``run``.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from penstock.cli.commands import main as command_line
from penstock.compiler.options import CompileOptions, RunOptions
from tools import layout

ROOT = Path(__file__).resolve().parent.parent
ADDED = {
    **{f"bench/{path.name}": f"benchmarks/{path.name}" for path in ROOT.glob("bench/*.md")},
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "licence.txt",
    "README.md": "index.md",
}
"""Where pages outside of ``docs`` are in the site, by their paths in the repository."""
RECORDS = {"CompileOptions": CompileOptions, "RunOptions": RunOptions}
COMMANDS, MODULES = "reference/command-line.md", "reference/modules.md"
SAME_ARGUMENTS = re.compile(r"``(\w+)``[^.]*, with the same\s+arguments")
"""in a docstring: the method whose list of arguments the method has, too"""
LINK = re.compile(r"\]\(([^)#\s]+)((?:#[^)]*)?)\)")


def command_line_page() -> str:
    """The help of all commands, as a page."""
    parts = ["# The command line"]
    context = click.Context(command_line, info_name="penstock")
    todo: list[tuple[click.Command, click.Context]] = [(command_line, context)]
    while todo:
        command, context = todo.pop(0)
        title = f"## {context.command_path}\n\n"
        parts.append(f"{title}```text\n{command.get_help(context)}\n```")
        if isinstance(command, click.Group):
            named = [(n, command.get_command(context, n)) for n in command.list_commands(context)]
            todo += [(c, click.Context(c, context, info_name=n)) for n, c in named if c is not None]
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in ``docs``."""
    for source, page in ADDED.items():
        if (existing := files.get_file_from_path(page)) is not None:
            files.remove(existing)
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, COMMANDS, content=command_line_page()))
    files.append(File.generated(config, MODULES, content=layout.page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links that leave ``docs`` lead to the pages of the site."""
    places = {page: source for source, page in ADDED.items()}
    uri = page.file.src_uri
    folder = posixpath.dirname(places.get(uri, f"docs/{uri}"))

    def moved(match: re.Match[str]) -> str:
        target, anchor = match.groups()
        if "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        path = ADDED.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        if path == "decisions":
            path = "decisions/README.md"
        if not path:
            raise PluginError(f"{uri}: the link to {target} leads out of the site")
        return f"]({posixpath.relpath(path, posixpath.dirname(uri) or '.')}{anchor})"

    return LINK.sub(moved, markdown)


class Options(griffe.Extension):
    """Reads what ``penstock.compiler.options`` declares, and the marks of reStructuredText."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"::(?=\n\s*\n)", ":", obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        for decorator in func.decorators:
            match = re.match(r"takes\((\w+)", str(decorator.value))
            if match and match[1] in RECORDS:
                self.take(func, RECORDS[match[1]])
        text = func.docstring.value if func.docstring is not None else ""
        if func.parent is not None and (match := SAME_ARGUMENTS.search(text)):
            other = func.parent.members[match[1]]
            assert func.docstring is not None
            assert other.docstring is not None
            begin = other.docstring.value.index("\nArgs:\n")
            func.docstring.value = f"{text.rstrip()}\n{other.docstring.value[begin:]}"

    def take(self, func: griffe.Function, record: Any) -> None:
        """Give a function the fields of a record as parameters, in place of what it passes on."""
        own = [p for p in func.parameters if p.kind is not griffe.ParameterKind.var_keyword]
        own = [p for p in own if p.kind is not griffe.ParameterKind.var_positional]
        names = {parameter.name for parameter in own}
        for field in fields(record):
            if field.name not in names:
                kind = griffe.ParameterKind.positional_or_keyword
                if field.kw_only is True or any(
                    p.kind is griffe.ParameterKind.keyword_only for p in own
                ):
                    kind = griffe.ParameterKind.keyword_only
                own.append(
                    griffe.Parameter(
                        field.name, annotation=field.type, kind=kind, default=repr(field.default)
                    )
                )
        func.parameters = griffe.Parameters(*own)
        texts = {f.name: re.sub(r"(__\w+__)", r"`\1`", f.metadata["help"]) for f in fields(record)}
        lines = [f"    {name}: {text}" for name, text in texts.items()]
        if func.docstring is not None:
            text = func.docstring.value.rstrip()
            begin = (
                [] if "\nArgs:\n" in text else ["", "Args:"]
            )  # else the function has some already
            func.docstring.value = "\n".join([text, *begin, *lines])
