"""The page of modules has each module once, with the first sentence of its docstring."""

from __future__ import annotations

import re

from tools import layout
from tools.source_tree import GENERATED, SOURCE, modules


def test_page_has_a_row_for_every_module():
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", layout.page(), re.MULTILINE)
    paths = [path.relative_to(SOURCE) for path in modules().values()]
    expected = [
        path.as_posix()
        for path in paths
        if (path.name != "__init__.py" or len(path.parts) == 1)
        and not path.name.endswith(GENERATED)
    ]
    assert sorted(path for path, _ in rows) == sorted(expected)


def test_summaries_of_modules_are_sentences_that_fit_a_row():
    lengths = {
        module: len(layout.summary(module))
        for module, path in modules().items()
        if not path.name.endswith(GENERATED)
    }
    assert {m: n for m, n in lengths.items() if not 0 < n <= 250} == {}
