"""Schedules on several devices of torch, each with streams of its own."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import penstock as ps
from tests.support.onnx_text import compile_text
from tests.support.torch_kernels import needs_torch

pytestmark = needs_torch

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)

#  x -+- Sin -+- MatMul ---+- Add      Sin and MatMul on the first device, Cos and Add on the
#     +- Cos -+- Div ------+           second: values cross in both directions
TEXT = """g (float[4, 4] x) => (float[4, 4] y, float[4, 4] z) {
    a = Sin(x) b = Cos(x) c = MatMul(a, b) d = Div(a, b) y = Add(c, d) z = MatMul(d, c) }"""
PLACE = {"Sin": "torch", "MatMul": "torch", "Cos": "second", "Div": "second", "Add": "second"}


def expected(x: np.ndarray) -> dict[str, np.ndarray]:
    return compile_text(TEXT, executor="linear", backends=["numpy"]).run({"x": x})


def late_devices():
    from penstock.backends.torch.backend import TorchBackend
    from tests.support.torch_device import LateRuntime

    return [
        TorchBackend("cpu", runtime=LateRuntime()),
        TorchBackend("cpu", runtime=LateRuntime(), name="second"),
    ]


def check(session: ps.Session) -> None:
    for i in range(6):
        results = session.run({"x": X * i})
        for name, want in expected(X * i).items():
            np.testing.assert_allclose(results[name], want, rtol=1e-4, atol=1e-6)


def test_each_device_has_streams_and_waits_for_events_of_the_other():
    devices = late_devices()
    session = compile_text(TEXT, backends=devices, place=PLACE, executor="streams", max_streams=8)
    assert {*session.inspect.executor.tasks.signals.devices} == {"torch", "second"}
    check(session)
    for backend in devices:
        counts = backend.device.runtime.counts
        assert min(counts["stream"], counts["wait"], counts["record"], counts["launch"]) > 0


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams"])
def test_values_go_from_device_to_device_without_the_host(executor):
    from penstock.backends.torch.backend import TorchBackend

    backends = [TorchBackend("cpu"), TorchBackend("cpu", name="second")]
    session = compile_text(TEXT, backends=backends, place=PLACE, executor=executor)
    check(session)
    steps = [
        step.node.attrs for step in session.inspect.plan.walk() if step.node.op.name == "Transfer"
    ]
    moves = Counter((attrs["source"], attrs["target"]) for attrs in steps)
    assert moves["torch", "second"] > 0
    assert moves["second", "torch"] > 0
    host = sum(n for pair, n in moves.items() if not {*pair} <= {"torch", "second"})
    assert host == 4  # the input to each device, and both outputs


def test_devices_of_fewer_bits_convert_what_crosses():
    from penstock.backends.torch.backend import TorchBackend

    backends = [TorchBackend("cpu"), TorchBackend("cpu", "float16", name="second")]
    session = compile_text(TEXT, backends=backends, place=PLACE, executor="linear")
    for name, value in session.run({"x": X}).items():
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, expected(X)[name], rtol=1e-2, atol=1e-2)


def test_each_device_has_an_arena_of_its_own():
    session = compile_text(TEXT, backends=late_devices(), place=PLACE, executor="linear")
    assert {*session.inspect.executor.arena_plan.remote} == {"torch cpu", "torch cpu of second"}


def test_devices_that_name_cuda_devices_have_a_backend_each(monkeypatch):
    import torch

    from penstock.backends.registry import backends_of
    from penstock.backends.torch import backend as module

    with pytest.raises(ps.PenstockError, match="CUDA devices here"):
        compile_text(TEXT, backends=["torch"], devices=["cuda:0", "cuda:64"], executor="streams")
    with pytest.raises(ValueError, match="has one device twice"):
        compile_text(TEXT, backends=["torch"], devices=["cuda:0", "cuda:0"])
    with pytest.raises(ValueError, match="devices= are for"):
        compile_text(TEXT, backends=["torch"], devices=["cpu:0", "cuda:0"], executor="streams")
    monkeypatch.setattr(module, "device_of", torch.device)
    chosen = backends_of(["numpy", "torch"], cuda_devices=["cuda:0", "cuda:1"])
    assert [b.name for b in chosen] == ["numpy", "torch", "torch:1"]
    assert [b.memory for b in chosen[1:]] == ["torch cuda:0", "torch cuda:1 of torch:1"]
