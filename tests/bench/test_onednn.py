"""Primitives of oneDNN, which kernels are measured beside: they compute what NumPy does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from bench.kernel_cases import Case, read
from bench.peers import ENGINES, installed
from bench.tables import disagreement
from bench.zoo.store import save_arrays
from bench.zoo.worker import Job, do

import penstock as ps

pytestmark = pytest.mark.skipif(not installed("onednn"), reason="needs onednn-cpu-gomp")

FEW = 200_000  # elements of a case that NumPy computes at once
# Families that oneDNN is asked for, and how many of their cases are tried.
COMPUTED = {
    "LRN": 1, "conv 1-D": 2, "conv 1x1": 2, "conv 3-D": 1, "conv 8-bit": 5, "conv depthwise": 2,
    "conv dilated": 1, "conv few input channels": 1, "conv grouped": 2, "conv strided": 2,
    "conv transposed": 3, "normalization": 4, "pooling": 6, "product 8-bit": 3,
    "product batched": 2, "product few rows": 3, "product many rows": 3, "product transposed": 3,
    "recurrent": 6, "softmax": 2,
}  # fmt: skip


def small(family: str, count: int) -> list[Case]:
    every = [c for c in read() if c.family == family]
    few = [c for c in every if c.elements <= FEW] or every[:1]
    return few[:: max(len(few) // count, 1)][:count]


@pytest.fixture(scope="module")
def engine():
    return ENGINES["onednn"](1)


@pytest.mark.parametrize(("family", "count"), COMPUTED.items())
def test_primitive_computes_what_numpy_does(family, count, engine, tmp_path: Path):
    for case in small(family, count):
        onnx.save(case.model(), tmp_path / "case.onnx")
        try:
            run = engine.load(tmp_path / "case.onnx")
        except ValueError as error:
            assert "status 2" in str(error), case.text  # unsigned weights
            continue
        got = run(case.feeds())
        want = [*ps.compile(case.model(), backends=["numpy"]).run(case.feeds()).values()]
        assert [a.shape for a in got] == [a.shape for a in want]
        assert disagreement(got, want)[0] < 2e-2, case.text
        again = run(case.feeds())
        assert all(np.array_equal(a, b) for a, b in zip(got, again, strict=True))


def test_what_there_is_no_primitive_of_is_refused(engine, tmp_path: Path):
    case = Case(17, "g(float[2]X)=>(float[2]Y){Y=Relu(X)}")
    onnx.save(case.model(), tmp_path / "case.onnx")
    with pytest.raises(ValueError, match="Relu"):
        engine.load(tmp_path / "case.onnx")


def test_primitive_is_timed_alone(engine, tmp_path: Path):
    case = small("conv strided", 1)[0]
    onnx.save(case.model(), tmp_path / "case.onnx")
    save_arrays(tmp_path / "case.npz", feed=case.feeds().values())
    files = {"case": str(tmp_path / "case.npz")}
    job = Job(str(tmp_path / "case.onnx"), ["X"], files, None, 1e-3, profiled=True, loads=1)
    measured = do(engine, job)
    (spent,) = measured.spent["case"]
    assert measured.error is None
    assert spent.backend == "onednn"
    assert spent.seconds > 0
