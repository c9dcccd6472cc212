"""`/metrics`: the last report in the format of Prometheus.

The text is made at most once for each report, about once a second. So a hundred scrapes a second cost no more than
sending it. Neither the database nor a worker is asked.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family

from tasklib_daemon import metrics
from tasklib_daemon.web import samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tasklib_daemon.metrics import Metric
    from tasklib_daemon.web.app import LatestReport
    from tasklib_daemon.web.samples import Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FRESH_SECONDS = 1.0  # afterwards the text is made again, because ages grow without a report too


class Exposition:
    def __init__(self, report: LatestReport) -> None:
        self._report = report
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._text = b""
        self._made_of = (-1, 0.0)

    def text(self) -> bytes:
        version, made_at = self._made_of
        now = self._report.now()
        if version != self._report.version or now - made_at > FRESH_SECONDS:
            self._text = generate_latest(self._registry)
            self._made_of = (self._report.version, now)
        return self._text

    def collect(self) -> Iterator[Family]:
        report = self._report
        return families(samples.of_daemon(report.status, report.age_seconds, report.totals, report.cluster))


def families(found: Iterable[Sample]) -> Iterator[Family]:
    """In the order of `metrics.ALL`."""
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
