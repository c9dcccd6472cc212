"""`/metrics`: what was told last, as Prometheus reads it.

Made at most once for each thing that is told, which is once a second: a hundred scrapes a second cost no more than the
sending. Neither the database nor a worker is asked.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family

from tasklib_daemon import metrics, samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tasklib_daemon.metrics import Metric
    from tasklib_daemon.samples import Sample
    from tasklib_daemon.web.app import Heard

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FRESH_SECONDS = 1.0  # ages are made anew after that, also if nobody tells anything


class Exposition:
    def __init__(self, heard: Heard) -> None:
        self._heard = heard
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._text = b""
        self._made_of = (-1, 0.0)

    def text(self) -> bytes:
        version, made_at = self._made_of
        now = self._heard.now()
        if version != self._heard.version or now - made_at > FRESH_SECONDS:
            self._text = generate_latest(self._registry)
            self._made_of = (self._heard.version, now)
        return self._text

    def collect(self) -> Iterator[Family]:
        heard = self._heard
        found = samples.of_daemon(heard.status, heard.age_seconds, heard.totals, heard.cluster)
        return families(found)


def families(found: Iterable[Sample]) -> Iterator[Family]:
    """In the order in which metrics are named."""
    by_metric: dict[Metric, list[Sample]] = {}
    for sample in found:
        by_metric.setdefault(sample.metric, []).append(sample)
    for metric in metrics.ALL:
        if metric in by_metric:
            yield _family(metric, by_metric[metric])


def _family(metric: Metric, found: Iterable[Sample]) -> Family:
    family = Family(metrics.PREFIX + metric.name, metric.help, metric.kind)
    for sample in found:
        labels = dict(zip(metric.labels, sample.labels, strict=True))
        if metric.kind == "histogram":
            _add_histogram(family, labels, sample)
        else:
            family.add_sample(metric.full_name, labels, sample.values[0])
    return family


def _add_histogram(family: Family, labels: dict[str, str], sample: Sample) -> None:
    *buckets, total = sample.values
    bounds = [*(f"{bound:g}" for bound in sample.metric.buckets), "+Inf"]
    counts = [*itertools.accumulate(buckets)]
    for bound, count in zip(bounds, counts, strict=True):
        family.add_sample(f"{family.name}_bucket", labels | {"le": bound}, count)
    family.add_sample(f"{family.name}_count", labels, counts[-1])
    family.add_sample(f"{family.name}_sum", labels, total)
