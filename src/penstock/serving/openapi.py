"""The description of the server's endpoints in OpenAPI 3.1, for generators of clients."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from inspect import getdoc
from urllib.parse import quote

from penstock.core import VERSION
from penstock.core.types import JsonObject
from penstock.serving.example import example_request
from penstock.serving.protocol import HEADER_LENGTH, datatypes
from penstock.serving.repository import ServedModel

Endpoint = tuple[str, str, Callable[..., Awaitable[object]]]
"""methods, a path and its handler, whose docstring says what it does"""

_STRING, _OBJECT = {"type": "string"}, {"type": "object"}
_TENSOR = {
    "name": _STRING,
    "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "datatype": {"type": "string", "enum": datatypes()},
    "parameters": _OBJECT,
    "data": {
        "type": "array",
        "description": "Elements in row-major order, also as nested rows. NaN and infinities are "
        'the strings "NaN", "Infinity" and "-Infinity".',
    },
}
_PORT = {
    "name": _STRING,
    "datatype": _TENSOR["datatype"],
    "shape": {"type": "array", "items": {"type": "integer", "minimum": -1}},
}


def _record(required: str, **properties: object) -> JsonObject:
    """The schema of an object, of whose properties some are required."""
    return {"type": "object", "properties": properties, "required": required.split()}


def _list(schema: str) -> JsonObject:
    return {"type": "array", "items": {"$ref": f"#/components/schemas/{schema}"}}


_REQUEST = {"inputs": _list("Tensor"), "outputs": _list("WantedOutput")}
_RESPONSE = {"model_name": _STRING, "model_version": _STRING, "id": _STRING}
_MODEL = {"name": _STRING, "versions": {"type": "array", "items": _STRING}, "platform": _STRING}
_SCHEMAS = {
    "Error": _record("error", error=_STRING),
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
_MEDIA_TYPES = {"page": "text/html", "show_metrics": "text/plain"}
_RESPONSES = {"infer": "InferenceResponse", "model_metadata": "Model"}


def openapi_document(endpoints: Iterable[Endpoint], models: Iterable[ServedModel]) -> JsonObject:
    """The description of endpoints, and of the inference of each model, with an example."""
    paths: dict[str, JsonObject] = {}
    for methods, path, handler in endpoints:
        own = paths.setdefault(path, {})
        for method in methods.split():
            own[method.lower()] = _operation(method, path, handler)
    # The path with a parameter says nothing of inputs: forms of Swagger UI would be empty.
    infer = "/v2/models/{model}/infer"
    for number, model in enumerate(models):
        own_path = infer.replace("{model}", quote(model.name, safe=""))
        operation = _of_model(model, paths[infer]["post"])
        # With a number, since names that differ in signs alone would give the same one.
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
                "An error.", "application/json", {"$ref": "#/components/schemas/Error"}
            ),
        },
    }
    if name == "infer":
        parameters.append(
            {
                "name": HEADER_LENGTH,
                "in": "header",
                "description": "The bytes of the JSON object, where bytes of tensors follow it.",
                "schema": {"type": "integer"},
            }
        )
        operation["requestBody"] = {"required": True, "content": _request_body()}
    elif method == "POST":
        operation["requestBody"] = {"content": {"application/json": {"schema": _OBJECT}}}
    return operation


def _of_model(model: ServedModel, infer: JsonObject) -> JsonObject:
    """The inference of one model, of which the path has no parameter."""
    content, example = _request_body(), example_request(model)
    # One with bytes of tensors is no JSON, which alone can be an example here.
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
