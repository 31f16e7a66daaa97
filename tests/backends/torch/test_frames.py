"""Frames on several devices, one of them of torch: TensorFlow's recorded cases."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import penstock as ps
from penstock.executors.frames.executor import FramesExecutor
from penstock.frontends.tensorflow.file import read_graph
from tests.support.tf_cases import Case, cases, follow
from tests.support.timing import SOON
from tests.support.torch_kernels import needs_torch

pytestmark = needs_torch

ON_DEVICES = [case for case in cases() if case.name.startswith("dev_")]


def late():
    from penstock.backends.torch.backend import TorchBackend
    from tests.support.torch_device import LateRuntime

    return TorchBackend("cpu", runtime=LateRuntime())


def with_gpu(case: Case) -> bytes:
    """The graph of a case whose second device is a GPU."""
    graph = read_graph(case.path)
    for node in graph.node:
        node.device = node.device.replace("CPU:1", "GPU:0")
    return graph.SerializeToString()


def parts(session: ps.Session) -> set[str]:
    executors = [x for x in session._plans.executors() if isinstance(x, FramesExecutor)]
    return {part.device.rpartition("/device:")[2] for x in executors for part in x.parts}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("case", ON_DEVICES, ids=lambda case: case.name)
def test_corpus_with_a_gpu_of_torch_equals_tensorflow(case, traced):
    backend = late()
    devices = {"CPU:0": "numpy", "GPU:0": backend}
    source = with_gpu(case)

    def compiled() -> ps.Session:
        return ps.compile(source, "frames", ["numpy"], devices=devices)

    session = follow(case, compiled, counted=traced, traced=traced)
    assert session is not None
    assert parts(session) == {"CPU:0", "GPU:0"}


@pytest.mark.parametrize("case", ON_DEVICES, ids=lambda case: case.name)
def test_corpus_with_the_cpu_device_of_torch_equals_tensorflow(case):
    devices = {"CPU:0": "numpy", "GPU:0": "torch"}
    source = with_gpu(case)
    follow(case, lambda: ps.compile(source, "frames", ["numpy"], devices=devices), counted=False)


@pytest.mark.full
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_corpus_on_random_devices_equals_tensorflow(case):
    graph = read_graph(case.path)
    for i, node in enumerate(graph.node):
        node.device = ("/device:CPU:0", "/device:GPU:0")[hash((case.name, i)) % 2]
    devices = {"CPU:0": "numpy", "GPU:0": late()}
    source = graph.SerializeToString()
    follow(case, lambda: ps.compile(source, "frames", ["numpy"], devices=devices), counted=False)


CASE = next(case for case in ON_DEVICES if case.name == "dev_while_body")


def test_nodes_that_name_the_gpu_run_there_and_their_ends_are_events():
    backend, ran = late(), Counter()
    kernel_of = backend.kernel

    def watched(node, types):
        kernel = kernel_of(node, types)
        if kernel is None:
            return None

        def function(*inputs):
            ran[node.op.name] += 1
            return kernel.function(*inputs)

        return type(kernel)(function)

    backend.kernel = watched
    session = None

    def compiled() -> ps.Session:
        devices = {"CPU:0": "numpy", "GPU:0": backend}
        return ps.compile(with_gpu(CASE), "frames", ["numpy"], devices=devices)

    session = follow(CASE, compiled, counted=False, traced=False)
    assert session is not None
    assert ran
    assert backend.device.runtime.counts["record"] > 0


def test_run_that_is_cancelled_while_the_gpu_works_ends_and_the_next_one_runs():
    import threading

    backend = late()
    text = "g (float[4, 4] x) => (float[4, 4] y) { a = Sin(x) y = Exp(a) }"
    from tests.support.onnx_text import model_from_text

    session = ps.compile(model_from_text(text), "frames", ["numpy"], devices={"GPU:0": backend})
    x = np.ones((4, 4), np.float32)
    np.testing.assert_allclose(session(x), np.exp(np.sin(x)), rtol=1e-6)
    gate, token = threading.Event(), ps.CancelToken()
    for stream in list(backend.device.runtime.streams):
        stream.put(lambda: gate.wait(SOON))
    run = session.submit({"x": x}, cancel=token)
    token.cancel()
    with pytest.raises(ps.Cancelled):
        run.result(SOON)
    gate.set()
    np.testing.assert_allclose(session(x), np.exp(np.sin(x)), rtol=1e-6)
