"""What a worker counts: batches in, numbers out."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any, get_args
from uuid import uuid4

import pytest

from tasklib.outcomes import AttemptOutcome, HeldTask, Problem, Settlement
from tasklib.runtime.metrics import BATCHES, SECONDS, STATEMENT_SECONDS, Counts, WorkerMetrics, histogram
from tasklib.statements import ClaimedTask
from tasklib.states import State

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PROBLEM = Problem("OOPS", "oops", "Oops: oops")


def held(name: str = "mail", queue: str = "default", **changes: Any) -> HeldTask:
    task = HeldTask(
        uuid4(), name, queue, "claimed", "worker", 1, 0, 0, 3, 0, 0, False, "retry", None, NOW, None, None, None
    )
    return task._replace(**changes)


def claimed(task: HeldTask, waited_seconds: float) -> ClaimedTask:
    return ClaimedTask(task, "{}", "{}", "{}", None, True, str(task.id), waited_seconds, 1)


def done(outcome: AttemptOutcome | None = "COMPLETED", state: State = State.COMPLETED, **more: Any) -> Settlement:
    return Settlement(state, outcome, **more)


def test_successes_are_counted_like_other_ends() -> None:
    """They come by a way of their own."""
    plain, settled = Counts(), Counts()
    ended = [(held(), 0.002), (held(), 0.004), (held(queue="bulk"), 3.0), (held("report"), 60.0)]
    plain.completed(ended)
    settled.settled((task, done(), seconds) for task, seconds in ended)
    assert plain.take() == settled.take() != {}


def test_a_batch_of_ends_is_counted_by_task_queue_and_outcome() -> None:
    """With how long each took, whatever its outcome."""
    counts = Counts()
    counts.settled([
        (held(), done(), 0.002),
        (held(), done(), 0.004),
        (held(queue="bulk"), done(), 3.0),
        (held("report"), done("TIMED_OUT", State.FAILED, problem=PROBLEM), 60.0),
    ])  # fmt: skip
    taken = counts.take()
    assert taken["finished", "mail", "default", "completed"] == [2]
    assert taken["finished", "mail", "bulk", "completed"] == [1]
    assert taken["finished", "report", "default", "timed_out"] == [1]
    assert taken["duration", "mail", "default"][-1] == pytest.approx(0.006)
    assert sum(taken["duration", "mail", "default"][:-1]) == 2
    assert counts.take() == {}


@pytest.mark.parametrize("outcome", get_args(AttemptOutcome))
def test_every_outcome_of_an_attempt_is_counted(outcome: AttemptOutcome) -> None:
    """The names are those of the view task_attempts, in small letters."""
    counts = Counts()
    counts.settled([(held(), done(outcome), 0.1)])
    assert counts.take()["finished", "mail", "default", outcome.lower()] == [1]


@pytest.mark.parametrize(
    ("settlement", "key"),
    [
        (done("FAILED", State.FAILED, problem=PROBLEM, due_at=NOW, is_retry=True), ("retried", "mail", "default")),
        (done("TIMED_OUT", State.FAILED, due_at=NOW, is_retry=True), ("retried", "mail", "default")),
        (done("FAILED", State.FAILED, problem=PROBLEM), ("failed", "mail", "default")),
        (done("WORKER_FAILURE", State.BURIED, is_crash=True, is_strike=True), ("buried", "mail")),
        (done("WORKER_FAILURE", State.PENDING, is_crash=True, suspect=True), ("suspected", "mail")),
        (done(None, State.PENDING), ("released",)),
        (done(None, State.EXPIRED), ("expired",)),
    ],
)
def test_what_followed_is_counted_too(settlement: Settlement, key: tuple[str, ...]) -> None:
    """Retries, failures for good, burials, suspects; and what never began, which is no attempt."""
    counts = Counts()
    counts.settled([(held(), settlement, 0.0)])
    taken = counts.take()
    assert taken.pop(key) == [1]
    assert {word for word, *_ in taken} <= {"finished", "duration"}
    assert ("finished" in {word for word, *_ in taken}) is settlement.began


def test_a_suspect_is_counted_once() -> None:
    """Not again each time that it brings its worker down."""
    counts = Counts()
    counts.settled([(held(suspect=True), done("WORKER_FAILURE", State.PENDING, is_crash=True, suspect=True), 0.0)])
    assert ("suspected", "mail") not in counts.take()


def test_what_was_marked_and_never_ran_took_no_time() -> None:
    """It has no start to count from."""
    counts = Counts()
    counts.settled([(held(), done("INTERRUPTED", State.PENDING), -math.inf)])
    assert counts.take()["duration", "mail", "default"] == histogram(SECONDS, [0.0])


def test_claims_tell_how_tasks_were_found_and_how_long_first_attempts_waited() -> None:
    """A later attempt has waited for its retry: that says nothing about the queue."""
    counts = Counts()
    tasks = [claimed(held(), 0.5), claimed(held(), 1.5), claimed(held(attempt=1), 300.0)]
    counts.claimed("default", tasks, "notification", 0.004)
    taken = counts.take()
    assert taken["claimed", "default", "notification"] == [3]
    assert taken["wait", "mail", "default"] == histogram(SECONDS, [0.5, 1.5])
    assert taken["claim_batch",] == histogram(BATCHES, [3])
    assert taken["claim_seconds",] == histogram(STATEMENT_SECONDS, [0.004])


def test_a_claim_that_finds_nothing_is_a_batch_of_none() -> None:
    """So that one can see how often the poll looks in vain."""
    counts = Counts()
    counts.claimed("default", [], "poll", 0.001)
    taken = counts.take()
    assert taken["claim_batch",][0] == 1
    assert not any(word in {"claimed", "wait"} for word, *_ in taken)


@pytest.mark.parametrize(("value", "bucket"), [(0.0, 0), (0.001, 0), (0.0011, 1), (7200.0, 17), (7201.0, 18)])
def test_a_bucket_holds_what_is_at_most_its_bound(value: float, bucket: int) -> None:
    """As Prometheus has it: `le` is less or equal."""
    assert histogram(SECONDS, [value])[bucket] == 1


def test_rounds_are_told_as_totals_and_counted_as_what_is_new() -> None:
    """A loop that stands still adds nothing."""
    counts = Counts()
    counts.rounds({"claim": 5, "finish": 2})
    counts.rounds({"claim": 7, "finish": 2})
    assert counts.take() == {("rounds", "worker", "claim"): [7], ("rounds", "worker", "finish"): [2]}


def test_nobody_counts_where_nobody_asks() -> None:
    """A worker without duties, that nobody watches, does not even look at its batches."""
    nobody = WorkerMetrics()
    nobody.settled(iter([]))
    nobody.settled(0)  # type: ignore[arg-type]  # it is not looked at
    nobody.claimed("default", [], "poll", 0.0)
    nobody.flushed(1, 0.0)
    nobody.failed("claim", "outage")
    nobody.rounds({"claim": 1})
    assert not nobody.is_counting


def test_what_the_dead_had_written_is_counted_by_its_row() -> None:
    """An attempt whose worker did not live to count it; the row tells all that there is to say."""
    counts = Counts()
    counts.found("mail", "default", "FAILED", seconds=timedelta(milliseconds=20).total_seconds(), will_retry=True)
    counts.found("mail", "default", "FAILED", seconds=0.02, will_retry=False)
    taken = counts.take()
    assert taken["finished", "mail", "default", "failed"] == [2]
    assert taken["retried", "mail", "default"] == [1]
    assert taken["failed", "mail", "default"] == [1]
    assert sum(taken["duration", "mail", "default"][:-1]) == 2
