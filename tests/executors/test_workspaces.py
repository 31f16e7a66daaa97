"""Workspaces belong to streams: runs on one share it, and it is counted and released."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.backends.base import HostBackend
from penstock.ir.kernel import Kernel
from tests.support.device_backend import DelayedBackend
from tests.support.onnx_text import compile_text

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
MIB = 1 << 20
WORKSPACE = {"Sin": 1000, "Cos": 3000, "Tanh": 2000}
#   x -+- Sin -- Cos -- Tanh -+- Add
#      +- Cos -- Sin -- Tanh -+
BRANCHES = """g (float[4, 4] x) => (float[4, 4] y) {
    a = Sin(x) b = Cos(a) c = Tanh(b) d = Cos(x) e = Sin(d) f = Tanh(e) y = Add(c, f) }"""


def compiled(backend, text=BRANCHES, executor="streams", **options) -> ps.Session:
    place = {name: backend.name for name in WORKSPACE if f"{name}(" in text}
    return compile_text(
        text, executor=executor, backends=[backend, "numpy"], place=place, **options
    )


def expected(text: str = BRANCHES) -> np.ndarray:
    session = compile_text(text, executor="linear", backends=["numpy"])
    return session.run({"x": X})["y"]


def device(**options) -> DelayedBackend:
    return DelayedBackend(operations=set(WORKSPACE), workspace=WORKSPACE, **options)


def test_kernels_on_a_stream_share_its_workspace():
    backend = device()
    session = compiled(backend, max_streams=3)
    for _ in range(3):
        np.testing.assert_allclose(session.run({"x": X})["y"], expected(), rtol=1e-6)
    # Two streams, each with the largest workspace of its kernels, kept from run to run.
    assert session.inspect.executor.tasks.signals.devices == ("late", "late")
    assert backend.device.allocated == [3000, 3000]


def test_kernel_on_two_devices_has_the_workspace_of_each_of_its_streams():
    text = "g (float[4, 4] x) => (float[4, 4] y) { a = Sin(x) b = Cos(a) y = Neg(b) }"
    backend = device(on={"Cos": (0, 1)})
    session = compiled(backend, text)
    for _ in range(3):
        np.testing.assert_allclose(session.run({"x": X})["y"], expected(text), rtol=1e-6)
    assert [each.allocated for each in backend.devices] == [[3000], [3000]]


def test_workspaces_are_counted_and_given_back():
    backend = device()
    session = compiled(backend, max_streams=3)
    session.run({"x": X})
    size = session.inspect.executor.arena_plan.size
    assert session.memory.arenas == size + 6000
    session.trim()
    assert session.memory.arenas == 0
    np.testing.assert_allclose(session.run({"x": X})["y"], expected(), rtol=1e-6)
    assert session.memory.arenas == size + 6000
    assert backend.device.allocated == [3000] * 4


def test_limit_of_bytes_counts_workspaces():
    limits = ps.Limits(max_bytes=5000)
    with pytest.raises(ps.LimitExceeded, match="6000 bytes on late, workspaces included"):
        compiled(device(), max_streams=3, limits=limits).run({"x": X})


def test_plans_lose_workspaces_beyond_the_limit_of_their_bytes():
    text = BRANCHES.replace("[4, 4]", "[n, 4]")
    session = compiled(device(), text, max_streams=3, limits=ps.Limits(max_plans_bytes=1))
    for n in (1, 2, 3):
        session.run({"x": X[:n]})
    # The workspaces of the last plan stay.
    assert 6000 <= session.memory.arenas < 12000


@pytest.mark.parametrize("executor", ["linear", "dataflow", "parallel", "frames"])
def test_kernels_outside_of_streams_get_no_workspace(executor):
    session = compiled(device(), executor=executor)
    np.testing.assert_allclose(session.run({"x": X})["y"], expected(), rtol=1e-6)


class Working(HostBackend):
    """Sin with a workspace of one MiB on the host."""

    name = "working"

    def kernel(self, node, types):
        if node.op.name not in WORKSPACE:
            return None
        function = {"Sin": np.sin, "Cos": np.cos, "Tanh": np.tanh}[node.op.name]

        def into(x, y, workspace):
            assert workspace.nbytes == MIB
            workspace[:] = 1
            function(x, y)

        return Kernel(function, into, workspace=MIB)


def test_workspaces_on_the_host_are_one_for_each_stream():
    session = compiled(Working(), max_streams=2)
    np.testing.assert_allclose(session.run({"x": X})["y"], expected(), rtol=1e-6)
    assert len(session.inspect.executor.tasks.tasks) == 2
    assert 2 * MIB <= session.memory.arenas < 2 * MIB + 4096
    session.trim()
    assert session.memory.arenas == 0
