"""Products and convolutions in parts on oneDNN, against the NumPy backend."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import penstock as ps
from penstock.backends.onednn import parts
from penstock.backends.onednn.library import library
from penstock.host.current_run import working_for
from tests.backends.onednn.forced import compile_on_onednn, same
from tests.support.counting_run import CountingRun
from tests.support.onnx_text import model_from_text

pytestmark = pytest.mark.skipif(library() is None, reason="needs libdnnl.so.3")

IMAGES = "float[{}, 6, {}, 9] x, float[5, 6, 3, 3] w"
# Inputs, the constants among them, and nodes.
CASES = {
    "product": ("float[40, 20] x, float[20, 30] w", "w", "y = MatMul(x, w)"),
    "two inputs": ("float[20, 20] x, float[20, 20] w", "", "y = MatMul(x, w)"),
    "batch of one": ("float[1, 40, 20] x, float[20, 30] w", "w", "y = MatMul(x, w)"),
    "batches": ("float[3, 40, 20] x, float[3, 20, 30] w", "", "y = MatMul(x, w)"),
    "batch and one": ("float[4, 8, 20] x, float[1, 20, 9] w", "", "y = MatMul(x, w)"),
    "one and batch": ("float[8, 20] x, float[4, 20, 9] w", "", "y = MatMul(x, w)"),
    "terms": (
        "float[40, 20] x, float[20, 30] w, float[30] b, float[40, 30] r, float[40, 1] s",
        "wb",
        "a = MatMul(x, w) c = Add(a, b) d = Add(c, r) y = Mul(d, s)",
    ),
    "residual": (
        "float[40, 30] x, float[30, 30] w",
        "w",
        "h = Neg(x) a = MatMul(h, w) y = Add(a, h)",
    ),
    "Gemm": (
        "float[40, 20] x, float[30, 20] w, float[40, 30] c",
        "w",
        "y = Gemm<transB = 1, alpha = 0.5>(x, w, c)",
    ),
    "images": (IMAGES.format(5, 4), "w", "y = Conv<pads = [1, 1, 1, 1]>(x, w)"),
    "image": (IMAGES.format(1, 20), "w", "y = Conv<pads = [2, 1, 0, 1]>(x, w)"),
    "strides": (
        IMAGES.format(1, 21),
        "w",
        "y = Conv<pads = [1, 0, 1, 1], strides = [2, 2]>(x, w)",
    ),
    "dilations": (
        IMAGES.format(1, 21),
        "w",
        "y = Conv<pads = [2, 2, 2, 2], dilations = [2, 2]>(x, w)",
    ),
    "same size": (
        IMAGES.format(1, 20),
        "w",
        'y = Conv<auto_pad = "SAME_UPPER", strides = [2, 1]>(x, w)',
    ),
    "one row": (
        "float[1, 6, 1, 80] x, float[5, 6, 1, 3] w, float[5] b, float[1, 5, 1, 78] r",
        "wb",
        "a = Conv(x, w, b) c = Add(a, r) y = Relu(c)",
    ),
    "groups": ("float[1, 6, 40, 9] x, float[6, 1, 3, 3] w", "w", "y = Conv<group = 6>(x, w)"),
    "transposed": (
        "float[6, 5, 4, 4] x, float[5, 6, 3, 3] w",
        "w",
        "y = ConvTranspose<strides = [2, 2]>(x, w)",
    ),
}
# What is read whole and in parts, and constants of as many rows as the result.
WHOLE = {
    "factor": ("float[30, 30] x, float[30, 30] w", "", "a = MatMul(x, w) y = Add(a, w)"),
    "constant": (
        "float[40, 20] x, float[20, 30] w, float[40, 30] b",
        "wb",
        "a = MatMul(x, w) y = Add(a, b)",
    ),
}


def model(case: tuple[str, str, str]) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A case as a model, and what to feed it."""
    inputs, constants, nodes = case
    rng = np.random.default_rng(3)
    proto = model_from_text(f"g ({inputs}) => (float[] y) {{ {nodes} }}")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    feeds = {}
    for port in list(proto.graph.input):
        dims = [dim.dim_value for dim in port.type.tensor_type.shape.dim]
        array = rng.standard_normal(dims).astype(np.float32)
        if port.name in constants:
            proto.graph.initializer.append(numpy_helper.from_array(array, port.name))
            proto.graph.input.remove(port)
        else:
            feeds[port.name] = array
    return proto, feeds


@pytest.fixture
def looks(monkeypatch) -> list[int]:
    """Grows with each part that is computed."""
    counted: list[int] = []
    monkeypatch.setattr(parts, "MOST_FLOPS", 8000)
    monkeypatch.setattr(parts, "checkpoint", lambda: counted.append(1))
    return counted


@pytest.mark.parametrize("executor", ["linear", "frames"])
@pytest.mark.parametrize("name", CASES)
def test_parts_equal_numpy(name: str, executor: str, looks) -> None:
    proto, feeds = model(CASES[name])
    session = compile_on_onednn(proto, executor=executor, threads=1)
    same(session, proto, feeds)
    assert len(looks) >= 2 * 2  # of two runs
    session.trim()
    same(session, proto, feeds)


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_divided_is_computed_at_once(name: str, looks) -> None:
    proto, feeds = model(WHOLE[name])
    same(compile_on_onednn(proto, executor="linear"), proto, feeds)
    assert not looks


def test_parts_take_no_more_than_they_may(monkeypatch) -> None:
    works: list[float] = []
    kernel_in_parts = parts.kernel_in_parts

    def recorded(library, make, desc, work):
        works.append(work)
        return kernel_in_parts(library, make, desc, work)

    monkeypatch.setattr(parts, "MOST_FLOPS", 8000)
    monkeypatch.setattr(parts, "kernel_in_parts", recorded)
    proto, feeds = model(CASES["images"])  # each image is divided, too
    same(compile_on_onednn(proto, executor="linear"), proto, feeds)
    assert works
    assert any(work <= 8000 for work in works)


def test_product_in_parts_ends_when_its_run_is_stopped(monkeypatch) -> None:
    monkeypatch.setattr(parts, "MOST_FLOPS", 8000)
    proto, feeds = model(CASES["product"])
    session = compile_on_onednn(proto, executor="linear")
    session.run(feeds)
    (step,) = session.inspect.plan.walk()
    arrays = [feeds["x"], None, np.empty((40, 30), np.float32)]
    run, arguments = step.kernel.bind(arrays[:2], arrays[2:], None)
    whole = CountingRun()
    working_for(whole, run, *arguments)
    assert whole.looks == 7  # of six rows, and of four
    stopped = CountingRun(last=4)
    with pytest.raises(ps.Cancelled):
        working_for(stopped, run, *arguments)
    assert stopped.looks == 4
