"""tasklib for Django: `"tasklib.django"` in INSTALLED_APPS, and submits are part of `transaction.atomic()`.

`TASKS = {"default": {"BACKEND": "tasklib.django.TasklibBackend"}}` runs the tasks of `django.tasks` too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasklib.django.settings import config

if TYPE_CHECKING:
    from tasklib.django.backend import TasklibBackend

__all__ = ["TasklibBackend", "config"]


def __getattr__(name: str) -> Any:
    """The backend needs django.tasks; the rest of the app does not."""
    if name == "TasklibBackend":
        from tasklib.django.backend import TasklibBackend  # noqa: PLC0415 - see above

        return TasklibBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
