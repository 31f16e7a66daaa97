"""User streams on a device of torch, behind and before the user's own work there."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import penstock as ps
from tests.support.onnx_text import compile_text
from tests.support.timing import SOON, wait_until
from tests.support.torch_kernels import needs_torch

pytestmark = needs_torch

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
TEXT = "g (float[4, 4] x) => (float[4, 4] y) { a = Sin(x) b = Exp(a) y = MatMul(a, b) }"


def late(most: float = 1e-3):
    from penstock.backends.torch.backend import TorchBackend
    from tests.support.torch_device import LateRuntime

    return TorchBackend("cpu", runtime=LateRuntime(most))


def expected(x: np.ndarray) -> np.ndarray:
    return np.sin(x) @ np.exp(np.sin(x))


def tensor(x: np.ndarray):
    import torch

    return torch.from_numpy(x.copy())


@pytest.mark.parametrize("device", [object(), 3, 1.5, b"cuda", [X]])
def test_stream_of_what_is_no_device_says_what_it_takes(device):
    with pytest.raises(TypeError, match=r"(?s)^device=.*a torch.device, or a name such as"):
        ps.Stream(device)


@pytest.mark.parametrize("executor", ["linear", "streams", "dataflow", "parallel"])
@pytest.mark.parametrize("returns", ["numpy", "torch"])
def test_run_is_behind_and_before_the_work_of_the_user(executor, returns):
    backend = late()
    options = {"max_streams": 3} if executor == "streams" else {}
    session = compile_text(TEXT, backends=[backend], executor=executor, **options)
    stream = ps.Stream(device=backend.device.stream())
    for i in range(5):
        with backend.device.runtime.on(stream.torch):
            x = tensor(X) * i  # late, too
            run = stream.run(session, {"x": x}, returns=returns)
            x.zero_()  # after the run has read it
        result = run.result(SOON)["y"]
        assert isinstance(result, np.ndarray) == (returns == "numpy")
        np.testing.assert_allclose(result, expected(X * i), rtol=1e-4, atol=1e-6)
    assert stream.wait(SOON)
    wait_until(stream.query)


def gated(stream) -> threading.Event:
    """Hold up the device's stream until the event is set."""
    gate = threading.Event()
    stream.torch.put(lambda: gate.wait(SOON))
    return gate


@pytest.mark.parametrize("executor", ["linear", "streams"])
def test_runs_are_put_on_the_device_without_waiting_for_it(executor):
    backend = late()
    options = {"max_streams": 3} if executor == "streams" else {}
    session = compile_text(TEXT, backends=[backend], executor=executor, **options)
    stream = ps.Stream(device=backend.device.stream())
    for _ in range(4):  # a capture waits for the device
        stream.run(session, {"x": tensor(X)}).result(SOON)
    gate = gated(stream)
    runs = [stream.run(session, {"x": tensor(X * i)}) for i in range(4)]
    assert not any(run.done() for run in runs)
    assert not stream.query()
    gate.set()
    for i, run in enumerate(runs):
        np.testing.assert_allclose(run.result(SOON)["y"], expected(X * i), rtol=1e-4, atol=1e-6)


def test_signal_of_one_device_stream_holds_up_another_on_the_device():
    backend = late()
    session = compile_text(TEXT, backends=[backend], executor="linear")
    first = ps.Stream(device=backend.device.stream())
    second = ps.Stream(device=backend.device.stream())
    gate = gated(first)
    first.run(session, {"x": tensor(X)})
    signal = first.signal()
    waits = backend.device.runtime.counts["wait"]
    second.wait_for(signal)
    run = second.run(session, {"x": tensor(X)})
    assert backend.device.runtime.counts["wait"] == waits + 1  # no thread of the host waits
    assert not signal.query()
    assert not run.done()
    gate.set()
    np.testing.assert_allclose(run.result(SOON)["y"], expected(X), rtol=1e-4, atol=1e-6)
    assert signal.wait(SOON)


def test_call_and_signal_of_the_host_hold_up_later_runs():
    backend = late()
    session = compile_text(TEXT, backends=[backend], executor="linear")
    host, stream = ps.Stream(), ps.Stream(device=backend.device.stream())
    opened, order = threading.Event(), []
    host.call(lambda: opened.wait(SOON))
    stream.run(session, {"x": X}).add_done_callback(lambda _: order.append("run"))
    stream.call(lambda: order.append("call"))
    stream.wait_for(host.signal())
    run = stream.run(session, {"x": X})
    wait_until(lambda: order == ["run", "call"])
    assert not run.done()
    opened.set()
    np.testing.assert_allclose(run.result(SOON)["y"], expected(X), rtol=1e-4, atol=1e-6)


def test_error_goes_to_the_future_and_the_stream_goes_on():
    backend = late()
    session = compile_text(TEXT, backends=[backend], executor="linear")
    stream = ps.Stream(device=backend.device.stream())
    with pytest.raises(ps.InvalidInput):
        stream.run(session, {"z": X}).result(SOON)
    token = ps.CancelToken()
    token.cancel()
    with pytest.raises(ps.Cancelled):
        stream.run(session, {"x": X}, cancel=token).result(SOON)
    np.testing.assert_allclose(
        stream.run(session, {"x": X}).result(SOON)["y"], expected(X), rtol=1e-4, atol=1e-6
    )


def test_session_without_the_device_and_cpu_are_refused():
    stream = ps.Stream(device=late().device.stream())
    session = compile_text(TEXT, backends=["numpy"])
    with pytest.raises(ps.PenstockError, match="no backend on cpu, the device of this stream"):
        stream.run(session, {"x": X})
    with pytest.raises(ps.PenstockError, match="torch's CPU device has no streams"):
        ps.Stream(device="cpu")
    with pytest.raises(ps.PenstockError, match="CUDA devices here"):
        ps.Stream(device="cuda:64")
    with pytest.raises(ps.PenstockError, match="is a queue of the host"):
        ps.Stream().torch  # noqa: B018
    with pytest.raises(ps.PenstockError, match="out= is for runs on the host"):
        backend = late()
        on_device = compile_text(TEXT, backends=[backend])
        ps.Stream(device=backend.device.stream()).run(on_device, {"x": X}, out={"y": X.copy()})


def test_submitted_run_is_behind_the_work_of_the_thread_that_submits_it():
    backend = late()
    session = compile_text(TEXT, backends=[backend], executor="linear")
    stream = backend.device.stream()
    for i in range(5):
        with stream.current():
            x = tensor(X) * i
            run = session.submit({"x": x}, returns="torch")
        result = run.result(SOON)["y"]  # there, whatever stream reads it
        np.testing.assert_allclose(result, expected(X * i), rtol=1e-4, atol=1e-6)
