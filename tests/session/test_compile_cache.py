"""``compile(cache=...)``: sessions that are kept in a folder."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, numpy_helper

import penstock as ps
from penstock.artifact import container
from penstock.backends.numpy import NumpyBackend
from penstock.cli import main
from penstock.compiler import compiler
from penstock.plan.grouping import ClusteredGrouping
from penstock.session import compile_cache, opening
from penstock.tuning.measure import CostModel
from tests.support.expert import with_expert
from tests.support.onnx_text import model_from_text

X = {"x": np.ones((2, 3), np.float32)}


def dense(factor: float = 1.0) -> ModelProto:
    model = model_from_text("g (float[N, 3] x) => (float[N, 4] y) { p = MatMul(x, w) y = Relu(p) }")
    weights = factor * np.arange(12, dtype=np.float32).reshape(3, 4)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "dense.onnx"
    path.write_bytes(dense().SerializeToString())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@contextmanager
def nothing_is_compiled() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "load", None)
        patch.setattr(compiler.Compiler, "compile", None)
        yield


def test_second_session_is_not_compiled(model: Path, folder: Path) -> None:
    expected = ps.compile(model, cache=folder).run(X)["y"]
    with nothing_is_compiled():
        second = ps.compile(model, cache=folder)
        np.testing.assert_array_equal(second.run(X)["y"], expected)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(second)).run(X)["y"], expected)
    assert second.model.path == str(model)


def test_bytes_and_strings_are_sources_too(model: Path, folder: Path) -> None:
    data = model.read_bytes()
    ps.compile(data, cache=str(folder)).run(X)
    with nothing_is_compiled():
        ps.compile(data, cache=folder).run(X)
    with pytest.raises(ValueError, match=r"needs the path or the bytes of a model, not a ModelP"):
        ps.compile(dense(), cache=folder)


def test_true_stands_for_the_folder_of_the_user(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(folder))
    ps.compile(model, cache=True).run(X)
    assert len(list((folder / "sessions").glob("*.penstock"))) == 1


def test_file_that_changes_in_place_is_compiled_anew(model: Path, folder: Path) -> None:
    ps.compile(model, cache=folder).run(X)
    status = model.stat()
    with model.open("r+b") as file:  # the same inode, size and time
        file.write(dense(2.0).SerializeToString())
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert model.stat().st_size == status.st_size
    assert ps.compile(model, cache=folder).run(X)["y"][0, 0] == 24


def test_digest_of_file_that_was_written_just_now_is_not_kept(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    ps.compile(model, cache=folder).run(X)
    assert not [*folder.glob("*.digest")]  # its next change may have the same time
    now = time.time_ns()
    monkeypatch.setattr(compile_cache.time, "time_ns", lambda: now + 10**10)
    ps.compile(model, cache=folder).run(X)
    assert len([*folder.glob("*.digest")]) == 1


def test_file_that_changes_before_it_is_read_is_not_kept(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, read = model.read_bytes(), opening.load

    def load(*arguments: Any, **options: Any) -> Any:
        model.write_bytes(dense(2.0).SerializeToString())
        return read(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(opening, "load", load)
        ps.compile(model, cache=folder).run(X)
    model.write_bytes(before)
    assert ps.compile(model, cache=folder).run(X)["y"][0, 0] == 12


def test_weights_beside_the_model_count(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "apart.onnx"

    def write(factor: float) -> None:
        proto = dense(factor)
        onnx.save(proto, path, save_as_external_data=True, location="apart.bin", size_threshold=0)

    write(1.0)
    ps.compile(path, cache=folder).run(X)
    with nothing_is_compiled():
        assert ps.compile(path, cache=folder).run(X)["y"][0, 0] == 12
    (tmp_path / "apart.bin").unlink()
    write(3.0)
    assert ps.compile(path, cache=folder).run(X)["y"][0, 0] == 36


@pytest.mark.parametrize(
    "options", [{"executor": "linear"}, {"threads": 1}, {"backends": ["numpy"]}]
)
def test_other_options_have_sessions_of_their_own(
    model: Path, folder: Path, options: dict[str, Any]
) -> None:
    ps.compile(model, cache=folder).run(X)
    ps.compile(model, cache=folder, **with_expert(options)).run(X)
    assert len(list(folder.glob("*.penstock"))) == 2


def test_plans_of_all_shapes_are_kept(model: Path, folder: Path) -> None:
    with ps.compile(model, cache=folder) as first:
        for rows in (1, 2, 4, 3, 6):
            first.run({"x": np.ones((rows, 3), np.float32)})
    with nothing_is_compiled():
        second = ps.compile(model, cache=folder)
        for rows in (1, 2, 4, 3, 6):
            assert second.run({"x": np.ones((rows, 3), np.float32)})["y"].shape == (rows, 4)


def test_damaged_session_is_replaced(model: Path, folder: Path) -> None:
    expected = ps.compile(model, cache=folder).run(X)["y"]
    (kept,) = folder.glob("*.penstock")
    kept.write_bytes(kept.read_bytes()[:-100])
    np.testing.assert_array_equal(ps.compile(model, cache=folder).run(X)["y"], expected)
    with nothing_is_compiled():
        ps.compile(model, cache=folder).run(X)


def test_session_with_any_damaged_byte_is_replaced(model: Path, folder: Path) -> None:
    expected = ps.compile(model, cache=folder).run(X)["y"]
    (kept,) = folder.glob("*.penstock")
    whole = kept.read_bytes()
    for i in range(0, len(whole), 67):
        kept.unlink()  # a mapped file must not change
        kept.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        np.testing.assert_array_equal(ps.compile(model, cache=folder).run(X)["y"], expected)
    with nothing_is_compiled():
        ps.compile(model, cache=folder).run(X)


def test_folder_keeps_what_was_used_last(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(factor: float) -> None:
        ps.compile(dense(factor).SerializeToString(), cache=folder).run(X)

    compiled(1)
    (first,) = folder.glob("*.penstock")
    compiled(2)
    for i, path in enumerate(sorted(folder.glob("*.penstock"), key=lambda path: path != first)):
        os.utime(path, (i, i))
    compiled(1)  # used again
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 2 * first.stat().st_size + 100)
    compiled(3)
    left = list(folder.glob("*.penstock"))
    assert len(left) == 2
    assert first in left


def test_folder_that_cannot_be_written_is_a_warning(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cache= keeps no session"):
        assert ps.compile(model, cache=tmp_path / "file").run(X)["y"].shape == (2, 4)


def test_options_that_are_objects_are_not_told_apart_and_keep_nothing(
    model: Path, folder: Path
) -> None:
    ps.compile(model, cache=folder).run(X)
    seen: list[str] = []
    for options in (
        {"cost_model": CostModel()},
        {"grouping": ClusteredGrouping},
        {"devices": 2},
        {"variables": ps.compile(dense()).variables},
        {"after_pass": lambda step, graph: seen.append(step.name)},
        {"backends": [NumpyBackend()]},
    ):
        with pytest.warns(UserWarning, match=f"keeps no session: {next(iter(options))}= is an obj"):
            session = ps.compile(model, cache=folder, **with_expert(options))
            assert session.run(X)["y"].shape == (2, 4)
    assert seen  # with the old entry no pass would have run
    assert len(list(folder.glob("*.penstock"))) == 1


def test_file_that_changes_while_it_is_compiled_is_not_kept(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = opening.load

    def load(*arguments: Any, **options: Any) -> Any:
        read = loaded(*arguments, **options)
        model.write_bytes(dense(2.0).SerializeToString())
        return read

    with monkeypatch.context() as patch:
        patch.setattr(opening, "load", load)
        first = ps.compile(model, cache=folder).run(X)["y"]
    assert not list(folder.glob("*.penstock"))
    np.testing.assert_array_equal(ps.compile(model, cache=folder).run(X)["y"], 2 * first)
    model.write_bytes(dense().SerializeToString())
    np.testing.assert_array_equal(ps.compile(model, cache=folder).run(X)["y"], first)


def test_weights_that_change_while_a_model_is_compiled_are_not_kept(
    tmp_path: Path, folder: Path
) -> None:
    path, weights = tmp_path / "model.onnx", tmp_path / "weights"
    onnx.save(dense(), path, save_as_external_data=True, location="weights", size_threshold=0)
    first = ps.compile(path, cache=folder)
    weights.write_bytes((2 * np.arange(12, dtype=np.float32)).tobytes())
    expected = first.run(X)["y"]
    assert not list(folder.glob("*.penstock"))
    np.testing.assert_array_equal(ps.compile(path, cache=folder).run(X)["y"], 2 * expected)


def test_full_disk_is_a_warning_and_leaves_nothing_behind(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(container.os, "fsync", full)
    with pytest.warns(UserWarning, match="cache= keeps no session: .*No space left"):
        assert ps.compile(model, cache=folder).run(X)["y"].shape == (2, 4)
    assert not list(folder.iterdir())


def test_folder_that_is_only_read_is_used(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ps.compile(model, cache=folder).run(X)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(compile_cache.os, "utime", refuse)
    with nothing_is_compiled():
        ps.compile(model, cache=folder).run(X)


def test_several_processes_and_threads_share_a_folder(model: Path, folder: Path) -> None:
    code = f"""
import numpy as np, penstock
x = {{"x": np.ones((2, 3), np.float32)}}
for _ in range(5):
    assert penstock.compile({str(model)!r}, cache={str(folder)!r}).run(x)["y"][0, 0] == 12
"""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    with ThreadPoolExecutor(4) as threads:
        runs = [threads.submit(lambda: ps.compile(model, cache=folder).run(X)) for _ in range(12)]
    assert all(run.result()["y"][0, 0] == 12 for run in runs)
    assert all(process.wait() == 0 for process in processes)
    assert len(list(folder.iterdir())) <= 2  # the session and a digest, and no partial file


def test_commands_list_and_clear_a_folder(model: Path, folder: Path) -> None:
    ps.compile(model, cache=folder).run(X)
    arguments = ["--folder", str(folder), "--json"]
    listed = json.loads(CliRunner().invoke(main, ["cache", "list", *arguments]).output)
    (entry,) = listed["sessions"]
    assert entry["bytes"] == (folder / entry["file"]).stat().st_size
    assert entry["file"] in CliRunner().invoke(main, ["cache", "list", *arguments[:2]]).output
    cleared = json.loads(CliRunner().invoke(main, ["cache", "clear", *arguments]).output)
    assert cleared["freed"] == entry["bytes"]
    assert not list(folder.iterdir())
