"""What the supervisor tells about the daemon, once a second and to who asks, and what follows from it.

The shape is fixed here; `tasklibd status --json` and `/status` give it out as it is. Pure, and nothing but the
standard library: the command that shows it is to be quick.
"""

from __future__ import annotations

from typing import Literal, TypedDict

State = Literal["starting", "running", "paused", "draining", "stopping"]
ChildState = Literal["starting", "ready", "stopping", "waiting"]  # waiting: dead, and not yet started again
MOST_NAMED = 5  # of a list, in one line
LIVE_SECONDS = 10.0  # pushed each second; a host that is short of time may be late with some


class ChildStatus(TypedDict, total=False):
    """The keeper and the web child have the first seven."""

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
    unwritten: int  # ended, and the outcome not committed yet
    connections: int
    beat_age_seconds: float | None  # since its claim loop last went on
    cpu_percent: float
    is_hung: bool


class Status(TypedDict, total=False):
    name: str
    version: str
    pid: int
    started_at: str
    state: State
    is_healthy: bool
    problems: list[str]  # why it is not healthy: a crash loop, a port that is taken ...
    database: bool  # the keeper has a connection
    listening: bool
    elected: bool
    unclaimable: list[str]  # queues in which tasks wait that this daemon cannot claim, though it is refused nothing
    unserved: list[str]  # names that wait in the database and that nobody serves
    term: int | None  # of the election, while elected
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
    """`age_seconds`: of the last status that came. The database has no say in it."""
    return [] if age_seconds < LIVE_SECONDS else [f"the supervisor has told nothing for {age_seconds:.0f} s"]


def why_not_ready(status: Status, age_seconds: float) -> list[str]:
    """Ready: connected, migrated, claiming, not draining. A worker is `ready` once it has seen a schema that fits."""
    reasons = why_not_live(age_seconds)
    if not status:
        return reasons or ["the supervisor has not told anything yet"]
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
    """For people. What is missing is left out: the daemon may be of another version."""
    health = "healthy" if status.get("is_healthy", True) else "NOT HEALTHY"
    lines = [f"{status.get('name')} (pid {status.get('pid')}): {status.get('state')}, {health}"]
    lines += [f"  problem: {problem}" for problem in status.get("problems", [])]
    links = {"connected": status.get("database"), "listening": status.get("listening")}
    lines.append("  database: " + ", ".join(word if is_so else f"not {word}" for word, is_so in links.items()))
    lines.append(f"  cluster duties: {'here' if status.get('elected') else 'elsewhere'}")
    lines += [f"  nobody serves: {name}" for name in status.get("unserved", [])]
    lines += [f"  tasks wait that cannot be claimed, in: {queue}" for queue in status.get("unclaimable", [])]
    lines += [_describe_child(f"worker {worker.get('slot', '?')}", worker) for worker in status.get("workers", [])]
    others = {"keeper": status.get("keeper"), "web": status.get("web")}
    return lines + [_describe_child(name, child) for name, child in others.items() if child]


def headline(status: Status) -> str:
    """In one line, for a service manager. What changes all the time is told only while somebody waits for it."""
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
