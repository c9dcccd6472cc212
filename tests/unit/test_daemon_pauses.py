"""How long a place waits after each of its children's deaths."""

from __future__ import annotations

from tasklib_daemon.plan import Pauses


def waits_after(lives: list[float]) -> list[float]:
    """In seconds, without jitter."""
    pauses, failures, waits = Pauses(first_seconds=0.1, longest_seconds=30), 0, []
    for lived in lives:
        failures = 1 if pauses.forgives(lived, failures) else failures + 1
        waits.append(round(pauses.after(failures, 1.0), 1))
    return waits


def test_a_few_that_died_young_are_forgotten_when_one_has_lived() -> None:
    """Killed by chance every few seconds, a place is never kept waiting for longer than its children live."""
    assert waits_after([0.5, 0.5, 0.5, 3, 3, 0.5, 3, 3]) == [0.1, 0.2, 0.4, 0.1, 0.1, 0.2, 0.1, 0.1]


def test_who_always_dies_at_once_waits_longer_and_longer() -> None:
    assert waits_after([0.1] * 11) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30]
