"""The states of a task, and the changes that are allowed between them. This is the only list of them.

A test compares it with the CHECK of the table.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    PENDING = "pending"  # waits for its time, its parents or a worker; `ready` tells which
    CLAIMED = "claimed"  # in a worker's buffer, or executing for less than 100 ms
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"  # with next_retry_at: waits for its next attempt; with completed_at: gave up
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # not started before its expires_at
    BURIED = "buried"  # killed its workers too often, or was held for too long too often; kept for a person


LEASED = frozenset({State.CLAIMED, State.RUNNING})
UNSUCCESSFUL = frozenset({State.FAILED, State.CANCELLED, State.EXPIRED, State.BURIED})

# verb -> (from, to). FAILED stands for both of its meanings: only the waiting one can be
# claimed, only the final one resolved; the guards of the statements tell them apart.
TRANSITIONS: dict[str, tuple[frozenset[State], State]] = {
    "claim": (frozenset({State.PENDING, State.FAILED}), State.CLAIMED),
    "start": (frozenset({State.CLAIMED}), State.RUNNING),
    "complete": (LEASED, State.COMPLETED),
    "fail": (LEASED, State.FAILED),
    "snooze": (LEASED, State.PENDING),
    "release": (LEASED, State.PENDING),
    "reap": (LEASED, State.PENDING),
    "bury": (LEASED, State.BURIED),
    "cancel": (frozenset({State.PENDING, State.CLAIMED, State.RUNNING, State.FAILED}), State.CANCELLED),
    "expire": (frozenset({State.PENDING, State.CLAIMED, State.FAILED}), State.EXPIRED),
    "pass_deadline": (frozenset({State.PENDING}), State.FAILED),  # while it waited; after an attempt it stays FAILED
    "retry": (UNSUCCESSFUL | {State.COMPLETED}, State.PENDING),
}
