"""A page with a line for each module of the package: ``python -m tools.layout`` prints it.

The lines are the first sentences of the modules' docstrings, so that no list of modules has to be
kept. The documentation site has the page as ``reference/modules.md`` (``tools/site.py``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.architecture import ORDER
from tools.source_tree import GENERATED, SOURCE, modules, top, tree

INTRODUCTION = """# Modules

All modules of `src/penstock/`, by folder, in the order in which the data flows
([layout](../layout.md)).
"""


def summary(module: str) -> str:
    """The first sentence of a module's docstring, on one line."""
    docstring = ast.get_docstring(tree(module)) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split()).rstrip(":")
    sentence = paragraph.split(". ")[0].rstrip(".")
    return sentence.replace("``", "`").replace("|", "\\|")


def page() -> str:
    """The page, in Markdown."""
    return "\n".join([INTRODUCTION, *_folders()]) + "\n"


def _folders() -> Iterator[str]:
    for folder in ORDER:
        members = [m for m in modules() if top(m) == folder]
        if not SOURCE.joinpath(folder).is_dir():
            continue
        yield f"## `{folder}/`: {summary(folder)}\n\n| module | |\n|---|---|"
        for module in members:
            path = modules()[module]
            if path.name != "__init__.py" and not path.name.endswith(GENERATED):
                yield f"| `{path.relative_to(SOURCE).as_posix()}` | {summary(module)} |"
        yield ""
    yield "## At the top of the package\n\n| module | |\n|---|---|"
    for path in sorted(SOURCE.glob("*.py")):
        yield f"| `{path.name}` | {summary(path.stem)} |"


if __name__ == "__main__":
    print(page(), end="")
