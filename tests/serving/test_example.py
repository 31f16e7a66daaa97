"""Examples of requests are requests: the server answers them."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

import penstock as ps
from penstock.serving.openapi import example_request
from tests.support.triton import save, serving

MODELS = {
    "few": "m (float[N, 3] x, string[N] s, bool b) => (float[N, 3] y) { y = Add(x, x) }",
    "many": "m (float[N, M] x, int64[M] i, string[N] s) => (float[N, M] y) { y = Add(x, x) }",
    "large": "m (uint8[1, 3, 224, 224] x, bfloat16[5] h) => (uint8[1, 3, 224, 224] y) { y = Add(x, x) }",
    "a name'\"<b>": "m (float[2] x) => (float[2] y) { y = Neg(x) }",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    paths = {
        name: save(folder / f"{i}.onnx", text) for i, (name, text) in enumerate(MODELS.items())
    }
    with serving(paths) as (_, url, server):
        yield url, server


@pytest.mark.parametrize("name", MODELS)
def test_command_of_an_example_is_answered(server, name):
    if shutil.which("curl") is None or shutil.which("bash") is None:
        pytest.skip("needs bash and curl")
    url, server = server
    command = example_request(server.repository.find(name)).curl(f"{url}/", name)
    result = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, check=True)
    answer = json.loads(result.stdout)
    assert answer["model_name"] == name
    assert set(answer["outputs"][0]["data"]) == {0}


def test_example_has_the_sizes_that_dims_of_one_name_share(server):
    _, server = server
    request = example_request(server.repository.find("many"))
    assert [of["shape"] for of in request.document["inputs"]] == [[1, 64], [64], [1]]
    assert request.zeros == 64 * 4 + 64 * 8 + 4


def test_example_is_of_the_shape_that_was_compiled(tmp_path):
    path = save(tmp_path / "m.onnx", MODELS["many"])
    shapes = [{"N": 2, "M": 3}, {"N": 7, "M": 7}]
    with serving({"m": path}, lambda path: ps.Replicas(path, shapes=shapes)) as (_, _, server):
        request = example_request(server.repository.find("m"))
    assert [of["shape"] for of in request.document["inputs"]] == [[2, 3], [3], [2]]
    assert [of["data"] for of in request.document["inputs"]] == [[0] * 6, [0] * 3, [""] * 2]
