"""The admin: tasks to look at, to cancel and to retry, whatever their number."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlencode
from uuid import UUID

import pytest
from django.db import connection
from django.test import Client as Browser
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

import tasklib
from tests.django_project import fixtures

if TYPE_CHECKING:
    from tests.support.raw_sql import Conn

set_up_project = fixtures.set_up_project
project = fixtures.project
others = fixtures.others


def browser_of(name: str, *permissions: str, is_superuser: bool = False) -> Browser:
    from django.contrib.auth.models import Permission, User  # noqa: PLC0415 - importable only in a project

    User.objects.filter(username=name).delete()
    user = User.objects.create(username=name, is_staff=True, is_superuser=is_superuser)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    made = Browser()
    made.force_login(user)
    return made


@pytest.fixture
def browser(project: tasklib.Config) -> Browser:
    return browser_of("root", is_superuser=True)


def listed(browser: Browser, **query: str | int) -> list[UUID]:
    """The ids on one page, in its order."""
    answer = browser.get(f"{reverse('admin:tasklib_task_changelist')}?{urlencode(query)}", follow=True)
    assert answer.status_code == 200
    return [UUID(found) for found in re.findall(r'field-id"[^>]*><a [^>]*>([0-9a-f-]{36})<', answer.content.decode())]


def act(browser: Browser, action: str, *ids: UUID) -> str:
    answer = browser.post(
        reverse("admin:tasklib_task_changelist"),
        {"action": action, "_selected_action": list(map(str, ids))},
        follow=True,
    )
    return answer.content.decode()


def test_the_list_is_newest_first_and_has_filters(browser: Browser, others: Conn) -> None:
    """By state, queue and name; and an id or a name can be searched for."""
    first = tasklib.submit_task_sync("ship", 1)
    second = tasklib.submit_task_sync("backend_pid", queue="mail")
    third = tasklib.submit_task_sync("ship", 2)
    tasklib.cancel_task(second)
    assert listed(browser) == [third, second, first]
    assert listed(browser, state="pending") == [third, first]
    assert listed(browser, state="cancelled") == [second]
    assert listed(browser, queue="mail") == [second]
    assert listed(browser, name="ship") == [third, first]
    assert listed(browser, name="ship", state="cancelled") == []
    assert listed(browser, q=str(first)) == [first]
    assert listed(browser, q="backend_pid") == [second]
    page = browser.get(reverse("admin:tasklib_task_changelist")).content.decode()
    for choice in ("?state=buried", "?queue=default", "?name=order_and_ship"):
        assert choice in page


def test_no_row_is_counted(browser: Browser, others: Conn) -> None:
    """A page costs a page: no count(*), no distinct values, none of the columns that may be large. There are as many
    pages as one can see from here: this one, and the next.
    """
    tasklib.submit_many_sync([tasklib.task(_noted).new(n) for n in range(250)])
    with CaptureQueriesContext(connection) as queries:
        assert len(listed(browser)) == 100
    about_tasks = [each["sql"].lower() for each in queries.captured_queries if '"tasklib"."tasks"' in each["sql"]]
    assert len(about_tasks) == 2  # a look beyond the page, and the page
    for sql in about_tasks:
        assert "count(" not in sql
        assert "distinct" not in sql
        assert "limit 10" in sql
        assert '"kwargs"' not in sql
    assert len(listed(browser, p=2)) == 100
    assert len(listed(browser, p=3)) == 50
    first = browser.get(reverse("admin:tasklib_task_changelist")).content.decode()
    assert re.findall(r"\?p=(\d)", first) == ["2"]
    assert "101 tasks" not in first


def _noted(number: int) -> None: ...


def test_a_task_is_shown_whole_and_cannot_be_edited(project: tasklib.Config, browser: Browser) -> None:
    """Arguments, result, error and attempts; there is no field, no save, no delete, no add."""
    task_id = tasklib.submit_task_sync("order_and_ship", note="a <b>book</b>", fail=True)
    fixtures.run_tasks(project)
    url = reverse("admin:tasklib_task_change", args=[task_id])
    page = browser.get(url).content.decode()
    assert "a &lt;b&gt;book&lt;/b&gt;" in page
    assert "raise Refused" in page
    assert re.search(r"3\. .*: FAILED, Refused:", page)
    assert "<textarea" not in page
    assert 'name="_save"' not in page
    assert browser.post(url, {"name": "other"}).status_code == 403
    assert browser.get(reverse("admin:tasklib_task_add")).status_code == 403
    assert browser.post(reverse("admin:tasklib_task_delete", args=[task_id]), {"post": "yes"}).status_code == 403
    missing = reverse("admin:tasklib_task_change", args=["00000000-0000-0000-0000-000000000000"])
    assert browser.get(missing).status_code == 302


def test_tasks_can_be_cancelled_and_retried(browser: Browser) -> None:
    """And it is told how many, and who did it is kept."""
    first, second = tasklib.submit_task_sync("ship", 1), tasklib.submit_task_sync("ship", 2)
    tasklib.cancel_task(second)
    assert "1 cancelled, 1 already final." in act(browser, "cancel", first, second)
    task = tasklib.get_task(first)
    assert tasklib.is_cancelled(task)
    assert "by root in the admin" in (task.error or "")
    assert "2 will run again." in act(browser, "retry", first, second)
    assert tasklib.is_pending(tasklib.get_task(first))


@pytest.mark.usefixtures("project")
def test_to_look_is_not_to_act() -> None:
    """Who may view tasks sees them, and no action; who may control them, too, does; others see nothing."""
    task_id = tasklib.submit_task_sync("ship", 1)
    viewer = browser_of("viewer", "view_task")
    assert listed(viewer) == [task_id]
    act(viewer, "cancel", task_id)
    assert tasklib.is_pending(tasklib.get_task(task_id))
    act(browser_of("operator", "view_task", "control_task"), "cancel", task_id)
    assert tasklib.is_cancelled(tasklib.get_task(task_id))
    assert browser_of("nobody").get(reverse("admin:tasklib_task_changelist")).status_code == 403
