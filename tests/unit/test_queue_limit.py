"""What a worker may start of a queue with a limit, and when it asks for more. Time is a number here."""

from __future__ import annotations

import math

import pytest

from tasklib.policies.queue_limit import GRANT_SECONDS, HUNGRY_SECONDS, UNUSED_SECONDS, PermitQuestion, QueueLimit
from tasklib.policies.queue_policy import ALL_QUEUES, Policies, QueuePolicy


def capped(*, own: int = 0, executing: int = 0, waiting: int = 0, slots: int = 10) -> QueueLimit:
    limit = QueueLimit(QueuePolicy("mail", has_cap=True), slots)
    limit.own = limit.held = own
    limit.executing, limit.waiting = executing, waiting
    return limit


def rated(per_second: float = 10.0, *, waiting: int = 0) -> QueueLimit:
    limit = QueueLimit(QueuePolicy("mail", starts_per_second=per_second), 10)
    limit.waiting = waiting
    return limit


def test_no_more_execute_than_it_has_permits() -> None:
    limit = capped(own=3, executing=2)
    assert limit.room(0.0) == 1
    limit.begin()
    assert limit.room(0.0) == 0
    limit.end()
    assert limit.room(0.0) == 1


def test_a_paused_queue_starts_nothing() -> None:
    limit = capped(own=3, waiting=4)
    limit.is_paused = True
    assert limit.room(0.0) == 0
    assert limit.excess(0.0, 0.01) == 4
    assert limit.is_closed(0.0)


def test_it_keeps_what_it_may_be_executing_until_the_answer_comes() -> None:
    """To keep only what executes at this moment is the near miss: tasks may start while the question is under way."""
    limit = capped(own=5, executing=2, waiting=9)
    assert limit.permit_question(0.0, free_slots=8) == PermitQuestion(wants=10, keeps=5)


def test_it_lowers_its_own_limit_before_it_gives_permits_back() -> None:
    limit = capped(own=5, executing=2)
    limit.ask_at = 100.0
    assert limit.permit_question(0.0, free_slots=8) is None  # not at once: the next task may come in a moment
    assert limit.permit_question(UNUSED_SECONDS, free_slots=8) == PermitQuestion(wants=2, keeps=2)
    assert limit.own == 2
    assert limit.room(0.0) == 0


def test_a_fallen_target_is_reached_as_tasks_end() -> None:
    limit = capped(own=5, executing=5, waiting=9)
    limit.note_permits(PermitQuestion(5, 5), permits=5, target=3, now=0.0)
    assert limit.room(0.0) == 0
    limit.end()
    question = limit.permit_question(0.0, free_slots=6)  # at once: others wait for it
    assert question is not None
    assert question.keeps == 4


def test_hungry_workers_ask_again_less_and_less_often() -> None:
    limit = capped(waiting=9)
    moments = []
    now = 0.0
    for _ in range(5):
        question = limit.permit_question(now, free_slots=10)
        assert question is not None
        limit.note_permits(question, permits=0, target=0, now=now)
        moments.append(limit.ask_at - now)
        now = limit.ask_at
    assert moments[0] == pytest.approx(HUNGRY_SECONDS[0])
    assert moments[-1] == pytest.approx(HUNGRY_SECONDS[1])
    limit.hear_ring()
    assert limit.permit_question(0.0, free_slots=10) is not None


def test_permits_that_other_queues_leave_no_slot_for_go_back() -> None:
    limit = capped(own=5, executing=1, waiting=9)
    limit.ask_at = 100.0
    limit.permit_question(0.0, free_slots=0)
    assert limit.permit_question(UNUSED_SECONDS, free_slots=0) == PermitQuestion(wants=1, keeps=1)


def test_a_grant_is_for_one_start_and_for_a_moment() -> None:
    limit = rated(waiting=5)
    assert limit.grants_wanted(0.0, free_slots=10, average_seconds=None) == 5
    limit.note_grants(sent_at=0.0, wanted=5, granted=2, next_seconds=0.5, now=0.01)
    assert limit.room(0.02) == 2
    limit.begin()
    assert limit.room(0.02) == 1
    assert limit.room(GRANT_SECONDS + 0.001) == 0
    assert limit.grants_wanted(0.2, 10, None) == 0  # the rate allows none before
    assert limit.grants_wanted(0.52, 10, None) == 5


def test_tasks_that_wait_long_for_a_grant_go_back() -> None:
    limit = rated(waiting=5)
    limit.note_grants(sent_at=0.0, wanted=5, granted=1, next_seconds=3600.0, now=0.0)
    assert limit.excess(0.0, None) == 4
    assert limit.excess(GRANT_SECONDS, None) == 5


def test_work_is_held_ahead_of_what_may_execute() -> None:
    """A tenth of a second of it, so that no permit is idle between the end of a task and the next claim."""
    assert capped(own=10).claim_room(0.01) == 110
    assert capped(own=10, executing=10, waiting=60).claim_room(0.01) == 0  # not worth a claim yet
    assert capped(own=10, executing=10, waiting=50).claim_room(0.01) == 50
    assert capped(own=10).claim_room(5.0) == 10
    assert capped(own=0).claim_room(0.01) == 0


def test_attempts_of_another_epoch_do_not_count() -> None:
    limit = QueueLimit(QueuePolicy("mail", has_cap=True, has_breaker=True, breaker_codes=["ConnectionError"]), 10)
    limit.epoch = 2
    limit.note_attempt(1, "ConnectionError")
    limit.note_attempt(2, "ValueError")
    limit.note_attempt(2, "ConnectionError")
    limit.note_attempt(2, None)
    assert (limit.succeeded, limit.failed) == (1, 1)


def test_a_pause_ends_at_its_time() -> None:
    policy = QueuePolicy("mail", is_paused=True, paused_until=100.0)
    assert policy.is_paused_at(99.0)
    assert not policy.is_paused_at(100.0)


def test_the_cap_over_all_queues_is_a_limit_of_its_own() -> None:
    policies = Policies(1, 5, {"mail": QueuePolicy("mail", rank=3), "slow": QueuePolicy("slow", max_per_worker=1)})
    assert set(policies.limited()) == {"slow", ALL_QUEUES}


def test_a_later_answer_does_not_prolong_earlier_grants() -> None:
    """The rate's period begins with the grant. A start long after it would fall into another period as well."""
    limit = rated(waiting=9)
    limit.note_grants(sent_at=0.0, wanted=9, granted=5, next_seconds=0.01, now=0.0)
    limit.note_grants(sent_at=0.09, wanted=4, granted=1, next_seconds=0.01, now=0.09)
    assert limit.room(0.095) == 6
    assert limit.room(GRANT_SECONDS + 0.001) <= 1


def test_permits_whose_answer_was_lost_are_asked_about_again() -> None:
    """The database may have given them. Nobody else could use them for as long as this worker lives."""
    limit = capped(waiting=4)
    assert limit.permit_question(0.0, free_slots=10) == PermitQuestion(wants=4, keeps=0)
    limit.waiting = 0
    assert limit.permit_question(0.1, free_slots=10) == PermitQuestion(wants=0, keeps=0)
    limit.note_permits(PermitQuestion(0, 0), permits=0, target=0, now=0.1)
    assert limit.permit_question(0.2, free_slots=10) is None


def test_a_ring_alone_is_no_reason_to_ask_for_permits() -> None:
    """Workers ring when they give permits back. If that made others ask, idle workers would never come to rest."""
    limit = capped()
    limit.hear_ring()
    assert limit.permit_question(0.0, free_slots=10) is None
    busy = capped(own=1, executing=1)
    busy.ask_at = 100.0
    busy.hear_ring()
    assert busy.permit_question(0.0, free_slots=9) == PermitQuestion(wants=10, keeps=1)


def test_a_worker_that_wants_no_more_takes_its_wish_back() -> None:
    """While it is noted as hungry, all others get no more than their share."""
    limit = capped(waiting=4)
    question = limit.permit_question(0.0, free_slots=10)
    assert question is not None
    limit.note_permits(question, permits=0, target=0, now=0.0)
    limit.waiting = 0
    assert limit.seconds_left(0.0) <= UNUSED_SECONDS
    assert limit.permit_question(0.01, free_slots=10) is None
    assert limit.permit_question(0.01 + UNUSED_SECONDS, free_slots=10) == PermitQuestion(wants=0, keeps=0)
    limit.note_permits(PermitQuestion(0, 0), permits=0, target=0, now=0.1)
    assert limit.permit_question(100.0, free_slots=10) is None
    assert limit.seconds_left(100.0) == math.inf
