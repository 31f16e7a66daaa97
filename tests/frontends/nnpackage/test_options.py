"""The configuration of a package, as options of compiling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.backends import registry
from tests.frontends.nnpackage.test_refusals import archive, files, folder, negate


def package(path: Path, *lines: str) -> Path:
    contents = {**files(negate(), configs=["a.cfg", "b.cfg"]), "metadata/b.cfg": b"EXECUTOR=?"}
    return folder(path, {**contents, "metadata/a.cfg": "\n".join(lines).encode()})


@pytest.mark.parametrize(
    ("line", "option", "value"),
    [
        ("EXECUTOR=Linear", "executor", "linear"),
        ('EXECUTOR="Dataflow"', "executor", "dataflow"),
        ("  EXECUTOR = 'Parallel' ", "executor", "parallel"),
        ("CPU_MEMORY_PLANNER=Bump", "memory_planner", "bump"),
        ("CPU_MEMORY_PLANNER=FirstFit", "memory_planner", "first_fit"),
        ("CPU_MEMORY_PLANNER=WIC", "memory_planner", "wic"),
        ("NUM_THREADS=1", "threads", 1),
        ("BACKENDS=numpy", "backends", ("numpy",)),
        ("OP_BACKEND_ALLOPS=numpy", "backends", ("numpy",)),
        ("OP_BACKEND_Neg=numpy", "place", {"Neg": "numpy"}),
        ("OP_BACKEND_MAP=0=numpy", "place", {"node:NEG_0": "numpy"}),
        ("OP_BACKEND_MAP=0=cpu", "place", None),
        ("PROFILING_MODE=0", "autotune", False),
        ("BACKENDS=cpu;ruy", "backends", None),
        ("OP_BACKEND_ALLOPS=cpu", "backends", None),
        ("OP_BACKEND_Conv2D=cpu", "place", None),
        ("USE_SCHEDULER=1", "executor", "auto"),
        ("TRACING_MODE=0", "executor", "auto"),
        ("# EXECUTOR=Linear", "executor", "auto"),
        ("", "executor", "auto"),
    ],
)
def test_key_of_a_configuration_is_an_option(
    tmp_path: Path, line: str, option: str, value: Any
) -> None:
    assert ps.compile(package(tmp_path, line)).options.get(option) == value


@pytest.mark.parametrize(
    "line",
    [
        "SOMETHING_ELSE=1",
        "EXECUTOR=Random",
        "NUM_THREADS=0",
        "NUM_THREADS=two",
        "BACKENDS=npu",
        "OP_BACKEND_Neg=npu",
        "OP_BACKEND_Conv2D=numpy",
        "OP_BACKEND_MAP=0=npu",
        "OP_BACKEND_MAP=1=numpy",
        "OP_BACKEND_MAP=numpy",
        "TRACING_MODE=1",
        "just a line",
    ],
)
def test_key_or_value_without_a_meaning_is_warned_of_by_name(tmp_path: Path, line: str) -> None:
    path = package(tmp_path, line)
    with pytest.warns(UserWarning, match="which is ignored") as caught:
        session = ps.compile(path)
    assert line.partition("=")[0] in str(caught[0].message)
    assert session.options == ps.compile(ps.load(folder(tmp_path / "p", files(negate())))).options


def test_options_of_the_caller_come_before_those_of_the_configuration(tmp_path: Path) -> None:
    path = package(tmp_path, "EXECUTOR=Dataflow", "CPU_MEMORY_PLANNER=Bump", "NUM_THREADS=1")
    options = ps.compile(path, executor="linear", threads=2).options
    assert (options.executor, options.threads, options.expert.memory_planner) == (
        "linear",
        2,
        "bump",
    )
    assert ps.compile(ps.load(path)).inspect.executor.name == "dataflow"


def test_configuration_of_a_zip_is_read(tmp_path: Path) -> None:
    contents = files(negate(), configs=["a.cfg"]) | {"metadata/a.cfg": b"EXECUTOR=Linear\n"}
    assert ps.compile(archive(tmp_path / "p.zip", contents)).options.executor == "linear"


def test_backend_that_this_machine_lacks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "missing", lambda name: None if name == "numpy" else "gone")
    with pytest.warns(UserWarning, match="BACKENDS=native"):
        ps.compile(package(tmp_path, "BACKENDS=native"))
