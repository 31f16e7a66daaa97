"""Models, their versions and configurations in a folder."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.serving.repository import ModelRepository
from tests.support.timing import SOON, wait_until
from tests.support.triton import AFFINE, InferenceServerException, asked, fed, save, serving


def test_configuration_is_that_of_the_model(client):
    triton, _ = client
    configuration = triton.get_model_config("affine", "1")
    assert configuration["name"] == "affine"
    assert configuration["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 3]}]
    assert [port["name"] for port in configuration["output"]] == ["y", "k"]
    assert configuration["instance_group"] == [{"count": 1, "kind": "KIND_CPU"}]
    with pytest.raises(InferenceServerException, match="unknown model 'other'"):
        triton.get_model_config("other")


def test_configuration_says_how_requests_are_joined(affine, tmp_path):
    path = save(tmp_path / "g.onnx", "g (float[N, 3] x) => (float[N, 3] y) { y = Sin(x) }")

    def make(path: Path) -> ps.Replicas:
        return ps.Replicas(path, max_batch=8, max_delay=0.002)

    with serving({"g": path}, make) as (triton, _, _):
        configuration = triton.get_model_config("g")
        assert configuration["max_batch_size"] == 8
        assert configuration["dynamic_batching"] == {"max_queue_delay_microseconds": 2000}
        assert configuration["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}]
        assert configuration["output"] == [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}]
        assert triton.get_model_metadata("g")["inputs"][0]["shape"] == [-1, 3]
    with serving({"affine": affine}) as (triton, _, _):
        configuration = triton.get_model_config("affine")
        assert configuration["max_batch_size"] == 0
        assert "dynamic_batching" not in configuration


def test_request_whose_model_is_loaded_again_meanwhile_runs_on_the_new_one(tmp_path, monkeypatch):
    path = save(tmp_path / "g.onnx", "g (float[N] x) => (float[N] y) { y = Sin(x) }")
    submit, replaced = ps.Replicas.submit, []
    with serving({"g": path}) as (triton, _, server):

        def replacing(replicas, *arguments, **options):
            if not replaced:
                replaced.append(replicas)
                server.repository.load("g")
                wait_until(lambda: replicas._queue._closed)
            return submit(replicas, *arguments, **options)

        monkeypatch.setattr(ps.Replicas, "submit", replacing)
        x = fed("x", np.array([1], np.float32), "FP32", binary=True)
        answer = triton.infer("g", [x], headers={"content-encoding": "identity"})
        np.testing.assert_allclose(answer.as_numpy("y"), np.sin([1]), rtol=1e-6)
    assert len(replaced) == 1


def test_models_that_are_ready_are_listed(affine):
    with serving({"affine": affine, "other": affine}) as (triton, url, _):
        assert listed(url) == ["affine", "other"]
        triton.unload_model("affine")
        assert listed(url) == ["other"]


def listed(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/v2/models", timeout=SOON) as response:
        names: list[str] = json.loads(response.read())["models"]
    return names


def test_model_is_not_loaded_in_another_configuration(client):
    triton, url = client
    with pytest.raises(InferenceServerException, match="does not accept the parameters 'config'"):
        triton.load_model("affine", config="{}")
    with pytest.raises(InferenceServerException, match="no path"):
        triton.load_model("other")
    for body, status in ((b"{", 400), (b"[]", 400), (b'{"parameters": 3}', 400), (b"", 200)):
        assert asked(f"{url}/v2/repository/models/affine/load", body)[0] == status


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
        with pytest.raises(InferenceServerException, match="unknown model"):
            answer()
        with pytest.raises(InferenceServerException, match="is not loaded"):
            triton.unload_model("g")
        with pytest.raises(InferenceServerException, match="no path"):
            triton.load_model("h")


def test_folder_whose_version_has_several_files_is_refused(tmp_path):
    for name in ("a.onnx", "b.onnx"):
        save(tmp_path / "g" / "1" / name, AFFINE)
    with pytest.raises(ps.PenstockError, match="exactly one model file, not 2"):
        ModelRepository({"g": tmp_path / "g"}, ps.Replicas)


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
