"""The torch backend on CUDA: skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.backends.registry import missing
from tests.support.onnx_text import compile_text
from tests.support.torch_kernels import needs_torch
from tests.test_models import assert_agree, onnxruntime_session, resnet50


def _has_cuda() -> bool:
    if missing("torch") is not None:
        return False
    import torch

    return torch.cuda.is_available()


pytestmark = [needs_torch, pytest.mark.skipif(not _has_cuda(), reason="torch finds no CUDA device")]

TEXT = """g (float[4, 6] x) => (float[6, 4] y) {
    a = Sin(x) b = Transpose(a) c = Exp(b) h = Hardmax(c) d = Mul(h, c) y = Add(d, b) }"""
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype_on_cuda_gives_about_the_same(dtype):
    from penstock.backends.torch.backend import TorchBackend

    session = compile_text(TEXT, backends=[TorchBackend("cuda", dtype)])
    wanted = compile_text(TEXT, backends=["numpy"])(X)
    np.testing.assert_allclose(session(X), wanted, rtol=5e-2, atol=5e-2)
