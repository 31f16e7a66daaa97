"""The extension modules of ``penstock.host.native``; everything else stands in pyproject.toml.

A module holds the C runtime (``host/c``) and all compiled kernels (``backends/native/c``). Each C
file is compiled once for each instruction set, and there is a module for each. An installation
without a C compiler, or with one that lacks an instruction set, goes on without them.

The modules have the stable interface of CPython and serve version 3.11 and all later ones. A build
that is free-threaded has no stable interface before 3.15: its modules serve that version alone.

A C file needs no entry here or elsewhere: its table of kernels (``KERNELS(x, ...)``) and its table
of functions for Python (``PyMethodDef x_functions[]``) are found in its text, and so are options
that it is compiled with (``// Compiler options: -ffp-contract=fast``), with GCC alone
(``// GCC options: -fno-thread-jumps``). ``tools/wheels.py`` takes all of this from here.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, PlatformError

PACKAGE = "penstock.host"
RUNTIME, KERNELS = Path("src/penstock/host/c"), Path("src/penstock/backends/native/c")
SOURCES = sorted([*RUNTIME.glob("*.c"), *KERNELS.rglob("*.c")])
HEADERS = sorted([*RUNTIME.glob("*.h"), *KERNELS.rglob("*.h")])
FOLDERS = sorted({path.parent for path in HEADERS})
BASELINE = RUNTIME / "module.c"
# ``host/native.py`` computes the same, and so recognizes modules compiled from other files.
CHECKSUM = zlib.crc32(b"".join(path.read_bytes() for path in sorted([*SOURCES, *HEADERS])))
OPTIONS = [
    *["-O3", "-std=gnu11", "-fwrapv", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
    *["-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-unknown-pragmas"],
    "-Wno-pass-failed",  # clang's, about loops that it does not vectorize though it may
]
# From version 13 on, GCC makes no fused multiply-adds of sums over a loop, unless told to: it takes
# their latency to matter. Kernels add to many sums in turn; and only some forms of one would be
# fused, and round otherwise than the others.
GCC_OPTIONS = ["--param=avoid-fma-max-bits=0"]
# GCC takes long to find where variables of unrolled tiles are, and to optimize many checks that are
# written out: image_depthwise.c would take 54 s, and takes 12.
GCC_SANITIZERS = ["-fno-var-tracking", "--param=asan-instrumentation-with-call-threshold=500"]
# PENSTOCK_SANITIZE=1 finds what kernels do beyond their memory or the language (CONTRIBUTING.md).
SANITIZE = bool(os.environ.get("PENSTOCK_SANITIZE"))
SANITIZERS = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=undefined"]
SANITIZERS = [*SANITIZERS, "-O1", "-g1"] if SANITIZE else []
GCC_OPTIONS += GCC_SANITIZERS if SANITIZE else []
# Symbols and lines for debuggers are two thirds of a module's bytes. -g comes from Python's flags.
STRIPPED = [] if SANITIZE else ["-g0"]
THREADS = [] if sys.platform == "win32" else ["-pthread"]
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
STABLE = [] if FREE_THREADED else [("Py_LIMITED_API", "0x030B0000")]
X86 = {"x86-64-v4": "_x86_64_v4", "x86-64-v3": "_x86_64_v3", "x86-64-v2": "_x86_64_v2"}


def generated_tables() -> str:
    """The text of ``generated_tables.h``: declarations of the tables in the C files, a list of the
    tables of each type, and the checksum of all files."""
    text = "".join(path.read_text() for path in SOURCES)
    kernels = [f"{name}_kernels" for name in re.findall(r"^KERNELS\((\w+),", text, re.MULTILINE)]
    functions = re.findall(r"^PyMethodDef (\w+)\[\]", text, re.MULTILINE)
    return "\n".join(
        [
            *[f"extern const kernel_entry {name}[];" for name in kernels],
            *[f"extern PyMethodDef {name}[];" for name in functions],
            f"#define KERNEL_TABLES(X) {' '.join(f'X({name})' for name in kernels)}",
            f"#define FUNCTION_TABLES(X) {' '.join(f'X({name})' for name in functions)}",
            f'#define CHECKSUM "{CHECKSUM}"',
            "",
        ]
    )


def files_read(source: Path) -> set[Path]:
    """A C file and the headers of Penstock that it includes, and these in turn."""
    found, left = {source}, [source]
    while left:
        names = re.findall(r'^ *# *include "(\w+\.h)"', left.pop().read_text(), re.MULTILINE)
        new = {path for path in HEADERS if path.name in names} - found
        found |= new
        left += new
    return found


def own_options(source: Path, clang: bool) -> list[str]:
    """The compiler's options that a C file asks for. Products, whose order of sums is not NumPy's
    anyway, use fused multiply-add. Clang refuses some that GCC's optimizer needs."""
    whose = "Compiler" if clang else "(?:Compiler|GCC)"
    lines = re.findall(rf"^// {whose} options: (.+)$", source.read_text(), re.MULTILINE)
    return [option for line in lines for option in line.split()]


def best_level() -> str | None:
    """The name of the module that this machine loads, as far as Linux tells what it can do."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    flags = set(text.partition("flags")[2].partition("\n")[0].split())
    if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
        return X86["x86-64-v4"]
    return X86["x86-64-v3"] if {"avx2", "fma", "bmi2", "f16c"} <= flags else None


def levels(machine: str) -> dict[str, list[str]]:
    """The compiler's options of each extension module."""
    if machine.lower() in ("x86_64", "amd64") and sys.maxsize > 2**32:
        return {name: [f"-march={level}"] for level, name in X86.items()}
    return {"_plain": []}


def macros(name: str) -> list[tuple[str, str]]:
    """What the C files of the module ``name`` are compiled with."""
    return [("LEVEL", name), (f"NATIVE{name.upper()}", "1"), *STABLE]


class BuildKernels(build_ext):
    """Compiles each C file with the options of the module, if it has changed since. Object files
    stay in ``build/kernels-*`` for the next installation, of whichever kind."""

    def run(self) -> None:
        # A checkout runs on the machine that it is installed on. PENSTOCK_LEVELS is for tests: it
        # names further levels, as "x86-64-v3", or "x86-64-v3:-O1" if that need not be fast, or
        # "all", as wheels have them by default.
        best, others = best_level(), os.environ.get("PENSTOCK_LEVELS", "").split()
        parts = [other.partition(":") for other in others]
        others = [level for level, _, _ in parts]
        self.last_options = {X86.get(level): option for level, _, option in parts}
        if unknown := {*others} - {*X86, "all"}:
            raise SystemExit(f"PENSTOCK_LEVELS names no level: {' '.join(sorted(unknown))}")
        of_this = bool(self.editable_mode or self.inplace or others)
        if of_this and best and "all" not in others:
            names = {f"{PACKAGE}.{name}" for name in [best, *map(X86.get, others)]}
            self.extensions = [
                ext for ext in self.extensions if ext.name in names
            ] or self.extensions
        super().run()

    def build_extension(self, ext: Extension) -> None:
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)  # where this build fails
        try:
            self._build(ext)
        except (CCompilerError, PlatformError, OSError) as error:
            self.warn(f"{ext.name} was not built: {error}")

    def _build(self, ext: Extension) -> None:
        import numpy

        name = f"{'sanitized' if SANITIZE else 'kernels'}-{self.plat_name}"
        # A free-threaded build has the cache tag of the ordinary one of its version.
        tag = f"{sys.implementation.cache_tag}{'t' if FREE_THREADED else ''}"
        last = self.last_options.get(ext.name.rpartition(".")[2], "")
        folder = Path("build", f"{name}-{tag}", ext.name + last)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "generated_tables.h").write_text(generated_tables())
        version = subprocess.run([*self.compiler.compiler, "--version"], stdout=subprocess.PIPE)
        clang = b"clang" in version.stdout
        options = [*OPTIONS, *STRIPPED, *([] if clang else GCC_OPTIONS)]

        def compiled(source: str) -> str:
            (target,) = self.compiler.object_filenames([source], output_dir=str(folder))
            # The checksum of all files is in one of them.
            read = [*SOURCES, *HEADERS] if Path(source) == BASELINE else files_read(Path(source))
            newest = max(path.stat().st_mtime for path in [Path(__file__), *read])
            if not os.path.exists(target) or os.path.getmtime(target) < newest:
                chosen = [] if Path(source) == BASELINE else ext.extra_compile_args
                chosen = [*chosen, *own_options(Path(source), clang)]
                self.compiler.compile(
                    [source],
                    output_dir=str(folder),
                    macros=ext.define_macros,
                    include_dirs=[numpy.get_include(), *map(str, FOLDERS), str(folder)],
                    extra_postargs=[*options, *chosen, *THREADS, *SANITIZERS, *last.split()],
                )
            return target

        # Those that take longest first: one of them would keep one core waiting at the end. They
        # are the products, which have options of their own, and then the largest.
        def cost(source: str) -> tuple[bool, int]:
            return bool(own_options(Path(source), clang)), os.path.getsize(source)

        sources = sorted(ext.sources, key=cost, reverse=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sources))
        path = self.get_ext_fullpath(ext.name)
        linking = ["-s"] if STRIPPED and sys.platform == "linux" else []
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            objects, path, extra_postargs=[*THREADS, *SANITIZERS, *linking, "-lm"]
        )


class StableWheel(bdist_wheel):
    """A wheel for CPython 3.11 and later versions; of a free-threaded build, for that version."""

    def finalize_options(self) -> None:
        self.py_limited_api = False if FREE_THREADED else "cp311"
        super().finalize_options()


if __name__ == "__main__":
    setup(
        cmdclass={"build_ext": BuildKernels, "bdist_wheel": StableWheel},
        ext_modules=[
            Extension(
                f"{PACKAGE}.{name}",
                [str(path) for path in SOURCES],
                define_macros=macros(name),
                extra_compile_args=options,
                py_limited_api=not FREE_THREADED,
                optional=True,
            )
            for name, options in levels(platform.machine()).items()
        ],
    )
