"""The server as an ASGI application: the Open Inference Protocol over HTTP, and metrics."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import DeadlineExceeded, InvalidInput, PenstockError, QueueFull
from penstock.serving.metrics import Metrics
from penstock.serving.protocol import (
    HEADER_LENGTH,
    decode_options,
    decode_request,
    encode_response,
)
from penstock.serving.replicas import ReplicasClosed
from penstock.serving.repository import (
    PLATFORM,
    ModelRepository,
    ServedModel,
    UnknownModel,
)
from penstock.version import VERSION

Handler = Callable[[Request], Awaitable[Response]]

EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]
# Bodies from which on requests are read on a thread, so that others go on meanwhile.
_LONG_BODY = 1 << 20

_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (UnknownModel, 404),
    (InvalidInput, 400),
    (QueueFull, 503),
    (DeadlineExceeded, 504),
)


class _TooLargeError(PenstockError):
    """A request is larger than the server takes."""


class Server:
    """Answers requests for the models of a repository. ``max_bytes``: of a request's body;
    ``timeout``: the seconds that it may take. ``app`` is the application; the repository is closed
    when it ends."""

    def __init__(self, repository: ModelRepository, *, max_bytes: int, timeout: float) -> None:
        self.repository = repository
        self.max_bytes = max_bytes
        self.timeout = timeout
        self.metrics = Metrics(repository)
        self.ready = True
        get, post = partial(Route, methods=["GET"]), partial(Route, methods=["POST"])
        paths = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
        # Routes are tried in their order: what is asked for most comes first.
        routes = [post(f"{path}/infer", self._answer(self.infer)) for path in paths]
        routes += [
            get("/v2", self._answer(self.metadata)),
            get("/v2/health/live", self._answer(self.live)),
            get("/v2/health/ready", self._answer(self.is_ready)),
            get("/v2/models/stats", self._answer(self.all_statistics)),
            post("/v2/repository/index", self._answer(self.index)),
            post("/v2/repository/models/{model}/load", self._answer(self.load)),
            post("/v2/repository/models/{model}/unload", self._answer(self.unload)),
            get("/metrics", self._answer(self.show_metrics)),
        ]
        for path in paths:
            routes += [
                get(path, self._answer(self.model_metadata)),
                get(f"{path}/config", self._answer(self.configuration)),
                get(f"{path}/ready", self._answer(self.model_is_ready)),
                get(f"{path}/stats", self._answer(self.statistics)),
            ]
        failures = dict.fromkeys((404, 405), _refuse)
        self.app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=failures)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.ready = False
        await asyncio.to_thread(self.repository.close)

    def _answer(self, handler: Handler) -> Handler:
        """A handler whose errors are answers in the form of the protocol."""

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except _TooLargeError as error:
                return _error(str(error), 413)
            except Exception as error:
                status = next((code for of, code in _STATUS if isinstance(error, of)), 500)
                own = isinstance(error, PenstockError | OSError)
                return _error(str(error) if own else f"{type(error).__name__}: {error}", status)

        return answer

    def _model(self, request: Request) -> ServedModel:
        return self.repository.find(*map(request.path_params.get, ("model", "version")))

    # The server.

    async def metadata(self, request: Request) -> Response:
        return JSONResponse({"name": "penstock", "version": VERSION, "extensions": EXTENSIONS})

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def is_ready(self, request: Request) -> Response:
        return JSONResponse({"ready": self.ready}, 200 if self.ready else 503)

    async def show_metrics(self, request: Request) -> Response:
        text, media_type = self.metrics.text()
        return Response(text, headers={"content-type": media_type})

    # Models.

    async def model_metadata(self, request: Request) -> Response:
        model = self._model(request)
        document = {
            "name": model.name,
            "versions": self.repository.versions(model.name),
            "platform": PLATFORM,
            "inputs": model.inputs,
            "outputs": model.outputs,
        }
        return JSONResponse(document)

    async def configuration(self, request: Request) -> Response:
        return JSONResponse(self._model(request).configuration())

    async def model_is_ready(self, request: Request) -> Response:
        model = self._model(request)
        return JSONResponse({"name": model.name, "ready": True})

    async def statistics(self, request: Request) -> Response:
        return JSONResponse({"model_stats": [self._model(request).statistics()]})

    async def all_statistics(self, request: Request) -> Response:
        models = self.repository.all()
        return JSONResponse({"model_stats": [model.statistics() for model in models]})

    async def index(self, request: Request) -> Response:
        wanted = decode_options(await self._body(request)).get("ready", False)
        entries = self.repository.index()
        return JSONResponse([e for e in entries if e["state"] == "READY" or not wanted])

    async def load(self, request: Request) -> Response:
        given = decode_options(await self._body(request)).get("parameters")
        if given:
            names = ", ".join(map(repr, given))
            raise InvalidInput(f"models are loaded as their paths have them, without {names:.80}")
        await asyncio.to_thread(self.repository.load, request.path_params["model"])
        return JSONResponse({})

    async def unload(self, request: Request) -> Response:
        await asyncio.to_thread(self.repository.unload, request.path_params["model"])
        return JSONResponse({})

    # Inference.

    async def infer(self, request: Request) -> Response:
        begin = perf_counter()
        while True:
            model = self._model(request)
            ok = False
            try:
                response = await self._infer(request, model)
                ok = True
                return response
            except ReplicasClosed:  # it was loaded again, or unloaded
                continue
            finally:
                seconds = perf_counter() - begin
                model.record(seconds, ok)
                self.metrics.record(model, seconds, ok)

    async def _infer(self, request: Request, model: ServedModel) -> Response:
        body = await self._body(request)
        length = request.headers.get(HEADER_LENGTH)
        if len(body) < _LONG_BODY:
            asked = decode_request(body, length)
        else:
            asked = await asyncio.to_thread(decode_request, body, length)
        fetches = asked.fetches or [port["name"] for port in model.outputs]
        timeout = min(self.timeout, asked.timeout or self.timeout)
        outputs = await model.replicas.arun(asked.feeds, fetches, timeout=timeout)
        encode = partial(encode_response, asked, model.name, model.version, outputs)
        nbytes = sum([getattr(value, "nbytes", 0) for value in outputs.values()])
        content, header = encode() if nbytes < _LONG_BODY else await asyncio.to_thread(encode)
        if header is None:
            return Response(content, media_type="application/json")
        headers = {HEADER_LENGTH: str(header), "content-type": "application/octet-stream"}
        return Response(content, headers=headers)

    async def _body(self, request: Request) -> bytes:
        """The body of a request, decompressed."""
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self.max_bytes:
                raise self._too_large()
            parts.append(part)
        body = b"".join(parts)
        encoding = request.headers.get("content-encoding", "identity")
        if encoding == "identity":
            return body
        if encoding not in ("gzip", "deflate"):
            raise InvalidInput(f"content-encoding {encoding!r:.40} is not gzip or deflate")
        return await asyncio.to_thread(self._decompressed, body)

    def _decompressed(self, body: bytes) -> bytes:
        decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip, or zlib
        try:
            content = decompressor.decompress(body, self.max_bytes + 1)
        except zlib.error as error:
            raise InvalidInput(f"the body is not compressed as it says: {error}") from error
        if len(content) > self.max_bytes:
            raise self._too_large()
        if not decompressor.eof:
            raise InvalidInput("the compressed body is cut off")
        return content

    def _too_large(self) -> _TooLargeError:
        return _TooLargeError(f"the request is larger than {self.max_bytes} bytes")


def _error(message: str, status: int) -> Response:
    return JSONResponse({"error": message}, status)


async def _refuse(request: Request, error: Any) -> Response:
    """What there is no endpoint for, or not by this method."""
    return _error(f"{request.method} {request.url.path}: {error.detail}", error.status_code)
