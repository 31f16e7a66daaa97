"""The file of a saved session: pages, mapped arrays, checks, replacement."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

import penstock as ps
from penstock.artifact.container import ArtifactFile
from penstock.artifact.writer import ArtifactWriter
from penstock.backends.registry import available
from penstock.cli import main
from penstock.core.limits import DEFAULT_LIMITS
from tests.session.test_artifact import assert_same, image, net, net_model
from tests.support.onnx_text import compile_text, model_from_text
from tests.support.sweeps import drawn


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.penstock"


def test_only_saved_sessions_are_opened(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(net_model().SerializeToString())
    with pytest.raises(ps.InvalidModel, match="no saved session; compile it"):
        ps.open(file)


@pytest.mark.parametrize("mapped", [True, False])
def test_sessions_of_one_file_share_its_pages(path: Path, mapped: bool) -> None:
    net(shapes={"x": (2, 3, 8, 8)}, backends=["numpy"]).save(path)
    sessions = [ps.open(path, map_weights=mapped) for _ in range(2)]
    for session in sessions:
        session.run(image())
    kernels = [
        next(
            s.const for s in session.inspect.plan.slots if s.const is not None and s.const.ndim == 4
        )
        for session in sessions
    ]
    assert np.shares_memory(*kernels) is mapped
    assert not kernels[0].flags.writeable


_PAGES_OF_WEIGHTS = """
import re, sys
import numpy as np
import penstock
session, x = penstock.open({path!r}), np.ones((8, 1024), np.float32)
def bytes_of(mapping, what):
    text = open("/proc/self/smaps").read()
    own = [m for m in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text) if mapping in m]
    return sum(int(n) for m in own for n in re.findall(rf"(?m)^{{what}}: +([0-9]+)", m)) << 10
before = bytes_of("", "Anonymous")
session.run({{"x": x}})
print(bytes_of("", "Anonymous") - before, flush=True)
sys.stdin.readline()  # other processes have the file open, too
print(*[bytes_of({path!r}, what) for what in ("Rss", "Pss", "Anonymous")])
"""


@pytest.mark.costly
@pytest.mark.skipif(sys.platform != "linux", reason="asks the system for the pages of a process")
@pytest.mark.parametrize("backends", [None, ["native", "numpy"], ["numpy"]], ids=str)
def test_processes_share_the_weights_of_a_file(path: Path, backends: Any) -> None:
    if backends and not {*backends} <= {*available()}:
        pytest.skip("not built")
    model = model_from_text("g (float[8, 1024] x) => (float[8, 4096] y) { y = MatMul(x, w) }")
    # 16 MiB: buffers of OpenBLAS take 4 MiB where it has kernels for AVX-512.
    weights = np.random.default_rng(3).standard_normal((1024, 4096)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    ps.compile(model, threads=1, backends=backends, shapes={"x": (8, 1024)}).save(path)
    command = [sys.executable, "-c", _PAGES_OF_WEIGHTS.format(path=str(path))]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    own = [int(process.stdout.readline()) for process in processes if process.stdout]
    shared = [[*map(int, process.communicate("\n")[0].split())] for process in processes[:1]]
    for process in processes[1:]:
        process.communicate("\n")
    assert len(own) == 3
    assert max(own) < weights.nbytes / 2  # no copy of the weights
    for resident, part, written in shared:
        assert resident >= weights.nbytes
        assert part < 0.5 * resident  # of three processes each has a third
        assert written == 0


def test_file_that_is_replaced_stays_as_it_was_for_those_that_have_it(path: Path) -> None:
    net(shapes={"x": (2, 3, 8, 8)}).save(path)
    opened = ps.open(path)
    compile_text("g (float[1] x) => (float[1] y) { y = Neg(x) }").save(path)
    assert opened.run(image())["y"].shape == (2, 5)
    assert ps.open(path).run({"x": np.ones(1, np.float32)})["y"] == -1


def written(path: Path, array: np.ndarray) -> ArtifactFile:
    """A file with one array."""
    writer = ArtifactWriter()
    writer.array(array)
    writer.save(path)
    with path.open("rb") as file:
        return ArtifactFile(file, path.name, DEFAULT_LIMITS)


def test_array_that_cannot_be_broadcast_is_damage(path: Path) -> None:
    file = written(path, np.broadcast_to(np.arange(3), (4, 3)))
    for whole in ([4, 5], [4], [4, -3], 7, [4.0, 3]):
        file._table["arrays"][0][5:] = [whole]
        with pytest.raises(ps.InvalidModel, match="array 0"):
            file.array(0)


def test_large_arrays_of_mapped_files_are_checked_when_asked(path: Path) -> None:
    model = model_from_text("g (float[1] x) => (float[40000] y) { y = Mul(x, w) }")
    array = np.arange(40_000, dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(array, "w"))
    ps.compile(model, shapes={}).save(path)
    data = bytearray(path.read_bytes())
    data[data.index(array[9000:9100].tobytes())] ^= 1
    path.write_bytes(data)
    x = {"x": np.ones(1, np.float32)}
    assert ps.open(path).run(x)["y"].shape == (40_000,)
    with pytest.raises(ps.InvalidModel, match="another checksum"):
        ps.open(path, map_weights=False).run(x)
    done = CliRunner().invoke(main, ["check", str(path)])
    assert done.exit_code == 1
    assert "another checksum" in done.output


@pytest.mark.parametrize("seed", drawn(range(200), 50))
def test_changed_bytes_are_found(path: Path, seed: int) -> None:
    session = net(shapes={"x": (2, 3, 8, 8)}, backends=["numpy"])
    session.save(path)
    data = bytearray(path.read_bytes())
    draw = random.Random(seed)
    if seed % 4:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    else:
        del data[draw.randrange(len(data)) :]
    path.write_bytes(data)
    try:
        got = ps.open(path, map_weights=False).run(image())
    except ps.PenstockError:
        return
    assert_same(got, session.run(image()))  # it was a byte between two sections
