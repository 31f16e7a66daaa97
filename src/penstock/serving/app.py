"""The server as an ASGI application: the Open Inference Protocol over HTTP, and metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.core import VERSION
from penstock.core.errors import Cancelled, InvalidInput, PenstockError
from penstock.core.types import STRING, NamedValues
from penstock.executors.control import CancelToken
from penstock.host.log import is_traced
from penstock.host.spans import TracedSpan, has_current_span, span
from penstock.serving import openapi
from penstock.serving.access_log import LoggedRequests
from penstock.serving.direct import LOOK_S, Answer, DirectAnswers
from penstock.serving.error_answers import (
    TEXTS,
    MissingExtensionError,
    described,
    error_answer,
    error_response,
    refused,
    text_error,
    text_error_document,
)
from penstock.serving.event_stream import events
from penstock.serving.listener import LoopErrors
from penstock.serving.metrics import Metrics
from penstock.serving.protocol import (
    HEADER_LENGTH,
    HEADER_PRIORITY,
    HEADER_TIMING,
    SHARED_MEMORY_OFF,
    InferenceRequest,
    decode_options,
    decode_request,
    encode_response,
    json_bytes,
    priority_of,
    timing,
)
from penstock.serving.refusals import refusal
from penstock.serving.replicas import Replicas
from penstock.serving.repository import PLATFORM, ModelRepository, ServedModel, UnknownModel
from penstock.serving.request_body import read_body
from penstock.serving.request_records import ReplicasClosed
from penstock.serving.sequences import Sequences
from penstock.serving.shared_memory import SharedMemory
from penstock.serving.text_answers import model_entry, model_list
from penstock.serving.text_endpoints import (
    MOST_BYTES,
    embeddings_document,
    read_embeddings_request,
    read_text_request,
    texts_document,
    texts_events,
)
from penstock.serving.text_models import TextModels

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]
# Triton's endpoints that Penstock does not support.
_UNSUPPORTED = (
    *("/v2/trace/setting", "/v2/models/{model}/trace/setting", "/v2/logging"),
    "/v2/cudasharedmemory/{rest:path}",
)
_SHARED = "/v2/systemsharedmemory"
_INFER = re.compile(r"/v2/models/([^/%?]+)(?:/versions/([^/%?]+))?/infer")
# Sizes of a body, and of JSON, in bytes, beyond which it is parsed or serialized on a thread, so
# that the event loop stays responsive. JSON numbers take 10 to 14 ns per byte.
_LONG_BODY, _LONG_JSON = 1 << 20, 1 << 12
# Approximate bytes of a number in JSON.
_DIGITS = 16


class Server:
    """Answers requests for the models of a repository. ``app`` is the ASGI application, which
    closes the repository when it ends. ``max_bytes``: the maximum size of a request's body;
    ``timeout``: the maximum seconds of a request. ``direct``: threads to which connections may be
    lent. With ``shared_memory``, tensors may be in shared memory, and clients can name any segment.
    ``cors``: origins whose pages may use the server from browsers ("*": all). ``texts``: the models
    of OpenAI's API."""

    def __init__(
        self,
        repository: ModelRepository,
        *,
        max_bytes: int,
        timeout: float,
        shared_memory: bool = False,
        cors: Sequence[str] = (),
        texts: TextModels | None = None,
    ) -> None:
        self.repository = repository
        self.texts = texts or TextModels()
        self.max_bytes = max_bytes
        self.timeout = timeout
        self.metrics = Metrics(repository, self.texts.generators.values())
        self.direct = DirectAnswers(self.is_direct, self.infer_here, max_bytes)
        self.shared = SharedMemory(max_bytes) if shared_memory else None
        self.ready = True
        routes = [
            Route(path, self._answer(handler, path), methods=methods.split())
            for methods, path, handler in self._endpoints()
        ]
        middleware = [Middleware(LoggedRequests)]
        if cors:
            # Browser scripts may read no other response header, and need this one to split the
            # bytes.
            expose, methods = [HEADER_LENGTH, HEADER_TIMING], ["GET", "POST"]
            options = {"allow_origins": [*cors], "allow_methods": methods, "allow_headers": ["*"]}
            middleware.append(Middleware(CORSMiddleware, **options, expose_headers=expose))
        failures = dict.fromkeys((404, 405), refused)
        self.app = Starlette(
            routes=routes,
            middleware=middleware,
            lifespan=self._lifespan,
            exception_handlers=failures,
        )

    def _endpoints(self) -> Iterator[tuple[str, str, Handler]]:
        """Return the methods, the path and the handler of each endpoint. They are tried in this
        order, so the most frequent ones come first."""
        models = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
        region = f"{_SHARED}/region/{{name}}"
        for path in models:
            yield "POST", f"{path}/infer", self.infer
            yield "POST", f"{path}/infer_stream", self.stream
        if self.texts:
            yield "POST", f"{TEXTS}chat/completions", self.chat_completions
            yield "POST", f"{TEXTS}completions", self.completions
            yield "POST", f"{TEXTS}embeddings", self.embeddings
            yield "GET", f"{TEXTS}models", self.text_models
            yield "GET", f"{TEXTS}models/{{model}}", self.text_model
        yield "GET", "/v2", self.metadata
        yield "GET", "/v2/health/live", self.live
        yield "GET", "/v2/health/ready", self.is_ready
        yield "GET", "/v2/models", self.models
        yield "GET", "/v2/models/stats", self.all_statistics
        yield "POST", "/v2/repository/index", self.index
        yield "POST", "/v2/repository/models/{model}/load", self.load
        yield "POST", "/v2/repository/models/{model}/unload", self.unload
        yield "GET", "/metrics", self.show_metrics
        yield "GET", "/", self.page
        yield "GET", "/openapi.json", self.openapi
        for path in models:
            yield "GET", path, self.model_metadata
            yield "GET", f"{path}/config", self.configuration
            yield "GET", f"{path}/ready", self.model_is_ready
            yield "GET", f"{path}/stats", self.statistics
        yield "GET", f"{_SHARED}/status", self.regions
        yield "GET", f"{region}/status", self.regions
        yield "POST", f"{region}/register", self.register
        yield "POST", f"{region}/unregister", self.unregister
        yield "POST", f"{_SHARED}/unregister", self.unregister
        for path in _UNSUPPORTED:
            yield "GET POST", path, self.unsupported

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        asyncio.get_running_loop().set_exception_handler(LoopErrors())
        yield
        self.ready = False
        await asyncio.to_thread(self.texts.close)
        await asyncio.to_thread(self.repository.close)
        await asyncio.to_thread(self.direct.close)

    def _answer(self, handler: Handler, path: str) -> Handler:
        """Wrap a handler, to convert errors to responses of the protocol."""

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except Exception as error:
                if path.startswith(TEXTS):
                    return text_error(error)
                return error_response(*described(error))

        async def traced(request: Request) -> Response:
            # A program that started its own span for the request also ends it.
            own = None if not is_traced() or has_current_span() else _request_span(request, path)
            if own is None:
                return await answer(request)
            error: BaseException | None = None
            try:
                with own.current():
                    response = await answer(request)
                own.add({"http.response.status_code": response.status_code})
                if response.status_code >= 500:
                    error = PenstockError(bytes(response.body).decode())
                return response
            finally:
                own.end(error)

        return traced

    def _model(self, request: Request) -> ServedModel:
        return self.repository.find(*map(request.path_params.get, ("model", "version")))

    # The server.

    async def metadata(self, request: Request) -> Response:
        """Describe the server."""
        extensions = [*EXTENSIONS, *(["system_shared_memory"] if self.shared else [])]
        if any(isinstance(model.replicas, Sequences) for model in self.repository.all()):
            extensions.append("sequence")
        return JSONResponse({"name": "penstock", "version": VERSION, "extensions": extensions})

    async def live(self, request: Request) -> Response:
        """Report that the server is live."""
        return JSONResponse({"live": True})

    async def is_ready(self, request: Request) -> Response:
        """Report whether the server accepts requests."""
        return JSONResponse({"ready": self.ready}, 200 if self.ready else 503)

    async def page(self, request: Request) -> Response:
        """Show the models of the server, and example requests."""
        models = self.repository.all()
        headers = {"content-security-policy": openapi.POLICY}
        page = openapi.page(models, str(request.base_url), [*self.texts.entries])
        return HTMLResponse(page, headers=headers)

    async def openapi(self, request: Request) -> Response:
        """Describe the endpoints in OpenAPI."""
        endpoints = [of for of in self._endpoints() if of[2] != self.unsupported]
        if self.shared is None:
            endpoints = [of for of in endpoints if not of[1].startswith(_SHARED)]
        names = dict.fromkeys(model.name for model in self.repository.all())
        return JSONResponse(openapi.openapi_document(endpoints, map(self.repository.find, names)))

    async def show_metrics(self, request: Request) -> Response:
        """Show metrics for Prometheus."""
        text, media_type = self.metrics.text()
        return Response(text, headers={"content-type": media_type})

    # Models.

    async def model_metadata(self, request: Request) -> Response:
        """Describe the inputs and outputs of a model."""
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
        """Describe a model in the format of Triton."""
        return JSONResponse(self._model(request).configuration())

    async def model_is_ready(self, request: Request) -> Response:
        """Report that a model is ready."""
        model = self._model(request)
        return JSONResponse({"name": model.name, "ready": True})

    async def statistics(self, request: Request) -> Response:
        """Count the requests of a model."""
        return JSONResponse({"model_stats": [self._model(request).statistics()]})

    async def models(self, request: Request) -> Response:
        """The names of the models that are ready."""
        ready = dict.fromkeys(model.name for model in self.repository.all())
        return JSONResponse({"models": [*ready]})

    async def all_statistics(self, request: Request) -> Response:
        """Count the requests of all models."""
        models = self.repository.all()
        return JSONResponse({"model_stats": [model.statistics() for model in models]})

    async def index(self, request: Request) -> Response:
        """List the models with paths, and their states."""
        wanted = decode_options(await self._body(request)).get("ready", False)
        entries = self.repository.index()
        return JSONResponse([e for e in entries if e["state"] == "READY" or not wanted])

    async def load(self, request: Request) -> Response:
        """Load or reload a model."""
        given = decode_options(await self._body(request)).get("parameters")
        if given:
            names = ", ".join(map(repr, given))
            raise InvalidInput(
                f"loading does not accept the parameters {names:.80}: models are loaded from "
                "their paths as they are"
            )
        await asyncio.to_thread(self.repository.load, request.path_params["model"])
        return JSONResponse({})

    async def unload(self, request: Request) -> Response:
        """Unload a model."""
        given = decode_options(await self._body(request)).get("parameters") or {}
        if any(given.values()):  # "unload_dependents": false is the default behavior
            names = ", ".join(map(repr, given))
            raise InvalidInput(
                f"unloading does not accept the parameters {names:.80}: models have no dependents"
            )
        await asyncio.to_thread(self.repository.unload, request.path_params["model"])
        return JSONResponse({})

    # Shared memory, and unsupported endpoints.

    def _shared(self) -> SharedMemory:
        if self.shared is None:
            raise MissingExtensionError(SHARED_MEMORY_OFF)
        return self.shared

    async def regions(self, request: Request) -> Response:
        """List regions of shared memory."""
        return JSONResponse(self._shared().describe(request.path_params.get("name")))

    async def register(self, request: Request) -> Response:
        """Register a region of shared memory."""
        document = decode_options(await self._body(request))
        self._shared().register(request.path_params["name"], document)
        return JSONResponse({})

    async def unregister(self, request: Request) -> Response:
        """Unregister a region of shared memory, or all of them."""
        self._shared().unregister(request.path_params.get("name"))
        return JSONResponse({})

    async def unsupported(self, request: Request) -> Response:
        raise MissingExtensionError(
            f"{request.url.path} belongs to a protocol extension that this server does not "
            f"support; supported are {', '.join(EXTENSIONS)}"
        )

    # Inference.

    async def infer(self, request: Request) -> Response:
        """Run a model on the tensors of a request."""
        begin, body = perf_counter(), None
        while True:
            model = self._model(request)
            try:
                with self._counted(model, begin):
                    body = await self._body(request) if body is None else body
                    return await self._infer(request, model, body)
            except ReplicasClosed:  # the model was reloaded or unloaded
                continue

    async def _infer(self, request: Request, model: ServedModel, body: bytes) -> Response:
        length = request.headers.get(HEADER_LENGTH)
        decode = partial(decode_request, body, length, self.shared)
        # Bytes in shared memory are copied; the length of the body does not include them.
        short = len(body) < _LONG_BODY and self.shared is None
        short = short and json_bytes(body, length) <= _LONG_JSON
        asked = decode() if short else await asyncio.to_thread(decode)
        times: list[str] = []
        try:
            run = asyncio.wrap_future(
                model.runner_of(asked).submit(
                    *self._run_of(model, asked),
                    timeout=self._left(asked),
                    priority=priority_of(request.headers.get(HEADER_PRIORITY)),
                    timed=lambda queue, run: times.append(timing(queue, run)),
                )
            )
            await _end_with_client(run, request)
            outputs = run.result()
        except InvalidInput as error:
            raise refusal(error, model.ports, asked) from error

        def encode() -> tuple[bytes, int | None]:
            parts, header = encode_response(asked, model.name, model.version, outputs)
            return b"".join(parts), header

        short = _is_short(asked, outputs)
        content, header = encode() if short else await asyncio.to_thread(encode)
        headers = {"content-type": "application/json"}
        if header is not None:
            headers = {HEADER_LENGTH: str(header), "content-type": "application/octet-stream"}
        # The requests of a failed batch run again, one at a time.
        headers[HEADER_TIMING] = times[-1]
        return Response(content, headers=headers)

    async def stream(self, request: Request) -> Response:
        """Run a model, and stream its values as events while they are computed."""
        begin, model = perf_counter(), self._model(request)
        body = await self._body(request)
        length = request.headers.get(HEADER_LENGTH)
        asked = await asyncio.to_thread(decode_request, body, length, self.shared)
        priority = priority_of(request.headers.get(HEADER_PRIORITY))
        lines = events(model, asked, self._left(asked), priority, lambda error: described(error)[0])
        try:
            first = await anext(lines)
        except Exception as error:
            self._count(model, begin, ok=False)
            if isinstance(error, InvalidInput):
                raise refusal(error, model.ports, asked) from error
            raise

        count = partial(self._count, model, begin)
        return StreamingResponse(_rest(first, lines, count), media_type="text/event-stream")

    # Texts, by OpenAI's API.

    async def chat_completions(self, request: Request) -> Response:
        """Generate the next message of a chat."""
        return await self._texts_of(request, is_chat=True)

    async def completions(self, request: Request) -> Response:
        """Continue texts."""
        return await self._texts_of(request, is_chat=False)

    async def _texts_of(self, request: Request, is_chat: bool) -> Response:
        asked = await read_text_request(await self._body(request, MOST_BYTES), is_chat)
        model, begin = self.texts.generator(asked.model), perf_counter()
        timeout = min(self.timeout, asked.timeout or self.timeout)
        priority = priority_of(request.headers.get(HEADER_PRIORITY)) or 0

        def count(ok: bool) -> None:
            self.metrics.record(model.name, model.version, perf_counter() - begin, ok)

        if not asked.stream:
            document = texts_document(model, asked, timeout, priority)
            with _noted(count):
                return JSONResponse(await _unless_gone(document, request))
        # Until the first token, errors are responses with their own status code.
        lines = texts_events(
            model, asked, timeout, priority, lambda error: text_error_document(error)[0]
        )
        try:
            first = await _unless_gone(anext(lines), request)
        except BaseException:
            count(ok=False)
            raise
        return StreamingResponse(_rest(first, lines, count), media_type="text/event-stream")

    async def embeddings(self, request: Request) -> Response:
        """Compute embeddings of texts."""
        asked = await read_embeddings_request(await self._body(request, MOST_BYTES))
        own, begin = self.texts.embedder(asked.model), perf_counter()
        timeout = min(self.timeout, asked.timeout or self.timeout)
        priority = priority_of(request.headers.get(HEADER_PRIORITY))
        while True:
            model = self.repository.find(own.name)
            assert isinstance(model.replicas, Replicas)
            document = embeddings_document(own, model.replicas, asked, timeout, priority)
            try:
                with self._counted(model, begin):
                    return JSONResponse(await _unless_gone(document, request))
            except ReplicasClosed:  # the model was reloaded or unloaded
                continue

    async def text_models(self, request: Request) -> Response:
        """List the models for text generation and embeddings."""
        return JSONResponse(model_list(self.texts.entries))

    async def text_model(self, request: Request) -> Response:
        """Describe a model for text generation or embeddings."""
        name, entries = request.path_params["model"], self.texts.entries
        if name not in entries:
            raise UnknownModel(f"unknown model {name!r:.80}; available are {', '.join(entries)}")
        return JSONResponse(model_entry(name, entries[name]))

    # Requests that a thread answers without the event loop.

    def is_direct(self, path: str) -> bool:
        """Whether ``infer_here`` answers the requests of a path, without waking another thread:
        those for inference by replicas of this process that do not join requests."""
        match = _INFER.fullmatch(path)
        if is_traced():  # the event loop reads the headers with the client's span
            return False
        try:
            return match is not None and self.repository.find(*match.groups()).replicas.runs_here
        except UnknownModel:
            return False

    def infer_here(
        self,
        path: str,
        length: str | None,
        priority: int | None,
        body: memoryview,
        cancel: CancelToken,
        late: Callable[[Answer], None],
    ) -> Answer:
        """Return the answer of ``infer``, computed on the calling thread; ``cancel`` ends it. Since
        kernels cannot be stopped, the run may continue after its deadline: then ``late`` is called
        with the answer, on another thread."""
        begin, match = perf_counter(), _INFER.fullmatch(path)
        assert match is not None
        try:
            while True:
                model = self.repository.find(*match.groups())
                try:
                    with self._counted(model, begin):
                        asked = decode_request(body, length, self.shared)
                        return self._infer_here(model, asked, priority, cancel, late)
                # The model was reloaded or unloaded: ``find`` returns the new replicas, or raises
                # an error.
                except ReplicasClosed:
                    continue
        except Exception as error:
            return error_answer(error)

    def _infer_here(
        self,
        model: ServedModel,
        asked: InferenceRequest,
        priority: int | None,
        cancel: CancelToken,
        late: Callable[[Answer], None],
    ) -> Answer:
        told = _Told(late)
        try:
            outputs = model.runner_of(asked).run_here(
                *self._run_of(model, asked),
                timeout=self._left(asked),
                cancel=cancel,
                priority=priority,
                told=told,
            )
        except InvalidInput as error:
            raise refusal(error, model.ports, asked) from error
        parts, header = encode_response(asked, model.name, model.version, outputs)
        return Answer(200, parts, header, told.timing)

    @contextmanager
    def _counted(self, model: ServedModel, begin: float) -> Iterator[None]:
        """Count a request that began at ``begin``, and whether the context raised an error."""
        with _noted(partial(self._count, model, begin)):
            yield

    def _count(self, model: ServedModel, begin: float, ok: bool) -> None:
        seconds = perf_counter() - begin
        model.record(seconds, ok)
        self.metrics.record(model.name, model.version, seconds, ok)

    def _run_of(
        self, model: ServedModel, asked: InferenceRequest
    ) -> tuple[NamedValues, Sequence[str] | None]:
        """Return the feeds and fetches of a request."""
        return asked.feeds, asked.fetches or model.fetches

    def _left(self, asked: InferenceRequest) -> float:
        """Return the maximum seconds of a request."""
        return min(self.timeout, asked.timeout or self.timeout)

    async def _body(self, request: Request, most: int | None = None) -> bytes:
        """Return the body of a request, decompressed."""
        most = self.max_bytes if most is None else min(most, self.max_bytes)
        return await read_body(request, most)


async def _rest(
    first: bytes, lines: AsyncGenerator[bytes, None], count: Callable[[bool], None]
) -> AsyncIterator[bytes]:
    """Yield all lines of a stream, and count its request after the last one."""
    ok = False
    try:
        yield first
        async for line in lines:
            yield line
        ok = True
    finally:
        await lines.aclose()
        count(ok)


@contextmanager
def _noted(count: Callable[[bool], None]) -> Iterator[None]:
    """Call ``count`` at the end of the context: with True unless it raised an error."""
    ok = False
    try:
        yield
        ok = True
    finally:
        count(ok)


async def _unless_gone(work: Coroutine[object, object, T], request: Request) -> T:
    """Await ``work`` and return its result; cancel it if the client disconnects."""
    task = asyncio.ensure_future(work)
    try:
        await _end_with_client(task, request)
    finally:
        if not task.done():
            task.cancel()
    return task.result()


def _request_span(request: Request, path: str) -> TracedSpan | None:
    """Return an OpenTelemetry span for a request, a child of the span that its headers name."""
    about = {
        "http.request.method": request.method,
        "http.route": path,
        "url.path": request.url.path,
    }
    return span(f"{request.method} {path}", about, headers=request.headers)


async def _end_with_client(run: asyncio.Future[Any], request: Request) -> None:
    """Wait until a run ends; cancel it if the client disconnects, which is only checked for runs
    that take a while."""
    done, _ = await asyncio.wait({run}, timeout=LOOK_S)
    if done:
        return
    hang_up = asyncio.ensure_future(request.receive())  # the body has been received
    try:
        await asyncio.wait({run, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        if not run.done():
            run.cancel()
            raise Cancelled("the client has disconnected")
    finally:
        hang_up.cancel()


def _is_short(asked: InferenceRequest, outputs: NamedValues) -> bool:
    """Whether the response is so short that it can be encoded on the event loop."""
    size = _LONG_BODY * bool(asked.places)
    numbers = 0
    for name, value in outputs.items():
        if getattr(value, "dtype", None) == STRING:
            return False  # strings of any length, whose size is slow to compute
        size += getattr(value, "nbytes", 0)
        if not asked.binary.get(name, asked.binary_by_default):
            numbers += getattr(value, "size", 0)
    return size < _LONG_BODY and numbers * _DIGITS <= _LONG_JSON


class _Told:
    """Callbacks of replicas for a request: converts late errors to answers, and keeps its times."""

    def __init__(self, late: Callable[[Answer], None]) -> None:
        self._late = late
        self.timing = ""

    def timed(self, queue: float, run: float) -> None:
        self.timing = timing(queue, run)

    def late(self, error: Exception) -> None:
        self._late(error_answer(error))
