"""A server with one model, which the tests of a file share that leave it as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.triton import AFFINE, InferenceServerClient, save, serving


@pytest.fixture(scope="module")
def affine(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "affine.onnx", AFFINE)


@pytest.fixture(scope="module")
def client(affine) -> Iterator[tuple[InferenceServerClient, str]]:
    with serving({"affine": affine}) as (client, url, _):
        yield client, url
