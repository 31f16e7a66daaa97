"""Metrics for Prometheus: requests by model and outcome, and queued and running requests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from penstock.serving.histogram import Histogram
from penstock.serving.repository import ModelRepository, Served
from penstock.serving.sequences import Sequences
from penstock.serving.text_models import TextModel

_Family: TypeAlias = "GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily"

_LABELS = ("model", "version")
_OUTCOMES = (*_LABELS, "outcome")
_GAUGES = {"queued": "Requests waiting for a replica.", "running": "Requests running on a replica."}
_COUNTERS = {"refused": "Requests rejected because the queue was full.", "batches": "Batches run."}
_HISTOGRAMS = {
    "queue_seconds": "Seconds that requests waited for a replica.",
    "compute_seconds": "Seconds from the start to the end of the run of requests.",
    "batch_rows": "Rows per batch.",
}
# For stateful models; a step counts as a batch.
_SEQUENCE_GAUGES = {"open": "Open sequences."}
_SEQUENCE_COUNTERS = {
    "begun": "Sequences started.",
    "idle": "Sequences ended because they were idle.",
}
# For text generation models. They have separate names, since requests for texts wait for space in
# the running batch, not for a replica.
_TEXT_GAUGES = {
    "queued": "Text requests waiting in the queue.",
    "running": "Text requests running.",
    "tokens_in_flight": "Tokens of running requests, of prompts and generated.",
}
_TEXT_COUNTERS = {
    "refused": "Text requests rejected because the queue was full.",
    "prompt_tokens": "Tokens of prompts.",
    "generated_tokens": "Tokens generated.",
}
_STEP_COUNTERS = {
    "steps": "Steps, each with rows of several texts.",
    "prefixes": "Tokens of prompts whose keys and values were cached.",
    "preempted": "Texts preempted, which are computed again.",
}
_STATES = ("used", "kept", "all")
_TEXT_HISTOGRAMS = {
    "queue_seconds": "Seconds that text requests waited in the queue.",
    "first_token_seconds": "Seconds to the first token of a request.",
    "between_tokens_seconds": "Seconds between consecutive tokens of a text.",
}


class Metrics:
    """The metrics of the models of a repository, and of models that generate text."""

    def __init__(self, repository: ModelRepository, texts: Iterable[TextModel] = ()) -> None:
        self._repository = repository
        self._texts: dict[tuple[str, ...], TextModel] = {
            (model.name, model.version): model for model in texts
        }
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        # Seconds of requests by model, version and outcome.
        self._took: dict[tuple[str, ...], Histogram] = {}
        self._registry.register(self)

    def record(self, name: str, version: str, seconds: float, ok: bool) -> None:
        """Count a request that has ended, by model, version and outcome."""
        key = (name, version, "success" if ok else "failure")
        with self._lock:
            took = self._took.get(key)
            if took is None:
                took = self._took[key] = Histogram()
            took.add(seconds)

    def collect(self) -> Iterator[Any]:
        """Yield the counters of this class and of replicas, for the registry."""
        text = "Seconds of requests, from the first byte to the response."
        with self._lock:
            took = {key: histogram.copy() for key, histogram in self._took.items()}
        yield _family("request_seconds", text, _OUTCOMES, took)
        replicas: dict[tuple[str, ...], Served] = {
            (m.name, m.version): m.replicas for m in self._repository.all()
        }
        counts = {labels: one.counts for labels, one in replicas.items()}
        yield from _counted("", _GAUGES, GaugeMetricFamily, counts)
        yield from _counted("", _COUNTERS, CounterMetricFamily, counts)
        histograms = {labels: one.histograms for labels, one in replicas.items()}
        for name, text in _HISTOGRAMS.items():
            values = {labels: getattr(of, name) for labels, of in histograms.items()}
            yield _family(name, text, _LABELS, values)
        own = {key: one.table.counts for key, one in replicas.items() if isinstance(one, Sequences)}
        if own:
            yield from _counted("sequences_", _SEQUENCE_GAUGES, GaugeMetricFamily, own)
            yield from _counted("sequences_", _SEQUENCE_COUNTERS, CounterMetricFamily, own)
        if self._texts:
            yield from self._of_texts()

    def _of_texts(self) -> Iterator[_Family]:
        """Yield the metrics of models that generate text."""
        counts = {labels: model.counts for labels, model in self._texts.items()}
        yield from _counted("text_", _TEXT_GAUGES, GaugeMetricFamily, counts)
        yield from _counted("text_", _TEXT_COUNTERS, CounterMetricFamily, counts)
        # Counters that steppers keep themselves, read only here.
        stats = {labels: model.generator.stepper.stats for labels, model in self._texts.items()}
        yield from _counted("text_", _STEP_COUNTERS, CounterMetricFamily, stats)
        pages = GaugeMetricFamily(
            "penstock_text_pages",
            "Cache pages by state: in use, of these kept as shared prefixes, and all.",
            labels=(*_LABELS, "state"),
        )
        for labels, of in stats.items():
            for state, count in zip(_STATES, of.pages, strict=True):
                pages.add_metric((*labels, state), count)
        yield pages
        for name, text in _TEXT_HISTOGRAMS.items():
            own: dict[tuple[str, ...], Histogram] = {
                labels: getattr(model.histograms, name).copy()
                for labels, model in self._texts.items()
            }
            yield _family(f"text_{name}", text, _LABELS, own)

    def text(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus's text format, and its media type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


def _counted(
    prefix: str,
    texts: Mapping[str, str],
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    counts: Mapping[tuple[str, ...], object],
) -> Iterator[_Family]:
    """Yield a family of metrics for each attribute that ``texts`` names, with its description."""
    for name, text in texts.items():
        metric = family(f"penstock_{prefix}{name}", text, labels=_LABELS)
        for labels, of in counts.items():
            metric.add_metric(labels, getattr(of, name))
        yield metric


def _family(
    name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], Histogram]
) -> HistogramMetricFamily:
    """Return a Prometheus family of histograms, given by label values."""
    metric = HistogramMetricFamily(f"penstock_{name}", text, labels=labels)
    for key, of in values.items():
        bounds = map(floatToGoString, of.bounds)
        metric.add_metric(key, [*zip(bounds, of.cumulative(), strict=True)], of.total)
    return metric
