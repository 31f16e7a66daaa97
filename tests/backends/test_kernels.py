"""The kernels of one compilation, and how often backends are asked for them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from onnx import parser

import penstock as ps
from penstock.backends.kernels import KernelTable
from penstock.backends.numpy import NumpyBackend
from penstock.core.types import FLOAT32, ShapeError, TensorType
from penstock.ir.graph import Node, Value
from penstock.ops import find
from penstock.ops.internal.fused import is_fused

N = 4000


class Counting(NumpyBackend):
    """NumPy that fuses, counts the questions it is asked, and refuses chains if told so."""

    fuses = True

    def __init__(self, name: str = "counting", fused: bool = True, seconds: float = 0.0) -> None:
        self.name = name
        self.fused = fused
        self.cost = seconds
        self.asked: Counter[str] = Counter()
        self.estimated: Counter[str] = Counter()

    def kernel(self, node, types):
        self.asked["fused" if is_fused(node) else "single"] += 1
        return super().kernel(node, types) if self.fused or not is_fused(node) else None

    def seconds(self, node):
        self.estimated["fused" if is_fused(node) else "single"] += 1
        return self.cost


def node_of(op: str = "Neg", dims: tuple[int, ...] = (3,)) -> Node:
    type_ = TensorType(FLOAT32, dims)
    return Node(find(op), [Value("x", type_)], [Value("y", type_)], name="n")


def model_of(text: str):
    return parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]> {text}')


def chain_model(n: int):
    lines = [f"v{i + 1} = {('Tanh', 'Neg', 'Abs')[i % 3]}(v{i})" for i in range(n)]
    text = "\n".join(lines)
    return model_of(f"g (float[8] v0) => (float[8] v{n}) {{ {text} }}")


# KernelTable.


def test_kernel_table_asks_once_for_each_node_and_backend():
    table, backend, node = KernelTable(), Counting(), node_of()
    kernel = table.kernel(backend, node)
    assert table.accepts(backend, node)
    assert table.kernel(backend, node) is kernel
    assert backend.asked.total() == 1
    table.kernel(Counting("other"), node)
    table.kernel(backend, node_of())
    assert backend.asked.total() == 2


def test_kernel_table_asks_again_for_other_types_and_constants():
    table, backend, node = KernelTable(), Counting(), node_of()
    table.kernel(backend, node)
    node.inputs[0] = Value("z", TensorType(FLOAT32, (4,)))
    table.kernel(backend, node)
    assert backend.asked.total() == 2
    node.inputs[0] = Value("k", node.inputs[0].type, const=np.zeros(4, np.float32))
    table.kernel(backend, node)
    table.kernel(backend, node)
    assert backend.asked.total() == 3


def test_kernel_table_remembers_errors():
    class Raising(Counting):
        def kernel(self, node, types):
            super().kernel(node, types)
            raise ShapeError("never")

    table, backend, node = KernelTable(), Raising(), node_of()
    assert table.accepts(backend, node)
    for _ in range(2):
        with pytest.raises(ShapeError, match="never"):
            table.kernel(backend, node)
    assert backend.asked.total() == 1


def test_kernel_table_without_state_drops_kernels_of_impure_operations():
    table, backend = KernelTable(), Counting()
    pure, random = node_of(), node_of("RandomNormalLike")
    kernels = [table.kernel(backend, node) for node in (pure, random)]
    copy = table.without_state()
    assert copy.kernel(backend, pure) is kernels[0]
    assert copy.kernel(backend, random) is not kernels[1]


# Questions of a compilation.


def test_compile_asks_one_backend_once_for_each_node():
    backend = Counting()
    backend.fuses = False
    ps.compile(chain_model(N), backends=[backend], shapes={})
    assert backend.asked == {"single": N}


@pytest.mark.parametrize("fused", [False, True])
def test_compile_asks_for_kernels_of_a_chain_in_linear_number(fused):
    backend = Counting(fused=fused)
    session = ps.compile(chain_model(N), backends=[backend, "numpy"], shapes={})
    assert backend.asked["fused"] <= (N if not fused else 1.1 * N / 16)
    assert backend.asked.total() <= 3 * N
    assert len(session.inspect.plan.steps) == (N if not fused else N // 16)


def test_compile_asks_a_slower_backend_for_nothing():
    backend = Counting(seconds=1.0)
    ps.compile(chain_model(N), backends=[backend, "numpy"], shapes={})
    assert not backend.asked


def test_compile_estimates_few_nodes_of_a_chain_and_each_chain_a_few_times(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))  # without what other tests have measured
    fast, slow = Counting("fast"), Counting("slow", seconds=1.0)
    ps.compile(chain_model(N), backends=[slow, fast, "numpy"], shapes={})
    for backend in (fast, slow):
        assert backend.estimated["single"] <= 2 * N / 16
        assert backend.estimated["fused"] <= 3 * N / 16
    assert not slow.asked
    assert fast.asked == {"fused": N / 16}
