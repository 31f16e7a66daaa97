"""The page of modules has each module once, with the first sentence of its docstring."""

from __future__ import annotations

import re

import pytest

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


@pytest.mark.parametrize("module", modules())
def test_summary_of_module_is_a_sentence_that_fits_a_row(module):
    path = modules()[module]
    if not path.name.endswith(GENERATED):
        assert 0 < len(layout.summary(module)) <= 250
