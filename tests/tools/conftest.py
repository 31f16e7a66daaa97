"""A package of a few lines, for the tests of what counts in sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools import architecture, code_style, ratchets, source_tree, string_imports

Sources = Callable[[dict[str, str]], None]


def _forget() -> None:
    for module in (architecture, code_style, ratchets, source_tree, string_imports):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sources]:
    """A function that writes files of source by their paths below the package, in whose place the
    tools then read these."""
    package = tmp_path / "src" / source_tree.PACKAGE
    for module in (architecture, code_style, source_tree):
        monkeypatch.setattr(module, "SOURCE", package)
    monkeypatch.setattr(ratchets, "SOURCE", package)
    monkeypatch.setattr(ratchets, "TESTS", tmp_path / "tests")

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        _forget()

    yield write
    _forget()
