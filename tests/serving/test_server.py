"""The server, asked by a client that others wrote: tritonclient."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import uvicorn

import penstock as ps
from penstock.serving import app
from penstock.serving.app import Server
from penstock.serving.connection import connections
from penstock.serving.repository import ModelRepository
from tests.serving.test_replicas import Held
from tests.support.onnx_text import model_from_text
from tests.support.timing import SOON, wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
    from tritonclient.utils import InferenceServerException

AFFINE = (
    "affine (float[N, 3] x) => (float[N, 3] y, int64[1] k) <int64[1] k = {7}> { y = Add(x, x) }"
)
MAX_BYTES = 1 << 20


def save(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model_from_text(text), path)
    return path


@contextmanager
def serving(
    paths: dict[str, Path], make: Callable[[Path], ps.Replicas] = ps.Replicas, **options: Any
) -> Iterator[tuple[InferenceServerClient, str, Server]]:
    """A client of a server, and the server's URL."""
    options = {"max_bytes": MAX_BYTES, "timeout": SOON} | options
    server = Server(ModelRepository(paths, make), **options)
    listener = socket.create_server(("127.0.0.1", 0))
    http_class = connections(options["timeout"], server.direct)
    config = uvicorn.Config(server.app, http=http_class, log_level="critical", lifespan="on")
    http = uvicorn.Server(config)
    thread = threading.Thread(target=http.run, args=([listener],))
    thread.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    client = InferenceServerClient(address, concurrency=8, network_timeout=SOON)
    try:
        wait_until(lambda: http.started)
        yield client, f"http://{address}", server
    finally:
        client.close()
        http.should_exit = True
        thread.join(SOON)
        listener.close()
        assert not thread.is_alive()
        assert not server.repository.all()


@pytest.fixture(scope="module")
def affine(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "affine.onnx", AFFINE)


@pytest.fixture(scope="module")
def client(affine) -> Iterator[tuple[InferenceServerClient, str]]:
    with serving({"affine": affine}) as (client, url, _):
        yield client, url


def fed(name: str, value: np.ndarray, datatype: str, *, binary: bool) -> InferInput:
    tensor = InferInput(name, list(value.shape), datatype)
    tensor.set_data_from_numpy(value, binary_data=binary)
    return tensor


def asked(url: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    """The status and the document of a POST."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, body, names)
    try:
        with urllib.request.urlopen(request, timeout=SOON) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


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


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_inference_takes_and_gives_json_and_bytes(client, into, out, compression):
    triton, _ = client
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    outputs = [InferRequestedOutput(name, binary_data=out) for name in ("k", "y")]
    result = triton.infer(
        "affine",
        [fed("x", x, "FP32", binary=into)],
        outputs=outputs,
        request_id="seven",
        request_compression_algorithm=compression,
    )
    np.testing.assert_array_equal(result.as_numpy("y"), x + x)
    np.testing.assert_array_equal(result.as_numpy("k"), [7])
    response = result.get_response()
    assert (response["id"], response["model_name"]) == ("seven", "affine")
    assert [entry["name"] for entry in response["outputs"]] == ["k", "y"]
    both = triton.infer("affine", [fed("x", x, "FP32", binary=into)], model_version="1")
    np.testing.assert_array_equal(both.as_numpy("y"), x + x)
    assert len(both.get_response()["outputs"]) == 2


TYPES = {
    "BOOL": "bool",
    **{f"INT{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"UINT{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    "FP16": "float16",
    "FP32": "float",
    "FP64": "double",
    "BF16": "bfloat16",
    "BYTES": "string",
}


def test_configuration_is_that_of_the_model(client):
    triton, _ = client
    configuration = triton.get_model_config("affine", "1")
    assert configuration["name"] == "affine"
    assert configuration["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 3]}]
    assert [port["name"] for port in configuration["output"]] == ["y", "k"]
    assert configuration["instance_group"] == [{"count": 1, "kind": "KIND_CPU"}]
    with pytest.raises(InferenceServerException, match="'other' is not there"):
        triton.get_model_config("other")


def test_model_is_not_loaded_in_another_configuration(client):
    triton, url = client
    with pytest.raises(InferenceServerException, match="without 'config'"):
        triton.load_model("affine", config="{}")
    with pytest.raises(InferenceServerException, match="no path"):
        triton.load_model("other")
    for body, status in ((b"{", 400), (b"[]", 400), (b'{"parameters": 3}', 400), (b"", 200)):
        assert asked(f"{url}/v2/repository/models/affine/load", body)[0] == status


# What each method of the client is called with, and what the error says; None: it is answered.
METHODS: dict[str, list[tuple[tuple[Any, ...], str | None]]] = {
    "is_server_live": [((), None)],
    "is_server_ready": [((), None)],
    "is_model_ready": [(("affine",), None), (("affine", "1"), None)],
    "get_server_metadata": [((), None)],
    "get_model_metadata": [(("affine",), None), (("other",), "'other' is not there")],
    "get_model_config": [(("affine",), None), (("affine", "2"), "no version '2'")],
    "get_model_repository_index": [((), None)],
    "load_model": [
        (("affine",), None),
        (("affine", None, None, "{}"), "without 'config'"),
        (("affine", None, None, "{}", {"file:1/model.onnx": b"x"}), "'file:1/model.onnx'"),
        (("other",), "'other' has no path"),
    ],
    "unload_model": [
        (("affine", None, None, True), "without 'unload_dependents'"),
        (("other",), "'other' is not there"),
    ],
    "get_inference_statistics": [(("affine",), None), ((), None)],
    "update_trace_settings": [(("affine", {"trace_rate": "1"}), "does not have"), ((), "not have")],
    "get_trace_settings": [(("affine",), "does not have"), ((), "does not have")],
    "update_log_settings": [(({"log_info": True},), "does not have")],
    "get_log_settings": [((), "does not have")],
    "get_system_shared_memory_status": [((), "--shared-memory"), (("r",), "--shared-memory")],
    "register_system_shared_memory": [(("r", "/key", 8), "--shared-memory")],
    "unregister_system_shared_memory": [((), "--shared-memory"), (("r",), "--shared-memory")],
    "get_cuda_shared_memory_status": [((), "does not have"), (("r",), "does not have")],
    "register_cuda_shared_memory": [(("r", b"handle", 0, 8), "does not have")],
    "unregister_cuda_shared_memory": [((), "does not have"), (("r",), "does not have")],
    "infer": [(("affine", []), "x"), (("other", []), "'other' is not there")],
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


def test_inference_takes_and_gives_every_datatype(tmp_path):
    check_every_datatype(tmp_path, ps.Replicas)


def check_every_datatype(tmp_path: Path, make: Callable[[Path], ps.Replicas]) -> None:
    """Feed a server whose models ``make`` loads each datatype, as JSON and as bytes."""
    paths = {
        name: save(tmp_path / f"{name}.onnx", f"g ({t}[N] x) => ({t}[N] y) {{ y = Identity(x) }}")
        for name, t in TYPES.items()
    }
    values = {
        "BOOL": np.array([True, False, True]),
        "BYTES": np.array(["a", "", "zwölf"], object),
        "BF16": np.array([1.5, -2, 3e38], ml_dtypes.bfloat16),
    }
    with serving(paths, make) as (triton, url, _):
        for name in TYPES:
            dtype = np.dtype(name.lower().replace("fp", "float")) if name not in values else None
            value = values.get(name, np.array([1, 0, 100]).astype(dtype))
            assert triton.get_model_metadata(name)["inputs"][0]["datatype"] == name
            for binary in (True, False):
                if name in ("FP16", "BF16") and not binary:
                    continue  # the client has no JSON for these
                inputs = [fed("x", value, name, binary=binary)]
                wanted = [InferRequestedOutput("y", binary_data=binary)]
                y = triton.infer(name, inputs, outputs=wanted).as_numpy("y")
                if name == "BYTES":
                    texts = [each.decode() if isinstance(each, bytes) else each for each in y]
                    assert texts == ["a", "", "zwölf"]
                else:
                    assert y.dtype == value.dtype
                    np.testing.assert_array_equal(y, value)
        nested = {"name": "x", "shape": [2], "datatype": "BF16", "data": [[1.5], [2]]}
        body = json.dumps({"inputs": [nested]}).encode()
        status, answer = asked(f"{url}/v2/models/BF16/infer", body)
        assert (status, answer["outputs"][0]["data"]) == (200, [1.5, 2.0])


X = {"name": "x", "shape": [1, 3], "datatype": "FP32"}


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "must be a JSON object"),
        ({"inputs": {}, "outputs": 1}, "must be a list of objects"),
        ({"inputs": [{**X, "data": [1, 2]}]}, "has 2 elements"),
        ({"inputs": [{**X, "data": [[1, 2], 3]}]}, "rows beside elements"),
        ({"inputs": [{**X, "data": [1, 2, "a"]}]}, "an element 'a'"),
        ({"inputs": [{**X, "data": [1, 2, None]}]}, "an element None"),
        ({"inputs": [{**X, "datatype": "FP8", "data": [1, 2, 3]}]}, "'FP8', which there is not"),
        ({"inputs": [{**X, "datatype": [], "data": [1, 2, 3]}]}, "which there is not"),
        ({"inputs": [{**X, "shape": [1, -3], "data": [1]}]}, "a list of sizes"),
        ({"inputs": [{**X, "datatype": "INT8", "data": [1, 2, 300]}]}, "300"),
        ({"inputs": [{**X, "datatype": "INT8", "data": [1, 2, 0.5]}]}, "not whole numbers"),
        ({"inputs": [{**X, "datatype": "INT64", "data": [1, 2, 3]}]}, "int64"),
        ({"inputs": [{**X, "data": [1, 2, 3]}] * 2}, "given twice"),
        ({"inputs": [X]}, "neither 'data'"),
        ({"inputs": [{**X, "parameters": {"binary_data_size": 12}}]}, "more than there are"),
        ({"inputs": [{**X, "parameters": {"binary_data_size": -1}}]}, "more than there are"),
        ({"inputs": [{**X, "parameters": 3, "data": []}]}, "'parameters' must be an object"),
        ({"inputs": [{**X, "name": "z", "data": [1, 2, 3]}]}, "no such value; it has 'x'"),
        ({"inputs": [{**X, "name": 3, "data": [1, 2, 3]}]}, "has no name"),
        ({"inputs": [{**X, "shape": [3], "data": [1, 2, 3]}]}, "x"),
        ({"inputs": [{**X, "data": [1, 2, 3]}], "outputs": [{"name": "z"}]}, "'z'"),
        ({"parameters": {"timeout": "soon"}}, "no number of microseconds"),
        ({"parameters": {"timeout": 10**400}}, "no number of microseconds"),
        ({"inputs": [{**X, "data": [1, 2, 1e40]}]}, "overflow"),
        ({"outputs": [{"name": "y", "parameters": {"classification": 1}}]}, "not supported"),
    ],
)
def test_wrong_request_is_refused_in_the_form_of_the_protocol(client, document, reason):
    _, url = client
    status, answer = asked(f"{url}/v2/models/affine/infer", json.dumps(document).encode())
    assert status == 400
    assert list(answer) == ["error"]
    assert reason in answer["error"]


def test_body_that_is_no_request_is_refused(client):
    _, url = client
    infer = f"{url}/v2/models/affine/infer"
    length = "Inference_Header_Content_Length"
    x = {**X, "parameters": {"binary_data_size": 12}}
    text = json.dumps({"inputs": [x]}).encode()
    for body, headers, status, reason in (
        (b"{", {}, 400, "no JSON"),
        (b"[" * 100_000, {}, 400, "no JSON"),
        (text + bytes(12), {length: "x"}, 400, "no length in the body"),
        (text + bytes(12), {length: "9999"}, 400, "no length in the body"),
        (text + bytes(12), {length: "9" * 5000}, 400, "no length in the body"),
        (text + bytes(13), {length: str(len(text))}, 400, "1 bytes follow"),
        (text + bytes(11), {length: str(len(text))}, 400, "more than there are"),
        (text, {"Content_Encoding": "br"}, 400, "not gzip or deflate"),
        (text, {"Content_Encoding": "gzip"}, 400, "not compressed"),
        (gzip.compress(text)[:-4], {"Content_Encoding": "gzip"}, 400, "cut off"),
        (bytes(MAX_BYTES + 1), {}, 413, "larger than"),
        (gzip.compress(bytes(50 * MAX_BYTES)), {"Content_Encoding": "gzip"}, 413, "larger than"),
    ):
        assert asked(infer, body, **headers)[0] == status, reason
        assert reason in asked(infer, body, **headers)[1]["error"]
    assert asked(f"{url}/v2/models/other/infer", b"{}")[0] == 404
    assert asked(f"{url}/v2/models/affine/versions/3/infer", b"{}")[0] == 404
    assert "error" in asked(f"{url}/v2/nothing", b"{}")[1]
    assert asked(f"{url}/v2", b"{}")[0] == 405


def test_client_raises_what_the_server_says(client):
    triton, _ = client
    with pytest.raises(InferenceServerException, match="'other' is not there"):
        triton.get_model_metadata("other")
    x = fed("x", np.ones((1, 4), np.float32), "FP32", binary=True)
    with pytest.raises(InferenceServerException, match="x"):
        triton.infer("affine", [x])


def test_strings_that_are_none_are_refused(tmp_path):
    path = save(tmp_path / "g.onnx", "g (string[N] x) => (string[N] y) { y = Identity(x) }")
    with serving({"g": path}) as (_, url, _):
        for data, reason in (
            (b"\x05\0\0\0ab", "ends beyond"),
            (b"\x01\0", "no strings"),
            (b"\x01\0\0\0\xff", "no strings"),
            (b"\x01\0\0\0a", "has 1 strings, not 2"),
        ):
            x = {"name": "x", "shape": [2], "datatype": "BYTES"}
            x["parameters"] = {"binary_data_size": len(data)}
            text = json.dumps({"inputs": [x]}).encode()
            length = {"Inference_Header_Content_Length": str(len(text))}
            status, answer = asked(f"{url}/v2/models/g/infer", text + data, **length)
            assert status == 400
            assert reason in answer["error"]


def test_halves_of_surrogate_pairs_are_no_strings(tmp_path):
    path = save(tmp_path / "g.onnx", "g (string[N] x) => (string[N] y) { y = Identity(x) }")
    x = {"name": "x", "shape": [2], "datatype": "BYTES", "data": ["\U0001f600", "\ud83d"]}
    with serving({"g": path}) as (_, url, _):
        for binary in (False, True):
            request = {"inputs": [x], "parameters": {"binary_data_output": binary}}
            status, answer = asked(f"{url}/v2/models/g/infer", json.dumps(request).encode())
            assert status == 400
            assert "surrogates not allowed" in answer["error"]


def test_models_have_versions_and_are_loaded_again(tmp_path):
    folder = tmp_path / "g"
    for version, times in ((1, "Neg"), (10, "Abs")):
        text = f"g (float[N] x) => (float[N] y) {{ y = {times}(x) }}"
        save(folder / str(version) / "model.onnx", text)
    x = fed("x", np.array([-2], np.float32), "FP32", binary=True)
    with serving({"g": folder}) as (triton, _, _):

        def answer(version: str = "") -> float:
            return float(triton.infer("g", [x], version).as_numpy("y")[0])

        assert triton.get_model_metadata("g")["versions"] == ["1", "10"]
        assert (answer(), answer("1"), answer("10")) == (2, 2, 2)
        save(folder / "11" / "model.onnx", "g (float[N] x) => (float[N] y) { y = Mul(x, x) }")
        assert answer() == 2
        triton.load_model("g")
        assert (answer(), answer("10")) == (4, 2)
        (folder / "11" / "model.onnx").write_bytes(b"no model")
        with pytest.raises(InferenceServerException, match=r"model\.onnx"):
            triton.load_model("g")
        assert answer() == 4  # what was there stays
        triton.unload_model("g")
        assert not triton.is_model_ready("g")
        assert triton.get_model_repository_index()[0]["state"] == "UNAVAILABLE"
        with pytest.raises(InferenceServerException, match="not there"):
            answer()
        with pytest.raises(InferenceServerException, match="not there"):
            triton.unload_model("g")
        with pytest.raises(InferenceServerException, match="no path"):
            triton.load_model("h")


def test_statistics_and_metrics_count_requests(affine):
    x = fed("x", np.ones((1, 3), np.float32), "FP32", binary=True)
    bad = fed("x", np.ones((1, 4), np.float32), "FP32", binary=True)
    with serving({"affine": affine}) as (triton, url, _):
        for _ in range(3):
            triton.infer("affine", [x])
        with pytest.raises(InferenceServerException):
            triton.infer("affine", [bad])
        (stats,) = triton.get_inference_statistics("affine")["model_stats"]
        assert stats["inference_count"] == 3
        assert stats["inference_stats"]["success"]["count"] == 3
        assert stats["inference_stats"]["fail"]["count"] == 1
        assert triton.get_inference_statistics()["model_stats"] == [stats]
        with urllib.request.urlopen(f"{url}/metrics", timeout=SOON) as response:
            text = response.read().decode()
        labels = 'model="affine",outcome="success",version="1"'
        assert f"penstock_request_seconds_count{{{labels}}} 3.0" in text
        assert 'penstock_batches_total{model="affine",version="1"} 4.0' in text


def test_requests_beyond_the_queue_are_refused_and_late_ones_end(tmp_path):
    path = save(tmp_path / "g.onnx", "g (float[N] x) => (float[N] y) { y = Sin(x) }")
    backend = Held()
    x = fed("x", np.ones(2, np.float32), "FP32", binary=True)

    def make(path: Path) -> ps.Replicas:
        return ps.Replicas(path, queue=1, backends=[backend])

    with serving({"g": path}, make) as (triton, _, server):
        counts = server.repository.find("g").replicas
        first = triton.async_infer("g", [x])
        wait_until(lambda: len(backend.shapes) == 1)
        second = triton.async_infer("g", [x])
        wait_until(lambda: counts.counts.queued == 1)
        with pytest.raises(InferenceServerException, match="1 requests wait") as refused:
            triton.infer("g", [x])
        assert refused.value.status() == "503"
        backend.opened.set()
        for each in (first, second):
            np.testing.assert_allclose(each.get_result().as_numpy("y"), np.sin([1, 1]), rtol=1e-6)
        backend.opened.clear()
        with pytest.raises(InferenceServerException, match="timeout") as late:
            triton.infer("g", [x], timeout=20_000)
        assert late.value.status() == "504"
        backend.opened.set()


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


def test_folder_whose_version_has_several_files_is_refused(tmp_path):
    for name in ("a.onnx", "b.onnx"):
        save(tmp_path / "g" / "1" / name, AFFINE)
    with pytest.raises(ps.PenstockError, match="one model, not 2"):
        ModelRepository({"g": tmp_path / "g"}, ps.Replicas)


@pytest.mark.parametrize("length", [3, 3000])
def test_long_json_is_read_and_written_while_others_are_answered(monkeypatch, affine, length):
    """Long JSON waits until the server has said that it lives: on its event loop, each would wait
    for the other."""
    at: list[int] = []
    lived = threading.Event()

    def held(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            at.append(threading.get_ident())
            assert length == 3 or lived.wait(SOON)
            return function(*arguments)

        return call

    monkeypatch.setattr(app, "decode_request", held(app.decode_request))
    monkeypatch.setattr(app, "encode_response", held(app.encode_response))
    x = {"name": "x", "datatype": "FP32", "shape": [length // 3, 3], "data": [0.125] * length}
    body = json.dumps({"inputs": [x]}).encode()
    with serving({"affine": affine}) as (triton, url, server), ThreadPoolExecutor(1) as threads:
        loop: list[int] = []
        find = server.repository.find
        monkeypatch.setattr(
            server.repository,
            "find",
            lambda *name: (loop.append(threading.get_ident()), find(*name))[1],
        )
        answer = threads.submit(asked, f"{url}/v2/models/affine/infer", body)
        wait_until(lambda: at)
        assert triton.is_server_live()
        lived.set()
        status, document = answer.result(SOON)
        assert (status, document["outputs"][0]["data"]) == (200, [0.25] * length)
        assert [ident == loop[0] for ident in at] == [length == 3] * 2


@pytest.mark.parametrize(("dims", "plans"), [("2, 3", 1), ("N, 3", 0)])
def test_plan_of_fixed_dims_is_compiled_before_the_first_request(tmp_path, dims, plans):
    text = f"g (float[{dims}] x) => (float[{dims}] y) {{ y = Add(x, x) }}"
    path = save(tmp_path / "g.onnx", text)
    x = fed("x", np.ones((2, 3), np.float32), "FP32", binary=True)
    with serving({"g": path}) as (triton, _, server):
        for _ in range(2):
            session = server.repository.find("g").replicas.session
            assert session.stats.plans_kept == plans
            np.testing.assert_array_equal(triton.infer("g", [x]).as_numpy("y"), np.full((2, 3), 2))
            assert session.stats.plans_kept == 1
            triton.load_model("g")


def test_model_that_cannot_be_compiled_does_not_take_the_place_of_another(tmp_path):
    path = save(tmp_path / "g.onnx", "g (float[2] x) => (float[2] y) { y = Add(x, x) }")
    with serving({"g": path}) as (triton, _, server):
        before = server.repository.find("g")
        save(path, "g (float[2] x, float[3] z) => (float[2] y) { y = Add(x, z) }")
        with pytest.raises(InferenceServerException):
            triton.load_model("g")
        assert server.repository.find("g") is before
