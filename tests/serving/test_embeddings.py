"""Vectors of texts: inputs and outputs of encoders, means of rows, and the endpoint."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.serving.embeddings import EmbeddingModel, EncoderInterface, pools_first
from penstock.serving.text_protocol import FieldError
from tests.support.text_server import client_of, post, text_serving
from tests.support.timing import SOON
from tests.support.triton import save
from tests.support.word_texts import word_tokenizer

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
TABLE = ", ".join(f"{i % 7}, {i % 5 - 2}, 1" for i in range(50))
ROWS = f"""g (int64[N, T] input_ids, int64[N, T] attention_mask, int64[N, T] token_type_ids)
    => (float[N, T, 3] last_hidden_state, float[N, 3] pooler_output)
    <float[50, 3] table = {{{TABLE}}}, int64 first = {{0}}> {{
    x = Gather (table, input_ids) m = Cast <to = 1> (attention_mask) last = Constant <value_ints = [2]> ()
    wide = Unsqueeze (m, last) masked = Mul (x, wide)
    t = Cast <to = 1> (token_type_ids) types = Unsqueeze (t, last)
    last_hidden_state = Add (masked, types)
    pooler_output = Gather <axis = 1> (last_hidden_state, first) }}"""
POOLED = f"""g (int32[N, T] ids) => (float[N, 3] vectors)
    <float[50, 3] table = {{{TABLE}}}, int64[1] one = {{1}}> {{
    x = Gather (table, ids) vectors = ReduceSum <keepdims = 0> (x, one) }}"""


def rows_of(ids: list[int]) -> np.ndarray:
    return np.array([[i % 7, i % 5 - 2, 1] for i in ids], np.float32)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "rows": save(folder / "rows.onnx", ROWS),
        "pooled": save(folder / "pooled.onnx", POOLED),
    }


@pytest.fixture(scope="module")
def url(paths):
    embedders = {
        "rows": EmbeddingModel("rows", word_tokenizer(), most=8),
        "pooled": EmbeddingModel("pooled", word_tokenizer()),
    }
    with text_serving(embedders=embedders, paths=paths) as (url, _):
        yield url


def test_official_client_gets_means_of_length_one(url):
    with client_of(url) as client:
        texts = ["w5 w3 w9", "w7"]
        answer = client.embeddings.create(model="rows", input=texts)  # in base64, by default
        plain = client.embeddings.create(model="rows", input=texts, encoding_format="float")
    for got in (answer, plain):
        vectors = [data.embedding for data in got.data]
        wanted = [unit(rows_of(ids).mean(axis=0)) for ids in ([5, 3, 9], [7])]
        np.testing.assert_allclose(vectors, wanted, rtol=1e-6)
        assert (got.usage.prompt_tokens, got.usage.total_tokens) == (4, 4)


def test_output_that_is_pooled_is_taken(url):
    status, answer, _ = post(url, "embeddings", {"model": "pooled", "input": [5, 3]})
    assert status == 200
    vector = answer["data"][0]["embedding"]
    np.testing.assert_allclose(vector, unit(rows_of([5, 3]).sum(axis=0)), rtol=1e-6)


def test_many_texts_come_in_their_order(url):
    texts = [f"w{i % 50} w{i % 11}" for i in range(300)]
    answer = post(url, "embeddings", {"model": "rows", "input": texts})[1]
    wanted = [unit(rows_of([i % 50, i % 11]).mean(axis=0)) for i in range(300)]
    np.testing.assert_allclose([d["embedding"] for d in answer["data"]], wanted, rtol=1e-5)
    assert [data["index"] for data in answer["data"]] == [*range(300)]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "rows", "input": "w1 " * 9}, 400, "9 tokens, more than the 8"),
        ({"model": "rows", "input": ["w1", ""]}, 400, "is empty"),
        ({"model": "rows", "input": "w1", "dimensions": 2}, 400, "embeddings of this model have 3"),
        ({"model": "other", "input": "w1"}, 404, "unknown model 'other'"),
        ({"input": "w1"}, 400, "field model is required"),
        ({"model": "rows", "input": [60]}, 400, "has token 60, but tokens must be below 50"),
    ],
)
def test_wrong_request_is_refused(url, fields, status, message):
    got, answer, _ = post(url, "embeddings", fields)
    assert (got, message in answer["error"]["message"]) == (status, True), answer


def test_dimensions_of_the_model_are_taken(url):
    assert post(url, "embeddings", {"model": "rows", "input": "w1", "dimensions": 3})[0] == 200


def test_models_are_in_both_interfaces(url):
    with urllib.request.urlopen(f"{url}/v2/models", timeout=SOON) as response:
        assert json.loads(response.read()) == {"models": ["rows", "pooled"]}
    with urllib.request.urlopen(f"{url}/v1/models", timeout=SOON) as response:
        assert [entry["id"] for entry in json.loads(response.read())["data"]] == ["rows", "pooled"]


def test_texts_of_a_request_are_joined(paths):
    model, ones = EmbeddingModel("rows", word_tokenizer()), np.ones((1, 4), np.int64)

    def make(path: Path) -> ps.Replicas:
        return ps.Replicas(path, 1, max_batch=8, sample=dict.fromkeys(INPUTS, ones))

    with text_serving(embedders={"rows": model}, paths={"rows": paths["rows"]}, make=make) as (
        url,
        _,
    ):
        texts = ["w1 " * (1 + i % 2) + f"w{i}" for i in range(20)]
        answer = post(url, "embeddings", {"input": texts})[1]
    ids = [[1] * (1 + i % 2) + [i] for i in range(20)]
    wanted = [unit(rows_of(own).mean(axis=0)) for own in ids]
    np.testing.assert_allclose([d["embedding"] for d in answer["data"]], wanted, rtol=1e-5)


def test_model_that_is_no_encoder_is_refused(tmp_path):
    wrong = save(tmp_path / "a.onnx", "g (float[N, 2] x) => (float[N, 2] y) { y = Neg(x) }")
    replicas = ps.Replicas(wrong)
    with pytest.raises(ps.InvalidInput, match="computes no embeddings of texts: its inputs"):
        EncoderInterface(replicas)
    replicas.close()
    scalar = save(
        tmp_path / "b.onnx",
        "g (int64[N, T] ids) => (int64[N] y) { y = ArgMax <axis = 1, keepdims = 0> (ids) }",
    )
    replicas = ps.Replicas(scalar)
    with pytest.raises(ps.InvalidInput, match="its outputs"):
        EncoderInterface(replicas)
    replicas.close()


def test_first_row_stands_for_a_text_if_a_folder_says_so(tmp_path, paths):
    assert not pools_first(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    assert pools_first(tmp_path) and pools_first(tmp_path / "model.onnx")
    replicas = ps.Replicas(paths["rows"])
    interface = EncoderInterface(replicas)
    outputs = {interface.output: rows_of([5, 3])[None]}
    np.testing.assert_allclose(interface.pooled(outputs, True), unit(rows_of([5])[0]), rtol=1e-6)
    with pytest.raises(FieldError, match="dimensions=9"):
        interface.check(9)
    replicas.close()
