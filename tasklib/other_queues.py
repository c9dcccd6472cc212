"""The names that other task queues use, for errors that say the name in this library."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

# Attributes of a task function.
_SUBMIT = "submit_sync(...), or `await ...submit(...)` in async code"
_WITH_OPTIONS = "options(delay_seconds=..., queue=...).submit_sync(...), or `await ...submit(...)` in async code"
ATTRIBUTES = {
    "delay": _SUBMIT,
    "send": _SUBMIT,
    "enqueue": _SUBMIT,
    "defer": _SUBMIT,
    "defer_async": "`await ...submit(...)`",
    "kiq": "`await ...submit(...)`",
    "apply_async": _WITH_OPTIONS,
    "send_with_options": _WITH_OPTIONS,
    "configure": _WITH_OPTIONS,
    "s": "new(...), which makes a task for submit_many",
    "si": "new(...), which makes a task for submit_many",
    "signature": "new(...), which makes a task for submit_many",
    "apply": "a plain call: the function is still a function",
    "retry": "raise tasklib.Retry(delay_seconds=...) inside the task",
    "request": "tasklib.current_task() inside the task",
    "update_state": "tasklib.current_task().progress(...) inside the task",
}

# Options of @task.
DEFINITION = {
    "bind": "tasklib.current_task(), inside the function",
    "autoretry_for": "retry_on",
    "dont_autoretry_for": "no_retry_on",
    "retry_backoff": "backoff=tasklib.Exponential(...)",
    "retry_jitter": "backoff=tasklib.Exponential(..., jitter=0.1)",
    "default_retry_delay": "backoff=tasklib.Fixed(seconds)",
    "retry_kwargs": "max_retries and backoff",
    "retry": "max_retries and backoff",
    "time_limit": "timeout_seconds",
    "soft_time_limit": "timeout_seconds",
    "timeout": "timeout_seconds",
    "ignore_result": "store_result=False",
    "acks_late": "on_crash: a task whose worker dies runs again by default",
    "queue_name": "queue",
}

# Options of a submit.
SUBMIT = {
    "countdown": "delay_seconds",
    "delay": "delay_seconds",
    "schedule_in": "delay_seconds",
    "eta": "scheduled_at",
    "schedule_at": "scheduled_at",
    "expires": "expires_at",
    "time_limit": "timeout_seconds",
    "soft_time_limit": "timeout_seconds",
    "timeout": "timeout_seconds",
    "job_timeout": "timeout_seconds",
    "ignore_result": "store_result=False",
    "routing_key": "queue",
    "queue_name": "queue",
    "job_id": "idempotency_key",
    "task_id": "idempotency_key",
    "queueing_lock": "idempotency_key",
}


def instead_of(names: Iterable[str], table: dict[str, str]) -> str:
    """One sentence for each name that another queue uses. Empty if there is none."""
    return "".join(f" Instead of {name}, use {table[name]}." for name in names if name in table)
