"""The options of `set_queue` and `set_cluster`: what each may be. The database has the same ranges as CHECK
constraints, and a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tasklib.errors import InvalidOptions
from tasklib.number import is_number
from tasklib.options import CENTURY_SECONDS, check_error_code, check_flag, check_whole
from tasklib.ranges import DAY_SECONDS, YEAR_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

_INT4 = 2**31 - 1
MOST_RUNNING = 1_000_000
MOST_STARTS = 1_000_000_000


class Unchanged(Enum):
    """The type of `UNCHANGED`."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Final = Unchanged.UNCHANGED  # the default of every option of `set_queue`: it stays as it is


def checked_queue_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that change something, each checked. None removes a limit."""
    return _checked(options, QUEUE_CHECKS)


def checked_cluster_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return _checked(options, CLUSTER_CHECKS)


def read_queue_options(pairs: Mapping[str, Any]) -> dict[str, Any]:
    """The options as words of a command line have them: `none`, a number, `true` or `false`, codes with commas. What
    is no text is JSON that has been read already.
    """
    return {name: _read(name, text, QUEUE_CHECKS) for name, text in pairs.items()}


def read_cluster_options(pairs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _read(name, text, CLUSTER_CHECKS) for name, text in pairs.items()}


def _checked(options: Mapping[str, Any], checks: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    _refuse_unknown(options, checks)
    given = {name: value for name, value in options.items() if value is not UNCHANGED}
    return {name: None if value is None else checks[name](value) for name, value in given.items()}


def _read(name: str, text: Any, checks: Mapping[str, Callable[[Any], Any]]) -> Any:
    _refuse_unknown([name], checks)
    if not isinstance(text, str):
        return text
    if text.lower() == "none":
        return None
    if name == "breaker_codes":
        return text.split(",")
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text  # which the check refuses, by its name


def _refuse_unknown(names: Iterable[str], checks: Mapping[str, Any]) -> None:
    if unknown := [name for name in names if name not in checks]:
        raise InvalidOptions(f"unknown option {', '.join(unknown)}; there are: {', '.join(checks)}")


def _whole(name: str, least: int, most: int = _INT4) -> Callable[[Any], int]:
    return lambda value: check_whole(name, value, least, most)


def _number(name: str, least: float, most: float) -> Callable[[Any], float]:
    def checked(value: Any) -> float:
        if not is_number(value, least, most):
            raise InvalidOptions(f"{name} must be a number from {least:g} to {most:.10g}, got {value!r}")
        return float(value)

    return checked


def _positive(name: str, most: float) -> Callable[[Any], float]:
    def checked(value: Any) -> float:
        if not is_number(value, 0, most) or value == 0:
            raise InvalidOptions(f"{name} must be a number above 0, up to {most:.10g}, got {value!r}")
        return float(value)

    return checked


def _codes(value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidOptions(f"breaker_codes must be a list of error codes, got {value!r}")
    if not (codes := list(value)):
        raise InvalidOptions("breaker_codes must have a code: with none, no failure would count. None: all count")
    return [check_error_code(code) for code in codes]


QUEUE_CHECKS: dict[str, Callable[[Any], Any]] = {
    "max_running": _whole("max_running", 0, MOST_RUNNING),
    "max_per_worker": _whole("max_per_worker", 1, MOST_RUNNING),
    "rate_limit": _whole("rate_limit", 1, MOST_STARTS),
    "rate_seconds": _number("rate_seconds", 0.01, YEAR_SECONDS),
    "rate_burst": _whole("rate_burst", 1, MOST_STARTS),
    "breaker_failures": _whole("breaker_failures", 1, 1_000_000),
    "breaker_share": _positive("breaker_share", 1),
    "breaker_window_seconds": _number("breaker_window_seconds", 1, DAY_SECONDS),
    "breaker_open_seconds": _number("breaker_open_seconds", 2, DAY_SECONDS),
    "breaker_probes": _whole("breaker_probes", 1, 1_000),
    "breaker_codes": _codes,
    "ageing_seconds": _number("ageing_seconds", 1, YEAR_SECONDS),
    "rank": _whole("rank", -1_000, 1_000),
    "weight": _number("weight", 0.001, 1_000),
    "default_priority": _whole("default_priority", -_INT4),
    "default_max_retries": _whole("default_max_retries", 0),
    "default_timeout_seconds": _positive("default_timeout_seconds", CENTURY_SECONDS),
    "retention_days": _positive("retention_days", 36_500),
    "audit": partial(check_flag, "audit"),
}
CLUSTER_CHECKS: dict[str, Callable[[Any], Any]] = {
    "cluster_wide_cap": _whole("cluster_wide_cap", 0, MOST_RUNNING),
    "refuses_unknown_queues": partial(check_flag, "refuses_unknown_queues"),
}
