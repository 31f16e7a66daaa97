"""Write the index of the native families: ``python -m tools.native_families``.

``families.txt`` of ``penstock.backends.native`` names the modules that register a family of
kernels, each with its operations, so that a module is imported when one of these is looked up. It
follows from the decorators: this imports all modules, and lists what they registered. ``make
kernels`` runs it; ``tests/backends/native/test_families.py`` compares the file with what it writes.
"""

from __future__ import annotations

import textwrap
from importlib import import_module
from pathlib import Path

from penstock.backends import native

WIDTH = 100


def index_text() -> str:
    """The text of the index: lines of a module and the operations that it has kernels for."""
    names: dict[str, list[str]] = {}
    for path in sorted(Path(native.INDEX).parent.glob("*.py")):
        if path.stem != "__init__":
            import_module(f"{native.__name__}.{path.stem}")
    for name, fields in native.REGISTERED.items():
        forms = map(fields.get, ("static", "any_shape", "ahead_of_cache"))
        for module in {form.__module__ for form in forms if form is not None}:
            if module.startswith(f"{native.__name__}."):
                names.setdefault(module.rpartition(".")[2], []).append(name)
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


def write_index() -> bool:
    """Write the index if it has changed; whether it has."""
    path, text = Path(native.INDEX), index_text()
    if path.exists() and path.read_text() == text:
        return False
    path.write_text(text)
    return True


if __name__ == "__main__":
    if write_index():
        print(f"wrote {native.INDEX}")
