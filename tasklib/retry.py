"""How long a task waits before its next attempt. Pure: chance comes in as a number.

`retry` counts from 1: the first retry, after the first run. Every delay is finite and at most `MAX_DELAY_SECONDS`,
however large the count: an exponential overflows a float at the thousandth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tasklib.errors import InvalidOptions
from tasklib.number import is_number

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_DELAY_SECONDS = 365 * 86400.0
MAX_MULTIPLIER = 1e300

Backoff: TypeAlias = "Exponential | Linear | Fixed | Callable[[int], float]"


@dataclass(frozen=True, slots=True)
class Exponential:
    """base, base * multiplier, base * multiplier^2 ..."""

    base_seconds: float = 5.0
    multiplier: float = 2.0
    cap_seconds: float = MAX_DELAY_SECONDS
    jitter: float = 0.0  # the share of the delay that chance adds or takes away, at most

    def __post_init__(self) -> None:
        _check(self, "base_seconds", "cap_seconds")
        if not is_number(self.multiplier, 1, MAX_MULTIPLIER):
            raise InvalidOptions(f"multiplier must be a number from 1 to {MAX_MULTIPLIER:g}, got {self.multiplier!r}")

    def __call__(self, retry: int) -> float:
        if self.base_seconds == 0:
            return 0.0
        try:
            return self.base_seconds * float(self.multiplier) ** (retry - 1)
        except OverflowError:
            return math.inf


@dataclass(frozen=True, slots=True)
class Linear:
    """step, 2 * step, 3 * step ..."""

    step_seconds: float = 5.0
    cap_seconds: float = MAX_DELAY_SECONDS
    jitter: float = 0.0

    def __post_init__(self) -> None:
        _check(self, "step_seconds", "cap_seconds")

    def __call__(self, retry: int) -> float:
        return self.step_seconds * retry


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    seconds: float
    jitter: float = 0.0
    cap_seconds: float = MAX_DELAY_SECONDS

    def __post_init__(self) -> None:
        _check(self, "seconds", "cap_seconds")

    def __call__(self, _retry: int) -> float:
        return self.seconds


def delay_seconds(backoff: Backoff, retry: int, chance: float = 0.5) -> float:
    """`chance` is a number from 0 to 1; one half leaves the delay as it is. If the user's own function returns NaN or a
    negative number, the task must not be lost: there is no delay then.
    """
    wanted = float(backoff(retry))
    if math.isnan(wanted) or wanted < 0:
        return 0.0
    cap: float = min(getattr(backoff, "cap_seconds", MAX_DELAY_SECONDS), MAX_DELAY_SECONDS)
    jitter: float = getattr(backoff, "jitter", 0.0)
    return min(min(wanted, cap) * (1 + jitter * (2 * chance - 1)), cap)


def _check(policy: Exponential | Linear | Fixed, *names: str) -> None:
    for name in names:
        value = getattr(policy, name)
        if not is_number(value, 0, MAX_DELAY_SECONDS):
            raise InvalidOptions(f"{name} must be a number of seconds from 0 to a year, got {value!r}")
    if not is_number(policy.jitter, 0, 1):
        raise InvalidOptions(f"jitter must be a share from 0 to 1, got {policy.jitter!r}")
