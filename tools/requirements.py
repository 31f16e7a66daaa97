"""The packages that Penstock and some of its extras require, one a line.

``python -m tools.requirements EXTRA...`` prints them for ``pip install -r``, which installs them
while Penstock itself is not built yet.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def requirements(*extras: str) -> Iterator[str]:
    """The requirements of Penstock, and of ``extras`` with the extras that these name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield from project["dependencies"]
    pending, done = [*extras], set()
    while pending:
        extra = pending.pop()
        if extra in done:
            continue
        done.add(extra)
        for requirement in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{re.escape(project['name'])}\[(.+)\]", requirement)
            if own:
                pending += own[1].split(",")
            else:
                yield requirement


if __name__ == "__main__":
    print(*requirements(*sys.argv[1:]), sep="\n")
