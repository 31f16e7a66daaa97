"""The server, asked by a client that others wrote: tritonclient."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import penstock as ps
from tests.serving.test_replicas import Held
from tests.support.timing import SOON, wait_until
from tests.support.triton import InferenceServerClient, InferenceServerException, fed, save, serving


def test_server_says_what_it_is_and_which_models_it_has(client):
    triton, _ = client
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("affine")
    assert triton.is_model_ready("affine", "1")
    assert not triton.is_model_ready("other")
    server = triton.get_server_metadata()
    assert (server["name"], server["version"]) == ("penstock", ps.__version__)
    assert triton.get_model_metadata("affine", "1") == {
        "name": "affine",
        "versions": ["1"],
        "platform": "penstock",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "k", "datatype": "INT64", "shape": [1]},
        ],
    }
    assert triton.get_model_repository_index() == [
        {"name": "affine", "version": "1", "state": "READY"}
    ]


# What each method of the client is called with, and what the error says; None: it is answered.
METHODS: dict[str, list[tuple[tuple[Any, ...], str | None]]] = {
    "is_server_live": [((), None)],
    "is_server_ready": [((), None)],
    "is_model_ready": [(("affine",), None), (("affine", "1"), None)],
    "get_server_metadata": [((), None)],
    "get_model_metadata": [(("affine",), None), (("other",), "unknown model 'other'")],
    "get_model_config": [(("affine",), None), (("affine", "2"), "no version '2'")],
    "get_model_repository_index": [((), None)],
    "load_model": [
        (("affine",), None),
        (("affine", None, None, "{}"), "does not accept the parameters 'config'"),
        (("affine", None, None, "{}", {"file:1/model.onnx": b"x"}), "'file:1/model.onnx'"),
        (("other",), "'other' has no path"),
    ],
    "unload_model": [
        (("affine", None, None, True), "does not accept the parameters 'unload_dependents'"),
        (("other",), "model 'other' is not loaded"),
    ],
    "get_inference_statistics": [(("affine",), None), ((), None)],
    "update_trace_settings": [
        (("affine", {"trace_rate": "1"}), "does not support"),
        ((), "does not support"),
    ],
    "get_trace_settings": [(("affine",), "does not support"), ((), "does not support")],
    "update_log_settings": [(({"log_info": True},), "does not support")],
    "get_log_settings": [((), "does not support")],
    "get_system_shared_memory_status": [((), "--shared-memory"), (("r",), "--shared-memory")],
    "register_system_shared_memory": [(("r", "/key", 8), "--shared-memory")],
    "unregister_system_shared_memory": [((), "--shared-memory"), (("r",), "--shared-memory")],
    "get_cuda_shared_memory_status": [((), "does not support"), (("r",), "does not support")],
    "register_cuda_shared_memory": [(("r", b"handle", 0, 8), "does not support")],
    "unregister_cuda_shared_memory": [((), "does not support"), (("r",), "does not support")],
    "infer": [(("affine", []), "x"), (("other", []), "unknown model 'other'")],
}


# ``async_infer`` is ``infer`` on a greenlet; the others ask for nothing.
OTHERS = {"async_infer", "close", "generate_request_body", "parse_response_body"}


OTHERS |= {"plugin", "register_plugin", "unregister_plugin"}


def test_every_method_of_the_client_is_answered_or_refused_by_name(affine):
    public = {name for name in dir(InferenceServerClient) if not name.startswith("_")}
    assert public - OTHERS == METHODS.keys()
    with serving({"affine": affine}) as (triton, _, _):
        for name, calls in METHODS.items():
            for arguments, reason in calls:
                if reason is None:
                    assert getattr(triton, name)(*arguments) is not False
                    continue
                with pytest.raises(InferenceServerException, match=reason) as refused:
                    getattr(triton, name)(*arguments)
                assert refused.value.status() in ("400", "404")
                assert "Not Found" not in str(refused.value)


def test_client_raises_what_the_server_says(client):
    triton, _ = client
    with pytest.raises(InferenceServerException, match="unknown model 'other'"):
        triton.get_model_metadata("other")
    x = fed("x", np.ones((1, 4), np.float32), "FP32", binary=True)
    with pytest.raises(InferenceServerException, match="x"):
        triton.infer("affine", [x])


def test_server_that_ends_answers_what_it_has(tmp_path):
    path = save(tmp_path / "g.onnx", "g (float[N] x) => (float[N] y) { y = Sin(x) }")
    backend = Held()
    x = fed("x", np.ones(2, np.float32), "FP32", binary=True)
    answers = []

    def ask(url: str) -> None:
        triton = InferenceServerClient(url.removeprefix("http://"), network_timeout=SOON)
        answers.append(triton.infer("g", [x]).as_numpy("y"))
        triton.close()

    with serving({"g": path}, lambda path: ps.Replicas(path, backends=[backend])) as (_, url, _):
        thread = threading.Thread(target=ask, args=(url,))
        thread.start()
        wait_until(lambda: len(backend.shapes) == 1)
        threading.Timer(0.05, backend.opened.set).start()
    thread.join(SOON)
    np.testing.assert_allclose(answers, [np.sin([1, 1])], rtol=1e-6)
