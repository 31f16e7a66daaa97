"""Streams of torch: what waits for what, on a device whose events come late at random."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from tests.executors.conformance import ExecutorConformance
from tests.executors.test_parallel import OfAllSteps
from tests.support.cost_models import EqualCosts, ScatteredCosts
from tests.support.onnx_text import compile_text
from tests.support.torch_kernels import inference_modes, needs_torch

pytestmark = needs_torch

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)

TWO_BRANCHES = """g (float[4, 4] x) => (float[4, 4] y) {
    a = Sin(x) b = Cos(x) c = MatMul(a, b) d = MatMul(b, a) y = Add(c, d) }"""


def late(most: float = 2e-4, **options):
    """A backend on a late device."""
    from penstock.backends.torch.backend import TorchBackend
    from tests.support.torch_device import LateRuntime

    return TorchBackend("cpu", runtime=LateRuntime(most), **options)


def expected(text: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return compile_text(text, executor="linear", backends=["numpy"]).run(feeds)


def test_each_stream_of_the_schedule_is_one_of_torch_and_each_signal_an_event():
    backend = late()
    session = compile_text(TWO_BRANCHES, backends=[backend], executor="streams", max_streams=8)
    assert len(session.inspect.executor.tasks.signals.devices) == 2
    assert backend.device.runtime.counts["stream"] == 2
    want = expected(TWO_BRANCHES, {"x": X})["y"]
    for _ in range(10):
        np.testing.assert_allclose(session(X), want, rtol=1e-5)
    assert backend.device.runtime.counts["wait"] > 0


def test_host_waits_for_results_and_for_nothing_between():
    backend = late()
    session = compile_text(TWO_BRANCHES, backends=[backend], executor="streams", max_streams=8)
    session(X)
    counts = backend.device.runtime.counts
    before = dict(counts)
    session(X)
    assert counts["synchronize"] - before["synchronize"] == 1  # to_host
    assert counts["launch"] > before["launch"]
    source = session.source
    assert source.count(".query(): yield S[") == 1


def test_memory_that_another_stream_reads_is_kept():
    backend = late()
    session = compile_text(TWO_BRANCHES, backends=[backend], executor="streams", max_streams=8)
    session(X)
    assert backend.device.runtime.counts["kept"] > 0


def test_streams_from_tensors_to_tensors():
    import torch

    backend = late()
    session = compile_text(TWO_BRANCHES, backends=[backend], executor="streams", max_streams=8)
    want = expected(TWO_BRANCHES, {"x": X})["y"]
    for _ in range(5):
        y = session.run({"x": torch.from_numpy(X.copy())}, returns="torch")["y"]
        np.testing.assert_allclose(y, want, rtol=1e-5)


LOOP = """g (int64 n, float[4, 4] x) => (float[4, 4] y, float[K, 4, 4] all, float[4, 4] z)
    <float low = {-9}> {
    y, all = Loop <body = b (int64 i, bool c, float[4, 4] v)
        => (bool d, float[4, 4] w, float[4, 4] r) {
        s = Sin(v) k = Cos(v) w = Mul(s, k) r = Exp(w)
        m = ReduceMax <keepdims = 0> (w) d = Greater(m, low) }> (n, , x)
    e = Exp(x) f = Neg(e) z = Abs(f) }"""


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams"])
def test_loop_with_a_condition_of_the_device(executor):
    backend = late()
    session = compile_text(LOOP, backends=[backend], executor=executor)
    for n in (0, 1, 5):
        feeds = {"n": np.int64(n), "x": X}
        found, wanted = session.run(feeds), expected(LOOP, feeds)
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5)


def test_tasks_run_in_inference_mode():
    import torch

    backend = late()
    seen = inference_modes(backend)
    for executor in ("streams", "dataflow", "parallel"):
        # Costs that are worth streams, and tasks that need none: one order would be captured, and
        # then replayed without a kernel's function.
        options = {"grouping": OfAllSteps} if executor == "parallel" else {}
        session = compile_text(
            TWO_BRANCHES,
            backends=[backend],
            executor=executor,
            cost_model=EqualCosts(),
            capture=False,
            **options,
        )
        assert session.effective.executor == executor
        seen.clear()
        session(X)
        assert len(seen) == 5
        assert all(seen)
        assert not torch.is_inference_mode_enabled()


def test_linear_run_is_put_on_the_stream_of_the_caller_who_need_not_wait():
    import torch

    backend = late(most=2e-3)
    session = compile_text(TWO_BRANCHES, backends=[backend], executor="linear")
    session.run({"x": torch.from_numpy(X.copy())}, returns="torch")
    counts, stream = backend.device.runtime.counts, backend.device.stream()
    want = expected(TWO_BRANCHES, {"x": X})["y"]
    before = dict(counts)
    with stream.current():
        x = torch.from_numpy(X.copy()) + 0  # work of the user's own, which the run comes behind
        y = session.run({"x": x}, returns="torch")["y"]
        z = y * 2  # and before
        assert counts["synchronize"] == before["synchronize"]
    stream.torch.synchronize()
    np.testing.assert_allclose(z, 2 * want, rtol=1e-5)


@pytest.mark.full
class TestStreamsOnLateTorch(ExecutorConformance):
    """All that holds for streams of the host; errors of kernels are the device's, and reach the
    host where it next waits for the stream."""

    executor = "streams"
    leaves_threads = True

    def compile(self, source, **options) -> ps.Session:
        from tests.backends.torch.test_backend import EXACT

        backend = late(most=1e-4)
        kernel_of = backend.kernel
        backend.fuses = False
        backend.kernel = lambda node, types: (
            kernel_of(node, types) if node.op.name in EXACT else None
        )
        return super().compile(
            source,
            backends=[backend, "numpy"],
            cost_model=ScatteredCosts(),
            max_streams=9,
            **options,
        )

    test_observer_is_told_the_error_of_a_failing_run = None
    test_error_of_a_submitted_run_is_raised_by_its_future = None
