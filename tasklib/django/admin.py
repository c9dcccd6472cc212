"""Tasks in the admin: they can be viewed, cancelled and retried, never edited."""

# ruff: noqa: ARG002 - Django decides on the parameters of its methods

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.contrib import admin, messages
from django.core.paginator import Paginator
from django.db import connections
from django.utils.functional import cached_property

from tasklib.application import default_client
from tasklib.django.models import Task, TaskAttempt
from tasklib.django.settings import database_alias, schema
from tasklib.registry import default_registry
from tasklib.sql import queries
from tasklib.states import UNSUCCESSFUL, State

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.db.models import QuerySet
    from django.http import HttpRequest

    ModelAdmin = admin.ModelAdmin[Task]
    TaskPaginator = Paginator[Task]
else:
    ModelAdmin = admin.ModelAdmin
    TaskPaginator = Paginator

_LARGE = ("args", "kwargs", "result", "error", "progress", "tags")


class LookaheadPaginator(TaskPaginator):
    """Looks for one row of the next page instead of counting all rows: count(*) would read every one."""

    page_number = 1

    @cached_property
    def count(self) -> int:
        """The known rows: the pages before, this page, and one row of the next."""
        before = (self.page_number - 1) * self.per_page
        seen = list(self.object_list[before : before + self.per_page + 1])
        return before + len(seen)


class StateFilter(admin.SimpleListFilter):
    title = parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(state.value, state.value) for state in State]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Task]) -> QuerySet[Task]:
        """Unsuccessful tasks are few, and have an index on their error code."""
        state = self.value()
        if state in UNSUCCESSFUL:
            queryset = queryset.filter(error_code__isnull=False)
        return queryset if state is None else queryset.filter(state=state)


class _KnownValues(admin.SimpleListFilter):
    """Offers values that are known without reading every row; other values can be written into the URL."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        known = {*self.known(), self.value()}
        return [(value, value) for value in sorted(filter(None, known))]

    def known(self) -> Iterable[str]:
        raise NotImplementedError

    def queryset(self, request: HttpRequest, queryset: QuerySet[Task]) -> QuerySet[Task]:
        value = self.value()
        return queryset if value is None else queryset.filter(**{str(self.parameter_name): value})


class NameFilter(_KnownValues):
    title = parameter_name = "name"

    def known(self) -> Iterable[str]:
        return [function.name for function in default_registry]


class QueueFilter(_KnownValues):
    title = parameter_name = "queue"

    def known(self) -> Iterable[str]:
        """The queues of the task functions, and those with waiting tasks."""
        with connections[database_alias()].cursor() as cursor:
            cursor.execute(queries("tasks", schema())["ready_queues"])
            waiting = [row[0] for row in cursor.fetchall()]
        return [*waiting, *(function.task_options.queue for function in default_registry)]


@admin.register(Task)
class TaskAdmin(ModelAdmin):
    list_display = ("id", "name", "state", "queue", "priority", "attempt", "created_at", "completed_at", "error_code")
    list_filter = (StateFilter, QueueFilter, NameFilter)
    list_max_show_all = 0
    sortable_by = ()  # newest first: any other order would sort every row
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    search_fields = ("id", "name")
    search_help_text = "A task's id, or its name."
    actions = ("cancel", "retry")
    actions_selection_counter = False  # and no "select all", which would mean all pages
    readonly_fields = ("attempts",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_control_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("tasklib.control_task"))  # type: ignore[union-attr] # staff has it

    def get_queryset(self, request: HttpRequest) -> QuerySet[Task]:
        """The list does not read the columns that may be large."""
        return super().get_queryset(request).defer(*_LARGE)

    def get_paginator(self, request: HttpRequest, *args: Any, **kwargs: Any) -> LookaheadPaginator:
        paginator = LookaheadPaginator(*args, **kwargs)
        page = request.GET.get("p", "")
        paginator.page_number = max(int(page), 1) if page.isdecimal() else 1
        return paginator

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Task], search_term: str
    ) -> tuple[QuerySet[Task], bool]:
        """Exact matches only: an index, or a scan from the newest task on, finds those."""
        term = search_term.strip()
        if not term:
            return queryset, False
        try:
            return queryset.filter(id=UUID(term)), False
        except ValueError:
            return queryset.filter(name=term), False

    @admin.display(description="attempts")
    def attempts(self, task: Task) -> str:
        return "\n".join(map(str, TaskAttempt.objects.filter(task_id=task.id))) or "-"

    @admin.action(permissions=["control"], description="Cancel: what waits will not run, what runs is asked to stop")
    def cancel(self, request: HttpRequest, tasks: QuerySet[Task]) -> None:
        reason = f"by {request.user} in the admin"
        answers = [default_client().cancel_task(task.id, reason) for task in tasks]
        self._tell(request, {"cancelled": "cancelled", "asked": "asked to stop", None: "already final"}, answers)

    @admin.action(permissions=["control"], description="Retry: run it again, now")
    def retry(self, request: HttpRequest, tasks: QuerySet[Task]) -> None:
        answers = [default_client().retry_task(task.id) for task in tasks]
        self._tell(request, {True: "will run again", False: "waiting or running already"}, answers)

    def _tell(self, request: HttpRequest, words: dict[Any, str], answers: list[Any]) -> None:
        counts = [f"{answers.count(answer)} {word}" for answer, word in words.items() if answer in answers]
        self.message_user(request, f"{', '.join(counts)}.", messages.INFO)
