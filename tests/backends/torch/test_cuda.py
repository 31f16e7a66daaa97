"""The torch backend on CUDA: skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.backends.registry import missing
from penstock.build import GraphBuilder
from tests.support.onnx_text import compile_text
from tests.support.torch_kernels import needs_torch
from tests.test_models import assert_agree, onnxruntime_session, resnet50


def _has_cuda(devices: int = 1) -> bool:
    if missing("torch") is not None:
        return False
    import torch

    return torch.cuda.is_available() and torch.cuda.device_count() >= devices


pytestmark = [needs_torch, pytest.mark.skipif(not _has_cuda(), reason="torch finds no CUDA device")]

TEXT = """g (float[4, 6] x) => (float[6, 4] y) {
    a = Sin(x) b = Transpose(a) c = Exp(b) h = Hardmax(c) d = Mul(h, c) y = Add(d, b) }"""
STATIC = """g (float[4, 6] x) => (float[6, 4] y) {
    a = Sin(x) b = Transpose(a) c = Exp(b) y = Add(c, b) }"""
BRANCHES = """g (float[4, 4] x) => (float[4, 4] y) {
    a = Sin(x) b = Cos(x) c = MatMul(a, b) d = MatMul(b, a) y = Add(c, d) }"""
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel"])
def test_plan_on_cuda_agrees_with_numpy(executor):
    session = compile_text(TEXT, backends=["torch"], executor=executor)
    wanted = compile_text(TEXT, backends=["numpy"])(X)
    for _ in range(2):
        np.testing.assert_allclose(session(X), wanted, rtol=1e-5)


def test_resnet_on_cuda_agrees_with_onnx_runtime():
    model = resnet50()
    x = np.random.default_rng(0).standard_normal((2, 3, 224, 224)).astype(np.float32)[:1]
    (want,) = onnxruntime_session(model.SerializeToString()).run(None, {"x": x})
    assert_agree(ps.compile(model, backends=["torch"])(x), want, 1e-4)


def test_recurrent_layer_on_cuda_keeps_all_bits_of_its_operands():
    rng = np.random.default_rng(0)
    inputs = {"x": (9, 2, 64), "w": (1, 256, 64), "r": (1, 256, 64)}
    # An eighth of them: as in trained layers, errors of one step become no larger in the next.
    arrays = {name: rng.normal(0, 1 / 8, of).astype(np.float32) for name, of in inputs.items()}
    b = GraphBuilder()
    x = b.input("x", np.float32, inputs["x"])
    b.output("y", b.op("LSTM", x, arrays["w"], arrays["r"], hidden_size=64, outputs=3)[0])
    wanted = ps.compile(b.model(), backends=["numpy"])(arrays["x"])
    got = ps.compile(b.model(), backends=["torch"])(arrays["x"])
    # TensorFloat-32 has 10 bits behind the point: its answers are some 1e-3 off.
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype_on_cuda_gives_about_the_same(dtype):
    from penstock.backends.torch.backend import TorchBackend

    session = compile_text(TEXT, backends=[TorchBackend("cuda", dtype)])
    wanted = compile_text(TEXT, backends=["numpy"])(X)
    np.testing.assert_allclose(session(X), wanted, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("executor", ["linear", "streams"])
def test_tensors_on_cuda_are_fed_and_returned_without_copies(executor):
    import torch

    session = compile_text(STATIC, backends=["torch"], executor=executor)
    wanted = compile_text(STATIC, backends=["numpy"])(X)
    for _ in range(5):  # with warm-ups, the capture and launches of the graph
        result = session.run({"x": torch.from_numpy(X.copy()).cuda()}, returns="torch")["y"]
        assert result.device.type == "cuda"
        np.testing.assert_allclose(result.cpu(), wanted, rtol=1e-5)
    assert all(step.node.op.name != "Transfer" for step in session.inspect.plan.walk())


def test_streams_on_cuda_agree_with_numpy():
    session = compile_text(BRANCHES, backends=["torch"], executor="streams", max_streams=4)
    assert set(session.inspect.executor.tasks.signals.devices) == {"torch"}
    wanted = compile_text(BRANCHES, backends=["numpy"])(X[:4, :4])
    for _ in range(20):
        np.testing.assert_allclose(session(X[:4, :4]), wanted, rtol=1e-4)


def test_plan_on_cuda_is_captured_and_says_so():
    session = compile_text(STATIC, backends=["torch"], executor="linear")
    wanted = compile_text(STATIC, backends=["numpy"])(X)
    for _ in range(6):
        np.testing.assert_allclose(session(X), wanted, rtol=1e-5)
    assert [graph["state"] for graph in session.inspect.describe()["graphs"]] == ["captured"]


@pytest.mark.parametrize("executor", ["linear", "streams"])
def test_stream_on_cuda_is_in_order_with_the_users_work(executor):
    import torch

    session = compile_text(STATIC, backends=["torch"], executor=executor)
    wanted = compile_text(STATIC, backends=["numpy"])
    side = torch.cuda.Stream()
    stream = ps.Stream(device=side)
    for i in range(6):
        with torch.cuda.stream(side):
            x = torch.from_numpy(X.copy()).cuda() * i
            run = stream.run(session, {"x": x})
            x.zero_()
        np.testing.assert_allclose(run.result(60)["y"], wanted(X * i), rtol=1e-4, atol=1e-6)


def test_frames_put_the_parts_of_a_gpu_there():
    from penstock.backends.torch.backend import TorchBackend
    from tests.backends.torch.test_frames import ON_DEVICES, with_gpu
    from tests.support.tf_cases import follow

    for case in ON_DEVICES:
        devices = {"CPU:0": "numpy", "GPU:0": TorchBackend("cuda")}
        source = with_gpu(case)
        follow(
            case,
            lambda source=source, devices=devices: ps.compile(
                source, "frames", ["numpy"], devices=devices
            ),
            counted=False,
        )


@pytest.mark.skipif(not _has_cuda(2), reason="torch finds no two CUDA devices")
def test_two_cuda_devices_exchange_values_directly():
    session = compile_text(
        BRANCHES,
        backends=["torch"],
        devices=["cuda:0", "cuda:1"],
        executor="streams",
        place={"Sin": "torch", "MatMul": "torch", "Cos": "torch:1", "Add": "torch:1"},
        max_streams=4,
    )
    wanted = compile_text(BRANCHES, backends=["numpy"])(X[:4, :4])
    for _ in range(20):
        np.testing.assert_allclose(session(X[:4, :4]), wanted, rtol=1e-4)


@pytest.mark.skipif(not _has_cuda(2), reason="torch finds no two CUDA devices")
@pytest.mark.parametrize("executor", ["linear", "streams"])
def test_all_reduce_on_two_cuda_devices_gives_both_the_sum(executor):
    text = """g (float[4, 4] x) => (float[4, 4] y, float[4, 4] z) {
        a = Sin(x) b = Cos(x) r, s = penstock.AllReduce(a, b) y = Exp(r) z = Tanh(s) }"""
    place = {"Sin": "torch", "Cos": "torch:1", "Exp": "torch", "Tanh": "torch:1"}
    session = compile_text(
        text,
        domains={"penstock": 1},
        backends=["torch"],
        devices=["cuda:0", "cuda:1"],
        executor=executor,
        place={**place, "AllReduce": ["torch", "torch:1"]},
    )
    x = X[:4, :4]
    wanted = {"y": np.exp(np.sin(x) + np.cos(x)), "z": np.tanh(np.sin(x) + np.cos(x))}
    for _ in range(20):
        for name, value in session.run({"x": x}).items():
            np.testing.assert_allclose(value, wanted[name], rtol=1e-5)
