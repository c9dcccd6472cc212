"""What the claimer does after a look at the queues: a pure decision."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tasklib.worker.sleep import STEPS, Move, Situation, next_move

IDLE = Situation(
    queues_are_empty=True, has_claimed=False, has_capacity=False, may_arm=True, is_armed=True, is_at_rest=False,
    is_busy=False, is_due=False, tried=frozenset(),
)  # fmt: skip
FULL = IDLE._replace(queues_are_empty=False)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, Move.SLEEP),
        ({"is_armed": False, "is_at_rest": True}, Move.ARM),
        ({"is_armed": False, "tried": {Move.ARM}}, Move.SLEEP),  # the lock could not be had: it is tried again soon
        ({"is_armed": False, "has_claimed": True}, Move.STAY_AWAKE),
        ({"has_claimed": True}, Move.SLEEP),
        ({"is_busy": True}, Move.STAY_AWAKE),
        ({"is_due": True}, Move.PROMOTE),
        ({"is_due": True, "tried": {Move.PROMOTE}}, Move.SLEEP),
        ({"is_due": True, "is_armed": False}, Move.ARM),
        ({"may_arm": False}, Move.DISARM),
        ({"may_arm": False, "is_armed": False}, Move.DISARM),  # some of its locks are left
        ({"may_arm": False, "is_armed": False, "is_at_rest": True}, Move.SLEEP),  # until the next poll
    ],
)
def test_a_worker_with_empty_queues(changed: dict[str, Any], expected: Move) -> None:
    """It sleeps, but only with an armed doorbell, if notifications reach it, and after it has promoted due tasks."""
    assert next_move(IDLE._replace(**changed)) is expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, Move.WAIT_FOR_SLOT),
        ({"has_capacity": True}, Move.LOOK_AGAIN),
        ({"is_busy": True}, Move.DISARM),
        ({"is_busy": True, "is_armed": False}, Move.WAIT_FOR_SLOT),
        ({"is_due": True}, Move.WAIT_FOR_SLOT),  # promoted tasks could not be claimed
        ({"is_armed": False, "may_arm": False}, Move.WAIT_FOR_SLOT),
    ],
)
def test_a_worker_whose_queues_have_more(changed: dict[str, Any], expected: Move) -> None:
    """It looks again when it has capacity. While it is busy, no insert has to notify it."""
    assert next_move(FULL._replace(**changed)) is expected


def all_situations() -> list[Situation]:
    tried = [set(each) for count in range(3) for each in itertools.combinations((Move.ARM, Move.PROMOTE), count)]
    flags = itertools.product([False, True], repeat=8)
    return [Situation._make([*each, moves]) for each in flags for moves in tried]


def test_no_worker_sleeps_without_a_doorbell_that_it_could_have() -> None:
    """Unless it has just tried to arm it. Otherwise no insert would wake it."""
    for at in all_situations():
        if next_move(at) is Move.SLEEP and at.may_arm:
            assert at.is_armed or Move.ARM in at.tried


def test_every_round_ends() -> None:
    """A step changes what it is decided by, so that it is not chosen again."""
    for situation in all_situations():
        at, moves = situation, []
        while (move := next_move(at)) in STEPS:
            moves.append(move)
            assert len(moves) == len(set(moves))
            disarmed = {"is_armed": False, "is_at_rest": True} if move is Move.DISARM else {}
            at = at._replace(tried={*at.tried, move}, **disarmed)
