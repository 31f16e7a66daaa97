"""Find and load the extension module for the instruction set of this processor."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

import numpy as np

from penstock.core.errors import PenstockError
from penstock.core.records import dataclass

FREE_THREADED = "free-threading build" in sys.version
"""whether Python can run without its lock, even if a module has turned that on"""
LEVELS = ("x86-64-v4", "x86-64-v3", "x86-64-v2", "plain")
"""instruction sets that kernels are compiled for, the fastest first"""
_CHOSEN = "PENSTOCK_NATIVE"
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_SOURCES = [os.path.join(_PACKAGE, *path) for path in (("host", "c"), ("backends", "native", "c"))]


@dataclass(frozen=True, eq=False)
class NativeLibrary:
    """The kernels compiled for the instruction set ``level``: their names, and ``call``, which
    binds one to its arguments (``c/module.c``)."""

    level: str
    path: str
    kernels: frozenset[str]
    operations: Mapping[str, int]  # of elementwise programs
    call: Callable[..., Any]
    functions: Any
    """the functions of the module: ``set_threads``, and those that take any arrays or strings"""
    integer_speed: int
    """operations per nanosecond of products of integers"""
    integer_instructions: str
    """what these use beyond the level, such as VNNI, or nothing"""
    multiplies_bfloat16: bool
    """whether the processor does"""

    def __repr__(self) -> str:
        return f"NativeLibrary({self.level!r}, {self.path!r}, {len(self.kernels)} kernels)"

    @property
    def instructions(self) -> str:
        """The level, and what its kernels use beyond it, such as "plain aarch64 with i8mm"."""
        level = f"plain {platform.machine()}" if self.level == "plain" else self.level
        more = self.integer_instructions
        return f"{level} with {more}" if more else level

    def call_of(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Return the call whose method ``run`` is ``function``, or None for other functions."""
        owner = getattr(function, "__self__", None)
        return owner if type(owner) is self.call else None


@cache
def library() -> NativeLibrary | None:
    """Return the library of this process: the level in ``PENSTOCK_NATIVE``, or else the fastest
    that the processor runs. None if the variable is ``off``, or no library is installed. Raises
    ``PenstockError`` if the level in the variable cannot be loaded."""
    chosen = os.environ.get(_CHOSEN)
    if chosen == "off":
        return None
    if chosen and (chosen not in LEVELS or load_level(chosen) is None):
        raise PenstockError(
            f"{_CHOSEN}={chosen} is none of the instruction sets that kernels were compiled for "
            f"and this processor has: unset it, or name one of {', '.join(supported_levels())}"
        )
    # A module refuses to load on a processor without its instructions: the first that loads is the
    # best.
    levels = [chosen] if chosen else LEVELS
    return next(filter(None, map(load_level, levels)), None)


@cache
def in_c_order() -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that copies an array to a new one in C order, compiled if possible, since
    NumPy's is slow for transposed dims."""
    loaded = library()
    return np.ndarray.copy if loaded is None else loaded.functions.copied


@cache
def contiguous() -> Callable[[Any], Any]:
    """Return a function that returns a tensor in C order, without a copy if it already is, and
    other values unchanged."""
    loaded = library()
    if loaded is not None:
        return loaded.functions.contiguous
    # ascontiguousarray makes a scalar one-dimensional.
    return lambda x: np.ascontiguousarray(x) if isinstance(x, np.ndarray) and x.ndim else x


@cache
def new_empty() -> Callable[[tuple[int, ...], np.dtype], np.ndarray]:
    """Return a function that allocates an uninitialized array, aligned to a cache line if large."""
    loaded = library()
    return np.empty if loaded is None else loaded.functions.empty


@cache
def refilled() -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return a function that copies its second argument into the first and returns the first."""
    loaded = library()
    return _refilled if loaded is None else loaded.functions.refilled


def _refilled(target: np.ndarray, value: np.ndarray) -> np.ndarray:
    np.copyto(target, value)
    return target


@cache
def are_strings() -> Callable[[np.ndarray], bool]:
    """Return a function that tells whether all elements of an object array are ``str``."""
    loaded = library()
    if loaded is not None:
        return loaded.functions.are_strings
    return lambda x: set(map(type, x.ravel().tolist())) <= {str}


def supported_levels() -> Sequence[str]:
    """Return the levels that this machine can run, and ``off``."""
    return *[level for level in LEVELS if load_level(level) is not None], "off"


@cache
def load_level(level: str) -> NativeLibrary | None:
    """Return the kernels compiled for ``level``, or None if they are not installed or the processor
    lacks the instructions. Raises ``PenstockError`` if they are compiled from other sources."""
    name = "_" + level.replace("-", "_")
    # A free-threaded build of Python 3.13 loads modules with the stable ABI, and crashes.
    module_path = os.path.join(os.path.dirname(__file__), name + EXTENSION_SUFFIXES[0])
    if FREE_THREADED and not os.path.exists(module_path):
        return None
    try:
        module: Any = import_module(f"penstock.host.{name}")
    except ImportError:
        return None
    newer = _newest() > os.stat(module.__file__).st_mtime_ns  # otherwise it is compiled from them
    if newer and getattr(module, "checksum", None) != _checksum():
        raise PenstockError(
            f"the compiled kernels in {module.__file__} are of another version of Penstock: "
            "run 'make kernels' where Penstock was checked out, or install it again; "
            f"{_CHOSEN}=off does without them"
        )
    kernels = frozenset(module.kernels)
    operations = {name: i for i, name in enumerate(module.elementwise_operations())}
    speed, more = module.integer_products()
    path, call, narrow = module.__file__, module.Call, module.multiplies_bfloat16()
    return NativeLibrary(level, path, kernels, operations, call, module, speed, more, narrow)


@cache
def _newest() -> int:
    """Return the time of the last change of the C files, or 0 if they are not installed."""
    return max([entry.stat().st_mtime_ns for entry in _files()], default=0)


@cache
def _checksum() -> str:
    """Return the checksum of the C files, which ``setup.py`` stores in the modules."""
    from pathlib import Path
    from zlib import crc32

    files = sorted([Path(entry.path) for entry in _files()])
    return str(crc32(b"".join([path.read_bytes() for path in files])))


def _files() -> Iterator[os.DirEntry[str]]:
    """Yield the C files, as far as they are installed."""
    folders = [*_SOURCES]
    for folder in folders:  # grows while it is walked, by the folders found in each
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(entry.path)
                else:
                    yield entry
