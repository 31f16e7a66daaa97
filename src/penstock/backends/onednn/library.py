"""Find and load ``libdnnl``: one handle for the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from penstock.core.errors import PenstockError
from penstock.core.records import dataclass
from penstock.core.types import RunValue
from penstock.host.native import adopt, openmp_settings

_WHEEL = "onednn-cpu-gomp"
_NAME = "libdnnl.so.3"
_PATH = "PENSTOCK_DNNL"

# Primitives whose code oneDNN keeps for equal ones to come, some 40 KiB each. Set once: oneDNN 3.2
# crashes if its cache is emptied while other threads create primitives.
_CACHED_PRIMITIVES = 256

_BFLOAT16 = 0x80  # the bit of instruction sets with dot products of bfloat16
_INT8 = 0x48  # those of instruction sets with dot products of int8, which do not saturate

# The common names of oneDNN's instruction sets (dnnl_cpu_isa_t).
_ISA = {
    0x1: "SSE4.1",
    0x3: "AVX",
    0x7: "AVX2",
    0xF: "AVX2 with VNNI",
    0x27: "AVX-512",
    0x67: "AVX-512 with VNNI",
    0xE7: "AVX-512 with bfloat16",
    0x1EF: "AVX-512 with float16",
    0xFEF: "AVX-512 with AMX",
}


@dataclass(frozen=True, eq=False)
class Library:
    """A loaded libdnnl: ``ffi`` creates its structures, ``lib`` has its functions. ``bfloat16`` and
    ``int8``: whether the processor has products of bfloat16, and exact ones of 8-bit integers.
    ``team``: whether its threads are those of the native kernels, which wait for none that is late
    (``native/c/team.c``), and not those of its OpenMP runtime."""

    path: str
    version: tuple[int, int, int]
    isa: str
    bfloat16: bool
    int8: bool
    team: bool
    ffi: Any
    lib: Any
    engine: Any
    stream: Any

    @property
    def threads(self) -> int:
        """The number of threads of kernels that the calling thread creates or runs."""
        return int(self.lib.omp_get_max_threads())

    def set_threads(self, threads: int) -> None:
        """Set the number of threads of kernels that the calling thread creates or runs."""
        self.lib.omp_set_num_threads(threads)

    @staticmethod
    def check(status: int) -> None:
        """Raise ``DnnlError`` unless oneDNN reports success."""
        if status:
            raise DnnlError(status)

    def constant(self, name: str) -> int:
        """The value of the constant ``dnnl_<name>``."""
        return int(getattr(self.lib, f"dnnl_{name}"))

    def new(self, name: str, create: Any, *arguments: RunValue, keep: Any = None) -> Any:
        """A new ``dnnl_<name>_t``, created by ``create(handle, *arguments)`` and destroyed with the
        last reference to it; ``keep`` lives as long. Raises ``DnnlError``."""
        handle = self.ffi.new(f"dnnl_{name}_t *")
        self.check(create(handle, *arguments))
        return self.kept(handle[0], getattr(self.lib, f"dnnl_{name}_destroy"), keep)

    def kept(self, handle: Any, destroy: Any, keep: Any) -> Any:
        """``handle``, which keeps ``keep`` alive until ``destroy`` is called, with the last
        reference gone. That runs no Python code of ours: a signal handler may raise
        KeyboardInterrupt there, and an exception in a destructor is lost."""
        destructor: Any = partial(destroy)
        destructor.keep = keep
        return self.ffi.gc(handle, destructor)


UNIMPLEMENTED = 3  # the status where there is no such primitive for these types and shapes


class DnnlError(PenstockError):
    """oneDNN refused a call: ``status`` is a dnnl_status_t."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"oneDNN reports status {status}")


@cache
def library() -> Library | None:
    """The library of this process; None if there is none. It is the one that ``PENSTOCK_DNNL``
    names (``PenstockError`` if that is no libdnnl 3), else that of the wheel ``onednn-cpu-gomp``,
    else the system's."""
    named = os.environ.get(_PATH)
    if named:
        loaded = _open(named)
        if loaded is None:
            raise PenstockError(
                f"{_PATH}={named} cannot be loaded as oneDNN 3: unset it, or name another"
            )
        return loaded
    return next(filter(None, map(_open, _places())), None)


def located() -> str | None:
    """Where the library is that ``library`` would load first; None if there is none. Loads nothing,
    which takes a fifth of the time to open a small session."""
    named = os.environ.get(_PATH) or next(_places())
    return named if os.path.sep in named and os.path.exists(named) else None


def _places() -> Iterator[str]:
    """The paths at which the library may be, the likeliest first."""
    inside = os.path.join(sys.prefix, "lib", _NAME)
    if os.path.exists(inside):
        yield inside
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        for file in distribution(_WHEEL).files or ():
            if file.name == _NAME:
                yield str(file.locate())
    except PackageNotFoundError:
        pass
    yield _NAME


def _open(path: str) -> Library | None:
    from penstock.backends.onednn._dnnl import ffi

    try:
        # libgomp reads these when it is loaded, and never again.
        with openmp_settings():
            lib: Any = ffi.dlopen(path)
            number = lib.dnnl_version()
    except (OSError, ffi.error):
        return None
    version = (number.major, number.minor, number.patch)
    # Other versions have functions and structs that differ from the declarations.
    if version[0] != 3:
        return None
    team = adopt(int(ffi.cast("uintptr_t", ffi.addressof(lib, "dnnl_version"))))
    engine, stream = ffi.new("dnnl_engine_t *"), ffi.new("dnnl_stream_t *")
    if lib.dnnl_engine_create(engine, lib.dnnl_cpu, 0):
        return None
    if lib.dnnl_stream_create(stream, engine[0], lib.dnnl_stream_in_order):
        return None
    lib.dnnl_set_primitive_cache_capacity(_CACHED_PRIMITIVES)
    isa = lib.dnnl_get_effective_cpu_isa()
    name, narrow, int8 = _ISA.get(isa, hex(isa)), bool(isa & _BFLOAT16), bool(isa & _INT8)
    return Library(path, version, name, narrow, int8, team, ffi, lib, engine[0], stream[0])
