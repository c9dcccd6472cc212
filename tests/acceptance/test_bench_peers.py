"""The benchmark beside other queues, in small: each peer can be installed, submits, and is drained."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from bench import __main__ as command
from bench import report, systems
from bench.figures import Results
from bench.systems import PEERS, TASKLIB, System

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_peers_are_measured_in_the_same_way(tmp_path: Path) -> None:
    """Each peer makes its schema, submits, and is drained, in the version that is pinned; or is said to be missing. Two
    of them are enough here: their drivers are all alike.
    """
    few = [peer for peer in PEERS if peer.name in {"procrastinate", "pgqueuer"}]
    names = [peer.name for peer in few]

    assert command.main(["drain", "--quick", "--tasks", "300", "--peers", *names, "--results", str(tmp_path)]) == 0

    (path,) = tmp_path.glob("bench-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    for peer in few:
        assert (peer.name in found["missing"]) != (peer.name in found["rounds"]["drain"]), found["notes"]
        if peer.name in found["rounds"]["drain"]:
            (measured,) = found["rounds"]["drain"][peer.name]
            assert measured["value"] > 0
            assert any(each in found["about"]["versions"][peer.name].values() for each in pinned(peer))
    if found["missing"]:
        pytest.skip(f"not installed here: {found['missing']}")


def test_what_cannot_be_installed_is_reported_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pip's reason; the others are not held up."""
    monkeypatch.setattr(systems, "ENVIRONMENTS", tmp_path)
    nowhere = System("nowhere", ("tasklib-pg-has-no-such-peer==0.0",), left="", mode="")

    commands, missing = systems.installed([nowhere, TASKLIB])

    assert list(commands) == [TASKLIB]
    assert "tasklib-pg-has-no-such-peer" in missing["nowhere"]
    assert "nowhere is missing: " in report.text(Results({}, missing))


def pinned(peer: System) -> list[str]:
    return [package.rpartition("==")[2] for package in peer.packages[:1]]
