"""The status and the document of answers to requests that fail."""

from __future__ import annotations

import json

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import DeadlineExceeded, InvalidInput, QueueFull
from penstock.serving.error_answers import (
    MissingExtensionError,
    TooLargeError,
    described,
    error_answer,
    text_error,
    text_error_document,
)
from penstock.serving.repository import UnknownModel
from penstock.serving.text_protocol import FieldError
from tests.support.triton import InferenceServerException, fed, save, serving

STATUS = {
    InvalidInput("x"): 400,
    UnknownModel("x"): 404,
    MissingExtensionError("x"): 404,
    TooLargeError("x"): 413,
    QueueFull("x"): 503,
    DeadlineExceeded("x"): 504,
    ValueError("x"): 500,
}


@pytest.mark.parametrize("error", STATUS, ids=lambda error: type(error).__name__)
def test_error_has_a_status_and_a_message(error: Exception) -> None:
    message, status = described(error)
    assert status == STATUS[error]
    assert message.endswith("x") or isinstance(error, QueueFull)
    answer = error_answer(error)
    assert answer.status == status
    assert json.loads(b"".join(answer.parts)) == {"error": message}


def test_error_of_a_bug_names_its_type() -> None:
    assert described(ValueError("x")) == ("ValueError: x", 500)


def test_text_error_names_the_field_and_when_to_ask_again() -> None:
    document, status = text_error_document(FieldError("top_p", "is too large"))
    assert (status, document["error"]["param"]) == (400, "top_p")
    document, status = text_error_document(UnknownModel("x"))
    assert (status, document["error"]["code"]) == (404, "model_not_found")
    refused = text_error(QueueFull("x"))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "retry-after" not in text_error(InvalidInput("x")).headers


@pytest.mark.parametrize("options", [{}, {"max_batch": 4}])
def test_number_that_an_operation_does_not_take_is_the_error_of_the_client(tmp_path, options):
    text = (
        """g (int64[N] i) => (float[N] y) <float[3] table = {1, 2, 3}> { y = Gather(table, i) }"""
    )
    path = save(tmp_path / "g.onnx", text)
    with serving({"g": path}, lambda path: ps.Replicas(path, **options)) as (client, _, _):
        for index, wanted in ((9, None), (1, [2.0]), (-4, None)):
            inputs = [fed("i", np.array([index]), "INT64", binary=True)]
            if wanted is None:
                with pytest.raises(InferenceServerException, match="out of") as caught:
                    client.infer("g", inputs)
                assert caught.value.status() == "400"
            else:
                assert client.infer("g", inputs).as_numpy("y").tolist() == wanted
