"""Tasks that were finished long ago, for tests of what is deleted when."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

from tasklib.duties.janitor import DAY_SECONDS
from tests.support.raw_sql import literal

if TYPE_CHECKING:
    from tests.support.raw_sql import Conn


def id_of(days_ago: float) -> UUID:
    """As it would have been made then."""
    return UUID(int=int((time.time() - days_ago * DAY_SECONDS) * 1000) << 80 | uuid4().int >> 48)


def keep(conn: Conn, state: str, days_ago: float, **values: Any) -> UUID:
    """A task that was made and reached this state so many days ago."""
    then = datetime.now(UTC) - timedelta(days=days_ago)
    is_final = state not in {"pending", "retrying"}
    row: dict[str, Any] = {
        "id": id_of(days_ago), "name": "t", "state": "failed" if state == "retrying" else state,
        "ready": state == "pending", "created_at": then, "completed_at": then if is_final else None,
        "error_code": None if state in {"pending", "completed"} else "X",
        "next_retry_at": then if state == "retrying" else None, "due_at": then if state == "retrying" else None,
        **values,
    }  # fmt: skip
    columns, places = ", ".join(row), ", ".join(["%s"] * len(row))
    conn.execute(literal(f"insert into tasklib.tasks ({columns}) values ({places})"), list(row.values()))
    conn.execute(
        """insert into tasklib.task_attempts (task_id, attempt, fencing_token, started_at, finished_at, outcome,
                                              worker_id, will_retry)
           values (%s, 1, 1, now(), now(), 'COMPLETED', 'w', false)""",
        [row["id"]],
    )
    return UUID(str(row["id"]))
