"""Versions of the onnx package: the tests of the front end pass with each that Penstock takes."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import onnx
import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".cache" / "onnx-versions"
MINOR = range(19, 23)  # beside the one that is installed
OF_THE_NEWEST = (
    # What they compare with is not in older packages, which the front end does without.
    *("test_schemas.py", "test_versions.py"),
    "test_upgrades.py::test_upgrade_tables_cover_every_operation_with_several_versions",
    "test_upgrade_graphs.py::test_flex_attention_applies_its_graphs",
)


def test_range_is_the_one_that_is_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least, most = MINOR[0], MINOR[-1] + 2
    assert f"onnx>=1.{least},<1.{most}" in project["optional-dependencies"]["onnx"]
    assert onnx.__version__.startswith(f"1.{most - 1}.")


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("minor", MINOR)
def test_front_end_works_with_each_version(minor: int) -> None:
    folder = FOLDER / f"1.{minor}"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    if not folder.exists():
        done = subprocess.run([*pip, f"onnx==1.{minor}.*"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot install onnx 1.{minor}: {done.stderr[-300:]}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/frontends/onnx",
    ]
    for name in OF_THE_NEWEST:
        command += ["--deselect" if "::" in name else "--ignore", f"tests/frontends/onnx/{name}"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
