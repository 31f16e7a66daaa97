"""Models whose weights are larger than what a session may hold are read from their file in runs."""

from __future__ import annotations

import gc
import mmap
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import penstock as ps
from penstock.build import GraphBuilder
from penstock.executors import pager as module
from penstock.executors.pager import Pager, can_page, resident_bytes
from tests.support.processes import in_child
from tests.support.timing import SOON, wait_until

pytestmark = pytest.mark.skipif(not can_page(), reason="the system does not tell what is resident")
LAYERS, WIDTH = 16, 512  # 1 MiB of weights each
WEIGHTS = LAYERS * WIDTH * WIDTH * 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    rng, b = np.random.default_rng(0), GraphBuilder()
    x = b.input("x", np.float32, ["rows", WIDTH])
    for _ in range(LAYERS):
        weights = rng.normal(0, 0.05, (WIDTH, WIDTH)).astype(np.float32)
        x = b.op("Relu", x @ weights)
    b.output("y", x)
    path = tmp_path_factory.mktemp("models") / "large.penstock"
    with ps.compile(b.model(), shapes={"x": (4, WIDTH)}, threads=1) as session:
        session.save(path)
    return path


X = np.random.default_rng(1).normal(size=(4, WIDTH)).astype(np.float32)


def test_model_larger_than_its_memory_gives_the_same_answers(saved):
    expected = ps.open(saved, threads=1).run({"x": X})["y"]
    with pytest.raises(ps.LimitExceeded) as caught:
        ps.open(saved, threads=1, memory="1MB").run({"x": X})
    found = re.search(r"at least (\d+) are needed", str(caught.value))
    assert found is not None and int(found[1]) < WEIGHTS // 4  # two layers, and the plan
    for memory in (int(found[1]), WEIGHTS // 2):
        session = ps.open(saved, threads=1, memory=memory)
        for _ in range(3):
            np.testing.assert_array_equal(session.run({"x": X})["y"], expected)
        assert session._plans.pager is not None and session._plans.pager.active
        jobs = [session.submit({"x": X}) for _ in range(8)]
        for job in jobs:
            np.testing.assert_array_equal(job.result(SOON)["y"], expected)
        session.close()


def test_weights_that_fit_stay_and_those_that_are_not_mapped_are_refused(saved):
    session = ps.open(saved, threads=1, memory=2 * WEIGHTS)
    session.run({"x": X})
    assert session._plans.pager is not None and not session._plans.pager.active
    with pytest.raises(ps.LimitExceeded, match="memory="):
        ps.open(saved, threads=1, memory=WEIGHTS // 2, map_weights=False).run({"x": X})


def mapped(path: Path, nbytes: int) -> mmap.mmap:
    path.write_bytes(bytes(nbytes))
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def test_pages_are_let_go_while_a_run_reads_more_than_there_is_room_for(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EVENT_S", (1e-5, 1e-4))
    size, most = 64 << 20, 16 << 20
    pager = Pager(mapped(tmp_path / "weights", size), lambda: most)
    pager.begin()
    before, peak, pages = resident_bytes(), 0, np.frombuffer(pager._mapping, np.uint8)
    assert pager.active

    def touch() -> int:
        nonlocal peak
        total = 0
        for at in range(0, size, 1 << 20):
            total += int(pages[at : at + (1 << 20) : mmap.PAGESIZE].sum())
            peak = max(peak, resident_bytes() - before)
            if peak > most - most // 8:
                wait_until(lambda: resident_bytes() - before < most)
        return total

    executor = SimpleNamespace(run=lambda inputs, control: touch())
    assert pager.run(executor, [], None) == 0 and not pager._wakes.is_set()
    assert most // 2 < peak <= most + (4 << 20)
    assert in_child(partial(pager.run, executor, [], None))
    thread = pager._thread
    assert thread is not None and thread.is_alive()
    del pager, executor
    gc.collect()
    thread.join(SOON)
    assert not thread.is_alive()


def test_bytes_in_the_file_are_told_from_others(tmp_path):
    pager = Pager(mapped(tmp_path / "weights", 8192), lambda: 0)
    inside = np.frombuffer(pager._mapping, np.uint8)
    other = np.zeros(100, np.uint8)
    at = [array.ctypes.data for array in (inside[64:], inside[4096:], other)]
    assert pager.bytes_of(dict(zip(at, (10, 20, 40), strict=True))) == 30


def test_error_of_a_run_that_is_watched_is_its_own(tmp_path):
    pager = Pager(mapped(tmp_path / "weights", 8192), lambda: 0)

    def fail(inputs: object, control: object) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        pager.run(SimpleNamespace(run=fail), [], None)
    assert pager._runs == 0
