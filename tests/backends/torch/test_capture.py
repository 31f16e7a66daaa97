"""Steps captured into graphs: how many launches a run has, and what is not captured."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.support.logs import logged
from tests.support.onnx_text import compile_text
from tests.support.timing import SOON
from tests.support.torch_kernels import needs_torch

pytestmark = needs_torch

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)


TEXT = """g (float[4, 4] x) => (float[4, 4] y, float[4, 4] z) {
    a = Sin(x) b = Transpose(a) c = MatMul(b, a) z = Exp(c) d = Softmax(c) y = Add(d, b) }"""


def late():
    from penstock.backends.torch.backend import TorchBackend
    from tests.support.torch_device import LateRuntime

    return TorchBackend("cpu", runtime=LateRuntime())


def expected(text: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return compile_text(text, executor="linear", backends=["numpy"]).run(feeds)


def run_on_a_stream(session: ps.Session, backend, feeds, **options) -> dict[str, np.ndarray]:
    """A run, put on a stream of the device, and its results as arrays."""
    stream = backend.device.stream()
    with stream.current():
        results = session.run(feeds, **options)
    stream.torch.synchronize()
    return results


def launches(session: ps.Session, backend, feeds, **options) -> tuple[int, int]:
    """How many graphs and kernels a run launches."""
    counts = backend.device.runtime.counts
    before = dict(counts)
    run_on_a_stream(session, backend, feeds, **options)
    return counts["replay"] - before["replay"], counts["launch"] - before["launch"]


@pytest.mark.costly
def test_plan_on_one_device_is_one_launch_after_its_warm_up():
    import torch

    backend = late()
    session = compile_text(TEXT, backends=[backend], executor="linear")
    assert session.source.count("graph_0(") == 1
    for i in range(8):
        x = X * (i + 1)
        feeds = {"x": torch.from_numpy(x.copy())}
        results = run_on_a_stream(session, backend, feeds, returns="torch")
        for name, want in expected(TEXT, {"x": x}).items():
            np.testing.assert_allclose(results[name], want, rtol=1e-4, atol=1e-6)
    graphs, kernels = launches(session, backend, feeds, returns="torch")
    assert graphs == 1
    assert kernels == 3  # the input is brought to the graph, and both outputs out of it
    assert backend.device.runtime.counts["capture"] == 1
    assert [graph["state"] for graph in session.inspect.describe()["graphs"]] == ["captured"]


def test_outputs_that_are_brought_to_the_host_are_not_copied_before():
    backend = late()
    session = compile_text(TEXT, backends=[backend], executor="linear")
    for i in range(5):
        results = run_on_a_stream(session, backend, {"x": X * i})
        for name, want in expected(TEXT, {"x": X * i}).items():
            np.testing.assert_allclose(results[name], want, rtol=1e-4, atol=1e-6)
    graphs, kernels = launches(session, backend, {"x": X})
    assert graphs == 1
    assert kernels == 3  # the input, and the copies of both outputs to the host


def test_results_of_earlier_launches_are_not_overwritten():
    backend = late()
    session = compile_text(TEXT, backends=[backend], executor="linear")
    runs = [run_on_a_stream(session, backend, {"x": X * i}, returns="torch") for i in range(8)]
    for i, results in enumerate(runs):
        for name, want in expected(TEXT, {"x": X * i}).items():
            np.testing.assert_allclose(results[name], want, rtol=1e-4, atol=1e-6)


def test_capture_that_fails_falls_back_and_says_why():
    backend = late()
    backend.device.runtime.refuses = lambda function: "softmax" in str(function)
    session = compile_text(TEXT, backends=[backend], executor="linear")
    with logged("penstock") as records:
        for i in range(5):
            results = run_on_a_stream(session, backend, {"x": X * i})
            for name, want in expected(TEXT, {"x": X * i}).items():
                np.testing.assert_allclose(results[name], want, rtol=1e-4, atol=1e-6)
    assert launches(session, backend, {"x": X})[0] == 0
    assert backend.device.runtime.counts["capture"] == 1
    (graph,) = session.inspect.describe()["graphs"]
    assert graph["state"] == "not captured"
    assert "not permitted when stream is capturing" in graph["reason"]
    assert "not permitted when stream is capturing" in session.explain()
    assert any("are not captured: RuntimeError" in record.getMessage() for record in records)


def test_runs_at_the_same_time_have_graphs_of_their_own():
    backend = late()
    session = compile_text(TEXT, backends=[backend], executor="linear")
    results = [session.submit({"x": X * i}) for i in range(24)]
    for i, result in enumerate(results):
        for name, want in expected(TEXT, {"x": X * i}).items():
            np.testing.assert_allclose(result.result(SOON)[name], want, rtol=1e-4, atol=1e-6)


def test_error_in_a_captured_step_names_it():
    backend = late()
    kernel_of = backend.kernel

    def failing(node, types):
        kernel = kernel_of(node, types)
        if kernel is None or node.op.name != "Exp":
            return kernel

        def fail(*inputs):
            raise ValueError("no")

        return type(kernel)(fail)

    backend.kernel = failing
    session = compile_text(
        "g (float[4, 4] x) => (float[4, 4] y) { a = Sin(x) b = Exp(a) y = Cos(b) }",
        backends=[backend],
        executor="linear",
        place={"Exp": "torch"},
    )
    with pytest.raises(ps.RunError, match="Exp"):
        session(X)
