"""Wheels for other platforms (``tools/wheels.py``): what their modules export and need. Whether
these run is for other tests to say, where there is a machine or an emulator for them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ziglang", reason="needs the extra 'wheels'")
abi3info = pytest.importorskip("abi3info")
lief = pytest.importorskip("lief")

from abi3info.models import PyVersion  # noqa: E402

from tools import wheels  # noqa: E402

pytestmark = pytest.mark.timeout(7200)  # 15 modules, of which each takes a minute of a core

STABLE = {
    symbol.name
    for table in (abi3info.FUNCTIONS, abi3info.DATAS)
    for symbol, entry in table.items()
    if entry.added <= PyVersion(3, 11)
}
# What is part of every system with the tag of the wheel.
LIBRARIES = {
    "manylinux": r"(libc|libm|libpthread|ld-linux-\w+([-_]\w+)?)\.so\.\d",
    "musllinux": r"libc\.so",
    "macosx": r"/usr/lib/libSystem\.B\.dylib",
    "win": r"(python3|kernel32|ntdll|api-ms-win-crt-\w+-l1-1-0)\.dll",
}


def _examined(name: str, content: bytes, tag: str) -> None:
    """Fail unless the module exports its initialization alone, and needs only what there is."""
    binary = lief.parse(list(content))
    stem = name.rpartition("/")[2].partition(".")[0]
    if "win" in tag.partition("_")[0]:
        exports = {entry.name for entry in binary.get_export().entries}
        python = {x.name for library in binary.imports for x in library.entries
                  if library.name == "python3.dll"}  # fmt: skip
        libraries = {library.name.lower() for library in binary.imports}
    else:
        mach = "macosx" in tag
        symbols = binary.symbols if mach else binary.dynamic_symbols
        undefined = [x.name for x in symbols if (x.raw_type & 15 == 1 if mach else x.shndx == 0)]
        python = {x.removeprefix("_" if mach else "") for x in undefined}
        python = {x for x in python if re.match("_?Py", x)}
        exports = {x.name.removeprefix("_" if mach else "") for x in binary.exported_symbols}
        exports -= {"_mh_dylib_header", "__dso_handle"}  # which each library of macOS has
        libraries = {getattr(library, "name", library) for library in binary.libraries}
        libraries.discard(name.rpartition("/")[2])  # its own name
    assert exports == {f"PyInit_{stem}"}
    assert python and python <= STABLE
    pattern = LIBRARIES[tag.partition("_")[0]]
    assert [x for x in libraries if not re.fullmatch(pattern, x, re.IGNORECASE)] == []
    if "manylinux" in tag:
        versions = {aux.name for need in binary.symbols_version_requirement
                    for aux in need.get_auxiliary_symbols()}  # fmt: skip
        newest = max(tuple(map(int, x[6:].split("."))) for x in versions if x[:6] == "GLIBC_")
        assert newest <= tuple(map(int, tag.split("_")[1:3]))


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, marks=[] if target.tag == "win_amd64" else [pytest.mark.full])
        for target in wheels.TARGETS
    ],
    ids=lambda target: target.tag,
)
def test_wheel_has_the_modules_of_its_platform(target, tmp_path):
    command = [sys.executable, "-m", "tools.wheels", "--into", str(tmp_path), target.tag]
    subprocess.run(command, cwd=wheels.ROOT, check=True)
    (path,) = tmp_path.glob("*.whl")
    assert path.name.endswith(f"-cp311-abi3-{target.tag}.whl")
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        modules = [name for name in names if name.startswith("penstock/host/_")]
        modules = [name for name in modules if name.endswith(target.suffix)]
        assert {name.rpartition("/")[2].partition(".")[0] for name in modules} == {*target.levels}
        for name in modules:
            _examined(name, wheel.read(name), target.tag)
    _installs(path, target, tmp_path / "installed")


def _installs(path, target, into) -> None:
    """Have pip put the wheel into a folder, as it would there: it compares names, and RECORD."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--only-binary=:all:"]
    options = ["--python-version=3.12", f"--platform={target.tag}", "--target", str(into)]
    subprocess.run([*command, *options, str(path)], check=True)
    assert (into / "penstock" / "host").is_dir()


def test_wheel_has_the_tag_and_the_record_of_its_platform(tmp_path):
    pure, module = tmp_path / "a-1-py3-none-any.whl", tmp_path / "_plain.pyd"
    module.write_bytes(b"module")
    with zipfile.ZipFile(pure, "w") as wheel:
        wheel.writestr("penstock/__init__.py", "")
        lines = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr("a-1.dist-info/WHEEL", lines)
        wheel.writestr("a-1.dist-info/RECORD", "penstock/__init__.py,sha256=wrong,0")
        wheel.writestr("a-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: a\nVersion: 1\n")
    (target,) = (target for target in wheels.TARGETS if target.tag == "win_amd64")
    made = wheels.assemble(pure, target, [module], tmp_path)
    assert made.name == "a-1-cp311-abi3-win_amd64.whl"
    with zipfile.ZipFile(made) as wheel:
        text = wheel.read("a-1.dist-info/WHEEL").decode()
        record = wheel.read("a-1.dist-info/RECORD").decode()
    assert "Root-Is-Purelib: false\nTag: cp311-abi3-win_amd64\n" in text
    hashes = dict(line.split(",")[:2] for line in record.splitlines())
    assert hashes.keys() >= {"penstock/__init__.py", "penstock/host/_plain.pyd"}
    assert "wrong" not in record


def test_headers_that_another_run_made_meanwhile_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "CACHE", tmp_path)
    target = wheels.TARGETS[0]
    folder = tmp_path / "numpy" / np.__version__ / target.tag

    def run(*command):
        (folder / "made by another").mkdir(parents=True)
        path = Path(command[command.index("--dest") + 1], "numpy.whl")
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("numpy/_core/include/numpy/ndarraytypes.h", "")

    monkeypatch.setattr(wheels, "_run", run)
    wheels.numpy_headers(target)
    assert [x.name for x in folder.iterdir()] == ["made by another"]
    assert [*folder.parent.iterdir()] == [folder]


def test_levels_are_those_of_the_machine():
    by_tag = {target.tag: target for target in wheels.TARGETS}
    assert {*by_tag["macosx_11_0_arm64"].levels} == {"_plain"}
    assert by_tag["win_amd64"].levels["_x86_64_v3"] == ["-march=x86_64_v3"]
    other = replace(by_tag["win_amd64"], zig="aarch64-windows-gnu")
    assert {*other.levels} == {"_plain"}
