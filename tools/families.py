"""Write the indexes of what registers itself: ``python -m tools.families``.

``families.txt`` of ``penstock.ops`` names the modules that register an operation, and that of
``penstock.backends.native`` those that register a family of kernels, each with its operations, so
that a module is imported when one of these is looked up. They follow from the decorators: this
imports all modules, and lists what they registered. ``make kernels`` runs it; tests compare the
files with what it writes.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

from penstock import ops
from penstock.ops import families, registry

WIDTH = 100


class _Registry(dict[tuple[str, str], list[Any]]):
    """The table of operations, which notes the module whose import enters each."""

    def __init__(self) -> None:
        super().__init__()
        self.homes: dict[tuple[str, str], set[str]] = {}

    def setdefault(self, key: tuple[str, str], default: Any = None) -> list[Any]:
        frame = sys._getframe(1)
        while frame.f_code.co_name != "<module>":
            assert frame.f_back is not None
            frame = frame.f_back
        self.homes.setdefault(key, set()).add(frame.f_globals["__name__"])
        return super().setdefault(key, default)


def operations_text() -> str:
    """The text of the index of operations: lines of a module, the domain if it has a name, and the
    operations. To be called in a process that has imported none of these modules."""
    assert not registry._REGISTRY, (
        "operations of modules that were imported before would be missing"
    )
    registry._REGISTRY = table = _Registry()
    for module in walk_packages(ops.__path__, f"{ops.__name__}."):
        import_module(module.name)
    names: dict[str, list[str]] = {}
    for (domain, name), homes in table.homes.items():
        for home in homes:
            module = home.removeprefix(f"{ops.__name__}.")
            names.setdefault(f"{module} {domain}".strip(), []).append(name)
    return _text(names)


def index_text() -> str:
    """The text of the index of native families: lines of a module and the operations that it has
    kernels for."""
    from penstock.backends import native  # which imports operations

    names: dict[str, list[str]] = {}
    for path in sorted(Path(native.INDEX).parent.glob("*.py")):
        if path.stem != "__init__":
            import_module(f"{native.__name__}.{path.stem}")
    for name, fields in native.REGISTERED.items():
        forms = map(fields.get, ("static", "any_shape", "ahead_of_cache"))
        for module in {form.__module__ for form in forms if form is not None}:
            if module.startswith(f"{native.__name__}."):
                names.setdefault(module.rpartition(".")[2], []).append(name)
    return _text(names)


def _text(names: Mapping[str, Iterable[str]]) -> str:
    lines = [
        textwrap.fill(
            f"{module}: {' '.join(sorted(operations))}",
            WIDTH,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for module, operations in sorted(names.items())
    ]
    return "\n".join([*lines, ""])


def write_indexes() -> None:
    """Write the indexes that have changed."""
    texts = {families.INDEX: operations_text()}
    from penstock.backends import native

    for index, text in {**texts, native.INDEX: index_text()}.items():
        path = Path(index)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path}")


if __name__ == "__main__":
    write_indexes()
