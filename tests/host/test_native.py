"""The extension modules of compiled kernels."""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import PenstockError
from penstock.host import native as library


def test_library_compiled_from_other_sources_says_how_to_compile_it_again(monkeypatch):
    level, *_ = library.supported_levels()
    if level == "off":
        pytest.skip("there are no compiled kernels")
    monkeypatch.setattr(library, "_checksum", lambda: "0")
    monkeypatch.setattr(library, "_newest", lambda: 2**63)
    with pytest.raises(PenstockError, match=r"another version of Penstock: run 'make kernels'"):
        library.load_level.__wrapped__(level)


def test_functions_of_all_tables_have_names_of_their_own():
    """One attribute has them all: of two functions of one name, one would be lost."""
    root = Path(__file__).parents[2] / "src" / "penstock"
    text = "".join(path.read_text() for path in sorted(root.rglob("*.c")))
    tables = re.findall(
        r"^PyMethodDef \w+_functions\[\] = \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL
    )
    names = Counter(
        name for table in tables for name in re.findall(r'^    \{"(\w+)",', table, re.MULTILINE)
    )
    assert len(names) > 30
    assert [name for name, count in names.items() if count > 1] == []


def test_library_newer_than_its_sources_is_not_compared_with_them(monkeypatch):
    level, *_ = library.supported_levels()
    if level == "off":
        pytest.skip("there are no compiled kernels")
    monkeypatch.setattr(library, "_checksum", lambda: "0")
    monkeypatch.setattr(library, "_newest", lambda: 0)
    assert library.load_level.__wrapped__(level) is not None


def test_second_interpreter_is_refused_the_modules_of_the_first():
    loaded = library.library()
    if loaded is None:
        pytest.skip("there are no compiled kernels")
    interpreters = pytest.importorskip(
        "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    )
    program = (
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        f"spec = spec_from_file_location({loaded.functions.__name__!r}, {loaded.path!r})\n"
        "try:\n"
        "    spec.loader.exec_module(module_from_spec(spec))\n"
        "except ImportError as error:\n"
        "    reason = str(error)\n"
        "assert 'interpreter' in reason, reason\n"
    )
    other = interpreters.create()
    try:
        assert interpreters.run_string(other, program) is None
    finally:
        interpreters.destroy(other)


def test_module_may_be_loaded_twice():
    """Each has types of its own; arrays that grow in the memory of one are copied by the other."""
    loaded = library.library()
    if loaded is None:
        pytest.skip("there are no compiled kernels")
    spec = spec_from_file_location(loaded.functions.__name__, loaded.path)
    assert spec is not None
    assert spec.loader is not None
    second = module_from_spec(spec)
    spec.loader.exec_module(second)
    assert second is not loaded.functions
    assert second.Call is not loaded.call
    x = np.arange(6, dtype=np.float32).reshape(3, 2)

    def memory(past, axis, most, least):
        assert (axis, past.shape[1:]) == (0, (2,))
        return np.empty((most, 2), past.dtype)

    y = loaded.functions.appended(memory, 0, x, x)
    z = second.appended(memory, 0, y, x)
    del second
    gc.collect()
    np.testing.assert_array_equal(z, np.concatenate([x, x, x]))
