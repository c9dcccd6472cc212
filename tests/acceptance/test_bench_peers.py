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


def test_every_workload_yields_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All workloads run on a durable server, and the table that is printed has a line for each."""
    found = results_of(tmp_path, "--processes", "2", beside=[])

    assert found["about"]["settings"]["fsync"] == found["about"]["settings"]["synchronous_commit"] == "on"
    assert found["about"]["settings"]["shared_buffers"] == "1GB"
    printed = capsys.readouterr().out
    for workload in peers.workloads(2):
        (measured,) = found["rounds"][workload.key]["tasklib"]
        assert all(value > 0 for value in measured.values()), workload.key
        assert f"| {workload.title} |" in printed


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_a_peer_is_measured_in_the_same_way(peer: System, tmp_path: Path) -> None:
    """A peer from PyPI submits, is drained, and starts tasks when idle; a ratio comes of it."""
    found = results_of(tmp_path, "--only", "bulk", "--only", "drain", "--only", "latency", beside=[peer])

    if peer.name in found["missing"]:
        pytest.skip(f"{peer.name} cannot be installed here: {found['missing'][peer.name]}")
    assert found["about"]["versions"][peer.name][peer.name] in peer.packages[0]
    for workload in ("bulk", "drain", "latency"):
        assert set(found["rounds"][workload]) == {"tasklib", peer.name}
        assert all(len(rounds) == 1 for rounds in found["rounds"][workload].values())


def test_what_cannot_be_installed_is_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are measured all the same."""
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path / "environments")
    nowhere = System("nowhere", ("tasklib-pg-has-no-such-peer==0.0",), left="", mode="")

    found = results_of(tmp_path, "--only", "submit_1", beside=[nowhere])

    assert list(found["missing"]) == ["nowhere"]
    assert set(found["rounds"]["submit_1"]) == {"tasklib"}
    assert "nowhere is missing" in capsys.readouterr().out


def test_more_than_one_means_that_we_are_ahead() -> None:
    """Also where less is better; and it is the median of the rounds' own ratios, not the ratio of medians."""
    by_key = {workload.key: workload for workload in peers.workloads(1)}
    rates = {"tasklib": [Measured(100), Measured(10), Measured(30)], "peer": [Measured(50), Measured(2), Measured(40)]}
    times = {"tasklib": [Measured(2.0)], "peer": [Measured(3.0)]}

    assert peers.ratios(by_key["drain"], {"drain": rates}, "peer") == [2.0, 5.0, 0.75]
    assert peers.ratios(by_key["latency"], {"latency": times}, "peer") == [1.5]
