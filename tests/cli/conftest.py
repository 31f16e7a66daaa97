"""Models in files, for commands."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from penstock.backends import registry
from tests.support.command_line import MODEL
from tests.support.onnx_text import model_from_text
from tests.support.tf_graphs import Builder, Type


@pytest.fixture
def numpy_alone(monkeypatch) -> None:
    """Commands compile for NumPy, which fuses nothing and is there on every machine."""
    monkeypatch.setattr(registry, "available", lambda: ("numpy",))


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "affine.onnx"
    onnx.save(model_from_text(MODEL), path)
    return str(path)


@pytest.fixture
def graph_def(tmp_path: Path) -> str:
    """A GraphDef, whose input ``n:0`` has the alias ``n``."""
    b = Builder()
    b.node("Neg", b.placeholder("n", "float32", -1), name="y", T=Type("float32"))
    path = tmp_path / "neg.pb"
    path.write_bytes(b.bytes())
    return str(path)
