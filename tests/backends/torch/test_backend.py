"""The torch backend in sessions: what it runs, what stays on the host, and what is transferred."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import penstock as ps
from penstock.backends.registry import backends_of, describe, missing
from penstock.tuning.measure import Cost, CostModel
from tests.executors.conformance import ExecutorConformance
from tests.support.cost_models import ScatteredCosts
from tests.support.onnx_text import compile_text
from tests.support.torch_kernels import needs_torch

pytestmark = needs_torch

CHAIN = "g (float[N] x) => (float[N] y) { a = Sin(x) b = Asinh(a) c = Mul(a, b) y = Exp(c) }"
X = np.array([1, 2, 3], np.float32)
Y = np.exp(np.sin(X) * np.arcsinh(np.sin(X)))


def steps(session: ps.Session) -> list[tuple[str, str]]:
    return [(step.node.op.name, step.backend) for step in session.inspect.plan.walk()]


def copies(session: ps.Session) -> Counter[tuple[str, str]]:
    """The transfers of a plan: source and target."""
    attrs = [
        step.node.attrs for step in session.inspect.plan.walk() if step.node.op.name == "Transfer"
    ]
    return Counter((attr["source"], attr["target"]) for attr in attrs)


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "streams"])
def test_plan_of_torch_alone_transfers_only_inputs_and_outputs(executor, monkeypatch):
    from penstock.backends.torch.memory import TorchMemory

    calls: Counter[str] = Counter()
    for name in ("from_host", "to_host"):
        copy = getattr(TorchMemory, name)

        def counted(self, value, _copy=copy, _name=name, **options):
            calls[_name] += 1
            return _copy(self, value, **options)

        monkeypatch.setattr(TorchMemory, name, counted)
    session = compile_text(CHAIN, backends=["torch"], executor=executor)
    np.testing.assert_allclose(session(X), Y, rtol=1e-6)
    calls.clear()
    np.testing.assert_allclose(session(X), Y, rtol=1e-6)
    assert calls == {"from_host": 1, "to_host": 1}
    assert {backend for _, backend in steps(session)} == {"torch"}


def test_operation_that_torch_lacks_runs_on_the_host_with_transfers():
    text = "g (float[4] x) => (float[4] y) { a = Sin(x) b = Hardmax(a) y = Cos(b) }"
    session = compile_text(text, backends=["torch"])
    x = np.array([0.5, 3, 1.5, 2], np.float32)
    np.testing.assert_allclose(session(x), np.cos(np.eye(4, dtype=np.float32)[2]), rtol=1e-6)
    assert ("Hardmax", "numpy") in steps(session)
    assert ("Sin", "torch") in steps(session)
    assert ("Cos", "torch") in steps(session)
    assert copies(session) == {("numpy", "torch"): 2, ("torch", "numpy"): 2}
    text = session.explain()
    assert "Hardmax(a/host <dynamic>) on numpy" in text
    assert "on torch to numpy" in text
    assert "on numpy to torch" in text


def test_shapes_are_computed_on_the_host_without_a_transfer():
    text = """g (float[N] x) => (int64[K, L] y) {
        a = NonZero(x)
        s = Shape<start = 1, end = 2>(a)
        two = Constant<value_ints = [2]>()
        h = Div(s, two)
        d = Concat<axis = 0>(h, two)
        r = Reshape(a, d)
        y = Neg(r)
    }"""
    session = compile_text(text, backends=["torch"])
    for x in (np.ones(4, np.float32), np.array([0, 3, 0, 0, 0, 2], np.float32)):
        np.testing.assert_array_equal(session(x), -np.flatnonzero(x).reshape(-1, 2))
    assert ("Shape", "torch") in steps(session)
    assert ("Concat", "numpy") in steps(session)
    assert copies(session) == {("numpy", "torch"): 1, ("torch", "numpy"): 1}


def test_place_and_costs_decide_between_torch_and_numpy():
    place = {"Sin": "torch", "Asinh": "numpy", "Mul": "torch", "Exp": "numpy"}
    session = compile_text(CHAIN, backends=["numpy", "torch"], place=place, cost_model=CostModel())
    np.testing.assert_allclose(session(X), Y, rtol=1e-6)
    assert {op: backend for op, backend in steps(session) if op != "Transfer"} == place


class CheapTorch:
    def cost(self, node, backend, threads):
        cheap = (backend.name == "torch") == (node.op.name in ("Sin", "Mul"))
        return Cost(1e-6 if cheap else 1e-2)


def test_costs_place_each_node_where_it_is_cheaper_by_more_than_its_transfers():
    session = compile_text(CHAIN, backends=["numpy", "torch"], cost_model=CheapTorch())
    np.testing.assert_allclose(session(X), Y, rtol=1e-6)
    placed = {op: backend for op, backend in steps(session) if op != "Transfer"}
    assert placed == {"Sin": "torch", "Asinh": "numpy", "Mul": "torch", "Exp": "numpy"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype_holds_float32_in_fewer_bits_on_the_device(dtype):
    import torch

    from penstock.backends.torch.backend import TorchBackend

    seen = set()
    backend = TorchBackend("cpu", dtype=dtype)
    kernel_of = backend.kernel

    def watched(node, types):
        kernel = kernel_of(node, types)
        if kernel is None or node.op.name != "Exp":
            return kernel

        def function(*inputs):
            seen.update(x.dtype for x in inputs)
            return kernel.function(*inputs)

        return type(kernel)(function)

    backend.kernel = watched
    session = compile_text(CHAIN, backends=[backend])
    result = session(X)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, Y, rtol=3e-2)
    assert not np.allclose(result, Y, rtol=1e-6)
    assert seen == {getattr(torch, dtype)}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "double", "int64", "bool"])
def test_tensors_of_every_type_come_back_as_they_went(dtype):
    element = {"double": "float64"}.get(dtype, dtype)
    text = f"g ({dtype}[2, 2] x) => ({dtype}[2, 2] y) {{ y = Transpose(x) }}"
    session = compile_text(text, backends=["torch"], precision="strict")
    import ml_dtypes

    x = np.array([[0, 1], [1, 1]]).astype(getattr(ml_dtypes, element, element))
    result = session(x)
    assert result.dtype == x.dtype
    np.testing.assert_array_equal(result, x.T)


def test_device_that_torch_has_not_is_refused():
    from penstock.backends.torch.backend import TorchBackend

    with pytest.raises(ps.PenstockError, match="no device of torch"):
        TorchBackend("gpu7")
    with pytest.raises(ps.PenstockError, match=r"torch finds [0-9]+ CUDA devices here"):
        TorchBackend("cuda:64")
    with pytest.raises(ps.PenstockError, match="runs on cpu and cuda devices"):
        TorchBackend("meta")
    with pytest.raises(ValueError, match="dtype='int8' is not one of float32"):
        TorchBackend("cpu", dtype="int8")


def test_numpy_stands_in_only_where_no_backend_of_the_host_is_chosen():
    assert [b.name for b in backends_of(["torch"])] == ["torch", "numpy"]
    assert [b.name for b in backends_of(["torch", "native"])] == ["torch", "native"]
    assert "PyTorch" in describe("torch")


def test_missing_torch_is_an_error_that_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "penstock-runtime[torch]" in (missing("torch") or "")
    with pytest.raises(ps.PenstockError, match=r"pip install 'penstock-runtime\[torch\]'"):
        compile_text(CHAIN, backends=["torch"])


EXACT = frozenset(
    """
    Abs Add And Cast Ceil Concat Equal Expand Flatten Floor Gather GatherElements Greater Identity
    Less Max Min Mul Neg Not Or Relu Reshape ScatterElements Shape Slice Split Squeeze Sub Tile
    Transpose Unsqueeze Where
    """.split()  # noqa: SIM905 - names are easier to read without quotes
)
"""operations whose results have the same bits in torch and NumPy"""


class OnTorchAndNumpy(ExecutorConformance):
    """All that holds for NumPy holds for nodes spread over torch and NumPy."""

    sampled = True

    def compile(self, source, **options) -> ps.Session:
        from penstock.backends.torch.backend import TorchBackend

        class ExactTorch(TorchBackend):
            fuses = False

            def kernel(self, node, types):
                return super().kernel(node, types) if node.op.name in EXACT else None

        backends = [ExactTorch("cpu"), "numpy"]
        return super().compile(source, backends=backends, cost_model=ScatteredCosts(), **options)


class TestLinearOnTorchAndNumpy(OnTorchAndNumpy):
    executor = "linear"


class TestDataflowOnTorchAndNumpy(OnTorchAndNumpy):
    executor = "dataflow"


class TestParallelOnTorchAndNumpy(OnTorchAndNumpy):
    executor = "parallel"
    leaves_threads = True
