"""Queues of requests."""

from __future__ import annotations

from pathlib import Path

import gevent
import numpy as np
import pytest

import penstock as ps
from tests.serving.test_replicas import Held
from tests.support.timing import wait_until
from tests.support.triton import InferenceServerException, fed, save, serving


def test_requests_beyond_the_queue_are_refused_and_late_ones_end(tmp_path):
    path = save(tmp_path / "g.onnx", "g (float[N] x) => (float[N] y) { y = Sin(x) }")
    backend = Held()
    x = fed("x", np.ones(2, np.float32), "FP32", binary=True)

    def make(path: Path) -> ps.Replicas:
        return ps.Replicas(path, queue=1, backends=[backend])

    with serving({"g": path}, make) as (triton, _, server):
        counts = server.repository.find("g").replicas
        first = triton.async_infer("g", [x])
        wait_until(lambda: gevent.idle() or len(backend.shapes) == 1)  # the client's turn
        second = triton.async_infer("g", [x])
        wait_until(lambda: gevent.idle() or counts.counts.queued == 1)
        with pytest.raises(InferenceServerException, match="try again later") as refused:
            triton.infer("g", [x])
        assert refused.value.status() == "503"
        assert "=" not in str(refused.value)  # no option of Python
        backend.opened.set()
        for each in (first, second):
            np.testing.assert_allclose(each.get_result().as_numpy("y"), np.sin([1, 1]), rtol=1e-6)
        backend.opened.clear()
        with pytest.raises(InferenceServerException, match="timeout") as late:
            triton.infer("g", [x], timeout=20_000)
        assert late.value.status() == "504"
        backend.opened.set()
