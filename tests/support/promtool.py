"""Prometheus's own judgement of what is exposed. Where it is not installed, the tests that need it are skipped; in CI
it is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

PROMTOOL = os.environ.get("TASKLIB_TEST_PROMTOOL") or shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")


def check_metrics(text: str) -> str:
    """What `promtool check metrics` says: nothing, if all is well."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr + ("" if done.returncode == 0 else f"exit code {done.returncode}")


def parsed(text: str) -> Series:
    """Every sample by its name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float | None:
    return series.get((name, frozenset(labels.items())))


def by_labels(series: Series, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The samples of one metric by these labels, summed over the others."""
    found: dict[tuple[str, ...], float] = {}
    for (sample, pairs), number in series.items():
        if sample == name:
            key = tuple(dict(pairs)[label] for label in labels)
            found[key] = found.get(key, 0.0) + number
    return found
