"""One keeper of all is elected, by a row: it is replaced soon after it falls silent, and knows so first."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
import pytest

from tasklib.duties.statements import KeeperStatements
from tasklib.runtime.session import Session
from tasklib_daemon.election import Election, WhenElected
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import tasklib
    from tests.support.raw_sql import Conn

TTL_SECONDS = 0.3
ROW = "select holder, term, until, ctid::text, xmax::text from tasklib.elections where name = 'duties'"


class Candidate(Protocol):
    def __call__(self, holder: str, ttl_seconds: float = TTL_SECONDS) -> Election: ...


def row(conn: Conn) -> tuple[Any, ...]:
    found = conn.execute(ROW).fetchone()
    assert found is not None
    return found


def has_ended(conn: Conn) -> bool:
    """The term, by the database's clock."""
    return conn.execute("select until < clock_timestamp() from tasklib.elections").fetchone() == (True,)


@pytest.fixture
def candidate(config: tasklib.Config, conn: Conn) -> Iterator[Candidate]:
    conn.execute("delete from tasklib.elections")
    sessions: list[Session] = []

    def make(holder: str, ttl_seconds: float = TTL_SECONDS) -> Election:
        sessions.append(Session(config, holder))
        return Election(sessions[-1], KeeperStatements(config), name="duties", holder=holder, ttl_seconds=ttl_seconds)

    yield make
    for session in sessions:
        session.close()


def test_one_is_elected_and_stays_while_it_renews(candidate: Candidate, conn: Conn) -> None:
    """In one term, whose end moves on with each renewal, in the row and in its own mind; the other waits."""
    first, second = candidate("a", 60.0), candidate("b", 60.0)
    told, own = [], []
    for _ in range(3):
        first.run_once()
        second.run_once()
        assert first.is_held()
        assert not second.is_held()
        told.append(row(conn)[2])
        own.append(first._until)
    assert told[0] < told[1] < told[2]
    assert own[0] < own[1] < own[2]
    assert row(conn)[:2] == ("a", 1)


def test_who_waits_writes_nothing_and_locks_nothing(candidate: Candidate, conn: Conn) -> None:
    """It is what every other keeper does all day."""
    first, second = candidate("a", 60.0), candidate("b")
    first.run_once()
    before = row(conn)
    second.run_once()
    assert row(conn) == before


def test_the_silent_are_replaced_and_know_it_first(candidate: Candidate, conn: Conn) -> None:
    """The holder judges itself by its own clock, from before it asked: at no moment do both believe it. The first look
    of another after the end of the term makes that one the holder.
    """
    first, second = candidate("a"), candidate("b", 60.0)
    first.run_once()
    assert first.term == 1
    is_over = False
    while not second.is_held():
        assert not is_over
        is_over = has_ended(conn)
        second.run_once()
        assert not (second.is_held() and first.is_held())
    assert (first.term, second.term) == (1, 2)
    first.run_once()
    assert not first.is_held()
    assert row(conn)[:2] == ("b", 2)


def test_coming_back_after_a_lapse_is_another_term(candidate: Candidate, conn: Conn) -> None:
    """Somebody else could have been elected in between."""
    only = candidate("a")
    only.run_once()
    wait_until(lambda: has_ended(conn), "the lapse")
    assert not only.is_held()
    only.run_once()
    assert only.term == 2


def test_a_refusal_is_an_answer(candidate: Candidate, conn: Conn) -> None:
    """Nobody can be elected, and it is not the connection that is at fault: whoever is told so looks elsewhere."""
    election = candidate("a")
    election.run_once()
    answered = election.answered
    conn.execute("alter table tasklib.elections rename to hidden")
    try:
        with pytest.raises(psycopg.errors.UndefinedTable):
            election.run_once()
    finally:
        conn.execute("alter table tasklib.hidden rename to elections")
    assert election.answered > answered
    conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where pid = %s", [backend(election)])
    answered = election.answered
    with pytest.raises(psycopg.OperationalError):
        election.run_once()
    assert election.answered == answered


def backend(election: Election) -> int:
    return election._session.connection().info.backend_pid


def test_who_resigns_is_replaced_at_once(candidate: Candidate) -> None:
    """A daemon that stops does not leave the others waiting."""
    first, second = candidate("a", 60.0), candidate("b", 60.0)
    first.run_once()
    first.resign()
    second.run_once()
    assert (first.is_held(), second.is_held()) == (False, True)


def test_of_many_at_once_one_is_elected(candidate: Candidate) -> None:
    """Into an empty table."""
    candidates = [candidate(f"c{number}", 60.0) for number in range(8)]
    together = threading.Barrier(len(candidates))

    def stand(each: Election) -> None:
        together.wait(20)
        each.run_once()

    threads = [threading.Thread(target=stand, args=[each]) for each in candidates]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sum(each.is_held() for each in candidates) == 1


def test_a_renewal_that_is_being_committed_is_waited_for(
    candidate: Candidate, conn: Conn, database_url: str, direct: Callable[[str], str]
) -> None:
    """The clock and the row are looked at again when the row's lock is held."""
    first, second = candidate("a"), candidate("b")
    first.run_once()
    conn.execute("update tasklib.elections set until = clock_timestamp() - interval '1 second'")
    with psycopg.connect(direct(database_url)) as renewing:
        renewing.execute("update tasklib.elections set until = clock_timestamp() + interval '1 minute'")
        thread = threading.Thread(target=second.run_once)
        thread.start()
        blocked = "select from pg_stat_activity where wait_event_type = 'Lock' and application_name = 'tasklib:b'"
        wait_until(lambda: conn.execute(blocked).fetchone() is not None, "the candidate to be blocked")
        renewing.commit()
        thread.join(20)
    assert not second.is_held()
    assert row(conn)[0] == "a"


def test_a_duty_of_the_elected_is_done_by_no_other(candidate: Candidate) -> None:
    """And by one who has just been elected not before its time."""
    done: list[str] = []

    class Duty:
        def __init__(self, name: str) -> None:
            self.name = name

        def run_once(self) -> float | None:
            done.append(self.name)
            return None

    first, second = candidate("a", 60.0), candidate("b")
    for each in (first, second):
        each.run_once()
    for election, duty in ((first, Duty("of a")), (second, Duty("of b"))):
        WhenElected(election, duty).run_once()
        WhenElected(election, duty, after_seconds=60).run_once()
    assert done == ["of a"]
