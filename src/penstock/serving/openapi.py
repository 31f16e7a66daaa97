"""Self-description of the server: its endpoints in OpenAPI 3.1, example requests, an HTML page."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Awaitable, Callable, Iterable, Sequence
from html import escape
from inspect import getdoc
from urllib.parse import quote

from penstock.core import VERSION
from penstock.core.records import dataclass
from penstock.core.types import JsonObject, TensorType
from penstock.ir.tables import html_table
from penstock.serving.batching import shapes_of
from penstock.serving.protocol import HEADER_LENGTH, HEADER_PRIORITY, datatypes, element_bytes
from penstock.serving.repository import ServedModel
from penstock.serving.sequences import Sequences
from penstock.session.ahead import values_of

Endpoint = tuple[str, str, Callable[..., Awaitable[object]]]
"""methods, path, and handler, whose docstring is the description"""

_STRING, _OBJECT = {"type": "string"}, {"type": "object"}
_TENSOR = {
    "name": _STRING,
    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "datatype": {"type": "string", "enum": datatypes()},
    "parameters": _OBJECT,
    "data": {
        "type": "array",
        "description": "Elements in row-major order, flat or as nested rows. NaN and infinities "
        'are the strings "NaN", "Infinity" and "-Infinity".',
    },
}
_PORT = {
    "name": _STRING,
    "datatype": _TENSOR["datatype"],
    "shape": {"type": "array", "items": {"type": "integer", "minimum": -1}},
}


def _record(required: str, **properties: object) -> JsonObject:
    """Return the schema of an object, some of whose properties are required."""
    return {"type": "object", "properties": properties, "required": required.split()}


def _list(schema: str) -> JsonObject:
    return {"type": "array", "items": {"$ref": f"#/components/schemas/{schema}"}}


_REQUEST = {"inputs": _list("Tensor"), "outputs": _list("WantedOutput")}
_RESPONSE = {"model_name": _STRING, "model_version": _STRING, "id": _STRING}
_MODEL = {"name": _STRING, "versions": {"type": "array", "items": _STRING}, "platform": _STRING}
_SCHEMAS = {
    "Error": _record("error", error=_STRING),
    "TextError": _record(
        "error", error=_record("message type", message=_STRING, type=_STRING, param={}, code={})
    ),
    "Tensor": _record("name shape datatype", **_TENSOR),
    "WantedOutput": _record("name", name=_STRING, parameters=_OBJECT),
    "InferenceRequest": _record("inputs", id=_STRING, parameters=_OBJECT, **_REQUEST),
    "InferenceResponse": _record("model_name outputs", **_RESPONSE, outputs=_list("Tensor")),
    "Port": _record("name datatype shape", **_PORT),
    "Model": _record(
        "name platform inputs outputs", **_MODEL, inputs=_list("Port"), outputs=_list("Port")
    ),
}
# By handler: the media type of the response, if it is no JSON, and its schema, if it has one.
_MEDIA_TYPES = {"page": "text/html", "show_metrics": "text/plain", "stream": "text/event-stream"}
_RESPONSES = {"infer": "InferenceResponse", "model_metadata": "Model"}


def openapi_document(endpoints: Iterable[Endpoint], models: Iterable[ServedModel]) -> JsonObject:
    """Return the description of endpoints, and of inference with each model, with an example."""
    paths: dict[str, JsonObject] = {}
    for methods, path, handler in endpoints:
        own = paths.setdefault(path, {})
        for method in methods.split():
            own[method.lower()] = _operation(method, path, handler)
    # The parameterized path does not describe inputs: Swagger UI's forms would be empty.
    infer = "/v2/models/{model}/infer"
    for number, model in enumerate(models):
        own_path = infer.replace("{model}", quote(model.name, safe=""))
        operation = _of_model(model, paths[infer]["post"])
        # With a number, since names that differ only in special characters would collide.
        paths[own_path] = {"post": {**operation, "operationId": f"infer_model_{number}"}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": VERSION,
            "description": "The Open Inference Protocol, version 2.",
        },
        "paths": paths,
        "components": {"schemas": _SCHEMAS},
    }


def _operation(method: str, path: str, handler: Callable[..., object]) -> JsonObject:
    name = handler.__name__
    schema = {"$ref": f"#/components/schemas/{_RESPONSES[name]}"} if name in _RESPONSES else {}
    failure = "TextError" if path.startswith("/v1/") else "Error"
    parameters = [
        {"name": of, "in": "path", "required": True, "schema": _STRING}
        for of in re.findall(r"{(\w+)}", path)
    ]
    operation: JsonObject = {
        "operationId": f"{method.lower()}{re.sub('[^a-z0-9]+', '_', path)}".rstrip("_"),
        "summary": (getdoc(handler) or "").partition("\n\n")[0].replace("\n", " "),
        "parameters": parameters,
        "responses": {
            "200": _content("The answer.", _MEDIA_TYPES.get(name, "application/json"), schema),
            "default": _content(
                "An error.", "application/json", {"$ref": f"#/components/schemas/{failure}"}
            ),
        },
    }
    if name in ("infer", "stream"):
        parameters.append(
            {
                "name": HEADER_LENGTH,
                "in": "header",
                "description": "The length of the JSON object in bytes, if binary tensor data "
                "follow it.",
                "schema": {"type": "integer"},
            }
        )
        urgency = "u=0 (first) to u=7, as in RFC 9218; u=3 stands for the priority 0."
        of = {"name": HEADER_PRIORITY, "in": "header", "description": urgency, "schema": _STRING}
        parameters.append(of)
        operation["requestBody"] = {"required": True, "content": _request_body()}
    elif method == "POST":
        operation["requestBody"] = {"content": {"application/json": {"schema": _OBJECT}}}
    return operation


def _of_model(model: ServedModel, infer: JsonObject) -> JsonObject:
    """Return the inference endpoint of one model, whose path has no parameter."""
    content, example = _request_body(), example_request(model)
    # Examples must be JSON, so tensors are not sent as bytes here.
    if not example.zeros:
        content["application/json"]["example"] = example.document
    names = ", ".join(f"{of['name']}: {of['datatype']}{of['shape']}" for of in model.inputs)
    return {
        **infer,
        "summary": f"Run the model {model.name}, with inputs {names}.",
        "parameters": [of for of in infer["parameters"] if of["in"] != "path"],
        "requestBody": {"required": True, "content": content},
    }


def _request_body() -> dict[str, JsonObject]:
    return {
        "application/json": {"schema": {"$ref": "#/components/schemas/InferenceRequest"}},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    }


def _content(description: str, media_type: str, schema: JsonObject) -> JsonObject:
    return {"description": description, "content": {media_type: {"schema": schema}}}


# An example of a request for a model, of zeros and empty strings.


# Example size of a symbolic dim, other than the first.
_OPEN = 64
# The most elements to show one by one: more of them are sent as bytes.
_MOST_SHOWN = 64


@dataclass(frozen=True)
class ExampleRequest:
    """An example request: its JSON object, and the number of zero bytes that follow."""

    document: JsonObject
    zeros: int

    def curl(self, base_url: str, model: str) -> str:
        """Return a command that sends the request."""
        text = json.dumps(self.document)
        url = shlex.quote(f"{base_url.rstrip('/')}/v2/models/{quote(model, safe='')}/infer")
        if not self.zeros:
            return f"curl {url} -H 'Content-Type: application/json' -d {shlex.quote(text)}"
        body = f"(printf %s {shlex.quote(text)}; head -c {self.zeros} /dev/zero)"
        return f"{body} | curl {url} --data-binary @- -H '{HEADER_LENGTH}: {len(text)}'"


def example_request(model: ServedModel) -> ExampleRequest:
    """Return an example request for a model, with the first shapes that it was compiled for, or
    else with dynamic dims replaced by examples."""
    session = model.replicas.session
    first = next((values_of(session, shapes) for shapes in shapes_of(session)), {})
    types = {port.name: port.type for port in session.inputs}
    inputs: list[JsonObject] = []
    sizes: dict[str, int] = {}  # a dim of one name has one size in all inputs
    for port in model.inputs:
        name, type_ = port["name"], types[port["name"]]
        declared = type_.shape if isinstance(type_, TensorType) else None
        dims = [*first[name].shape] if name in first else _closed(declared or (), sizes)
        inputs.append({"name": name, "datatype": port["datatype"], "shape": dims})
    long = sum(math.prod(of["shape"]) for of in inputs) > _MOST_SHOWN
    for of in inputs:
        count = math.prod(of["shape"])
        if long:
            size = count * element_bytes(of["datatype"])
            of["parameters"] = {"binary_data_size": size}
        else:
            zero: object = {"BYTES": "", "BOOL": False}.get(of["datatype"], 0)
            of["data"] = [zero] * count
    zeros = sum(of["parameters"]["binary_data_size"] for of in inputs) if long else 0
    document: JsonObject = {"inputs": inputs}
    if isinstance(model.replicas, Sequences):
        document["parameters"] = {"sequence_id": 1, "sequence_start": True}
    return ExampleRequest(document, zeros)


def _closed(dims: Sequence[int | str | None], sizes: dict[str, int]) -> list[int]:
    """Return dims with the dynamic ones replaced by the ``sizes`` of their names."""
    closed = []
    for i, dim in enumerate(dims):
        size = dim if isinstance(dim, int) else _OPEN if i else 1
        closed.append(sizes.setdefault(dim, size) if isinstance(dim, str) else size)
    return closed


# The page at ``/``: the models of the server, and example requests.


POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""the Content-Security-Policy of the page"""

_STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
td, th { text-align: left; padding: 0.2rem 1.5rem 0.2rem 0; }
pre { overflow-x: auto; padding: 1rem; border: 1px solid; }
""".strip()
_LINKS = ("/v2", "/v2/models", "/v2/health/ready", "/metrics", "/openapi.json")


def page(models: Iterable[ServedModel], base_url: str, texts: Sequence[str] = ()) -> str:
    """Return the HTML page of models. ``base_url``: the URL at which the client reached the server;
    ``texts``: the names of text models."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>Penstock</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>",
        f"<h1>Penstock {escape(VERSION)}</h1>",
        "<p>This server implements the Open Inference Protocol, version 2.</p>",
        f"<p>{' '.join(_link(path) for path in _LINKS)}</p>",
        *[_model(model, base_url) for model in models],
        *([_texts(texts)] if texts else ()),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _model(model: ServedModel, base_url: str) -> str:
    path = f"/v2/models/{quote(model.name, safe='')}/versions/{model.version}"
    example = example_request(model).curl(base_url, model.name)
    return "\n".join(
        [
            f"<h2>{escape(model.name)}, version {escape(model.version)}</h2>",
            f"<p>{' '.join(_link(path + end) for end in ('', '/config', '/stats'))}</p>",
            _table("Inputs", model.inputs),
            _table("Outputs", model.outputs),
            f"<p>An example, of zeros:</p>\n<pre>{escape(example)}</pre>",
        ]
    )


def _texts(names: Sequence[str]) -> str:
    shown = ", ".join(map(escape, names))
    return (
        f"<h2>Texts</h2>\n<p>OpenAI's API, at {_link('/v1/models')}, /v1/chat/completions, "
        f"/v1/completions and /v1/embeddings, has: {shown}.</p>"
    )


def _table(title: str, ports: Sequence[JsonObject]) -> str:
    rows = [(port["name"], port["datatype"], str(port["shape"])) for port in ports]
    return html_table((title, "Datatype", "Shape"), rows)


# From the root of whatever host the page came by, which may be a proxy.
def _link(path: str) -> str:
    return f'<a href="{escape(path)}">{escape(path)}</a>'
