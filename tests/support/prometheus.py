"""Debian's Prometheus for tests: promtool, and a server for the length of a `with` block."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import pytest
import yaml

from tests.support.promtool import PROMTOOL
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PROMETHEUS = os.environ.get("TASKLIB_TEST_PROMETHEUS") or shutil.which("prometheus")
needs_prometheus = pytest.mark.skipif(
    (PROMTOOL is None or PROMETHEUS is None) and not os.environ.get("CI"),  # there, it is an error
    reason="Prometheus is not installed here: apt-get install prometheus",
)

Sample = tuple[dict[str, str], float]


def promtool(*words: str | Path) -> str:
    """What it says. AssertionError, if it does not like what it has been given."""
    assert PROMTOOL is not None, "apt-get install prometheus"
    ended = subprocess.run([PROMTOOL, *map(str, words)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


class Prometheus:
    def __init__(self, address: str) -> None:
        self._address = address

    def query(self, expr: str) -> list[Sample]:
        """As of now. AssertionError, if it does not parse."""
        found = self._get("query", query=expr)
        if found["resultType"] == "scalar":
            return [({}, float(found["result"][1]))]
        return [(each["metric"], float(each["value"][1])) for each in found["result"]]

    def query_range(self, expr: str, *, start: float, end: float, step: float = 1.0) -> list[list[float]]:
        """Lines, as a graph has them."""
        found = self._get("query_range", query=expr, start=start, end=end, step=step)
        return [[float(value) for _, value in each["values"]] for each in found["result"]]

    def up(self) -> list[str]:
        """Targets that were scraped."""
        return [each["scrapeUrl"] for each in self._get("targets")["activeTargets"] if each["health"] == "up"]

    def _get(self, what: str, **words: Any) -> Any:
        with contextlib.closing(http.client.HTTPConnection(self._address, timeout=30)) as conn:
            conn.request("GET", f"/api/v1/{what}?{urlencode(words)}")
            answer = json.load(conn.getresponse())
        assert answer["status"] == "success", (words, answer)
        return answer["data"]


@contextlib.contextmanager
def prometheus(jobs: Mapping[str, Sequence[str]], *, rules: Sequence[Path] = ()) -> Iterator[Prometheus]:
    """Scrapes the addresses of each job every second, and evaluates the rules as often."""
    assert PROMETHEUS is not None, "apt-get install prometheus"
    with tempfile.TemporaryDirectory(prefix="prometheus-") as made:
        directory = Path(made)
        settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": list(targets)}]} for name, targets in jobs.items()
            ],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(settings), "utf-8")
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    PROMETHEUS, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        try:
            yield Prometheus(_address(process, directory / "log"))
        finally:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Its port is its own choice; it tells the log."""

    def is_ready() -> bool:
        return process.poll() is not None or "Server is ready to receive web requests" in log.read_text("utf-8")

    wait_until(is_ready, "Prometheus")
    found = re.search(r'msg="Listening on" address=(\S+)', log.read_text("utf-8"))
    assert found is not None, log.read_text("utf-8")
    return found[1]
