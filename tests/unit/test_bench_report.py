"""What the benchmark makes of its figures: ratios, verdicts on the targets, tables and plots."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from bench import plots, report
from bench.catalogue import WORKLOADS
from bench.figures import Results
from bench.harness import Measured
from bench.targets import TARGETS, Figure, Target
from bench.workloads.drains import last_quarter_of_first

if TYPE_CHECKING:
    from pathlib import Path

BY_KEY = {workload.key: workload for workload in WORKLOADS}


def results(**by_workload: dict[str, list[float]]) -> Results:
    found = Results({}, {})
    for key, by_system in by_workload.items():
        for system, values in by_system.items():
            for value in values:
                found.add(key, system, Measured(value))
    return found


def test_more_than_one_means_that_we_are_ahead() -> None:
    """Also where less is better; and it is each round's own ratio, not the ratio of medians."""
    found = results(
        drain={"tasklib": [100, 10, 30], "peer": [50, 2, 40]},
        latency={"tasklib": [2.0], "peer": [3.0]},
    )

    assert report.ratios(BY_KEY["drain"], found, "peer") == [2.0, 5.0, 0.75]
    assert report.ratios(BY_KEY["latency"], found, "peer") == [1.5]


def test_a_target_is_judged_by_the_median_of_the_rounds_ratios() -> None:
    target = Target("W3", "", Figure("drain"), Figure("drain", "bare"), at_least=0.6)
    found = results(drain={"tasklib": [50, 70, 60], "bare": [100, 100, 200]})

    assert target.measured(found) == 0.5
    assert not target.is_met(0.5)
    assert target.is_met(0.6)


def test_an_allowance_is_taken_from_ours_alone() -> None:
    """p99 at most twice the limit's, and 2 ms."""
    (target,) = [each for each in TARGETS if each.less]
    found = results(latency={})
    for system, p99 in (("tasklib", 6.0), ("bare", 2.0)):
        found.add("latency", system, Measured(1.0, {"p99_ms": p99}))

    assert target.measured(found) == 2.0
    assert target.is_met(2.0)
    assert not target.is_met(2.1)


def test_what_was_not_measured_is_not_judged() -> None:
    """Neither met nor missed: a run may be of some workloads only, and a peer may be missing."""
    found = results(drain={"tasklib": [1.0]})

    judged = [target for target in TARGETS if target.measured(found) is not None]

    assert judged == []
    assert report.targets(found) == ""


def test_targets_speak_of_workloads_that_there_are() -> None:
    for target in TARGETS:
        for figure in filter(None, (target.ours, target.beside)):
            assert figure.workload in BY_KEY
        assert (target.at_least is None) != (target.at_most is None)
        assert BY_KEY[target.ours.workload].number == target.number or target.number == "W12"


def test_the_report_tells_verdicts_figures_and_what_is_missing() -> None:
    found = results(drain={"tasklib": [90.0], "bare": [100.0]}, drain_sync={"tasklib": [45.0]})
    found.missing["nowhere"] = "no such package"
    found.note("drain_finished", "tasklib", "not run: no room")

    said = report.text(found)

    assert "| W3 | drain, 1 process, of the raw loop | at least 0.6 | 0.90 | met |" in said
    assert "| W3 | sync tasks, of async ones | at least 0.6 | 0.50 | **missed** |" in said
    assert "| W3 | drain, async tasks, 1 process | 90/s | 100/s **0.90** |" in said
    assert "- nowhere is missing: no such package" in said
    assert "- W9, drain among many finished: tasklib not run: no room" in said


def test_results_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    """And several files become one, workload by workload."""
    one, other = results(drain={"tasklib": [1.0]}), results(bulk={"tasklib": [2.0], "bare": [3.0]})
    one.add("drain", "tasklib", Measured(2.0, {"worker_us": 50.0}, {"p50_ms": [1.0, 2.0]}))
    one.write(tmp_path / "one.json")
    other.write(tmp_path / "other.json")

    found = Results.read([tmp_path / "one.json", tmp_path / "other.json"])

    assert found.rounds == one.rounds | other.rounds


def test_a_failure_of_ours_is_told_apart_from_what_has_no_place_here() -> None:
    found = results()
    found.note("drain_finished", "tasklib", "not run: no room")
    found.note("drain", "peer", "failed: RuntimeError")
    assert not found.has_failed("tasklib")

    found.note("drain", "tasklib", "failed: RuntimeError")
    assert found.has_failed("tasklib")


def test_a_drain_that_tires_is_seen() -> None:
    even, tiring = list(range(100)), [number**2 for number in range(100)]

    assert last_quarter_of_first(even) == 1.0
    assert last_quarter_of_first(tiring) < 0.2


@given(st.dictionaries(st.text(max_size=20), st.floats(0.001, 1e6), min_size=1, max_size=8), st.booleans())
def test_bars_stay_within_the_plot(values: dict[str, float], is_log: bool) -> None:
    """Whatever the values; and labels are text, never markup."""
    names = {f"system {number} <&>": value for number, value in enumerate(values.values())}

    drawn = ET.fromstring(plots.bars("title", [plots.Row("row", names)], is_log=is_log))  # noqa: S314 - our own text

    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    for bar in drawn.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, wide, high = (float(bar.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + wide <= width
        assert 0 <= y <= y + high <= height


@given(st.lists(st.floats(0, 1e6), max_size=400))
def test_lines_stay_within_the_plot(samples: list[float]) -> None:
    drawn = ET.fromstring(plots.lines("title", {"one": samples, "none": []}, unit="ms"))  # noqa: S314 - our own text

    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    for line in drawn.iter("{http://www.w3.org/2000/svg}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height
