"""Every answer has a line in the access log, from whichever part of the server it comes."""

from __future__ import annotations

import http.client
import json
import re
import socket
from pathlib import Path

import pytest

from penstock.serving.access_log import log_request, logging_to
from tests.support.timing import SOON, wait_until
from tests.support.triton import serving

LINE = re.compile(
    r'127\.0\.0\.1 - - \[\d\d/[A-Z][a-z]{2}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4}\] "(.*)" (\d+) (\d+)'
)
BODY = json.dumps(
    {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}
)
INFER = "POST /v2/models/affine/infer HTTP/1.1"


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "access.log"
    with logging_to(path):
        yield path


def lines(path: Path, count: int) -> list[tuple[str, ...]]:
    wait_until(lambda: len(path.read_text().splitlines()) >= count)
    found = [LINE.fullmatch(line) for line in path.read_text().splitlines()]
    assert None not in found
    return [match.groups() for match in found if match is not None]


def test_event_loop_and_threads_log_requests(affine, log):
    with serving({"affine": affine}) as (_, url, server):
        client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=SOON)
        sizes = []
        for path, body in ((None, BODY), (None, BODY), (None, "{"), ("/v2?a=b", None)):
            client.request("POST" if body else "GET", path or "/v2/models/affine/infer", body)
            with client.getresponse() as response:
                sizes.append(str(len(response.read())))
            wait_until(lambda: server.direct._workers.threads == 1)
        client.close()
        statuses = ["200", "200", "400", "200"]
        requests = [INFER, INFER, INFER, "GET /v2?a=b HTTP/1.1"]
        own = [line for line in lines(log, 4) if "health" not in line[0]]
        assert own == [*zip(requests, statuses, sizes, strict=True)]


def test_what_is_no_request_is_logged(affine, log):
    with serving({"affine": affine}) as (_, url, _):
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), SOON) as client:
            client.sendall(b"no request\r\n\r\n")
            assert b"400" in client.recv(1 << 16)
        ((request, status, _),) = lines(log, 1)
        assert (request, status) == ("-", "400")


def test_request_cannot_forge_a_line(log):
    log_request("127.0.0.1", 'GET /"\r\n\x1b[2J\\ü HTTP/1.1', 404, 7)
    ((request, *_),) = lines(log, 1)
    assert request == r"GET /\x22\x0d\x0a\x1b[2J\x5c\xfc HTTP/1.1"


def test_log_that_was_renamed_is_opened_anew(log, tmp_path):
    log_request("127.0.0.1", INFER, 200, 7)
    log.rename(tmp_path / "access.log.1")
    log_request("127.0.0.1", INFER, 503, 7)
    assert [line[1] for line in lines(log, 1)] == ["503"]


def test_nothing_is_logged_unless_it_is_asked_for(tmp_path, capsys):
    with logging_to(None):
        log_request("127.0.0.1", INFER, 200, 7)
    assert capsys.readouterr() == ("", "")
    with logging_to(Path("-")):
        log_request("127.0.0.1", INFER, 200, 7)
    log_request("127.0.0.1", INFER, 200, 7)
    assert LINE.fullmatch(capsys.readouterr().out.strip())
