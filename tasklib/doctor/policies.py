"""Checks of the queues' policies: whether one holds tasks up that nobody meant to hold up, or is not kept by all.

A policy that makes tasks wait is no fault in itself. It is a finding if nothing ends it: no time, no worker, no person
who remembers it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasklib.doctor.findings import age, critical, ok, some, warning
from tasklib.sql import in_schema

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib.doctor.findings import Finding, Thresholds
    from tasklib.doctor.probe import Probe


def check_policies(probe: Probe, thresholds: Thresholds) -> Iterator[Finding]:
    yield ok("none holds tasks up for good")
    yield from _old_workers(probe)
    yield from _forgotten_permits(probe, thresholds.stuck_seconds)
    yield from _pauses(probe, thresholds.paused_seconds)
    yield from _closed_caps(probe)
    yield from _stuck_breakers(probe, thresholds.breaker_seconds)


def _old_workers(probe: Probe) -> Iterator[Finding]:
    """The database refuses them when they register, and refuses a policy while one lives. A trigger that was off, or
    SQL by hand, lets both be.
    """
    found = [
        f"{worker_id} (pid {pid} on {host}, lacks {lacks})" for worker_id, pid, host, lacks in probe.ask("ignorant")
    ]
    if found:
        yield critical(
            f"policies are in use that live workers do not know, and will not keep: {some(found)}",
            "install the present tasklib-pg on their hosts, and restart them: pip install --upgrade tasklib-pg",
            workers=found,
        )


def _forgotten_permits(probe: Probe, seconds: float) -> Iterator[Finding]:
    for queue, permits, workers, longest in probe.ask("forgotten_permits", seconds):
        yield warning(
            f"{permits} permits of {_named(queue)} are held by {workers} workers that are dead or unknown and hold no "
            f"task, the oldest for {age(longest)}: fewer tasks execute than the cap allows",
            f"select {probe.schema}.forget_permits(); any live worker or daemon does so, too: if one runs, see its log",
            queue=queue,
            permits=permits,
            seconds=round(longest),
        )


def _pauses(probe: Probe, seconds: float) -> Iterator[Finding]:
    for queue, who, why, lasted in probe.ask("forgotten_pauses", seconds):
        reason = f" ({why})" if why else ""
        yield warning(
            f"queue {queue} was paused {age(lasted)} ago by {who}{reason}, the pause has no end, and tasks wait",
            f"select {probe.schema}.resume_queue('{queue}'); or pause it again, with an end",
            queue=queue,
            seconds=round(lasted),
        )


def _closed_caps(probe: Probe) -> Iterator[Finding]:
    for (queue,) in probe.ask("closed_caps"):
        remedy = (
            f"select {probe.schema}.set_cluster('{{\"cluster_wide_cap\": null}}');"
            if queue == "*"
            else f"select {probe.schema}.set_queue('{queue}', '{{\"max_running\": null}}');"
        )
        yield warning(
            f"the cap of {_named(queue)} is 0, and tasks wait: none of them can start",
            f"{remedy} or raise it; to hold a queue up on purpose, pause it: a pause has an author and an end",
            queue=queue,
        )


def _stuck_breakers(probe: Probe, seconds: float) -> Iterator[Finding]:
    for queue, is_half_open, lasts in probe.ask("stuck_breakers", seconds):
        told = (
            f"has been half open for {age(lasts)}, and no worker has reported a probe"
            if is_half_open
            else f"stays open for {age(lasts)} more, longer than its policy says"
        )
        yield warning(
            f"the breaker of queue {queue} {told}; tasks wait",
            f"{in_schema(CLOSE_BREAKER.format(queue), probe.config.schema)} then see `workers`: does one serve it?",
            queue=queue,
            seconds=round(lasts),
        )


# Attempts that are under way count in no epoch but the one in which they began.
CLOSE_BREAKER = (
    "update tasklib.breakers set state = 'closed', epoch = epoch + 1, open_until = null, succeeded = 0, failed = 0, "
    "since = clock_timestamp() where queue = '{0}'; select tasklib.ring('{0}');"
)


def _named(queue: str) -> str:
    return "all queues together" if queue == "*" else f"queue {queue}"
