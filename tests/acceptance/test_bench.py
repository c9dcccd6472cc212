"""The benchmark in small: all of its workloads run, on a durable server, and its report is whole."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import pytest

from bench import __main__ as command
from bench.catalogue import WORKLOADS
from bench.systems import BARE, TASKLIB

if TYPE_CHECKING:
    from pathlib import Path

LIMITS = {"submit_1", "submit_10", "submit_1_draining", "submit_10_draining", "submit_10_half_loaded", "bulk", "drain"}


@pytest.mark.slow
@pytest.mark.long
def test_every_workload_yields_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python3 dev.py bench --quick`: every workload, beside the limits, with results, report and plots."""
    assert command.main(["--quick", "--results", str(tmp_path), "--docs", str(tmp_path)]) == 0

    (path,) = tmp_path.glob("bench-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    settings = found["about"]["settings"]
    assert settings["fsync"] == settings["synchronous_commit"] == settings["full_page_writes"] == "on"
    assert not found["notes"]
    printed = capsys.readouterr().out
    for workload in WORKLOADS:
        by_system = found["rounds"][workload.key]
        assert set(by_system) == {system.name for system in (TASKLIB, BARE) if workload.takes(system)}
        assert all(len(each) == 1 for each in by_system.values())
        assert f"| {workload.number} | {workload.title} |" in printed
    assert {key for key in LIMITS if BARE.name in found["rounds"][key]} == LIMITS
    page = (tmp_path / "benchmarks-report.md").read_text()
    for plot in ("ratios", "drain", "latency", "size", "dead-rows"):
        assert f"plots/{plot}.svg" in page
        ET.parse(tmp_path / "plots" / f"{plot}.svg")  # noqa: S314 - our own file


def test_what_there_is_no_room_for_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the reason; and that is no failure."""
    assert command.main(["W9", "--quick", "--finished", str(10**12), "--results", str(tmp_path)]) == 0

    assert "not run: 1,000,000,000,000 rows need" in capsys.readouterr().out


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["W99"])

    assert "no such workload: w99" in capsys.readouterr().err
