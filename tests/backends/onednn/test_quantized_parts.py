"""Products and convolutions of 8-bit codes in parts on oneDNN, against NumPy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

from penstock.backends.onednn import parts
from penstock.ops.work_estimate import flops
from tests.backends.onednn.forced import compile_on_onednn
from tests.backends.onednn.quantized_nets import (
    CONVOLUTIONS,
    F32,
    I8,
    U8,
    Net,
    agree,
    codes,
    convolution,
    needs_int8,
    restart_rng,
    rng,
    steps,
)

pytestmark = needs_int8


@pytest.fixture(autouse=True)
def looks(monkeypatch) -> list[int]:
    """Grows with each part that is computed."""
    restart_rng()
    counted: list[int] = []
    monkeypatch.setattr(parts, "MOST_FLOPS", 100_000)
    monkeypatch.setattr(parts, "checkpoint", lambda: counted.append(1))
    return counted


def of_constants(*dims: int) -> tuple[Net, str]:
    net = Net()
    w = net.dequantize(net.constant(codes(I8, dims[-1], 24)), 0.004, I8(0))
    made = net.add("MatMul", [net.dequantize(net.feed(codes(U8, *dims)), 0.03, U8(119)), w])
    return net, net.quantize(made, 0.07, U8(127))


def of_two(first: tuple[int, ...], second: tuple[int, ...], dtype: type) -> tuple[Net, str]:
    net = Net()
    given = [net.feed(codes(U8, *first)), net.feed(codes(dtype, *second))]
    given += [net.feed(np.array([131], U8)), net.constant(dtype(17))]
    made = net.add("Cast", [net.add("MatMulInteger", given)], to=onnx.TensorProto.FLOAT)
    made = net.add("Mul", [made, net.feed(np.array(0.003, F32))])
    return net, net.add("Add", [made, net.feed(rng.standard_normal((64, 1)).astype(F32))])


def of_integers() -> tuple[Net, str]:
    net = Net()
    given = [net.feed(codes(U8, 3, 16, 12, 7)), net.constant(codes(I8, 24, 16, 3, 3))]
    made = net.add("ConvInteger", [*given, net.feed(np.array(131, U8))], pads=[1, 1, 1, 1])
    made = net.add("Cast", [made], to=onnx.TensorProto.FLOAT)
    return net, net.add("Mul", [made, net.constant(rng.uniform(0, 0.01, (24, 1, 1)), F32)])


def residual() -> tuple[Net, str]:
    net = Net()
    x = net.dequantize(net.feed(codes(U8, 2, 16, 20, 9)), 0.03, U8(113))
    w = net.dequantize(net.constant(codes(I8, 16, 16, 3, 3)), 0.004, I8(0))
    made = net.dequantize(
        net.quantize(net.add("Conv", [x, w], pads=[1, 1, 1, 1]), 0.1, U8(9)), 0.1, U8(9)
    )
    return net, net.quantize(net.add("Add", [made, x]), 0.12, U8(13))


CASES: dict[str, Callable[[], tuple[Net, str]]] = {
    "matrix": lambda: of_constants(64, 128),
    "batch": lambda: of_constants(5, 16, 128),
    "one batch": lambda: of_constants(1, 64, 128),
    "two matrices": lambda: of_two((64, 48), (48, 24), I8),
    "two batches": lambda: of_two((3, 64, 48), (3, 48, 24), U8),
    "a batch and a matrix": lambda: of_two((3, 64, 48), (48, 24), U8),
    "a matrix and a batch": lambda: of_two((64, 48), (3, 48, 24), I8),
    "integers": of_integers,
    "residual": residual,
}


@pytest.mark.parametrize("executor", ["linear", "frames"])
@pytest.mark.parametrize("name", CASES)
def test_parts_of_codes_equal_numpy(name: str, executor: str, looks: list[int]) -> None:
    net, result = CASES[name]()
    session = agree(net.proto(result), net.feeds, None, reference=False, executor=executor)
    assert all(
        backend == "onednn" for ops, backend in steps(session) if "MatMul" in ops or "Conv" in ops
    )
    assert len(looks) >= 2 * 2  # of two runs


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_codes_in_parts_equal_numpy(name: str, looks, monkeypatch) -> None:
    net, result = convolution(name)
    work = max(
        flops(step.node) for step in compile_on_onednn(net.proto(result)).inspect.plan.walk()
    )
    monkeypatch.setattr(parts, "MOST_FLOPS", work // 3)
    agree(net.proto(result), net.feeds, [("Conv QuantizeLinear", "onednn")])
    assert bool(looks)
