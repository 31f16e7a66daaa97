"""Wheels are built with and without a C compiler, and installed in environments of their own."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import onnx.parser
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.requirements import requirements

pytestmark = pytest.mark.costly(share=1)

ROOT = Path(__file__).parents[1]
MODEL = """
<ir_version: 10, opset_import: ["": 21]> g (float[2, 3] x) => (float[2, 3] y, float[2, 2] z) {
    axis = Constant <value = int64 {1}> ()
    y = CumSum(x, axis)
    transposed = Transpose(x)
    z = MatMul(x, transposed)
}
"""
SMOKE = """
import sys, numpy as np, penstock as ps

x = np.arange(6, dtype=np.float32).reshape(2, 3)
results = ps.compile(ps.load("model.onnx")).run({"x": x})
assert (results["y"] == x.cumsum(1)).all() and (results["z"] == x @ x.T).all()
assert not {"click", "onnx", "rich"} & {*sys.modules}

import penstock.compat.onnxruntime as ort

assert (ort.InferenceSession("model.onnx").run(["y"], {"x": x})[0] == x.cumsum(1)).all()
print(ps.__file__)
"""


# What a session, the front ends and the command line do not run without.
REQUIRED = frozenset(
    {"penstock-runtime", "numpy", "ml-dtypes", "protobuf", "threadpoolctl", "click"}
)
MOST_PACKAGES, MOST_MEGABYTES = 9, 90


def closure(texts: list[str]) -> set[str]:
    """The packages that requirements bring on this machine, extras aside."""
    names: set[str] = set()
    while texts:
        requirement = Requirement(texts.pop())
        name = canonicalize_name(requirement.name)
        if name not in names and (
            not requirement.marker or requirement.marker.evaluate({"extra": ""})
        ):
            names.add(name)
            texts += metadata.requires(name) or []
    return names


def test_requirements_bring_few_packages():
    packages = closure([*requirements()]) | {"penstock-runtime"}
    assert packages == REQUIRED
    assert len(packages) <= MOST_PACKAGES


def test_demo_needs_what_every_installation_has():
    tree = ast.parse((ROOT / "examples" / "filetypes.py").read_text())
    nodes = [*ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    foreign = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    assert foreign == {"numpy", "penstock"}


# Without the bytecode that pip compiles, which differs between versions of Python.
SIZES = """
import json, sys
from importlib.metadata import files

def size(name):
    kept = [f for f in files(name) or () if "__pycache__" not in f.parts]
    return sum(f.locate().stat().st_size for f in kept)

print(json.dumps({name: size(name) for name in sys.argv[1:]}))
"""


# Of pip, which downloads and installs what a package requires: minutes where a machine is busy.
_INSTALLED_S = 750


def _run(*command: str | Path, cwd: Path, seconds: float = 250, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    result = subprocess.run(
        list(map(str, command)), cwd=cwd, env=kept | environment, capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The sdist of this checkout, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    command = ["egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder]
    with open(ROOT / "setup.py") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the files are first gathered in the checkout itself
        _run(sys.executable, "setup.py", "-q", *command, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder / "sdist", filter="data")
    (source,) = (folder / "sdist").iterdir()
    return source


def test_sdist_has_all_files_of_the_repository(sdist):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git repository, to know what belongs to it")
    files = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    files -= {"PKG-INFO", "setup.cfg"}
    files = {name for name in files if ".egg-info/" not in name}
    kept = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert sorted(kept - files) == []
    untracked = ["git", "ls-files", "--others", "--exclude-standard"]
    new = subprocess.run(untracked, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    assert sorted(files - kept - {*new}) == []


def test_c_files_are_compiled_again_if_a_header_that_they_read_has_changed(monkeypatch):
    monkeypatch.chdir(ROOT)
    setup = runpy.run_path("setup.py", run_name="setup")
    read = {path.name: {p.name for p in setup["files_read"](path)} for path in setup["SOURCES"]}
    # Some of these are included by headers alone.
    assert {path.name for path in setup["HEADERS"]} <= set().union(*read.values())
    assert {"panels.c", "panels_of.h", "floats.h", "compilers.h"} <= read["panels.c"]
    assert "panels_of.h" not in read["trees.c"]


def _installed(sdist: Path, folder: Path, *, objects: bool, **environment: str) -> str:
    """What ``penstock info`` says of itself in an environment with a wheel of this checkout, which
    is built with the object files that are there, if ``objects``."""
    source, wheels, home = folder / "source", folder / "wheels", folder / "environment"
    shutil.copytree(sdist, source)
    for path in (ROOT / "build").glob("kernels-*") if objects else ():
        shutil.copytree(path, source / "build" / path.name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", wheels, source]
    # Of the instruction sets that this checkout was compiled for, where some were chosen.
    chosen = {name: os.environ[name] for name in ("PENSTOCK_LEVELS",) if name in os.environ}
    _run(*pip, *build, cwd=folder, **environment, **chosen)
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    (wheel,) = wheels.glob("*.whl")
    install = ["install", "--no-deps", "--no-index", "--no-compile"]
    _run(*pip, "--python", python, *install, wheel, cwd=folder)
    # The requirements are those of this environment: a path file in a path file is not followed,
    # so the checkout itself is out of reach.
    paths = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
    Path(paths["purelib"], "requirements.pth").write_text(sysconfig.get_paths()["purelib"])
    onnx.save(onnx.parser.parse_model(MODEL), folder / "model.onnx")
    module = Path(_run(python, "-c", SMOKE, cwd=folder).strip())
    assert module.is_relative_to(home)
    _run(home / "bin" / "penstock", "report", "model.onnx", "-o", "report.html", cwd=folder)
    assert "</html>" in (folder / "report.html").read_text()
    assert "CumSum" in _run(home / "bin" / "penstock", "info", "model.onnx", cwd=folder)
    return _run(home / "bin" / "penstock", "info", cwd=folder)


def test_installation_without_compiler_runs_on_numpy(sdist, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    shown = _installed(sdist, tmp_path, objects=False, PATH=str(empty), CC="cc")
    words = " ".join(shown.split())
    assert "native not available: not compiled when Penstock was installed" in words


@pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc").split()[-1]) is None, reason="needs a C compiler"
)
def test_installation_with_compiler_has_compiled_kernels(sdist, tmp_path):
    shown = _installed(sdist, tmp_path, objects=True)
    assert " kernels for " in shown
    assert str(tmp_path) in "".join(shown.split())
    modules = [*(tmp_path / "environment").rglob("_*.abi3.so")]
    assert modules
    for module in modules:  # no symbols for debuggers, which nobody who installs it reads
        assert b".symtab" not in module.read_bytes()


@pytest.mark.parametrize("version", ["1.26.4", "2.0.2"])
def test_numpy_that_is_too_old_is_an_error_that_names_it(version):
    program = f"import numpy; numpy.__version__ = {version!r}; import penstock; penstock.compile"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    expected = f"ImportError: Penstock needs NumPy 2.1 or newer, and NumPy {version} is installed"
    assert expected in result.stderr


@pytest.mark.full
def test_models_of_exporters_run_without_compiled_kernels():
    files = ["tests/models/test_zoo.py", "tests/executors/test_linear.py"]
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    summary = _run(*pytest_, *files, cwd=ROOT, PENSTOCK_NATIVE="off").splitlines()[-1]
    assert int(summary.split(" passed")[0].split()[-1]) > 200, summary


def _python(minor: int) -> str:
    """A Python 3.``minor`` of this machine, of pyenv's as well. The test is skipped without one."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for python in (f"python3.{minor}", *pyenv.glob(f"3.{minor}.*/bin/python")):
        # The shims of pyenv are there for versions that are switched off, and fail.
        found = shutil.which(python)
        if found and not subprocess.run([found, "--version"], capture_output=True).returncode:
            return found
    pytest.skip(f"there is no Python 3.{minor} here")


@pytest.mark.full  # packages are installed for each
@pytest.mark.timeout(600)
@pytest.mark.parametrize("minor", [12, 13, 14])
def test_sample_of_tests_passes_on_each_python(minor, tmp_path):
    """With the compiled modules of this checkout, which all versions load."""
    home = tmp_path / "environment"
    _run(_python(minor), "-m", "venv", "--without-pip", home, cwd=tmp_path)
    python = home / "bin" / "python"
    wanted = [*requirements("onnx"), "pytest", "pytest-timeout", "hypothesis"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--python", python]
    _run(*pip, "install", "--no-compile", *wanted, cwd=tmp_path, seconds=_INSTALLED_S)
    files = ["tests/session/test_session.py", "tests/tuning/test_cost_table.py"]
    files += ["tests/observers/test_profile.py", "tests/cli/test_run.py"]
    pytest_ = [python, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    source = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    summary = _run(*pytest_, cwd=ROOT, PYTHONPATH=source).splitlines()[-1]
    assert int(summary.split(" passed")[0].split()[-1]) > 100, summary


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("minor", [12, 13, 14])
def test_installation_with_its_requirements_runs_on_each_python(minor, sdist, tmp_path):
    """Built and installed as a user does it, from the sdist, with a Python that is there."""
    home = tmp_path / "environment"
    _run(_python(minor), "-m", "venv", home, cwd=tmp_path)
    pip = [home / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    source = shutil.copytree(sdist, tmp_path / "source")
    _run(*pip, source, cwd=tmp_path, seconds=_INSTALLED_S)
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "model.onnx")
    module = Path(_run(home / "bin" / "python", "-c", SMOKE, cwd=tmp_path).strip())
    assert module.is_relative_to(home)
    listed = json.loads(_run(*pip[:-2], "list", "--format", "json", cwd=tmp_path))
    packages = {canonicalize_name(entry["name"]) for entry in listed} - {"pip", "setuptools"}
    assert packages == closure([*requirements()]) | {"penstock-runtime"}
    sizes = json.loads(_run(home / "bin" / "python", "-c", SIZES, *packages, cwd=tmp_path))
    assert sum(sizes.values()) <= MOST_MEGABYTES * 1e6, sizes
    _run(home / "bin" / "penstock", "report", "model.onnx", "-o", "report.html", cwd=tmp_path)
