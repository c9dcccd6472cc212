"""What a worker and an isolated task's process say to each other, and how a death is put into words."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from tasklib.errors import InvalidTaskDefinition
from tasklib.outcomes import Cancelled, Completed, Failed, HeldTask, Interrupted, Problem, Snoozed, TimedOut
from tasklib.statements import ClaimedTask
from tasklib.worker.isolation.protocol import (
    IMPORTED_MAIN,
    NO_ANSWER,
    Request,
    decoded_outcome,
    encoded_outcome,
    how_it_ended,
    place_of,
)

if TYPE_CHECKING:
    from tasklib.outcomes import Outcome

texts = st.text(st.characters(exclude_categories=["Cs"]))
problems = st.builds(Problem, texts, texts, texts)
delays = st.floats(0, 1e9)
outcomes = st.one_of(
    st.builds(Completed, st.none() | texts),
    st.builds(Failed, problems, st.booleans(), st.none() | delays),
    st.builds(TimedOut, problems),
    st.builds(Snoozed, delays),
    st.builds(Cancelled, problems, st.booleans()),
    st.builds(Interrupted, st.booleans(), st.booleans()),
)
moments = st.datetimes(timezones=st.just(UTC))
held = st.builds(
    HeldTask,
    id=st.uuids(),
    name=texts,
    queue=st.just("default"),
    state=st.sampled_from(["claimed", "running"]),
    worker_id=texts,
    fencing_token=st.integers(1, 2**63 - 1),
    attempt=st.integers(0, 9),
    retry_count=st.integers(0, 9),
    max_retries=st.integers(0, 9),
    crash_count=st.integers(0, 9),
    strikes=st.integers(0, 9),
    suspect=st.booleans(),
    on_crash=st.sampled_from(["retry", "fail"]),
    timeout_seconds=st.none() | delays,
    claimed_at=moments,
    started_at=st.none() | moments,
    expires_at=st.none() | moments,
    deadline_at=st.none() | moments,
    cancel_asked_at=st.none() | moments,
)
claimed = st.builds(
    ClaimedTask,
    held=held,
    args=texts,
    kwargs=texts,
    tags=texts,
    parent_id=st.none() | st.uuids(),
    store_result=st.booleans(),
    id_text=texts,
    waited_seconds=st.floats(0, 1e9),
    claim_id=st.integers(1, 2**63 - 1),
)


@given(outcomes)
def test_an_outcome_comes_out_as_it_went_in(outcome: Outcome) -> None:
    """Every kind that a task's process can come to."""
    assert decoded_outcome(from_json(to_json(encoded_outcome(outcome)))) == outcome


@given(claimed, moments, st.floats(0, 1e9))
def test_a_task_comes_out_as_it_went_in(task: ClaimedTask, moment: datetime, monotonic: float) -> None:
    """With ids and times, which JSON does not have."""
    request = Request(task, "a.b", monotonic, moment, (moment, monotonic), is_always_isolated=True)
    read = Request.decode(request.encode())
    assert read == request
    assert isinstance(read.claimed.held.id, UUID)


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        5,
        [],
        {},
        {"kind": []},
        {"kind": "Crashed", "reason": "x"},
        {"kind": "Completed"},
        {"kind": "Completed", "result": {"value": 1}},
        {"kind": "Failed", "problem": {"code": 1}},
        {"kind": "Snoozed", "delay_seconds": "soon"},
    ],
)
def test_what_is_no_outcome_is_none(nonsense: Any) -> None:
    """A task can write what it likes: it must not reach the worker's own statements."""
    assert decoded_outcome(nonsense) is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (1, "exited with code 1"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-signal.SIGKILL, "was killed by SIGKILL, perhaps out of memory"),
        (-63, "was killed by signal 63"),
        (NO_ANSWER, "could not send its outcome: has it closed file descriptors that are not its own?"),
    ],
)
def test_a_death_in_words(code: int, words: str) -> None:
    """For the attempt, and for who looks at it."""
    assert how_it_ended(code) == words


def test_a_function_is_found_by_its_module() -> None:
    """By its name, as every import does."""
    assert place_of(os.path.join) == "posixpath"


def test_a_script_that_starts_its_worker_at_its_import_is_told_how_to_keep_from_it() -> None:
    """The processes of isolated tasks import it again: without a guard, all that it does is done once more."""

    def task() -> None: ...

    task.__module__ = IMPORTED_MAIN
    with pytest.raises(InvalidTaskDefinition, match=r'if __name__ == "__main__":'):
        place_of(task)
