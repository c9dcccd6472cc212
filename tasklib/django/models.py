"""The tables of tasklib, to read them with the ORM. Django neither creates nor changes them."""

# ruff: noqa: DJ001 - the migrations decide whether a column may be null
# The types of fields are known only to a mypy plugin, which needs a project:
# mypy: disable-error-code="var-annotated"

from __future__ import annotations

from typing import ClassVar, TypeVar

from django.db import models

from tasklib.django.connection import ensure_schema
from tasklib.django.settings import database_alias, schema
from tasklib.states import State

Row = TypeVar("Row", bound=models.Model)


class TasklibManager(models.Manager[Row]):
    def get_queryset(self) -> models.QuerySet[Row]:
        ensure_schema()
        return super().get_queryset().using(database_alias())


class Task(models.Model):
    """One submitted task."""

    id = models.UUIDField(primary_key=True)
    name = models.TextField()
    state = models.TextField(choices=[(state.value, state.value) for state in State])
    queue = models.TextField()
    priority = models.IntegerField()
    args = models.JSONField()
    kwargs = models.JSONField()
    tags = models.JSONField()
    result = models.JSONField(null=True)
    progress = models.JSONField(null=True)
    error_code = models.TextField(null=True)
    error = models.TextField(null=True)
    attempt = models.IntegerField()
    retry_count = models.IntegerField()
    max_retries = models.IntegerField()
    timeout_seconds = models.FloatField(null=True)
    idempotency_key = models.TextField(null=True)
    parent_id = models.UUIDField(null=True)
    worker_id = models.TextField(null=True)
    created_at = models.DateTimeField()
    scheduled_at = models.DateTimeField()
    expires_at = models.DateTimeField(null=True)
    deadline_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    next_retry_at = models.DateTimeField(null=True)
    cancel_asked_at = models.DateTimeField(null=True)
    completed_at = models.DateTimeField(null=True)

    objects: ClassVar[TasklibManager[Task]] = TasklibManager()

    class Meta:
        managed = False
        db_table = f'"{schema()}"."tasks"'
        ordering = ("-id",)  # ids are ordered by time
        default_permissions = ("view",)
        permissions = (("control_task", "Can cancel and retry tasks"),)

    def __str__(self) -> str:
        return f"{self.name} {self.id}"


class TaskAttempt(models.Model):
    """One run of a task, from its first line to its end."""

    pk = models.CompositePrimaryKey("task_id", "attempt")
    task_id = models.UUIDField()
    attempt = models.IntegerField()
    outcome = models.TextField()
    error_code = models.TextField(null=True)
    error_message = models.TextField(null=True)
    worker_id = models.TextField()
    started_at = models.DateTimeField()
    finished_at = models.DateTimeField()

    objects: ClassVar[TasklibManager[TaskAttempt]] = TasklibManager()

    class Meta:
        managed = False
        db_table = f'"{schema()}"."task_attempts"'
        ordering = ("attempt",)
        default_permissions = ()

    def __str__(self) -> str:
        error = f", {self.error_code}: {self.error_message}" if self.error_code else ""
        return f"{self.attempt}. {self.started_at:%Y-%m-%d %H:%M:%S %Z}: {self.outcome}{error} ({self.worker_id})"
