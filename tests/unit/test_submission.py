"""Options are checked, and defaults applied, before any database is asked."""

from __future__ import annotations

import inspect
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest

import tasklib
from tasklib.options import RESERVED_PARAMETERS

if TYPE_CHECKING:
    from tasklib.submission import NewTask

SOON = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def resize() -> tasklib.TaskFunction[[str, int], None]:
    @tasklib.task(queue="images", priority=5, max_retries=1, timeout_seconds=30, store_result=False, on_crash="fail")
    def resize(path: str, size: int) -> None: ...

    return resize


def test_a_task_takes_its_defaults_from_its_function(resize: Any) -> None:
    """What the decorator says holds where the submit says nothing."""
    new = resize.new("a.png", size=64)
    assert (new.name, new.args, json.loads(new.kwargs)) == ("resize", "{}", {"path": "a.png", "size": 64})
    terms = new.terms
    assert (terms.queue, terms.priority, terms.max_retries, terms.timeout_seconds) == ("images", 5, 1, 30.0)
    assert (terms.store_result, terms.on_crash, terms.delay_seconds, terms.tags) == (False, "fail", 0.0, "{}")


def test_a_submit_overrides_its_function(resize: Any) -> None:
    """Zero and False are values, not absence."""
    options = {"queue": "slow", "priority": 0, "max_retries": 0, "store_result": True, "on_crash": "retry"}
    step = resize.options(**options).options(timeout_seconds=1, delay_seconds=timedelta(minutes=2))
    terms = step.new("a", 1).terms
    assert (terms.queue, terms.priority, terms.max_retries) == ("slow", 0, 0)
    assert (terms.store_result, terms.on_crash) == (True, "retry")
    assert (terms.timeout_seconds, terms.delay_seconds) == (1.0, 120.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"queue": "Images"}, "queue"),
        ({"queue": "q" * 49}, "queue"),
        ({"queue": 5}, "queue"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"priority": True}, "priority"),
        ({"max_retries": -1}, "max_retries"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds"),
        ({"delay_seconds": -1}, "delay_seconds"),
        ({"delay_seconds": float("inf")}, "delay_seconds"),
        ({"delay_seconds": "soon"}, "delay_seconds"),
        ({"delay_seconds": 10**400}, "delay_seconds"),
        ({"delay_seconds": 1e15}, "delay_seconds"),
        ({"scheduled_at": datetime(2030, 1, 1)}, "time zone"),
        ({"scheduled_at": "tomorrow"}, "scheduled_at"),
        ({"scheduled_at": datetime.max.replace(tzinfo=UTC)}, "lie between"),
        ({"expires_at": datetime.min.replace(tzinfo=timezone(timedelta(hours=14)))}, "lie between"),
        ({"expires_at": datetime(2030, 1, 1)}, "time zone"),
        ({"scheduled_at": SOON, "delay_seconds": 5}, "not both"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": "k" * 256}, "idempotency_key"),
        ({"idempotency_key": "a\0b"}, "idempotency_key"),
        ({"idempotency_key": "\ud800"}, "idempotency_key"),
        ({"tags": {"bad key": 1}}, "bad key"),
        ({"tags": {1: 1}}, "tag"),
        ({"tags": {"a": object()}}, "tags"),
        ({"tags": {"a": "\0"}}, "tags"),
        ({"tags": {"a": "x" * 20_000}}, "tags"),
        ({"tags": ["a"]}, "tags must be a mapping"),
        ({"tags": 5}, "tags must be a mapping"),
        ({"store_result": "yes"}, "store_result"),
        ({"on_crash": "ignore"}, "on_crash"),
        ({"prioritty": 1}, "unknown option prioritty"),
    ],
)
def test_a_wrong_option_is_named(resize: Any, options: dict[str, Any], said: str) -> None:
    """Refused by us, before SQL, in words that name the option."""
    with pytest.raises((tasklib.InvalidOptions, tasklib.InvalidArguments), match=said):
        resize.options(**options).new("a.png", 64)


@pytest.mark.parametrize("name", ["", "9lives", "a b", "näme", "x" * 201, "a\n", "a;b"])
def test_a_task_cannot_be_named_anyhow(name: str) -> None:
    """Names go into logs, metrics and channels."""
    with pytest.raises(tasklib.InvalidTaskDefinition, match="task's name"):
        tasklib.Client(tasklib.Config("host=nowhere")).submit_task(name)


def test_a_submit_by_name_takes_json_values_only() -> None:
    """Without the function at hand there is no signature to convert by."""
    client = tasklib.Client(tasklib.Config("host=nowhere"))
    with pytest.raises(tasklib.InvalidArguments, match="when"):
        client.submit_task("report", when=SOON)


def test_a_plain_function_is_not_a_task() -> None:
    """The error says what is missing."""
    with pytest.raises(tasklib.TaskNotRegistered, match=r"@tasklib\.task"):
        tasklib.Client(tasklib.Config("host=nowhere")).submit_task(print)  # type: ignore[arg-type]


def test_arguments_over_the_configured_size_are_refused(resize: Any) -> None:
    """Config.max_argument_bytes counts bytes, not characters."""
    client = tasklib.Client(tasklib.Config("host=nowhere", max_argument_bytes=100))
    for path in ("x" * 100, "ä" * 45):
        with pytest.raises(tasklib.InvalidArguments, match="max_argument_bytes"):
            client.submit(resize.new(path, 64))


def test_submit_task_names_every_option() -> None:
    """Its signature is what an editor shows; it must not fall behind the options that there are."""
    parameters = inspect.signature(tasklib.submit_task).parameters
    options = {name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
    assert options == RESERVED_PARAMETERS


def test_json_for_many_leaves_out_what_is_default() -> None:
    """The text is what a bulk submit sends; what equals the SQL function's default costs bytes for nothing."""

    @tasklib.task
    def ping() -> None: ...

    plain: NewTask = ping.new()

    def sent(new: NewTask, **defaults: Any) -> dict[str, Any]:
        return dict(json.loads(new.to_json(new.terms.to_json(defaults))))

    assert sent(plain, max_retries=3) == {"id": plain.id.hex, "name": "ping", "kwargs": {}, "resolved": True}
    other = sent(plain, max_retries=7, timeout_seconds=9.0)
    assert other["otherwise"] == {"max_retries": 7, "timeout_seconds": 9.0}
    said = sent(ping.options(priority=0, max_retries=3).new(), max_retries=7)
    assert (said["priority"], said["max_retries"]) == (0, 3), "the queue may have other defaults"
    assert "otherwise" not in said
    every = ping.options(
        queue="q", priority=-1, scheduled_at=SOON, expires_at=SOON, max_retries=3, timeout_seconds=2,
        deadline_seconds=5, tags={"a": [1]}, idempotency_key='"k"', store_result=False, on_crash="fail",
    ).new()  # fmt: skip
    assert sent(every) == {
        "id": every.id.hex, "name": "ping", "kwargs": {}, "queue": "q", "priority": -1, "tags": {"a": [1]},
        "scheduled_at": "2030-01-01T00:00:00Z", "expires_at": "2030-01-01T00:00:00Z", "timeout_seconds": 2.0,
        "max_retries": 3, "deadline_seconds": 5.0,
        "idempotency_key": '"k"', "store_result": False, "on_crash": "fail", "resolved": True,
    }  # fmt: skip
