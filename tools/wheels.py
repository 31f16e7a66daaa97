"""Build wheels for several platforms on one: ``python -m tools.wheels [--into FOLDER] [TAG ...]``

The compiler is clang as ``ziglang`` on PyPI has it, with the C libraries of all of ``TARGETS``.
Files, options and levels are those of ``setup.py``. What differs by platform besides comes from

- NumPy's wheel for it, whose headers have the sizes of its types;
- ``PYCONFIG``, in place of the ``pyconfig.h`` of this machine's Python: of that, headers of the
  limited API need little more than sizes, which the compiler knows;
- for Windows, where a module names the library that a function is in: an import library of
  ``python3.dll``, made of the names that ``abi3info`` lists.

``make wheels`` installs what this needs, and builds them all.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "wheels"
PYTHON, ABI = "cp311", "abi3"
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")

PYCONFIG = """\
/* In place of a Python's own, for headers of its limited API on any platform (tools/wheels.py). */
#if !defined(__APPLE__) /* as pymacconfig.h does */
#define SIZEOF_LONG __SIZEOF_LONG__
#define SIZEOF_SIZE_T __SIZEOF_SIZE_T__
#define SIZEOF_VOID_P __SIZEOF_POINTER__
#endif
#define SIZEOF_INT __SIZEOF_INT__
#define SIZEOF_LONG_LONG __SIZEOF_LONG_LONG__
#define SIZEOF_PID_T 4
#define SIZEOF_WCHAR_T __SIZEOF_WCHAR_T__
#define HAVE_STDDEF_H 1
#define HAVE_WCHAR_H 1
#if defined(_WIN32)
#define MS_WINDOWS 1
#define MS_WIN64 1
#define Py_ENABLE_SHARED 1
#define HAVE_DECLSPEC_DLL 1
#else
#define HAVE_SYS_TIME_H 1
#define HAVE_SYS_TYPES_H 1
#endif
"""


@dataclass(frozen=True)
class Target:
    """A platform: its tag in the names of wheels, how zig names it, with the oldest version of its
    C library, and the tags of wheels of NumPy for it."""

    tag: str
    zig: str
    numpy: tuple[str, ...]

    @property
    def levels(self) -> dict[str, list[str]]:
        """The modules for it, as ``levels`` of ``setup.py``; zig writes names of processors with
        underscores."""
        levels = SETUP["levels"](self.zig.partition("-")[0])
        return {name: [x.replace("-64-v", "_64_v") for x in levels[name]] for name in levels}

    @property
    def suffix(self) -> str:
        return ".pyd" if "windows" in self.zig else ".abi3.so"

    def libraries(self, folder: Path) -> list[str | Path]:
        """What to link to besides the C library; what has to be made goes into ``folder``."""
        if "windows" in self.zig:
            return [import_library(folder), "-lpthread"]
        return ["-Wl,-undefined,dynamic_lookup"] if "macos" in self.zig else ["-lm", "-lpthread"]


def _manylinux(machine: str) -> tuple[str, ...]:
    return *[f"manylinux_2_{n}_{machine}" for n in (28, 27, 17)], f"manylinux2014_{machine}"


TARGETS = (
    Target("manylinux_2_17_x86_64", "x86_64-linux-gnu.2.17", _manylinux("x86_64")),
    Target("manylinux_2_17_aarch64", "aarch64-linux-gnu.2.17", _manylinux("aarch64")),
    Target("musllinux_1_2_x86_64", "x86_64-linux-musl", ("musllinux_1_2_x86_64",)),
    Target("musllinux_1_2_aarch64", "aarch64-linux-musl", ("musllinux_1_2_aarch64",)),
    Target("macosx_11_0_arm64", "aarch64-macos.11.0", ("macosx_11_0_arm64",)),
    Target("macosx_11_0_x86_64", "x86_64-macos.11.0", ("macosx_11_0_x86_64",)),
    Target("win_amd64", "x86_64-windows-gnu", ("win_amd64",)),
)


def _run(*command: str | Path) -> None:
    caches = {name: str(CACHE / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    subprocess.run(command, cwd=ROOT, env=os.environ | caches, check=True)


def _zig(*arguments: str | Path) -> None:
    _run(sys.executable, "-m", "ziglang", *arguments)


def python_headers(folder: Path) -> None:
    """Make ``folder`` with the headers of this Python, and ``PYCONFIG``: they include the
    ``pyconfig.h`` that is beside them."""
    shutil.copytree(sysconfig.get_path("include"), folder)
    (folder / "pyconfig.h").write_text(PYCONFIG)


def numpy_headers(target: Target) -> Path:
    """The headers in the wheel of NumPy for this platform, as they are there. They stay for later
    runs, and appear whole, for other runs may look for them now."""
    import numpy

    folder = CACHE / "numpy" / numpy.__version__ / target.tag
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            _run(
                *[sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check"],
                *["--no-deps", "--only-binary=:all:", "--python-version=3.11", "--dest", made],
                *[*[f"--platform={tag}" for tag in target.numpy], f"numpy=={numpy.__version__}"],
            )
            (wheel,) = Path(made).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                headers = [x for x in archive.namelist() if "/_core/include/" in x]
                archive.extractall(Path(made, "headers"), headers)
            try:
                Path(made, "headers").rename(folder)
            except OSError:
                if not folder.exists():  # or another run was first
                    raise
    return folder / "numpy" / "_core" / "include"


def import_library(folder: Path) -> Path:
    """Tells the linker that names of the stable ABI of Python 3.11 are in ``python3.dll``."""
    from abi3info import DATAS, FUNCTIONS
    from abi3info.models import PyVersion

    def names(entries: dict) -> list[str]:
        return sorted(x.name for x, entry in entries.items() if entry.added <= PyVersion(3, 11))

    definition, library = folder / "python3.def", folder / "python3.lib"
    exports = [*names(FUNCTIONS), *[f"{name} DATA" for name in names(DATAS)]]
    definition.write_text("\n".join(["LIBRARY python3.dll", "EXPORTS", *exports, ""]))
    _zig("dlltool", "-m", "i386:x86-64", "-d", definition, "-l", library)
    return library


def build_module(target: Target, name: str, pool: ThreadPoolExecutor, work: Path) -> Path:
    """Compile the module ``name`` for a platform, in a folder in ``work``, which has the headers of
    Python; returns its path."""
    folder = work / target.tag / name
    folder.mkdir(parents=True)
    (folder / "generated_tables.h").write_text(SETUP["generated_tables"]())
    include = [work / "python", numpy_headers(target), folder, *SETUP["FOLDERS"]]
    macros = [f"-D{macro}={value}" for macro, value in SETUP["macros"](name)]
    compiler = ["cc", "-target", target.zig]
    # zig keeps frame pointers otherwise.
    shared = [*SETUP["OPTIONS"], "-g0", "-DNDEBUG", "-fomit-frame-pointer", *macros]
    shared += [] if "windows" in target.zig else ["-fPIC"]

    def compiled(source: Path) -> Path:
        result = folder / f"{source.stem}.o"
        chosen = [] if source == SETUP["BASELINE"] else target.levels[name]
        chosen = [*shared, *chosen, *SETUP["own_options"](source, clang=True)]
        _zig(*compiler, "-c", source, "-o", result, *chosen, *[f"-I{path}" for path in include])
        return result

    objects = list(pool.map(compiled, sorted(SETUP["SOURCES"], key=os.path.getsize, reverse=True)))
    module = folder / f"{name}{target.suffix}"
    libraries = target.libraries(folder)
    if "macos" in target.zig:  # or the path on this machine is in the module
        libraries += [f"-Wl,-install_name,{module.name}"]
    _zig(*compiler, "-shared", "-o", module, *objects, *libraries, "-Wl,-s")
    return module


def build_pure_wheel(folder: Path) -> Path:
    """Build the wheel of what is the same on all platforms; returns its path."""
    from setuptools import setup

    folder.mkdir()
    base = ["egg_info", "--egg-base", str(folder), "build", "--build-base", str(folder / "build")]
    wheel = ["bdist_wheel", "--bdist-dir", str(folder / "wheel"), "--dist-dir", str(folder)]
    setup(script_name="setup.py", script_args=["-q", *base, *wheel])
    (path,) = folder.glob("*.whl")
    return path


def assemble(pure: Path, target: Target, modules: list[Path], into: Path) -> Path:
    """Write the wheel of a platform, with these modules; returns its path."""
    from wheel.wheelfile import WheelFile

    tag = f"{PYTHON}-{ABI}-{target.tag}"
    path = into / pure.name.replace("py3-none-any", tag)
    with zipfile.ZipFile(pure) as source, WheelFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith(".dist-info/WHEEL"):
                content = content.replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false")
                content = content.replace(b"Tag: py3-none-any", f"Tag: {tag}".encode())
            if not name.endswith(".dist-info/RECORD"):  # which the new one gets when it is closed
                wheel.writestr(source.getinfo(name), content)
        for module in modules:
            wheel.write(module, f"penstock/host/{module.name}")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="the folder of wheels")
    parser.add_argument("tags", nargs="*", default=[target.tag for target in TARGETS])
    arguments = parser.parse_args()
    arguments.into.mkdir(parents=True, exist_ok=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    # Of its own, for there may be other runs; and within CACHE, which git ignores.
    with tempfile.TemporaryDirectory(dir=CACHE) as made, ThreadPoolExecutor(os.cpu_count()) as pool:
        work = Path(made)
        python_headers(work / "python")
        pure = build_pure_wheel(work / "pure")
        for target in (target for target in TARGETS if target.tag in arguments.tags):
            modules = [build_module(target, name, pool, work) for name in target.levels]
            print(assemble(pure, target, modules, arguments.into), flush=True)


if __name__ == "__main__":
    main()
