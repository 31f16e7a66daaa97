"""A server with small decoders, and clients of OpenAI's API: the official one, and plain requests."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai

import penstock as ps
from penstock.generation.generator import Generator
from penstock.generation.tokenizer import TextTokenizer
from penstock.serving.app import Server
from penstock.serving.embeddings import EmbeddingModel
from penstock.serving.text_models import TextModel, TextModels
from tests.support.decoders import decoder_model
from tests.support.streams import HeldSteps
from tests.support.timing import SOON
from tests.support.triton import serving
from tests.support.word_texts import word_tokenizer

CHAT = "{% for m in messages %}{{ m.content }} {% endfor %}{% if tools %}w9 {% endif %}w2"


def text_model(
    name: str = "words", tokenizer: TextTokenizer | None = None, **options: Any
) -> TextModel:
    """A decoder whose tokens are words, or those of a tokenizer, with a template for chats."""
    own = tokenizer or word_tokenizer(chat_templates={"default": CHAT}, end_ids=[0])
    steps = {key: options.pop(key) for key in ("max_rows", "cache_bytes") if key in options}
    generator = Generator(ps.load(decoder_model("spelled")), own, context=200, **steps)
    return TextModel(name, generator, **options)


class Gate(HeldSteps):
    """Holds the steps of a model until it is opened."""

    def __init__(self, model: TextModel) -> None:
        super().__init__(model.generator.stepper)


@contextmanager
def text_serving(
    *models: TextModel,
    embedders: Mapping[str, EmbeddingModel] | None = None,
    paths: dict[str, Path] | None = None,
    **options: Any,
) -> Iterator[tuple[str, Server]]:
    """The URL of a server, and the server."""
    texts = TextModels({model.name: model for model in models}, embedders)
    make = options.pop("make", ps.Replicas)
    with serving(paths or {}, make, texts=texts, **options) as (_, url, server):
        yield url, server


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SOON)


def post(url: str, path: str, document: object, **headers: str) -> tuple[int, Any, Mapping]:
    """The status, the document and the headers of an answer."""
    body = json.dumps(document).encode()
    request = urllib.request.Request(f"{url}/v1/{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=SOON) as response:
            return response.status, json.loads(response.read()), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), error.headers


def events(url: str, path: str, document: Mapping[str, object]) -> list[Any]:
    """The documents of a stream, and "[DONE]" behind them."""
    body = json.dumps({**document, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/{path}", body)
    with urllib.request.urlopen(request, timeout=SOON) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = response.read().decode().split("\n\n")
    assert blocks.pop() == "" and all(block.startswith("data: ") for block in blocks)
    texts = [block.removeprefix("data: ") for block in blocks]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def metrics(url: str) -> dict[str, float]:
    """The values of all metrics, by name with labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=SOON) as response:
        lines = response.read().decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in pairs}


def raw_post(url: str, path: str, document: object) -> socket.socket:
    """A connection that has sent a request."""
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps(document).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), SOON)
    connection.sendall(head.encode() + body)
    return connection
