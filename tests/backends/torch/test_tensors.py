"""Torch tensors as feeds and results of runs, without copies."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import numpy as np
import pytest

import penstock as ps
from penstock.tuning.measure import Cost
from tests.support.onnx_text import compile_text
from tests.support.timing import SOON
from tests.support.torch_kernels import needs_torch

pytestmark = needs_torch

CHAIN = "g (float[N, 4] x) => (float[4, N] y) { a = Sin(x) b = Exp(a) y = Transpose(b) }"
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
Y = np.exp(np.sin(X)).T


def tensor(x=X):
    import torch

    return torch.from_numpy(np.array(x))


@pytest.fixture
def copies(monkeypatch) -> Counter[str]:
    """Counts copies between the host's memory and the device's."""
    from penstock.backends.torch.memory import TorchMemory

    counts: Counter[str] = Counter()
    for name in ("from_host", "to_host", "_pinned"):
        copy = getattr(TorchMemory, name)

        def counted(self, value, _copy=copy, _name=name, **options):
            counts[_name] += 1
            return _copy(self, value, **options)

        monkeypatch.setattr(TorchMemory, name, counted)
    return counts


def transfers(session: ps.Session) -> int:
    return sum(step.node.op.name == "Transfer" for step in session.inspect.plan.walk())


@pytest.mark.parametrize("executor", ["auto", "linear", "dataflow", "parallel", "streams"])
def test_run_from_tensors_to_tensors_transfers_nothing(executor, copies):
    import torch

    session = compile_text(CHAIN, backends=["torch"], executor=executor)
    session.run({"x": tensor()}, returns="torch")  # measures what the copies of plans take
    copies.clear()
    result = session.run({"x": tensor()}, returns="torch")["y"]
    assert isinstance(result, torch.Tensor)
    np.testing.assert_allclose(result.numpy(), Y, rtol=1e-6)
    assert not copies
    assert transfers(session) == 0


def test_kernels_read_the_memory_of_the_tensor_that_is_fed():
    x = tensor()
    from penstock.backends.torch.backend import TorchBackend

    read = []
    backend = TorchBackend("cpu")
    kernel_of = backend.kernel

    def watched(node, types):
        kernel = kernel_of(node, types)
        return type(kernel)(lambda x: read.append(x.data_ptr()) or kernel.function(x))

    backend.kernel = watched
    session = compile_text(
        "g (float[3, 4] x) => (float[3, 4] y) { y = Neg(x) }", backends=[backend]
    )
    session.run({"x": x}, returns="torch")
    read.clear()
    session.run({"x": x}, returns="torch")
    assert read == [x.data_ptr()]


def test_tensor_fed_and_array_returned_take_one_transfer_and_the_reverse(copies):
    session = compile_text(CHAIN, backends=["torch"], executor="linear")
    session.run({"x": tensor()})
    copies.clear()
    result = session.run({"x": tensor()})["y"]
    assert isinstance(result, np.ndarray)
    np.testing.assert_allclose(result, Y, rtol=1e-6)
    assert copies == {"to_host": 1}
    session.run({"x": X}, returns="torch")
    copies.clear()
    np.testing.assert_allclose(session.run({"x": X}, returns="torch")["y"], Y, rtol=1e-6)
    assert copies == {"from_host": 1, "_pinned": 1}
    assert transfers(session) == 1


def test_runs_with_arrays_and_with_tensors_alternate_on_plans_that_are_kept():
    session = compile_text(CHAIN, backends=["torch"], executor="linear")
    for _ in range(4):
        np.testing.assert_allclose(session(X), Y, rtol=1e-6)
        np.testing.assert_allclose(session.run({"x": tensor()})["y"], Y, rtol=1e-6)
        np.testing.assert_allclose(session.run({"x": X}, returns="torch")["y"], Y, rtol=1e-6)
    assert session.stats.plans_made == 3


def test_result_that_is_the_feed_is_a_copy_of_it():
    import torch

    text = "g (float[3, 4] x) => (float[12] y, float[3, 4] z) { s = Constant<value_ints = [12]>()"
    session = compile_text(text + " y = Reshape(x, s) z = Identity(x) }", backends=["torch"])
    x = tensor()
    for result in session.run({"x": x}, returns="torch").values():
        np.testing.assert_array_equal(result.reshape(3, 4), X)
        with torch.inference_mode():
            result.zero_()
    np.testing.assert_array_equal(x, X)


def test_results_of_earlier_runs_are_not_overwritten():
    session = compile_text(CHAIN, backends=["torch"], executor="linear")
    results = [session.run({"x": tensor(X * i)}, returns="torch")["y"] for i in range(5)]
    for i, result in enumerate(results):
        np.testing.assert_allclose(result, np.exp(np.sin(X * i)).T, rtol=1e-6)


def test_result_of_the_host_comes_as_a_tensor():
    import torch

    text = """g (float[4] x) => (float[4] y, int64[1] s, float[4] z) {
        y = Hardmax(x) s = Shape(x) z = Sin(x) }"""
    session = compile_text(text, backends=["torch"])
    x = np.array([0.5, 3, 1.5, 2], np.float32)
    results = session.run({"x": tensor(x)}, returns="torch")
    assert all(isinstance(result, torch.Tensor) for result in results.values())
    np.testing.assert_array_equal(results["y"], np.eye(4)[1])
    np.testing.assert_array_equal(results["s"], [4])
    np.testing.assert_allclose(results["z"], np.sin(x), rtol=1e-6)


def test_tensor_that_the_host_reads_is_brought_there():
    text = "g (float[12] x, int64[2] s) => (float[K, L] y) { y = Reshape(x, s) }"
    session = compile_text(text, backends=["torch"])
    feeds = {"x": tensor(X.ravel()), "s": tensor(np.array([4, 3]))}
    np.testing.assert_array_equal(session.run(feeds)["y"], X.reshape(4, 3))


def test_object_with_dlpack_is_read_where_it_is(copies):
    class Exported:
        def __init__(self, x):
            self.x = x
            self.__dlpack_device__ = x.__dlpack_device__

        def __dlpack__(self, **options):
            return self.x.__dlpack__(**options)

    session = compile_text(CHAIN, backends=["torch"], executor="linear")
    session.run({"x": Exported(tensor())}, returns="torch")
    copies.clear()
    result = session.run({"x": Exported(tensor())}, returns="torch")["y"]
    np.testing.assert_allclose(np.from_dlpack(result), Y, rtol=1e-6)
    assert not copies


def test_strided_tensor_and_one_with_a_gradient_are_taken():
    session = compile_text(CHAIN, backends=["torch"])
    x = tensor(X.T).T.requires_grad_()
    result = session.run({"x": x}, returns="torch")["y"]
    assert not result.requires_grad
    np.testing.assert_allclose(result, Y, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensors_are_float32_outside_where_the_device_holds_fewer_bits(dtype):
    import torch

    from penstock.backends.torch.backend import TorchBackend

    session = compile_text(CHAIN, backends=[TorchBackend("cpu", dtype)])
    result = session.run({"x": tensor()}, returns="torch")["y"]
    assert result.dtype is torch.float32
    np.testing.assert_allclose(result, Y, rtol=3e-2)


def test_tensor_of_another_type_or_shape_is_refused_by_name():
    session = compile_text(CHAIN, backends=["torch"])
    with pytest.raises(ps.InvalidInput, match=r"'x' must be float32, not int64.*\.to\(torch"):
        session.run({"x": tensor(np.ones((3, 4), np.int64))})
    with pytest.raises(ps.InvalidInput, match="'x' must have 4 at axis 1"):
        session.run({"x": tensor(np.ones((3, 5), np.float32))})
    with pytest.raises(ps.InvalidInput, match="did you mean"):
        session.run({"xx": tensor()})


def test_returns_needs_the_torch_backend_and_a_known_name():
    with pytest.raises(ps.PenstockError, match=r"compile the model with backends=\['torch'\]"):
        compile_text(CHAIN, backends=["numpy"]).run({"x": X}, returns="torch")
    session = compile_text(CHAIN, backends=["torch"])
    with pytest.raises(ValueError, match="returns 'jax' is not one of numpy, torch"):
        session.run({"x": X}, returns="jax")
    with pytest.raises(ValueError, match="out= has arrays"):
        session.run({"x": X}, returns="torch", out={"y": Y.copy()})


def test_submitted_runs_take_and_return_tensors():
    session = compile_text(CHAIN, backends=["torch"])
    done, came = threading.Event(), []
    session.run_async(
        lambda *result: (came.append(result), done.set()), {"x": tensor()}, returns="torch"
    )
    assert done.wait(SOON)
    results = [
        session.submit({"x": tensor()}, returns="torch").result(SOON),
        asyncio.run(session.arun({"x": tensor()}, returns="torch")),
        ps.Stream().run(session, {"x": tensor()}, returns="torch").result(SOON),
        came[0][0],
    ]
    for result in results:
        np.testing.assert_allclose(result["y"].numpy(), Y, rtol=1e-6)


@pytest.mark.parametrize("executor", ["interpret", "frames"])
def test_executors_that_plan_nothing_take_and_return_tensors(executor):
    import torch

    session = compile_text(CHAIN, backends=["torch"], executor=executor)
    result = session.run({"x": tensor()}, returns="torch")["y"]
    assert isinstance(result, torch.Tensor)
    np.testing.assert_allclose(result, Y, rtol=1e-6)


def test_loop_and_branch_from_tensors_to_tensors_transfer_no_tensor_inside(copies):
    text = """g (float[4] x, int64 n, bool c) => (float[4] y) {
        v = Loop (n, , x) <body = b (int64 i, bool o, float[4] u) => (bool d, float[4] w) {
            d = Identity(o) w = Sin(u) }>
        y = If (c) <then_branch = t () => (float[4] p) { p = Exp(v) },
                    else_branch = e () => (float[4] q) { q = Neg(v) }> }"""
    session = compile_text(text, backends=["torch"], executor="linear")
    x = np.array([0.1, 0.5, -1, 2], np.float32)
    feeds = {"x": tensor(x), "n": np.array(3), "c": np.array(True)}
    wanted = np.exp(np.sin(np.sin(np.sin(x))))
    np.testing.assert_allclose(session.run(feeds, returns="torch")["y"], wanted, rtol=1e-5)
    copies.clear()
    np.testing.assert_allclose(session.run(feeds, returns="torch")["y"], wanted, rtol=1e-5)
    assert copies["to_host"] == 0


def test_saved_session_takes_and_returns_tensors(tmp_path):
    session = compile_text(CHAIN, backends=["torch"], executor="linear")
    session(X)
    session.save(tmp_path / "model.ps")
    with ps.open(tmp_path / "model.ps") as opened:
        np.testing.assert_allclose(opened.run({"x": tensor()}, returns="torch")["y"], Y, rtol=1e-6)


@pytest.mark.parametrize("executor", ["linear", "parallel"])
def test_nodes_are_placed_where_their_feeds_are_and_results_are_wanted(executor):
    class Costs:
        """A node takes 300 us on the host and 500 us on torch, a transfer a millisecond."""

        def cost(self, node, backend, threads):
            return Cost(500e-6 if backend.name == "torch" else 300e-6)

        def transfer(self, source, target, nbytes):
            return 1e-3

    options = {"backends": ["numpy", "torch"], "cost_model": Costs(), "executor": executor}
    session = compile_text(CHAIN, **options)

    def places() -> set[str]:
        return {step.backend for step in session.inspect.plan.walk()}

    np.testing.assert_allclose(session.run({"x": X})["y"], Y, rtol=1e-6)
    assert places() == {"numpy"}
    np.testing.assert_allclose(session.run({"x": tensor()}, returns="torch")["y"], Y, rtol=1e-6)
    assert places() == {"torch"}
    # One transfer is needed wherever they run.
    np.testing.assert_allclose(session.run({"x": tensor()})["y"], Y, rtol=1e-6)
    assert places() == {"numpy", "torch"}
    assert [step.node.op.name for step in session.inspect.plan.walk()].count("Transfer") == 1
    np.testing.assert_allclose(session.run({"x": X})["y"], Y, rtol=1e-6)
    assert places() == {"numpy"}
