"""Metrics for Prometheus.

    metrics = PrometheusSignals()
    box = Pillarbox(engine, ..., signals=[metrics])
    app.mount("/metrics", metrics)              # an ASGI application; `pillarbox relay --http` serves it by itself

Values are kept in plain dictionaries and converted at each scrape, so an update costs no more than an addition. Gauges
are read at each scrape, too.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import accumulate
from typing import Any
from weakref import WeakSet

from . import telemetry
from .errors import ConfigurationError, MissingExtraError
from .telemetry import Labels, Metric, Observer, Sample, Source

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.core import Metric as Family
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ImportError:
    raise MissingExtraError("PrometheusSignals", extra="prometheus") from None

OTHER = "other"
"""The tenant label of tenants beyond the limit."""

_Scope = MutableMapping[str, Any]


class _Histogram:
    """Counts per bound, one more for values above all bounds, and the sum of the values."""

    __slots__ = ("counts", "total")

    def __init__(self, bounds: int) -> None:
        self.counts = [0] * (bounds + 1)
        self.total = 0.0


class PrometheusSignals(Observer, Collector):
    """The metrics of a process, and the ASGI application that serves them.

    ``registry`` is one of prometheus_client's, if it has other metrics, too; by default it is a new one.
    ``tenant_label`` adds the label ``tenant`` to the metrics that support it, for the first ``tenant_limit`` tenants;
    all others are ``other``.
    """

    def __init__(
        self, registry: CollectorRegistry | None = None, *, tenant_label: bool = False, tenant_limit: int = 50
    ) -> None:
        if tenant_limit < 1:
            raise ConfigurationError(f"tenant_limit must be at least 1, got {tenant_limit}")
        self.by_tenant = tenant_label
        self._tenant_limit = tenant_limit
        self._tenants: set[str] = set()
        self._lock = threading.Lock()
        self._sources: WeakSet[Source] = WeakSet()
        self._asked: list[Sample] = []
        self._counts: dict[Metric, dict[Labels, int]] = {}
        self._histograms: dict[Metric, dict[Labels, _Histogram]] = {}
        for metric in telemetry.METRICS:  # metrics without labels exist from the beginning
            if metric.kind == "counter":
                self._counts[metric] = {} if self._labels(metric) else {(): 0}
            elif metric.kind == "histogram":
                empty: dict[Labels, _Histogram] = {} if self._labels(metric) else {(): _Histogram(len(metric.buckets))}
                self._histograms[metric] = empty
        self.registry = registry if registry is not None else CollectorRegistry()
        self.registry.register(self)

    # -- updates -------------------------------------------------------------------------------------------------------

    def count(self, metric: Metric, labels: Labels, amount: int, tenant: str | None = None) -> None:
        """See `Observer.count`."""
        with self._lock:
            counts = self._counts[metric]
            labels = self._with_tenant(metric, labels, tenant)
            counts[labels] = counts.get(labels, 0) + amount

    def observe(self, metric: Metric, labels: Labels, values: Mapping[float, int], tenant: str | None = None) -> None:
        """See `Observer.observe`."""
        with self._lock:
            labels = self._with_tenant(metric, labels, tenant)
            histogram = self._histograms[metric].get(labels)
            if histogram is None:
                histogram = self._histograms[metric][labels] = _Histogram(len(metric.buckets))
            bounds, counts = metric.buckets, histogram.counts
            for value, times in values.items():
                counts[bisect_left(bounds, value)] += times
                histogram.total += value * times

    def watch(self, source: Source) -> None:
        """See `Observer.watch`."""
        self._sources.add(source)

    def _labels(self, metric: Metric) -> Labels:
        return (*metric.labels, "tenant") if self.by_tenant and metric.by_tenant else metric.labels

    def _with_tenant(self, metric: Metric, labels: Labels, tenant: str | None) -> Labels:
        if not (self.by_tenant and metric.by_tenant):
            return labels
        if tenant is not None and tenant not in self._tenants:
            if len(self._tenants) < self._tenant_limit:
                self._tenants.add(tenant)
            else:
                tenant = OTHER
        return (*labels, tenant or "")

    # -- scrapes -------------------------------------------------------------------------------------------------------

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics and their content type. Reads gauges first."""
        asked: list[Sample] = []
        for source in [*self._sources]:
            asked += await source.asked()
        self._asked = asked
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def describe(self) -> Iterable[Family]:
        """See prometheus_client: the names, for its check for duplicates."""
        return [self._family(metric) for metric in telemetry.METRICS]

    def collect(self) -> Iterator[Family]:
        """See prometheus_client. Samples from the database are those of the last `render`, and are returned once."""
        gauges = _added([sample for source in [*self._sources] for sample in source.samples()] + self._asked)
        self._asked = []
        for metric in telemetry.METRICS:
            family = self._family(metric)
            with self._lock:
                if isinstance(family, HistogramMetricFamily):
                    for labels, histogram in self._histograms[metric].items():
                        family.add_metric(labels, _cumulated(metric, histogram), histogram.total)
                elif isinstance(family, CounterMetricFamily):
                    for labels, amount in self._counts[metric].items():
                        family.add_metric(labels, amount)
                elif isinstance(family, GaugeMetricFamily):
                    for labels, value in gauges.get(metric, {}).items():
                        family.add_metric(labels, value)
            yield family

    def _family(self, metric: Metric) -> Family:
        families: dict[str, Callable[..., Family]] = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        return families[metric.kind](metric.name, metric.help, labels=self._labels(metric))

    async def __call__(
        self,
        scope: _Scope,
        receive: Callable[[], Awaitable[_Scope]],  # noqa: ARG002  requests have no body
        send: Callable[[_Scope], Awaitable[None]],
    ) -> None:
        """The ASGI application: GET returns the metrics."""
        if scope["type"] != "http":
            return
        status, body, kind = 405, b"", "text/plain"
        if scope["method"] in ("GET", "HEAD"):
            accept = b",".join(value for name, value in scope["headers"] if name == b"accept").decode("latin-1")
            (body, kind), status = await self.render(accept), 200
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body if scope["method"] != "HEAD" else b""})


def _added(samples: Iterable[Sample]) -> dict[Metric, dict[Labels, float]]:
    """Merge the gauges of several relays or boxes in one process: lanes are added, of ages the highest counts."""
    shown: dict[Metric, dict[Labels, float]] = {}
    for metric, labels, value in samples:
        values = shown.setdefault(metric, {})
        before = values.get(labels, 0.0)
        values[labels] = max(before, value) if metric.unit == "seconds" else before + value
    return shown


def _cumulated(metric: Metric, histogram: _Histogram) -> list[tuple[str, float]]:
    bounds = [*(f"{bound:g}" for bound in metric.buckets), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
