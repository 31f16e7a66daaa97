"""Connections that are lent to threads: what these answer, and what they give back."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.serving import direct
from penstock.serving.app import Server
from tests.serving.test_replicas import Held
from tests.support.timing import SOON, wait_until
from tests.support.triton import save, serving

SINE = "g (float[N] x) => (float[N] y) { y = Sin(x) }"
ROW = 1 << 23  # more than the system buffers
WIDE = f"""g (float[N] x) => (float[N, {ROW}] y) <int64[2] s = {{1, {ROW}}}, int64[2] c = {{-1, 1}}> {{
    v = Reshape(x, c) y = Expand(v, s) }}"""


class Client:
    """A connection, and the requests that its thread has answered."""

    def __init__(self, address: tuple[str, int], server: Server) -> None:
        self.server = server
        self.socket = socket.create_connection(address, SOON)
        self.file = self.socket.makefile("rb")
        self.direct: list[str] = []
        self.loans = self.returned = 0
        self.rest = b""  # the bytes behind the document of the last answer
        answer, offer = server.direct.answer, server.direct.offer

        def counted(path: str, *others: Any) -> Any:
            self.direct.append(path)
            self.priority = others[1]
            return answer(path, *others)

        def counted_offer(connection: Any) -> bool:
            give_back = connection.give_back

            def counted_return(*arguments: Any, **options: Any) -> None:
                self.returned += 1
                give_back(*arguments, **options)

            connection.give_back = counted_return
            self.loans += 1
            return offer(connection)

        server.direct.answer, server.direct.offer = counted, counted_offer

    def begin(self) -> None:
        """Make a request, after which the connection is lent to a thread."""
        self.ask(1)
        self.check(1)
        wait_until(lambda: self.loans == 1)

    def ask(self, *values: float, **parameters: Any) -> None:
        self.socket.sendall(infer(*values, **parameters))

    def answer(self) -> tuple[int, Any]:
        """The status and the document of the next answer."""
        status, document, self.rest, self.headers = read_answer(self.file)
        return status, document

    def ended(self) -> bool:
        """Whether the server hangs up."""
        try:
            return self.file.read(1) == b""
        except ConnectionResetError:  # it has not read all
            return True

    def check(self, *values: float) -> None:
        status, document = self.answer()
        assert status == 200, document
        np.testing.assert_allclose(document["outputs"][0]["data"], np.sin(values), rtol=1e-6)


def read_answer(file: Any) -> tuple[int, Any, bytes, dict[bytes, bytes]]:
    """The status and the document of an answer, the bytes behind it, and its headers."""
    status = int(file.readline().split()[1])
    headers = {}
    while (line := file.readline()) != b"\r\n":
        name, _, value = line.partition(b":")
        headers[name.lower()] = value
    body = file.read(int(headers[b"content-length"]))
    text = int(headers.get(b"inference-header-content-length", len(body)))
    return status, json.loads(body[:text]), body[text:], headers


def infer(*values: float, head: str = "", **parameters: Any) -> bytes:
    """A request for inference; ``head`` has further lines."""
    x = {"name": "x", "shape": [len(values)], "datatype": "FP32", "data": values}
    body = json.dumps({"inputs": [x], "parameters": parameters})
    begin = "POST /v2/models/g/infer HTTP/1.1\r\nHost: here\r\n"
    return f"{begin}{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


@contextmanager
def connected(
    path: Path, make: Any = ps.Replicas, text: str = SINE, **options: Any
) -> Iterator[Client]:
    model = save(path / "g.onnx", text)
    with (
        serving({"g": model}, make, **options) as (_, url, server),
        client_of(url, server) as client,
    ):
        yield client


@contextmanager
def client_of(url: str, server: Server) -> Iterator[Client]:
    host, _, port = url.removeprefix("http://").partition(":")
    client = Client((host, int(port)), server)
    try:
        yield client
    finally:
        client.file.close()
        client.socket.close()


def threads(name: str) -> int:
    return sum(thread.name.startswith(f"penstock-{name}") for thread in threading.enumerate())


def test_requests_after_the_first_are_answered_by_one_thread(tmp_path):
    with connected(tmp_path) as client:
        client.begin()
        for k in range(19):
            client.ask(k)
            client.check(k)
        assert client.direct == ["/v2/models/g/infer"] * 19
        assert (threads("http"), threads("replicas")) == (1, 1)
    assert threads("http") == 0


def test_priority_is_read_and_times_are_told_on_both_ways(tmp_path):
    for joined in (1, 4):
        with connected(tmp_path, lambda path, n=joined: ps.Replicas(path, max_batch=n)) as client:
            for _ in range(3):
                client.ask(2.0, head="Priority: u=1, i\r\n")
                client.check(2.0)
                times = client.headers[b"server-timing"].decode().strip()
                found = re.fullmatch(r"queue;dur=([\d.]+), run;dur=([\d.]+)", times)
                assert found is not None and float(found[2]) > 0
            assert joined > 1 or client.priority == 2
            client.ask(2.0)
            client.check(2.0)
            assert joined > 1 or client.priority is None


def test_requests_that_are_joined_are_not_lent(tmp_path):
    with connected(tmp_path, lambda path: ps.Replicas(path, max_batch=4)) as client:
        for k in range(3):
            client.ask(k)
            client.check(k)
        assert client.direct == []


@pytest.mark.parametrize(
    "odd",
    [
        b"GET /v2/models/g/ready HTTP/1.1\r\nHost: here\r\n\r\n",
        b"POST /v2/models/h/infer HTTP/1.1\r\nHost: here\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v2/models/g/infer HTTP/1.1\r\nHost: here\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"POST /v2/models/g/infer HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n",
        b"POST /v2/models/g/infer HTTP/1.1\r\nHost: here\r\nContent-Encoding: br\r\n"
        b"Content-Length: 2\r\n\r\n{}",
        infer(1, id=list("x" * 400_000)),
    ],
)
def test_other_request_goes_back_to_the_event_loop(tmp_path, odd):
    with connected(tmp_path) as client:
        client.begin()
        client.ask(2)
        client.check(2)
        client.socket.sendall(odd)
        status, _ = client.answer()
        assert status in (200, 400, 404, 413)
        assert len(client.direct) == 1
        client.ask(3)
        client.check(3)


BEGIN = b"POST /v2/models/g/infer HTTP/1.1\r\nHost: here\r\n"
BODY = b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}'
N = len(BODY)


def headed(*lines: str, begin: bytes = BEGIN, body: bytes = BODY) -> bytes:
    return begin + "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body


def of_shape(shape: Any, **parameters: Any) -> bytes:
    x = {"name": "x", "shape": shape, "datatype": "FP32", "parameters": parameters}
    text = json.dumps({"inputs": [x if parameters else {**x, "data": []}]}).encode()
    length = [f"Inference-Header-Content-Length: {len(text)}"] if parameters else []
    return headed(f"Content-Length: {len(text)}", *length, body=text)


HOSTILE = {
    "upper case": (headed(f"CONTENT-LENGTH: {N}"), 200),
    "spaces": (headed(f"Content-Length:   {N}  "), 200),
    "a length twice": (headed(f"Content-Length: {N}", f"Content-Length: {N}"), 400),
    "two lengths": (headed(f"Content-Length: {N}", "Content-Length: 1"), 400),
    "chunks and a length": (
        headed("Transfer-Encoding: chunked", f"Content-Length: {N}", body=b"0\r\n\r\n"),
        400,
    ),
    "a length and chunks": (
        headed(f"Content-Length: {N}", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
        400,
    ),
    "unknown coding": (headed("Transfer-Encoding: x", f"Content-Length: {N}"), 400),
    "space before colon": (headed("Transfer-Encoding : chunked", f"Content-Length: {N}"), 400),
    "list of lengths": (headed(f"Content-Length: {N}, {N}"), 400),
    "signed length": (headed(f"Content-Length: +{N}"), 400),
    "hexadecimal length": (headed("Content-Length: 0x10"), 400),
    "length beyond 64 bits": (headed(f"Content-Length: {10**30}"), 400),
    "no length": (headed(body=b""), 400),
    "ends of lines": (headed(f"Content-Length: {N}").replace(b"\r\n", b"\n"), 400),
    "head in a head": (headed("Content-Length: 100\n\nGET / HTTP/1.1", body=bytes(100)), 400),
    "folded line": (headed("A: b\r\n c", f"Content-Length: {N}"), 400),
    "zero byte": (headed("A: \0", f"Content-Length: {N}"), 400),
    "close": (headed("Connection: close", f"Content-Length: {N}"), 200),
    "HTTP 1.0": (headed(f"Content-Length: {N}", begin=BEGIN.replace(b"1.1", b"1.0")), 200),
    "query": (headed(f"Content-Length: {N}", begin=BEGIN.replace(b"infer", b"infer?a=b")), 200),
    "escaped name": (headed(f"Content-Length: {N}", begin=BEGIN.replace(b"/g/", b"/%67/")), 200),
    "other version": (
        headed(f"Content-Length: {N}", begin=BEGIN.replace(b"/g/", b"/g/versions/2/")),
        404,
    ),
    "other method": (headed(f"Content-Length: {N}", begin=BEGIN.replace(b"POST", b"PUT")), 405),
    "length of the object twice": (
        headed(
            f"Inference-Header-Content-Length: {N}",
            "Inference-Header-Content-Length: 3",
            f"Content-Length: {N}",
        ),
        200,
    ),
    "length of the object that is none": (
        headed("Inference-Header-Content-Length: -1", f"Content-Length: {N}"),
        400,
    ),
    "object beyond the body": (
        headed(f"Inference-Header-Content-Length: {N + 1}", f"Content-Length: {N}"),
        400,
    ),
    "dims of no array": (of_shape([0, 1 << 70]), 400),
    "dims of no array, as bytes": (of_shape([0, 1 << 70], binary_data_size=0), 400),
    "long body": (headed(f"Content-Length: {2 << 20}", body=b" " * (2 << 20)), 413),
}


@pytest.fixture(scope="class")
def besieged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    model = save(tmp_path_factory.mktemp("besieged") / "g.onnx", SINE)
    with serving({"g": model}) as (_, url, server):
        yield url, server


class TestHostileRequests:
    """Requests that one server answers, on the event loop and on a thread."""

    @pytest.mark.parametrize("name", HOSTILE)
    def test_thread_and_event_loop_answer_the_same(self, besieged, name):
        request, status = HOSTILE[name]
        with client_of(*besieged) as client:
            client.socket.sendall(request)
            with suppress(OSError):  # it has been refused before its end
                client.socket.shutdown(socket.SHUT_WR)
            first = client.answer()
            assert first[0] == status
            assert client.ended()
            with client_of(*besieged) as other:
                other.begin()
                other.socket.sendall(request)
                with suppress(OSError):
                    other.socket.shutdown(socket.SHUT_WR)
                assert other.answer() == first
                assert other.ended()


def test_client_that_waits_for_a_go_ahead_gets_it(tmp_path):
    with connected(tmp_path) as client:
        client.begin()
        for k in range(3):
            head, _, body = infer(k, head="Expect: 100-continue\r\n").partition(b"\r\n\r\n")
            client.socket.sendall(head + b"\r\n\r\n")
            assert client.file.readline() == b"HTTP/1.1 100 Continue\r\n"
            assert client.file.readline() == b"\r\n"
            client.socket.sendall(body)
            client.check(k)


@pytest.mark.parametrize("cut", [1, -1])
def test_request_that_trickles_goes_back_to_the_event_loop_in_time(tmp_path, monkeypatch, cut):
    """Though no single piece is late."""
    received: list[int] = []
    receive = direct._Requests._receive

    def counted(requests: Any, into: Any) -> int:
        received.append(receive(requests, into))
        return received[-1]

    monkeypatch.setattr(direct, "_PAUSE_S", SOON)
    monkeypatch.setattr(direct, "_ARRIVAL_S", -1)
    monkeypatch.setattr(direct._Requests, "_receive", counted)
    with connected(tmp_path) as client:
        client.begin()
        request = infer(2)
        client.socket.sendall(request[:cut])
        wait_until(lambda: received)
        client.socket.sendall(request[cut:])
        client.check(2)
        assert client.direct == []


@pytest.mark.parametrize("same_head", [False, True])
@pytest.mark.parametrize("cut", [40, -3])
def test_piece_of_a_request_is_acknowledged_at_once(tmp_path, monkeypatch, cut, same_head):
    """Once before each further piece is read: the client's system may hold that back until then."""
    done: list[str] = []
    acknowledge, receive = direct._Requests._acknowledge, direct._Requests._receive

    def acknowledged(requests: Any) -> None:
        done.append("acknowledged")
        acknowledge(requests)

    def received(requests: Any, into: Any) -> int:
        count = receive(requests, into)
        done.append("received")
        return count

    monkeypatch.setattr(direct, "_PAUSE_S", SOON)
    monkeypatch.setattr(direct, "_ARRIVAL_S", SOON)
    monkeypatch.setattr(direct._Requests, "_acknowledge", acknowledged)
    monkeypatch.setattr(direct._Requests, "_receive", received)
    with connected(tmp_path) as client:
        client.begin()
        if same_head:
            client.ask(3)
            client.check(3)
            assert done == ["received"]
            done.clear()
        request = infer(2)
        client.socket.sendall(request[:cut])
        wait_until(lambda: len(done) == 2)
        client.socket.sendall(request[cut:])
        client.check(2)
        assert done[:3] == ["received", "acknowledged", "received"]
        client.socket.shutdown(socket.SHUT_WR)


def test_client_that_sends_no_more_gets_its_answers(tmp_path):
    with connected(tmp_path) as client:
        client.socket.sendall(infer(1) + infer(2, 3) + infer(4))
        client.socket.shutdown(socket.SHUT_WR)
        client.check(1)
        client.check(2, 3)
        client.check(4)
        assert client.ended()


def test_models_are_loaded_again_while_threads_answer(tmp_path):
    count = 4
    with connected(tmp_path) as client:
        address = client.socket.getpeername()
        stop = threading.Event()

        def ask(k: int) -> int:
            asked = 0
            with socket.create_connection(address, SOON) as connection:
                file = connection.makefile("rb")
                while not stop.is_set() or not asked:
                    connection.sendall(infer(k, asked))
                    status, document, _, _ = read_answer(file)
                    assert status == 200, document
                    data = document["outputs"][0]["data"]
                    np.testing.assert_allclose(data, np.sin([k, asked]), rtol=1e-6)
                    asked += 1
            return asked

        with ThreadPoolExecutor(count) as threads_:
            answers = [threads_.submit(ask, k) for k in range(count)]
            for k in range(5):
                wait_until(lambda k=k: len(client.direct) > 20 * k)
                client.server.repository.load("g")
            stop.set()
            total = sum(answer.result(SOON) for answer in answers)
        assert total > len(client.direct) > 80
    assert threads("http") == 0


def test_pipelined_requests_are_answered_in_their_order(tmp_path):
    with connected(tmp_path) as client:
        client.socket.sendall(infer(0) + infer(1))
        client.check(0)
        client.check(1)
        for k in range(5):
            client.socket.sendall(b"".join(infer(k, j) for j in range(4)))
            for j in range(4):
                client.check(k, j)


@pytest.mark.parametrize("cut", [1, 30, -1])
def test_request_that_comes_in_pieces_is_answered_by_the_event_loop(tmp_path, cut):
    with connected(tmp_path) as client:
        client.begin()
        request = infer(2)
        client.socket.sendall(request[:cut])
        pause = threading.Timer(0.3, client.socket.sendall, [request[cut:]])
        pause.start()
        client.check(2)
        assert client.direct == []
        pause.join()


def test_request_that_stays_away_is_refused_in_time(tmp_path):
    with connected(tmp_path, timeout=0.5) as client:
        client.begin()
        client.socket.sendall(infer(2)[:-1])
        assert client.answer()[0] == 408


@pytest.mark.parametrize(
    ("request_", "status", "reason"),
    [(b'{"inputs": 1}', 400, "list of objects"), (b"{", 400, "not valid JSON")],
)
def test_thread_answers_errors_in_the_form_of_the_protocol(tmp_path, request_, status, reason):
    head = b"POST /v2/models/g/infer HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n"
    with connected(tmp_path) as client:
        client.begin()
        client.socket.sendall(head % len(request_) + request_)
        code, document = client.answer()
        assert code == status
        assert reason in document["error"]
        client.ask(2)
        client.check(2)
        assert len(client.direct) == 2


def test_answer_that_is_not_read_at_once_is_sent_by_the_event_loop(tmp_path):
    with connected(tmp_path, text=WIDE) as client:
        for _ in range(10):
            before, returned = len(client.direct), client.returned
            client.ask(0.5, binary_data_output=True)
            if client.loans > returned:
                wait_until(lambda returned=returned: client.returned > returned)
            status, document = client.answer()
            assert (status, document["outputs"][0]["shape"]) == (200, [1, ROW])
            if len(client.direct) > before > 0:
                return
        raise AssertionError("a client that takes long answers is not lent to threads")


def test_request_beyond_its_deadline_is_answered_while_its_run_goes_on(tmp_path):
    backend = Held()
    backend.opened.set()
    with connected(tmp_path, lambda path: ps.Replicas(path, backends=[backend])) as client:
        client.begin()
        backend.opened.clear()
        client.ask(2, timeout=20_000)
        assert client.answer()[0] == 504
        assert len(client.direct) == 1
        backend.opened.set()
        client.ask(3)
        client.check(3)


def test_server_ends_while_connections_are_lent(tmp_path):
    with connected(tmp_path) as client:
        client.begin()
    assert threads("http") == 0


def test_head_that_is_sent_again_is_not_parsed_again(tmp_path, monkeypatch):
    parsed: list[bytes] = []
    parse = direct._Request.__init__
    monkeypatch.setattr(
        direct._Request, "__init__", lambda self, head: (parsed.append(head), parse(self, head))[1]
    )
    with connected(tmp_path) as client:
        client.begin()
        parsed.clear()
        for k in range(10, 20):
            client.ask(k)
            client.check(k)
        assert len([head for head in parsed if head]) == 1
        client.socket.sendall(infer(100, head="A: b\r\n"))
        client.check(100)
        client.socket.sendall(infer(1) + infer(2, 3) + infer(4))
        client.check(1)
        client.check(2, 3)
        client.check(4)


@pytest.mark.parametrize("padding", range(0, 64, 7))
def test_bytes_of_a_request_are_fed_where_they_were_received(tmp_path, monkeypatch, padding):
    fed: list[np.ndarray] = []
    run = ps.Replicas.run_here

    def counted(replicas: Any, feeds: Any, *arguments: Any, **options: Any) -> Any:
        fed.append(feeds["x"])
        return run(replicas, feeds, *arguments, **options)

    monkeypatch.setattr(ps.Replicas, "run_here", counted)
    x = np.arange(1000, dtype=np.float32)
    tensor = {"name": "x", "shape": [1000], "datatype": "FP32", "parameters": {}}
    tensor["parameters"] = {"binary_data_size": x.nbytes}
    text = json.dumps({"inputs": [tensor]}) + " " * padding
    head = (
        "POST /v2/models/g/infer HTTP/1.1\r\nHost: here\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\n"
        f"Content-Length: {len(text) + x.nbytes}\r\n\r\n{text}"
    )
    with connected(tmp_path) as client:
        client.begin()
        for k in range(3):
            client.socket.sendall(head.encode() + (x + k).tobytes())
            client.check(*(x + k))
    assert {value.ctypes.data for value in fed} == {fed[0].ctypes.data}
    assert fed[0].ctypes.data % 64 == 0


def test_answer_of_many_outputs_is_that_of_the_session(tmp_path):
    count = 1500  # more than the system sends as parts of one message
    outputs = ", ".join(f"float[N] y{i}" for i in range(count))
    text = f"g (float[N] x) => ({outputs}) {{ {' '.join(f'y{i} = Neg(x)' for i in range(count))} }}"
    with connected(tmp_path, text=text) as client:
        # The first one goes over the event loop, and so do those whose bytes come late.
        for k in range(50):
            if len(client.direct) == 2:
                break
            client.ask(k, binary_data_output=True)
            status, document = client.answer()
            assert status == 200
            assert [entry["name"] for entry in document["outputs"]] == [
                f"y{i}" for i in range(count)
            ]
            values = np.frombuffer(client.rest, np.float32)
            np.testing.assert_array_equal(values, np.full(count, -k, np.float32))
        assert len(client.direct) == 2
