"""The server as an application of Ray Serve, asked by tritonclient."""

from __future__ import annotations

import socket
import sys

import numpy as np
import onnx
import pytest

import penstock as ps
from tests.cluster.conftest import ray_started  # noqa: F401
from tests.support.onnx_text import model_from_text
from tests.support.timing import SOON
from tests.support.triton import AFFINE, InferenceServerClient, InferenceServerException, fed


def test_deployment_without_ray_serve_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(ps.PenstockError, match=r"pip install 'ray\[serve\]'"):
        ps.ray_deployment(tmp_path / "affine.onnx")
    with pytest.raises(TypeError, match="paths by name"):
        ps.ray_deployment({})


@pytest.mark.full
@pytest.mark.usefixtures("ray_started")
def test_deployment_answers_as_the_server_does(tmp_path):
    serve = pytest.importorskip("ray.serve", reason="needs ray[serve]", exc_type=ImportError)
    path = tmp_path / "affine.onnx"
    onnx.save(model_from_text(AFFINE), path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        application = ps.ray_deployment(path, deployment={"num_replicas": 2}, max_batch=4)
        serve.run(application, route_prefix="/")
        client = InferenceServerClient(f"127.0.0.1:{port}", network_timeout=SOON)
        assert client.is_server_ready()
        x = np.ones((1, 3), np.float32)
        for binary in (True, False):
            result = client.infer("affine", [fed("x", x, "FP32", binary=binary)])
            np.testing.assert_array_equal(result.as_numpy("y"), x + x)
        with pytest.raises(InferenceServerException, match="unknown model 'other'"):
            client.get_model_metadata("other")
        client.close()
    finally:
        serve.shutdown()
