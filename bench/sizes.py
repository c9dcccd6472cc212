"""How large the workloads are. The defaults are those of a full run; QUICK is for a test that they all work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    tasks: int = 50_000  # in a drain, and submitted in bulk
    submits: int = 1_000  # by one submitter; ten make three times as many
    latencies: int = 300
    pace_seconds: float = 0.02  # between two submits to an idle worker
    settle_seconds: float = 2.0  # in which workers start, and fall idle
    idle_seconds: float = 10.0
    standing: int = 60_000  # tasks that a worker has before it while others are submitted
    backlog: int = 1_000_000  # ready
    backlog_drain: int = 100_000  # so many of them are run
    snapshot_tasks: int = 200_000
    delayed: int = 1_000_000
    finished: int = 10_000_000
    nap_seconds: float = 10.0  # of work in naps at full concurrency
    trial_seconds: float = 5.0  # of each rate that is tried
    sustain_seconds: float = 300.0
    retention_seconds: float = 60.0
    daemons: int = 5
    daemon_workers: int = 10
    storm_seconds: float = 20.0
    storm_connections: int = 200


QUICK = Size(
    tasks=1_000, submits=100, latencies=20, settle_seconds=0.5, idle_seconds=1.0, standing=10_000, backlog=5_000,
    backlog_drain=1_000, snapshot_tasks=2_000, delayed=5_000, finished=5_000, nap_seconds=0.1, trial_seconds=0.4,
    sustain_seconds=2.0, retention_seconds=0.5, daemons=2, daemon_workers=2, storm_seconds=1.0, storm_connections=20,
)  # fmt: skip
