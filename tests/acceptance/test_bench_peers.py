"""The benchmark beside other queues, in small: it runs, and its results are whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from bench import peers
from bench.peers import Measured, System

if TYPE_CHECKING:
    from pathlib import Path

TINY = ["--rounds", "1", "--tasks", "100", "--submits", "5", "--latencies", "5"]


def results_of(directory: Path, *options: str, beside: list[System]) -> dict[str, Any]:
    assert peers.main([*TINY, "--results", str(directory), *options], beside) == 0
    (path,) = directory.glob("peers-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.slow
def test_every_workload_yields_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All workloads run on a durable server, and the table that is printed has a line for each."""
    found = results_of(tmp_path, beside=[])

    settings = found["about"]["settings"]
    assert settings["fsync"] == settings["synchronous_commit"] == settings["full_page_writes"] == "on"
    assert settings["shared_buffers"] == "1GB"
    printed = capsys.readouterr().out
    for workload in peers.workloads(1):
        (measured,) = found["rounds"][workload.key]["tasklib"]
        assert all(value > 0 for value in measured.values()), workload.key
        assert f"| {workload.title} |" in printed


@pytest.mark.slow
def test_peers_from_pypi_are_measured_in_the_same_way(tmp_path: Path) -> None:
    """Each peer makes its schema, submits, and is drained, in the version that is pinned; or is said to be missing."""
    found = results_of(tmp_path, "--only", "drain", beside=peers.PEERS)

    for peer in peers.PEERS:
        assert (peer.name in found["missing"]) != (peer.name in found["rounds"]["drain"])
    for name, measured in found["rounds"]["drain"].items():
        assert [set(each) for each in measured] == [{"value", "worker_us", "postgresql_us"}], name
    for peer in peers.PEERS:
        if peer.name in found["rounds"]["drain"]:
            assert f"{peer.name}=={found['about']['versions'][peer.name][peer.name]}" == peer.packages[0]
    if found["missing"]:
        pytest.skip(f"not installed here: {found['missing']}")


def test_what_cannot_be_installed_is_reported_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pip's reason; the others are not held up."""
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    nowhere = System("nowhere", ("tasklib-pg-has-no-such-peer==0.0",), left="", mode="")

    pythons, missing = peers.installed([nowhere, peers.TASKLIB])

    assert list(pythons) == [peers.TASKLIB]
    assert "tasklib-pg-has-no-such-peer" in missing["nowhere"]
    assert "nowhere is missing: " in peers.report([], {}, [peers.TASKLIB], missing)


def test_more_than_one_means_that_we_are_ahead() -> None:
    """Also where less is better; and it is the median of the rounds' own ratios, not the ratio of medians."""
    by_key = {workload.key: workload for workload in peers.workloads(1)}
    rates = {"tasklib": [Measured(100), Measured(10), Measured(30)], "peer": [Measured(50), Measured(2), Measured(40)]}
    times = {"tasklib": [Measured(2.0)], "peer": [Measured(3.0)]}

    assert peers.ratios(by_key["drain"], {"drain": rates}, "peer") == [2.0, 5.0, 0.75]
    assert peers.ratios(by_key["latency"], {"latency": times}, "peer") == [1.5]
