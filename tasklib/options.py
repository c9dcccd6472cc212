"""The options of a task: those of its definition, and those of one submit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from tasklib.arguments import encode_untyped
from tasklib.errors import InvalidOptions
from tasklib.names import check_key, check_queue, check_tag_key
from tasklib.number import is_number, is_whole_number
from tasklib.other_queues import SUBMIT, instead_of

if TYPE_CHECKING:
    from tasklib.retry import Backoff

OnCrash = Literal["retry", "fail"]
Isolation = Literal["worker", "process"]
DEFAULT_QUEUE = "default"
QUEUE_OPTIONS = frozenset({"priority", "max_retries", "timeout_seconds"})  # of which a queue may have defaults
MAX_TAG_BYTES = 16 * 1024
FIRST_MOMENT = datetime(1, 1, 2, tzinfo=UTC)
LAST_MOMENT = datetime(9999, 12, 30, tzinfo=UTC)  # a day short of the calendar's ends, for every time zone
CENTURY_SECONDS = 100 * 365 * 86400
MAX_ERROR_CODE = 200
_INT4 = 2**31 - 1


class SubmitOptions(TypedDict, total=False):
    """The options of a submit. None means the task function's value. No parameter of a task may have these names."""

    queue: str | None
    priority: int | None  # higher runs first; usual range -10 to 100
    delay_seconds: float | timedelta | None
    scheduled_at: datetime | None
    expires_at: datetime | None
    deadline_at: datetime | None
    deadline_seconds: float | None
    max_retries: int | None
    timeout_seconds: float | None
    tags: Mapping[str, Any] | None
    idempotency_key: str | None
    store_result: bool | None
    on_crash: OnCrash | None
    connection: Any  # the submit is part of its transaction: see tasklib/caller_transaction.py


RESERVED_PARAMETERS = frozenset(SubmitOptions.__annotations__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """The defaults of one task function. None means that the function says nothing: then the queue's default counts, or
    else the Config's value.
    """

    queue: str = DEFAULT_QUEUE
    priority: int | None = None
    max_retries: int | None = None
    timeout_seconds: float | None = None
    deadline_seconds: float | None = None
    retry_on: tuple[type[BaseException], ...] | None = None
    no_retry_on: tuple[type[BaseException], ...] = ()
    store_result: bool = True
    on_crash: OnCrash = "retry"
    backoff: Backoff | None = None
    error_codes: Mapping[type[BaseException], str] = field(default_factory=dict)
    isolation: Isolation = "worker"  # "process": each execution has a process of its own
    memory_limit_mb: int | None = None  # of that process

    def __post_init__(self) -> None:
        own = {name: getattr(self, name) for name in RESERVED_PARAMETERS & set(self.__slots__)}
        for name in ("queue", "store_result", "on_crash"):
            if own[name] is None:
                raise InvalidOptions(f"@task({name}=None): leave it out for the default")
        checked_options(own)
        _check_exception_types("retry_on", self.retry_on or ())
        _check_exception_types("no_retry_on", self.no_retry_on or ())
        _check_error_codes(self.error_codes)
        _check_isolation(self.isolation, self.memory_limit_mb)
        if self.backoff is not None and not callable(self.backoff):
            raise InvalidOptions(
                f"backoff takes tasklib.Exponential(...), Linear(...), Fixed(...) or a function of the number of the "
                f"retry that returns seconds, got {self.backoff!r}"
            )


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, each checked and in the form in which it is stored."""
    if unknown := sorted(options.keys() - RESERVED_PARAMETERS):
        raise InvalidOptions(
            f"unknown option {', '.join(unknown)}; there are: {', '.join(sorted(RESERVED_PARAMETERS))}."
            f"{instead_of(unknown, SUBMIT)}"
        )
    if options.get("delay_seconds") and options.get("scheduled_at") is not None:
        raise InvalidOptions("give delay_seconds or scheduled_at, not both")
    if options.get("deadline_seconds") is not None and options.get("deadline_at") is not None:
        raise InvalidOptions("give deadline_seconds or deadline_at, not both")
    return {name: _CHECKS[name](value) for name, value in options.items() if value is not None and name in _CHECKS}


def check_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidOptions(f"{name} must be a string, got {value!r}")
    return value


def check_whole(name: str, value: Any, least: int, most: int = _INT4) -> int:
    if not is_whole_number(value, least, most):
        raise InvalidOptions(f"{name} must be a whole number from {least} to {most}, got {value!r}")
    return int(value)


def check_moment(name: str, value: Any) -> datetime:
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise InvalidOptions(
            f"{name} must be a datetime with a time zone, e.g. datetime.now(timezone.utc) + timedelta(hours=1); "
            f"a naive one would mean another moment on another host. Got {value!r}"
        )
    if not FIRST_MOMENT <= value <= LAST_MOMENT:
        raise InvalidOptions(f"{name} must lie between {FIRST_MOMENT} and {LAST_MOMENT}, got {value!r}")
    return value.astimezone(UTC)  # JSON has no seconds in an offset


def _check_seconds(name: str, value: Any) -> float:
    if not is_number(value, 0, CENTURY_SECONDS) or value == 0:
        raise InvalidOptions(f"{name} must be a positive number of seconds, got {value!r}")
    return float(value)


def _check_delay(value: Any) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not is_number(seconds, 0, CENTURY_SECONDS):
        raise InvalidOptions(
            f"delay_seconds must be a number of seconds (or a timedelta) from zero to a century, got {value!r}"
        )
    return float(seconds)


def _check_tags(tags: Any) -> str:
    if not isinstance(tags, Mapping):
        raise InvalidOptions(f"tags must be a mapping, got {type(tags).__name__}")
    for key in tags:
        check_tag_key(key)
    return encode_untyped("tags", (), tags, max_bytes=MAX_TAG_BYTES).kwargs


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidOptions(f"{name} must be True or False, got {value!r}")
    return value


def _check_on_crash(value: Any) -> str:
    if value not in ("retry", "fail"):
        raise InvalidOptions(f'on_crash must be "retry" or "fail", got {value!r}')
    return str(value)


def _check_exception_types(name: str, types: tuple[Any, ...]) -> None:
    for kind in types:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise InvalidOptions(f"{name} takes exception classes, got {kind!r}")


def _check_error_codes(codes: Any) -> None:
    if not isinstance(codes, Mapping):
        raise InvalidOptions(f"error_codes maps exception classes to codes, got {codes!r}")
    _check_exception_types("error_codes", tuple(codes))
    for code in codes.values():
        check_error_code(code)


def _check_isolation(isolation: Any, memory_limit_mb: Any) -> None:
    if isolation not in ("worker", "process"):
        raise InvalidOptions(f'isolation must be "worker" or "process", got {isolation!r}')
    if memory_limit_mb is None:
        return
    if isolation != "process":
        raise InvalidOptions('memory_limit_mb needs isolation="process": all tasks in a worker share its memory')
    check_whole("memory_limit_mb", memory_limit_mb, 1)


def check_error_code(code: Any) -> str:
    if not isinstance(code, str) or not 1 <= len(code) <= MAX_ERROR_CODE or not code.isprintable():
        raise InvalidOptions(f"an error code is a word of 1 to {MAX_ERROR_CODE} printable characters, got {code!r}")
    return code


# Every option that is stored with the task. `connection` is not: it says where to submit.
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "queue": lambda value: check_queue(check_text("queue", value)),
    "priority": lambda value: check_whole("priority", value, -_INT4),
    "delay_seconds": _check_delay,
    "scheduled_at": partial(check_moment, "scheduled_at"),
    "expires_at": partial(check_moment, "expires_at"),
    "deadline_at": partial(check_moment, "deadline_at"),
    "deadline_seconds": partial(_check_seconds, "deadline_seconds"),
    "max_retries": lambda value: check_whole("max_retries", value, 0),
    "timeout_seconds": partial(_check_seconds, "timeout_seconds"),
    "tags": _check_tags,
    "idempotency_key": lambda value: check_key(check_text("idempotency_key", value), "idempotency_key"),
    "store_result": partial(check_flag, "store_result"),
    "on_crash": _check_on_crash,
}
