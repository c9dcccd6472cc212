"""The daemon's status, as `tasklibd status --json` and `/status` show it, and what follows from it.

Pure, and only with the standard library, so that the command starts quickly.
"""

from __future__ import annotations

from typing import Literal, TypedDict

DaemonState = Literal["starting", "running", "paused", "draining", "stopping"]
ChildState = Literal["starting", "ready", "stopping", "waiting"]  # waiting: dead, and to be started again
MOST_NAMED = 5  # names in one line
LIVE_SECONDS = 10.0  # a status comes every second, and on a busy host somewhat later


class ChildStatus(TypedDict, total=False):
    """The keeper and the web child have only the first seven."""

    slot: int
    pid: int | None
    state: ChildState
    started_at: str | None
    restarts: int
    memory_bytes: int
    cpu_seconds: float
    worker_id: str | None
    running: int
    claimed: int
    ended: int
    unwritten: int  # ended, with an outcome that is not committed yet
    connections: int
    beat_age_seconds: float | None  # since the last round of its claim loop
    cpu_percent: float
    is_hung: bool


class Status(TypedDict, total=False):
    name: str
    version: str
    pid: int
    started_at: str
    state: DaemonState
    is_healthy: bool
    problems: list[str]  # why it is not healthy: a crash loop, a port that is taken ...
    database: bool  # the keeper has a connection
    listening: bool
    elected: bool
    unclaimable: list[str]  # queues with waiting tasks that this daemon cannot claim, though it gets no error
    unserved: list[str]  # names of waiting tasks that no worker serves
    term: int | None  # only while elected
    connections: int  # of the keeper
    budget: int  # connections that the daemon may open
    wanted_workers: int
    concurrency: int
    memory_bytes: int  # of the supervisor
    cpu_seconds: float
    workers: list[ChildStatus]
    keeper: ChildStatus
    web: ChildStatus


def why_not_live(age_seconds: float) -> list[str]:
    """`age_seconds` is that of the last status. The database plays no part in it."""
    return [] if age_seconds < LIVE_SECONDS else [f"the supervisor has not reported for {age_seconds:.0f} s"]


def why_not_ready(status: Status, age_seconds: float) -> list[str]:
    """Ready means connected, migrated, claiming and not draining. A worker is ready once it has checked the schema."""
    reasons = why_not_live(age_seconds)
    if not status:
        return reasons or ["the supervisor has not reported yet"]
    state = status.get("state", "starting")
    if state != "running":
        reasons.append(f"the daemon is {state}")
    if not status.get("database", False):
        reasons.append("there is no connection to the database")
    if unclaimable := status.get("unclaimable"):
        reasons.append(
            f"tasks wait that cannot be claimed, in: {', '.join(unclaimable[:MOST_NAMED])}; see tasklib doctor"
        )
    if not any(_is_claiming(worker) for worker in status.get("workers", [])):
        reasons.append("no worker is ready and claiming")
    if not status.get("is_healthy", True):
        reasons += status.get("problems", []) or ["the daemon is not healthy"]
    return reasons


def describe(status: Status) -> list[str]:
    """For people. Missing values are left out, because the daemon may be of another version."""
    health = "healthy" if status.get("is_healthy", True) else "NOT HEALTHY"
    lines = [f"{status.get('name')} (pid {status.get('pid')}): {status.get('state')}, {health}"]
    lines += [f"  problem: {problem}" for problem in status.get("problems", [])]
    links = {"connected": status.get("database"), "listening": status.get("listening")}
    lines.append("  database: " + ", ".join(word if is_so else f"not {word}" for word, is_so in links.items()))
    lines.append(f"  cluster duties: {'here' if status.get('elected') else 'elsewhere'}")
    lines += [f"  no worker serves: {name}" for name in status.get("unserved", [])]
    lines += [f"  tasks wait that cannot be claimed, in: {queue}" for queue in status.get("unclaimable", [])]
    lines += [_describe_child(f"worker {worker.get('slot', '?')}", worker) for worker in status.get("workers", [])]
    others = {"keeper": status.get("keeper"), "web": status.get("web")}
    return lines + [_describe_child(name, child) for name, child in others.items() if child]


def headline(status: Status) -> str:
    """One line for a service manager. Numbers that change all the time are in it only while the daemon stops."""
    state, workers = status.get("state", "starting"), status.get("workers", [])
    ready = sum(_is_claiming(worker) for worker in workers)
    words = [f"{ready} of {status.get('wanted_workers', len(workers))} workers ready"]
    if state in {"draining", "stopping"}:
        words = [f"{sum(worker.get('running', 0) for worker in workers)} tasks execute"]
    if not status.get("database", False):
        words.append("no connection to the database")
    return f"{state}: {', '.join([*words, *status.get('problems', [])])}"


def _describe_child(name: str, child: ChildStatus) -> str:
    words = [f"  {name:<10} {child.get('state', '?'):<9} pid {child.get('pid') or '-'}"]
    words += [f"{child.get(key)} {key}" for key in ("running", "claimed", "ended", "restarts") if key in child]
    if "memory_bytes" in child:
        words.append(f"{child['memory_bytes'] / 1024 / 1024:.0f} MB")
    if "cpu_percent" in child:
        words.append(f"{child['cpu_percent']:.0f} % CPU")
    return "  ".join(words) + ("  HUNG" if child.get("is_hung") else "")


def _is_claiming(worker: ChildStatus) -> bool:
    return worker.get("state") == "ready" and not worker.get("is_hung", False)
