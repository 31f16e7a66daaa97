"""What a server tells Prometheus: its requests by model and outcome, and what waits and runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from penstock.serving.repository import ModelRepository, ServedModel

_LABELS = ("model", "version")
_GAUGES = {
    "queued": "Requests that wait for a replica.",
    "running": "Requests that a replica runs.",
}
_COUNTERS = {
    "refused": "Requests refused since the queue was full.",
    "batches": "Batches that were run.",
}


class Metrics:
    """The metrics of the models of a repository."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            "penstock_request_seconds",
            "Seconds of requests, from their first byte to the response.",
            (*_LABELS, "outcome"),
            registry=self._registry,
        )
        self._registry.register(self)

    def record(self, model: ServedModel, seconds: float, ok: bool) -> None:
        """Count a request that has ended."""
        outcome = "success" if ok else "failure"
        self._seconds.labels(model.name, model.version, outcome).observe(seconds)

    def collect(self) -> Iterator[Any]:
        """For the registry: what replicas count themselves."""
        counts = [(model, model.replicas.counts) for model in self._repository.all()]
        for names, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, text in names.items():
                metric = family(f"penstock_{name}", text, labels=_LABELS)
                for model, of in counts:
                    metric.add_metric((model.name, model.version), getattr(of, name))
                yield metric

    def text(self) -> tuple[bytes, str]:
        """All metrics in Prometheus's form, and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
