"""The states and their changes, as data. That the table's CHECK agrees is tested with the schema."""

from __future__ import annotations

from tasklib.states import LEASED, TRANSITIONS, UNSUCCESSFUL, State

WAITING = {State.PENDING, State.FAILED}  # FAILED has two meanings: it waits for its retry, or gave up
FINAL = {State.COMPLETED, *UNSUCCESSFUL}


def reached_from(*states: State) -> set[State]:
    reached = set(states)
    while more := {to for before, to in TRANSITIONS.values() if before & reached} - reached:
        reached |= more
    return reached


def test_every_state_is_one_of_three_kinds() -> None:
    """Waiting, leased or final; only FAILED is of two."""
    assert set(State) == WAITING | LEASED | FINAL
    assert not LEASED & (WAITING | FINAL)
    assert {State.FAILED} == WAITING & FINAL


def test_every_verb_starts_somewhere_and_changes_something() -> None:
    """No verb leads from a state to itself, but for the two meanings of FAILED."""
    for verb, (before, after) in TRANSITIONS.items():
        assert before, verb
        assert after not in before, verb


def test_only_a_claim_leads_into_a_lease_and_only_a_start_goes_on_in_it() -> None:
    """Who holds a task has claimed it, with a token."""
    into = {verb for verb, (_, after) in TRANSITIONS.items() if after in LEASED}
    assert into == {"claim", "start"}
    assert TRANSITIONS["claim"][0] == WAITING
    assert TRANSITIONS["start"] == (frozenset({State.CLAIMED}), State.RUNNING)


def test_a_worker_settles_only_what_is_leased() -> None:
    """And may settle it from both states: what is short is never marked as running."""
    for verb in ("complete", "fail", "snooze", "release", "reap", "bury"):
        assert TRANSITIONS[verb][0] == LEASED, verb


def test_what_is_running_does_not_expire() -> None:
    """It was started before its expires_at."""
    assert State.RUNNING not in TRANSITIONS["expire"][0]


def test_only_a_person_brings_back_what_is_final() -> None:
    """`retry` alone leads out of a final state; a failed task that waits is the other FAILED."""
    out = {verb for verb, (before, _) in TRANSITIONS.items() if before & (FINAL - {State.FAILED})}
    assert out == {"retry"}
    assert TRANSITIONS["retry"][0] == FINAL


def test_every_state_is_reached_and_none_is_a_trap() -> None:
    """From the first state to all others, and from all others back: the last way out is a person's."""
    assert reached_from(State.PENDING) == set(State)
    for state in State:
        assert State.PENDING in reached_from(state), state
