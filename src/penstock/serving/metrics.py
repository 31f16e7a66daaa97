"""Metrics for Prometheus: requests by model and outcome, and those that wait and run."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from penstock.serving.repository import ModelRepository, ServedModel

_LABELS = ("model", "version")
_OUTCOMES = (*_LABELS, "outcome")
# prometheus_client's own counters take a lock for each bucket of each request.
_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    math.inf,
)
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
        self._lock = threading.Lock()
        # For each model, version and outcome: requests by the first of ``_SECONDS`` that they did
        # not exceed, and their seconds in all.
        self._took: dict[tuple[str, str, str], tuple[list[int], list[float]]] = {}
        self._registry.register(self)

    def record(self, model: ServedModel, seconds: float, ok: bool) -> None:
        """Count a request that has ended."""
        key = (model.name, model.version, "success" if ok else "failure")
        with self._lock:
            counts, total = self._took.setdefault(key, ([0] * len(_SECONDS), [0.0]))
            counts[bisect_left(_SECONDS, seconds)] += 1
            total[0] += seconds

    def collect(self) -> Iterator[Any]:
        """For the registry: what was counted here, and what replicas count themselves."""
        yield self._seconds()
        counts = [(model, model.replicas.counts) for model in self._repository.all()]
        for names, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, text in names.items():
                metric = family(f"penstock_{name}", text, labels=_LABELS)
                for model, of in counts:
                    metric.add_metric((model.name, model.version), getattr(of, name))
                yield metric

    def _seconds(self) -> HistogramMetricFamily:
        text = "Seconds of requests, from their first byte to the response."
        metric = HistogramMetricFamily("penstock_request_seconds", text, labels=_OUTCOMES)
        with self._lock:
            took = [(key, [*counts], total[0]) for key, (counts, total) in self._took.items()]
        for key, counts, total in took:
            below = zip(map(floatToGoString, _SECONDS), accumulate(counts), strict=True)
            metric.add_metric(key, [*below], total)
        return metric

    def text(self) -> tuple[bytes, str]:
        """All metrics in Prometheus's form, and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
