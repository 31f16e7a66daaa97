"""Pages of other origins may use the server if it is told so."""

from __future__ import annotations

import http.client
import json

import pytest

from tests.support.timing import SOON
from tests.support.triton import serving

ORIGIN = "https://example.com"
INFER = "/v2/models/affine/infer"
BODY = json.dumps(
    {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}
)


def allowed(url: str, origin: str, method: str = "POST", body: str | None = BODY) -> list[str]:
    """What each of some requests of one connection has as the origin that it is for."""
    client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=SOON)
    headers = {"Origin": origin}
    if method == "OPTIONS":
        headers["Access-Control-Request-Method"] = "POST"
        headers["Access-Control-Request-Headers"] = "inference-header-content-length"
    found = []
    for _ in range(3):  # the first one, and those that a thread would answer
        client.request(method, INFER, body, headers)
        with client.getresponse() as response:
            response.read()
            found.append(response.headers.get("access-control-allow-origin", ""))
    client.close()
    return found


@pytest.mark.parametrize("method", ["POST", "OPTIONS"])
def test_pages_of_the_given_origins_are_answered(affine, method):
    body = BODY if method == "POST" else None
    with serving({"affine": affine}, cors=[ORIGIN]) as (_, url, _):
        assert allowed(url, ORIGIN, method, body) == [ORIGIN] * 3
        assert allowed(url, "https://other.com", method, body) == [""] * 3
    with serving({"affine": affine}, cors=["*"]) as (_, url, _):
        assert allowed(url, ORIGIN, method, body) == ["*"] * 3
    with serving({"affine": affine}) as (_, url, _):
        assert allowed(url, ORIGIN, method, body) == [""] * 3
