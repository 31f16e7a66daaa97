"""The examples in docstrings of the package show what the code does."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import penstock

SOURCE = Path(penstock.__file__).parent


def modules_with_examples() -> list[str]:
    """The modules of the package in whose source an example stands."""
    files = [f for f in sorted(SOURCE.rglob("*.py")) if ">>> " in f.read_text()]
    parts = [("penstock", *f.relative_to(SOURCE).with_suffix("").parts) for f in files]
    return [".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts]


def names_before(module: str) -> dict[str, Any]:
    """What an example begins with: all names that "the example of ``another.module``" leaves, if
    the docstring of ``module`` says that it goes on from that one."""
    text = import_module(module).__doc__ or ""
    continued = re.search(r"\bexample\s+of\s+``(penstock[\w.]+)``", text)
    if continued is None:
        return {}
    earlier = import_module(continued[1])
    names = {**vars(earlier), **names_before(continued[1])}
    test = doctest.DocTestParser().get_doctest(earlier.__doc__ or "", names, continued[1], None, 0)
    assert not doctest.DocTestRunner().run(test, clear_globs=False).failed
    return dict(test.globs)


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_of_module_give_what_they_show(module: str) -> None:
    loaded = import_module(module)
    names = {**names_before(module), **vars(loaded)}
    failed, examples = doctest.testmod(loaded, globs=names, optionflags=doctest.ELLIPSIS)
    assert examples
    assert not failed, "see the examples that failed above"
