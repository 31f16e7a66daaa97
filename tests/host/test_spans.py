"""Spans of OpenTelemetry, collected by its own SDK. Names are those of docs/how-to/opentelemetry.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import penstock as ps
from penstock.host.log import is_traced
from penstock.host.spans import span
from tests.support.onnx_text import model_from_text
from tests.support.triton import AFFINE, InferenceServerException, fed, save, serving

X = {"x": np.ones((2, 3), np.float32)}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Collects the spans of the test."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # A provider may be set once in a process.
    monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)
    return exporter


def affine() -> onnx.ModelProto:
    return model_from_text("affine (float[N, 3] x) => (float[N, 3] y) { y = Add(x, x) }")


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def child_of(one: ReadableSpan, parent: ReadableSpan) -> bool:
    return one.parent is not None and one.parent.span_id == parent.context.span_id


def test_run_is_part_of_the_span_around_it(exporter: InMemorySpanExporter) -> None:
    session = ps.compile(affine())
    with trace.get_tracer("app").start_as_current_span("question"):
        session.run(X)
    (question,) = named(exporter, "question")
    (run,) = named(exporter, "penstock.run")
    (compiled,) = named(exporter, "penstock.compile")
    assert child_of(run, question)
    assert child_of(compiled, run)
    assert run.attributes == {
        "penstock.graph": "affine",
        "penstock.executor": "linear",
        "penstock.inputs": ("x: float32[2, 3]",),
        "penstock.priority": 0,
    }
    assert [event.name for event in run.events] == ["begin"]
    assert run.status.status_code is StatusCode.UNSET
    assert question.start_time <= run.start_time <= compiled.start_time
    assert compiled.end_time <= run.events[0].timestamp <= run.end_time <= question.end_time


@pytest.mark.parametrize("way", ["submit", "arun", "run_async"])
def test_run_on_another_thread_is_part_of_the_span_where_it_was_submitted(
    exporter: InMemorySpanExporter, way: str
) -> None:
    import asyncio
    from concurrent.futures import Future

    session = ps.compile(affine())
    with trace.get_tracer("app").start_as_current_span("question"):
        if way == "submit":
            session.submit(X, priority=2).result()
        elif way == "arun":
            asyncio.run(session.arun(X, priority=2))
        else:
            future: Future[object] = Future()
            session.run_async(lambda outputs, error: future.set_result(outputs), X, priority=2)
            future.result()
    (question,) = named(exporter, "question")
    (run,) = named(exporter, "penstock.run")
    assert child_of(run, question)
    assert run.attributes is not None
    assert run.attributes["penstock.priority"] == 2


def test_failed_run_has_its_error(exporter: InMemorySpanExporter) -> None:
    session = ps.compile(affine())
    with pytest.raises(ps.InvalidInput):
        session.run({"x": np.ones((2, 4), np.float32)})
    (run,) = named(exporter, "penstock.run")
    assert run.status.status_code is StatusCode.ERROR
    assert run.events[-1].name == "exception"
    token = ps.CancelToken()
    token.cancel()
    with pytest.raises(ps.Cancelled):
        session.run(X, cancel=token)
    assert named(exporter, "penstock.run")[-1].status.status_code is StatusCode.ERROR


def test_stream_of_values_is_a_run(exporter: InMemorySpanExporter) -> None:
    session = ps.compile(affine())
    with session.stream(X, ["y"]) as values:
        assert len(list(values)) == 1
    (run,) = named(exporter, "penstock.run")
    assert run.status.status_code is StatusCode.UNSET


def test_requests_of_a_batch_are_linked_to_it(exporter: InMemorySpanExporter) -> None:
    with ps.Replicas(affine(), max_batch=4, max_delay=60.0) as replicas:
        futures = [replicas.submit(X), replicas.submit(X)]
        for future in futures:
            future.result()
    requests = named(exporter, "penstock.request")
    (batch,) = named(exporter, "penstock.batch")
    assert {link.context.span_id for link in batch.links} == {
        request.context.span_id for request in requests
    }
    assert batch.attributes == {"penstock.rows": 4}
    assert any(child_of(run, batch) for run in named(exporter, "penstock.run"))
    assert all(request.end_time >= batch.start_time for request in requests)


def test_request_that_is_refused_ends_its_span(exporter: InMemorySpanExporter) -> None:
    replicas = ps.Replicas(affine(), max_batch=4)
    with pytest.raises(ps.InvalidInput):
        replicas.submit({"x": np.ones((2, 4), np.float32)}).result()
    replicas.close()
    with pytest.raises(ps.PenstockError):
        replicas.submit(X)
    requests = named(exporter, "penstock.request")
    assert [request.status.status_code for request in requests] == [StatusCode.ERROR] * 2


def test_server_goes_on_with_the_trace_of_its_client(
    exporter: InMemorySpanExporter, tmp_path: Path
) -> None:
    path = save(tmp_path / "affine.onnx", AFFINE)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with serving({"affine": path}) as (client, _, _):
        client.infer(
            "affine", [fed("x", X["x"], "FP32", binary=True)], headers={"traceparent": parent}
        )
        with pytest.raises(InferenceServerException):
            client.infer("other", [fed("x", X["x"], "FP32", binary=True)])
    infer = "POST /v2/models/{model}/infer"
    served, missed = named(exporter, infer)
    assert served.parent is not None
    assert f"{served.parent.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{served.parent.span_id:016x}" == "b7ad6b7169203331"
    assert served.kind is trace.SpanKind.SERVER
    assert served.attributes == {
        "http.request.method": "POST",
        "http.route": "/v2/models/{model}/infer",
        "url.path": "/v2/models/affine/infer",
        "http.response.status_code": 200,
    }
    assert missed.attributes is not None
    assert missed.attributes["http.response.status_code"] == 404
    assert missed.status.status_code is StatusCode.UNSET
    (request,) = [r for r in named(exporter, "penstock.request") if child_of(r, served)]
    assert [run for run in named(exporter, "penstock.run") if child_of(run, request)]


def test_program_that_collects_no_spans_has_none() -> None:
    """The API alone has a provider that stands for one that may come."""
    assert not is_traced()
    assert span("penstock.run", {}) is None
    program = """
import sys
import numpy as np
import penstock as ps
from penstock.build import GraphBuilder

builder = GraphBuilder()
builder.output("y", builder.input("x", "float32", (2,)) + 1)
session = ps.compile(builder.model())
session.run({"x": np.ones(2, np.float32)})
assert not any(name.startswith("opentelemetry") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
