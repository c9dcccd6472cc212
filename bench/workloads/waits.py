"""W4, W7: how soon an idle worker begins, and what it costs while it has nothing to do."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bench.harness import Measured
from bench.systems import BARE
from bench.workloads import tables
from tools.measures import percentile

if TYPE_CHECKING:
    from bench.harness import Bench
    from bench.systems import System


def latency(bench: Bench, system: System) -> Measured:
    """From before the submit, in another process, to the first line of the function in an idle worker."""
    kind = "notify" if system is BARE else "async"
    with (
        bench.database(system) as dsn,
        bench.submitter(system, dsn, kind=kind) as submitter,
        bench.workers(system, dsn, kind=kind) as (worker,),
    ):
        submitter.ask("submit", count=1, concurrency=1)
        tables.settle(bench)
        paced = submitter.ask("pace", count=bench.size.latencies, pause=bench.size.pace_seconds)
        tables.wait_until_begun([worker], bench.size.latencies)
        began = worker.stop()
    late = [(began[str(number)] - moment) * 1_000 for number, moment in enumerate(paced["submitted"])]
    return Measured(percentile(late, 50), {"p95_ms": percentile(late, 95), "p99_ms": percentile(late, 99)})


def idle(bench: Bench, system: System) -> Measured:
    """Thousandths of a core, of the worker and of PostgreSQL together."""
    with bench.database(system) as dsn, bench.workers(system, dsn) as workers:
        tables.settle(bench)
        before, began = bench.spent(workers), time.monotonic()
        time.sleep(bench.size.idle_seconds)
        after, seconds = bench.spent(workers), time.monotonic() - began
        worker = (after.worker_seconds - before.worker_seconds) / seconds * 1_000
        postgresql = (after.postgresql_seconds - before.postgresql_seconds) / seconds * 1_000
        return Measured(worker + postgresql, {"worker_millicores": worker, "postgresql_millicores": postgresql})
