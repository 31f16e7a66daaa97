"""The description of the server in OpenAPI is that of its endpoints and of what they answer."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import jsonschema
import pytest

from tests.support.timing import SOON
from tests.support.triton import asked, serving


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "shared memory"])
def described(request, affine):
    models = {"affine": affine, "a-b": affine, "a_b": affine}
    with serving(models, shared_memory=request.param) as (_, url, server):
        yield url, server, get(f"{url}/openapi.json")


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=SOON) as response:
        return json.loads(response.read())


def operations(document: Any) -> list[tuple[str, str, Any]]:
    paths = document["paths"].items()
    return [(path, method, of) for path, methods in paths for method, of in methods.items()]


def check(document: Any, schema: str, value: Any) -> None:
    """Validate a value by a schema of the document."""
    reference = {"$ref": f"#/components/schemas/{schema}", "components": document["components"]}
    jsonschema.Draft202012Validator.check_schema(document["components"]["schemas"][schema])
    jsonschema.validate(value, reference, jsonschema.Draft202012Validator)


def test_description_has_every_endpoint_and_no_other(described):
    _, server, document = described
    endpoints = {
        (path, method.lower())
        for methods, path, handler in server._endpoints()
        for method in methods.split()
        if handler != server.unsupported and (server.shared or "sharedmemory" not in path)
    }
    own = {(f"/v2/models/{name}/infer", "post") for name in ("affine", "a-b", "a_b")}
    assert {(path, method) for path, method, _ in operations(document)} == endpoints | own


def test_operations_have_names_of_their_own_and_say_what_they_do(described):
    _, _, document = described
    found = [operation for _, _, operation in operations(document)]
    names = [operation["operationId"] for operation in found]
    assert len({*names}) == len(names)
    assert all(re.fullmatch(r"\w+", name) for name in names)
    assert all(operation["summary"].endswith(".") for operation in found)
    for path, _, operation in operations(document):
        named = [of["name"] for of in operation["parameters"] if of["in"] == "path"]
        assert named == re.findall(r"{(\w+)}", path)


def test_answers_are_as_they_are_described(described):
    url, _, document = described
    infer = document["paths"]["/v2/models/affine/infer"]["post"]
    example = infer["requestBody"]["content"]["application/json"]["example"]
    check(document, "InferenceRequest", example)
    status, answer = asked(f"{url}/v2/models/affine/infer", json.dumps(example).encode())
    assert status == 200
    check(document, "InferenceResponse", answer)
    check(document, "Model", get(f"{url}/v2/models/affine"))
    check(document, "Error", asked(f"{url}/v2/models/affine/infer", b"{")[1])
    with pytest.raises(jsonschema.ValidationError):
        check(document, "InferenceRequest", {"inputs": [{"name": "x"}]})


def test_answers_that_are_no_json_are_described_so(described):
    url, _, document = described
    for path, methods in document["paths"].items():
        if "get" not in methods or "{" in path:
            continue
        (media_type,) = methods["get"]["responses"]["200"]["content"]
        with urllib.request.urlopen(url + path, timeout=SOON) as response:
            assert response.headers.get_content_type() == media_type
