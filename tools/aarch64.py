"""Run Python for aarch64 on another processor: ``python -m tools.aarch64 [--folder FOLDER] ...``

The arguments are those of Python: ``python -m tools.aarch64 -m pytest tests/backends/native``. QEMU
translates the instructions, which takes about 10 times as long; the operating system is the host's.
``QEMU_CPU`` names another processor: ``neoverse-n1`` has dotprod but not i8mm, ``cortex-a53``
neither.

The folder, ``.cache/aarch64`` by default, becomes an environment like those of ``venv``, by the
ordinary clients of Debian and PyPI, without changing the system and without the rights to do so:

    debs, lists         what apt has downloaded
    root                Debian's packages for arm64, unpacked: Python and the C library
    bin/python          a script that starts root/usr/bin/python3.11 by QEMU: sys.executable
    lib/python3.11      wheels for aarch64

The extension module stands beside the host's in ``src/penstock/host``: there is one level,
``plain``. The cross compiler runs without translation.

Simulated threads see the memory order of the host: that of x86 is stronger than that of aarch64, so
these tests say nothing on atomics (docs/decisions/0063-a-team-of-threads.md does).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zlib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "aarch64"
COMMANDS = {  # and the Debian packages that they are part of
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "qemu-aarch64-static": "qemu-user-static",
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
}
PYTHON = "python3.11"  # Debian 12's
# The kernels of SVE in OpenBLAS report divisions by zero that there are not, under QEMU 7.2.
PROCESSOR = "max,sve=off"
DEBS = [f"{PYTHON}-minimal", f"lib{PYTHON}-dev", "libstdc++6"]
# Of the requirements in pyproject.toml, those that tests of kernels need. ONNX Runtime is none of
# them: QEMU 7.2 crashes where its module is loaded.
WHEELS = re.compile(
    r"(numpy|ml_dtypes|protobuf|threadpoolctl|click|onnx|pytest.*|hypothesis|setuptools|"
    r"rich|Pillow|google-crc32c|platformdirs)\b(?!-)"
)


def lacking() -> str:
    """The Debian packages to install before this works, or an empty text."""
    return " ".join(package for name, package in COMMANDS.items() if not shutil.which(name))


def set_up(folder: Path) -> None:
    """Fill ``folder`` where it is not full, and compile the module where its sources have changed,
    one process at a time."""
    if names := lacking():
        raise SystemExit(f"install these packages of Debian 12 first: {names}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, wanted = folder / "installed", "\n".join([*DEBS, *_wheels()])
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            _unpack_debs(folder)
            _make_environment(folder)
            stamp.write_text(wanted)
        _compile(folder)


def environment(folder: Path) -> dict[str, str]:
    """The variables of a process that runs the Python of ``folder``."""
    # A processor that OpenBLAS is told to take the host for is none of aarch64's.
    kept = {name: x for name, x in os.environ.items() if not name.startswith("OPENBLAS")}
    headers = folder / "root" / "usr" / "include"
    return {
        **kept,
        "PENSTOCK_CACHE": str(folder / "penstock"),  # times of translated kernels are no costs
        "PYTHONPATH": str(ROOT / "src"),
        "PYTEST_ADDOPTS": f"--timeout=3000 {os.environ.get('PYTEST_ADDOPTS', '')}",
        "QEMU_CPU": os.environ.get("QEMU_CPU", PROCESSOR),
        "C_INCLUDE_PATH": f"{headers / PYTHON}:{headers}",
    }


def python(folder: Path) -> str:
    """The path of the Python of ``folder``."""
    return str(folder / "bin" / "python")


def _wheels() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    wanted += project["optional-dependencies"]["rich"]
    return [requirement for requirement in wanted if WHEELS.match(requirement)]


def _unpack_debs(folder: Path) -> None:
    """Download ``DEBS`` and all that they need, by an apt that knows of no installed package."""
    for part in ("debs", "lists"):
        (folder / part / "partial").mkdir(parents=True)
    (folder / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Debug::NoLocking": "1",
        "Dir::Cache::archives": folder / "debs",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
    }
    apt = ["apt-get", "-qq", *[f"-o{name}={value}" for name, value in options.items()]]
    _run([*apt, "update"])
    _run([*apt, "--yes", "--no-install-recommends", "--download-only", "install", *DEBS])
    for deb in sorted((folder / "debs").glob("*.deb")):
        _run(["dpkg-deb", "--extract", deb, folder / "root"])


def _make_environment(folder: Path) -> None:
    root, script = folder / "root", Path(python(folder))
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\n"  # Python takes its environment from the path that it believes to be called by
        f'exec qemu-aarch64-static -L "{root}" -0 "$0" "{root}/usr/bin/{PYTHON}" "$@"\n'
    )
    script.chmod(0o755)
    (folder / "pyvenv.cfg").write_text(f"home = {root}/usr/bin\n")
    platforms = [f"--platform=manylinux_2_{n}_aarch64" for n in (34, 28, 27, 26, 17)]
    _run(
        [
            *[sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"],
            "--no-warn-conflicts",
            *["--target", folder / "lib" / PYTHON / "site-packages", "--only-binary=:all:"],
            *[*platforms, "--platform=manylinux2014_aarch64", "--python-version=3.11", *_wheels()],
        ]
    )


def _compile(folder: Path) -> None:
    module, options = ROOT / "src" / "penstock" / "host" / "_plain.abi3.so", ROOT / "setup.py"
    is_new = module.exists() and module.stat().st_mtime > options.stat().st_mtime
    if not is_new or not is_of_sources(module):
        _run([python(folder), "setup.py", "-q", "build_ext", "--inplace"], environment(folder))


def is_of_sources(module: Path) -> bool:
    """Whether an extension module was compiled from the C files as they are. Its time does not
    tell: one that was copied from another checkout is newer than they, and of others."""
    sources = sorted((ROOT / "src").rglob("*.[ch]"))
    checksum = zlib.crc32(b"".join([path.read_bytes() for path in sources]))
    return str(checksum).encode() in module.read_bytes()  # as setup.py puts it there


def _run(command: Sequence[str | Path], variables: dict[str, str] | None = None) -> None:
    subprocess.run(command, cwd=ROOT, env=variables, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, usage="%(prog)s [--folder FOLDER] ...")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the environment is")
    options, arguments = parser.parse_known_args()
    folder = options.folder.resolve()
    set_up(folder)
    os.execve(python(folder), [python(folder), *arguments], environment(folder))


if __name__ == "__main__":
    main()
