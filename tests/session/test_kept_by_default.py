"""Sessions that are kept without ``cache=``: which, when, and which processes open them."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bench.zoo.sample import samples
from onnx import ModelProto, numpy_helper

import penstock as ps
from penstock.artifact.container import ArtifactFile
from penstock.backends.numpy import NumpyBackend
from penstock.core import origins
from penstock.core.errors import warn
from penstock.core.limits import DEFAULT_LIMITS
from penstock.extend import Kernel, operator
from penstock.ops import registry
from penstock.ops.common.constant_cache import Reordered
from penstock.session import compile_cache, opening
from penstock.session.artifact import Artifact
from penstock.tuning.cost_table import cost_table
from tests.session.test_compile_cache import nothing_is_compiled
from tests.support.expert import with_expert
from tests.support.onnx_text import model_from_text
from tests.support.sweeps import drawn
from tests.support.tflite_cases import cases, follow

X = {"x": np.ones((2, 300), np.float32)}
WEIGHTS_BYTES = 300 * 1000 * 4  # weights are read one by one from files of at least a megabyte


def dense(factor: float = 1.0) -> ModelProto:
    """A layer whose weights are large enough to be read from the model's file."""
    model = model_from_text("""g (float[N, 300] x) => (float[N, 1000] y) {
        p = MatMul(x, w) y = Relu(p) }""")
    weights = factor * np.arange(300 * 1000, dtype=np.float32).reshape(300, 1000)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    return model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_cache, "_SETTLED_NS", -(10**12))  # new files count as old
    monkeypatch.setattr(
        compile_cache, "USER_OPERATIONS", set()
    )  # whatever other tests have registered
    return tmp_path / "cache" / "sessions"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "dense.onnx"
    path.write_bytes(dense().SerializeToString())
    return path


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def use(model: Any, **options: Any) -> np.ndarray:
    with ps.compile(model, **options) as session:
        return np.asarray(session.run(X)["y"])


def entry_of(folder: Path) -> ArtifactFile:
    (path,) = kept(folder)
    with path.open("rb") as file:
        return ArtifactFile(file, path.name, DEFAULT_LIMITS)


@pytest.mark.parametrize("end", ["closed", "dropped"])
def test_session_is_kept_when_it_ends(model: Path, folder: Path, end: str) -> None:
    session = ps.compile(model)
    expected = session.run(X)["y"]
    assert not kept(folder)  # the first answer does not wait for it
    if end == "closed":
        session.close()
    del session
    assert len(kept(folder)) == 1
    with nothing_is_compiled():
        np.testing.assert_array_equal(use(model), expected)
    assert len(kept(folder)) == 1


def test_sessions_of_a_process_are_kept_when_it_ends(model: Path, folder: Path) -> None:
    code = f"""
import numpy as np, penstock
from penstock.session import compile_cache
compile_cache._SETTLED_NS = -10**12
session = penstock.compile({str(model)!r})
session.run({{"x": np.ones((2, 300), np.float32)}})
print(session._executors.opened)
"""
    for restored in ("0", "1"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr) == (restored, "")
        assert len(kept(folder)) == 1


def test_session_without_a_run_is_not_kept(model: Path, folder: Path) -> None:
    ps.compile(model).close()
    assert not kept(folder)


@pytest.mark.parametrize(
    "source",
    [lambda path: path.read_bytes(), lambda path: onnx.load(path), ps.load],
    ids=["bytes", "proto", "model"],
)
def test_only_models_in_files_are_kept(
    model: Path, folder: Path, source: Callable[[Path], Any]
) -> None:
    use(source(model))
    assert not kept(folder)


def test_folder_of_many_files_is_not_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "MOST_FILES", 20)
    walked: list[str] = []

    def walk(folder: str) -> Any:
        for number in range(1000):
            walked.append(folder)
            yield folder, [], [f"file {number}.{i}" for i in range(10)]

    with monkeypatch.context() as patch:
        patch.setattr(compile_cache.os, "walk", walk)
        with pytest.raises(ps.InvalidModel):
            ps.compile(tmp_path)
    assert len(walked) == 3


def test_saved_session_is_not_kept_once_more(model: Path, folder: Path) -> None:
    saved = model.parent / "saved.penstock"
    with ps.compile(model, cache=False) as session:
        session.save(saved)
    for open_ in (ps.compile, ps.open):
        with open_(saved) as session:
            session.run(X)
    assert not kept(folder)


def test_nothing_is_kept_where_it_is_turned_off(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(model, cache=False)
    assert not kept(folder)
    monkeypatch.setenv("PENSTOCK_CACHE", "off")
    monkeypatch.chdir(model.parent)
    use(model)
    use(model, cache=True)
    with ps.compile(model) as session:
        session.profile(X, runs=1)
    assert cost_table().path == ""
    assert [path.name for path in model.parent.iterdir()] == ["dense.onnx"]


def test_options_that_cannot_be_named_keep_nothing_and_say_nothing(
    model: Path, folder: Path
) -> None:
    use(model, backends=[NumpyBackend()])
    use(model, **with_expert({"after_pass": lambda step, graph: None}))
    assert not kept(folder)


def test_programs_of_users_keep_nothing(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "USER_OPERATIONS", {"Example"})
    use(model)
    assert not kept(folder)


def test_registered_operations_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    monkeypatch.setattr(registry, "USER_OPERATIONS", seen)
    operator("KeptByDefault", domain="test.kept")(lambda node, types: Kernel(lambda x: x))
    assert seen == {"KeptByDefault"}


def test_model_that_is_warned_of_is_not_kept(model: Path, folder: Path) -> None:
    loaded = opening.load

    def load(*arguments: Any, **options: Any) -> Any:
        warn("the model is odd")
        return loaded(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "load", load)
        for _ in range(2):
            with pytest.warns(UserWarning, match="odd"):
                use(model)
    assert not kept(folder)


def test_variables_begin_anew_in_each_session(folder: Path) -> None:
    (case,) = [c for c in cases("op") if c.name == "unidirectional_sequence_lstm_state_kept"]
    follow(case, lambda _: ps.compile(case.path))
    assert len(kept(folder)) == 1
    with nothing_is_compiled():
        first, second = ps.compile(case.path), ps.compile(case.path)
        feeds = case.feeds(case.data["runs"][0])
        expected = [first.run(feeds), first.run(feeds)]
        for each in expected:
            for name, y in second.run(feeds).items():
                np.testing.assert_array_equal(y, each[name])
    follow(case, lambda _: ps.compile(case.path))


def test_file_that_is_touched_is_compiled_anew(model: Path, folder: Path) -> None:
    use(model)
    status = model.stat()
    with model.open("r+b") as file:  # the same inode and size
        file.write(dense(2.0).SerializeToString())
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert use(model)[0, 0] == 2 * 1000 * sum(range(300))


def test_file_of_just_now_may_change_without_a_trace_and_is_not_kept(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "_SETTLED_NS", 10**12)
    use(model)
    assert not kept(folder)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="folders have no owner")
def test_folder_that_others_may_write_is_not_used(model: Path, folder: Path) -> None:
    use(model)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (path,) = kept(folder)
    folder.chmod(0o770)
    path.write_bytes(b"PENSTOCK")
    use(model)
    assert path.read_bytes() == b"PENSTOCK"  # neither read nor replaced


def test_folder_that_cannot_be_made_is_no_warning(model: Path, folder: Path) -> None:
    folder.parent.write_text("a file")
    assert use(model).shape == (2, 1000)
    assert folder.parent.read_text() == "a file"


def test_weights_are_read_from_the_model_s_file(model: Path, folder: Path) -> None:
    use(model)
    (path,) = kept(folder)
    assert path.stat().st_size < WEIGHTS_BYTES + 50_000  # what kernels have packed
    assert [len(entry) for entry in entry_of(folder)._table["arrays"]].count(4) == 1


def test_weights_beside_the_model_are_read_there(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "apart.onnx"
    onnx.save(dense(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    expected = use(path)
    assert kept(folder)[0].stat().st_size < WEIGHTS_BYTES + 50_000
    with nothing_is_compiled():
        np.testing.assert_array_equal(use(path), expected)
    weights = tmp_path / "w.bin"
    weights.write_bytes((np.frombuffer(weights.read_bytes(), np.float32) * 2).tobytes())
    np.testing.assert_array_equal(use(path), 2 * expected)


@pytest.mark.parametrize("cache", [None, True])
def test_weights_beside_the_model_count_after_a_further_shape(
    tmp_path: Path, cache: bool | None
) -> None:
    path, weights = tmp_path / "apart.onnx", tmp_path / "w.bin"
    onnx.save(dense(), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    expected = use(path, cache=cache)
    with ps.compile(path, cache=cache) as session:  # opened, and kept once more
        session.run({"x": np.ones((3, 300), np.float32)})
        assert session.stats.plans_opened == 0
    weights.write_bytes((np.frombuffer(weights.read_bytes(), np.float32) * 2).tobytes())
    np.testing.assert_array_equal(use(path, cache=cache), 2 * expected)


def test_model_and_weights_are_found_under_another_path(tmp_path: Path, folder: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    onnx.save(dense(), first / "m.onnx", save_as_external_data=True, location="w", size_threshold=0)
    expected = use(first / "m.onnx", cache=tmp_path / "named")
    second.mkdir()
    for name in ("m.onnx", "w"):
        (first / name).rename(second / name)
    with nothing_is_compiled():
        np.testing.assert_array_equal(use(second / "m.onnx", cache=tmp_path / "named"), expected)


def test_model_behind_a_link_is_kept(model: Path, folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.onnx"
    link.symlink_to(model)
    expected = use(link)
    with nothing_is_compiled():
        np.testing.assert_array_equal(use(link), expected)


def test_mapped_weights_stay_mapped(model: Path) -> None:
    expected = use(model, map_weights=True)
    with nothing_is_compiled():
        np.testing.assert_array_equal(use(model, map_weights=True), expected)


def test_weights_are_not_held_beside_what_kernels_packed(model: Path) -> None:
    expected = use(model)
    gc.collect()
    before = len(origins._ORIGINS)
    session = ps.compile(model)
    assert len(origins._ORIGINS) == before + 1
    np.testing.assert_array_equal(session.run(X)["y"], expected)
    assert len(origins._ORIGINS) == before


def test_model_s_file_may_be_replaced_while_a_session_lives(model: Path) -> None:
    expected = use(model)
    session = ps.compile(model)
    session.run(X)
    model.write_bytes(dense(3.0).SerializeToString())
    # Another plan needs the weights again, which the first one has released.
    rows = session.run({"x": np.ones((5, 300), np.float32)})["y"]
    np.testing.assert_allclose(rows, np.broadcast_to(expected[:1], rows.shape), rtol=1e-6)
    (weights,) = [v.const for v in session.model.graph.nodes[0].inputs if v and v.is_constant]
    np.testing.assert_array_equal(weights, numpy_helper.to_array(dense().graph.initializer[0]))


def test_weights_that_are_cut_short_meanwhile_are_no_session(model: Path, folder: Path) -> None:
    expected = use(model)
    entry = compile_cache.CacheEntry.load

    def load(self: Any) -> Any:
        assert os.path.isfile(self.path)  # found by the file as it was
        model.write_bytes(b"")
        try:
            assert entry(self) is None
        finally:
            model.write_bytes(dense().SerializeToString())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_cache.CacheEntry, "load", load)
        np.testing.assert_array_equal(use(model), expected)


def test_what_takes_too_much_is_kept_without_packed_weights_or_not_at_all(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "MOST_BY_DEFAULT", 10_000)
    expected = use(model)
    assert kept(folder)[0].stat().st_size < 50_000  # without packed weights
    with nothing_is_compiled():
        np.testing.assert_array_equal(use(model), expected)
    kept(folder)[0].unlink()
    proto = dense()
    proto.graph.initializer[0].ClearField("raw_data")
    proto.graph.initializer[0].float_data.extend(np.arange(300 * 1000))  # no bytes to refer to
    model.write_bytes(proto.SerializeToString())
    np.testing.assert_array_equal(use(model), expected)
    assert not kept(folder)


def test_plans_of_further_shapes_are_added(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in (1, 2, 3):  # each in a process of its own
        with ps.compile(model) as session:
            session.run({"x": np.ones((rows, 300), np.float32)})
    with nothing_is_compiled(), ps.compile(model) as session:
        for rows in (1, 2, 3):
            assert session.run({"x": np.ones((rows, 300), np.float32)})["y"].shape == (rows, 1000)
    monkeypatch.setattr(compile_cache, "MOST_PLANS", 3)
    before = kept(folder)[0].read_bytes()
    with ps.compile(model) as session:
        session.run({"x": np.ones((4, 300), np.float32)})
    assert kept(folder)[0].read_bytes() == before


def test_weights_that_kernels_hold_are_not_given_back_for_further_plans(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(rows: int) -> np.ndarray:
        return np.asarray(session.run({"x": np.ones((rows, 300), np.float32)})["y"])

    expected = []
    for rows in (20, 30):  # each in a process of its own
        with ps.compile(model) as session:
            expected.append(run(rows))
    with nothing_is_compiled(), ps.compile(model) as session:
        np.testing.assert_array_equal(run(20), expected[0])
        monkeypatch.setattr(Reordered, "array", lambda weights: pytest.fail("they are given back"))
        np.testing.assert_array_equal(run(30), expected[1])


def test_measured_costs_decide_anew(model: Path, folder: Path) -> None:
    use(model)
    with ps.compile(model) as session:
        session.profile(X, runs=1)
    # They may speak for another plan.
    with pytest.raises(TypeError), nothing_is_compiled():
        ps.compile(model)


def test_other_limits_have_sessions_of_their_own(model: Path) -> None:
    use(model)
    with pytest.raises(ps.InvalidModel, match="nodes"):
        ps.compile(model, limits=ps.Limits(max_nodes=1))


def test_changed_program_finds_nothing(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(model)
    program = compile_cache._program()
    monkeypatch.setattr(compile_cache, "_program", lambda: [*program, "changed"])
    use(model)
    assert len(kept(folder)) == 2


def test_session_of_another_key_with_the_same_name_is_not_used(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "crc32", lambda text: 0)
    monkeypatch.setattr(compile_cache, "adler32", lambda text: 0)
    use(model, threads=1)
    with pytest.raises(TypeError), nothing_is_compiled():
        ps.compile(model, threads=2)


@pytest.mark.parametrize(
    ("path", "offset"),
    [("../dense.onnx", 0), ("/etc/passwd", 0), ("dense.onnx", -1), ("dense.onnx", 1 << 40)],
)
def test_reference_that_leads_elsewhere_is_damage(
    model: Path, folder: Path, path: str, offset: int
) -> None:
    expected = use(model)
    (file,) = kept(folder)
    made = compile_cache.CacheEntry.writer

    def writer(self: Any) -> Any:
        result = made(self)
        refer = result._refer
        result._refer = lambda origin, *rest: refer(
            origin._replace(path=os.path.join(model.parent, path), offset=offset), *rest
        )
        return result

    file.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_cache.CacheEntry, "writer", writer)
        use(model)
    np.testing.assert_array_equal(use(model), expected)
    with nothing_is_compiled():  # it has been replaced
        np.testing.assert_array_equal(use(model), expected)


@pytest.mark.parametrize("cache", [None, True])
def test_plan_that_cannot_be_restored_is_made_again(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, cache: bool | None
) -> None:
    expected = use(model, cache=cache)

    def fail(*arguments: Any) -> Any:
        raise ValueError("of another program")

    with monkeypatch.context() as patch:
        patch.setattr(Artifact, "_plan", fail)
        with ps.compile(model, cache=cache) as session:
            np.testing.assert_array_equal(session.run(X)["y"], expected)
            assert session.stats.plans_opened == 0
    with nothing_is_compiled():  # it has been replaced
        np.testing.assert_array_equal(use(model, cache=cache), expected)


def same_bits(got: Any, wanted: Any) -> bool:
    """Whether two outputs are equal bit by bit, whatever their types."""
    if isinstance(got, np.ndarray) and got.dtype != object:
        same = got.dtype == wanted.dtype and got.shape == wanted.shape
        return bool(same and got.tobytes() == wanted.tobytes())
    if isinstance(got, list | tuple):
        return len(got) == len(wanted) and all(map(same_bits, got, wanted))
    return bool(np.all(got == wanted))


ZOO = list(samples())


@pytest.mark.parametrize("number", drawn(range(len(ZOO)), 12))
def test_kept_session_answers_bit_by_bit_as_the_compiled_one(tmp_path: Path, number: int) -> None:
    _, model, feeds = ZOO[number]
    path = tmp_path / "model.onnx"
    path.write_bytes(model)
    with ps.compile(path) as first:
        wanted = first.run(feeds)
        names = [port.name for port in (*first.inputs, *first.outputs, *first.values)]
    with ps.compile(path) as second:
        got = second.run(feeds)
        assert second.stats.plans_opened == 1
        assert [port.name for port in (*second.inputs, *second.outputs, *second.values)] == names
    assert list(got) == list(wanted)
    assert same_bits([*got.values()], [*wanted.values()])
