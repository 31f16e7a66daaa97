"""Wheels are built with and without a C compiler, and installed in environments of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILT = ["LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py", "src"]
SMOKE = """
import numpy as np, onnx.parser, penstock as ps

model = onnx.parser.parse_model('''
    <ir_version: 10, opset_import: ["": 21]> g (float[2, 3] x) => (float[2, 3] y, float[2, 2] z) {
        axis = Constant <value = int64 {1}> ()
        y = CumSum(x, axis)
        transposed = Transpose(x)
        z = MatMul(x, transposed)
    }
''')
onnx.save(model, "model.onnx")
x = np.arange(6, dtype=np.float32).reshape(2, 3)
results = ps.compile(ps.load("model.onnx")).run({"x": x})
assert (results["y"] == x.cumsum(1)).all() and (results["z"] == x @ x.T).all()
print(ps.__file__)
"""


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")}
    result = subprocess.run(
        list(map(str, command)), cwd=cwd, env=kept | environment, capture_output=True, text=True,
        timeout=250, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


def _installed(folder: Path, *, objects: bool, **environment: str) -> str:
    """What ``penstock info`` says of a model in an environment with a wheel of this checkout, which
    is built with the object files that are there, if ``objects``."""
    source, wheels, home = folder / "source", folder / "wheels", folder / "environment"
    left_out = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    for name in BUILT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=left_out)
        else:
            source.mkdir(exist_ok=True)
            shutil.copy2(ROOT / name, source)
    for path in (ROOT / "build").glob("kernels-*") if objects else ():
        shutil.copytree(path, source / "build" / path.name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", wheels, source]
    _run(*pip, *build, cwd=folder, **environment)
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    (wheel,) = wheels.glob("*.whl")
    _run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    # The requirements are those of this environment: a path file in a path file is not followed,
    # so the checkout itself is out of reach.
    paths = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
    Path(paths["purelib"], "requirements.pth").write_text(sysconfig.get_paths()["purelib"])
    module = Path(_run(python, "-c", SMOKE, cwd=folder).strip())
    assert module.is_relative_to(home)
    return _run(home / "bin" / "penstock", "info", "model.onnx", cwd=folder)


def test_installation_without_compiler_runs_on_numpy_and_onednn(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    shown = _installed(tmp_path, objects=False, PATH=str(empty), CC="cc")
    assert "native      not available: not compiled when Penstock was installed" in shown


@pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc").split()[-1]) is None, reason="needs a C compiler"
)
def test_installation_with_compiler_has_compiled_kernels(tmp_path):
    shown = _installed(tmp_path, objects=True)
    assert " kernels for " in shown
    assert str(tmp_path) in "".join(shown.split())


def test_models_of_exporters_run_without_compiled_kernels():
    files = ["tests/models/test_zoo.py", "tests/executors/test_linear.py"]
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    summary = _run(*pytest_, *files, cwd=ROOT, PENSTOCK_NATIVE="off").splitlines()[-1]
    assert int(summary.split(" passed")[0].split()[-1]) > 200, summary
