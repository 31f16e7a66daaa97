"""Metrics for Prometheus: requests by model and outcome, and those that wait and run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from penstock.serving.histogram import Histogram
from penstock.serving.replicas import Replicas
from penstock.serving.repository import ModelRepository, ServedModel

_LABELS = ("model", "version")
_OUTCOMES = (*_LABELS, "outcome")
_GAUGES = {
    "queued": "Requests that wait for a replica.",
    "running": "Requests that a replica runs.",
}
_COUNTERS = {
    "refused": "Requests refused since the queue was full.",
    "batches": "Batches that were run.",
}
_HISTOGRAMS = {
    "queue_seconds": "Seconds that requests waited for a replica.",
    "compute_seconds": "Seconds of requests from the beginning of their run to its end.",
    "batch_rows": "Rows of batches that were run.",
}


class Metrics:
    """The metrics of the models of a repository."""

    def __init__(self, repository: ModelRepository) -> None:
        self._repository = repository
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        # Seconds of requests by model, version and outcome.
        self._took: dict[tuple[str, ...], Histogram] = {}
        self._registry.register(self)

    def record(self, model: ServedModel, seconds: float, ok: bool) -> None:
        """Count a request that has ended."""
        key = (model.name, model.version, "success" if ok else "failure")
        with self._lock:
            took = self._took.get(key)
            if took is None:
                took = self._took[key] = Histogram()
            took.add(seconds)

    def collect(self) -> Iterator[Any]:
        """For the registry: what was counted here, and what replicas count themselves."""
        text = "Seconds of requests, from their first byte to the response."
        with self._lock:
            took = {key: histogram.copy() for key, histogram in self._took.items()}
        yield _family("request_seconds", text, _OUTCOMES, took)
        replicas: dict[tuple[str, ...], Replicas] = {
            (m.name, m.version): m.replicas for m in self._repository.all()
        }
        counts = {labels: one.counts for labels, one in replicas.items()}
        for names, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, text in names.items():
                metric = family(f"penstock_{name}", text, labels=_LABELS)
                for labels, of in counts.items():
                    metric.add_metric(labels, getattr(of, name))
                yield metric
        histograms = {labels: one.histograms for labels, one in replicas.items()}
        for name, text in _HISTOGRAMS.items():
            values = {labels: getattr(of, name) for labels, of in histograms.items()}
            yield _family(name, text, _LABELS, values)

    def text(self) -> tuple[bytes, str]:
        """All metrics in Prometheus's form, and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


def _family(
    name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], Histogram]
) -> HistogramMetricFamily:
    """Histograms by the values of their labels, as Prometheus has them."""
    metric = HistogramMetricFamily(f"penstock_{name}", text, labels=labels)
    for key, of in values.items():
        bounds = map(floatToGoString, of.bounds)
        metric.add_metric(key, [*zip(bounds, of.cumulative(), strict=True)], of.total)
    return metric
