"""Statements about claims: taking tasks, and what a worker has taken. Rows are read by the names of their columns."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID  # noqa: TC003 - pydantic reads the types of ClaimedTask

from tasklib.outcomes import HeldTask
from tasklib.sql import columns, queries
from tasklib.statements.statement import Row, Statement, as_texts, read_column, read_nothing
from tasklib.states import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tasklib.config import Config

MOST_AGEING_STEPS = 1_000  # as in `claim_aged`
LEAST_PATIENCE_SECONDS = 10.0  # a worker that has lost its row has this long to notice it


class ClaimedTask(NamedTuple):
    """A task as a claim answers it."""

    held: HeldTask
    args: str | None  # JSON text: an argument that Python cannot read fails its own task, not the whole claim
    kwargs: str | None  # None, as args: too large to come with the claim
    tags: str
    parent_id: UUID | None
    store_result: bool
    id_text: str  # Python takes ten times as long to write an id
    waited_seconds: float  # since it could have run
    claim_id: int


class Place(NamedTuple):
    """The place of a task in its queue."""

    submitted: float  # seconds since 1970
    priority: int


class _ClaimRows:
    """Reads the rows of a claim that answers `claimed_columns` and some further ones. A getter for each use is made
    once, from the names: it costs no more than to read by position.
    """

    _SAME_FOR_ALL = ("state", "worker_id", "claimed_at", "started_at", "cancel_asked_at", "queue")

    def __init__(self, *further: str) -> None:
        self._columns = [*columns("claimed_columns"), *further]
        extended = [*self._columns, *self._SAME_FOR_ALL]  # a queue of the row's own comes first, and counts
        self._held = itemgetter(*(extended.index(name) for name in HeldTask._fields))
        self._rest = self.getter(*ClaimedTask._fields[1:])
        self._of_the_claim = self.getter("claim_id", "claimed_epoch")
        self._order = self.getter("priority", "submitted", "id_text")

    def getter(self, *names: str) -> Callable[[Row], Any]:
        return itemgetter(*(self._columns.index(name) for name in names))

    def tasks(self, rows: list[Row], worker_id: str, queue: str | None = None) -> list[ClaimedTask]:
        """In the order of the queue. The rows are sorted in place. The UPDATE of a claim answers in no order, and the
        server would take 1.5 us a task to sort them: five times as long.
        """
        claim_id, claimed = self._of_the_claim(rows[0])
        if claim_id is None:
            return []
        order, held_of, rest_of = self._order, self._held, self._rest
        rows.sort(key=lambda row: (-(found := order(row))[0], *found[1:]))
        same = (State.CLAIMED, worker_id, datetime.fromtimestamp(claimed, UTC), None, None, queue)
        return [ClaimedTask(HeldTask._make(held_of(row + same)), *rest_of(row)) for row in rows]


_FROM_ONE = _ClaimRows("is_short", "has_suspects", "due_seconds", "has_elsewhere", "policy_version")
_FROM_MANY = _ClaimRows("queue", "reached")
_PLACE = _FROM_ONE.getter(*Place._fields)
_OF_ONE = _FROM_ONE.getter(
    "answered_epoch", "is_short", "has_suspects", "due_seconds", "has_elsewhere", "policy_version"
)
_AGE = _FROM_ONE.getter("submitted", "priority", "claimed_epoch")
_OF_MANY = _FROM_MANY.getter("answered_epoch", "reached")


class Claim(NamedTuple):
    """The answer to a claim from one queue. If the queue had no more tasks, it also has what the worker needs to know
    before it sleeps.
    """

    tasks: list[ClaimedTask]
    answered_at: datetime  # by the database's clock
    reached: Place | None  # by the last of them
    is_short: bool
    has_suspects: bool  # they wait for a worker to take them
    due_seconds: float | None  # until the next task is due; None: none is known
    has_elsewhere: bool  # tasks are ready in queues that the worker does not look at by itself
    policy_version: int | None  # None: the queue has more, and the version was not read

    @classmethod
    def from_rows(cls, rows: list[Row], worker_id: str, queue: str) -> Claim:
        answered, is_short, has_suspects, due_seconds, has_elsewhere, version = _OF_ONE(rows[0])
        tasks = _FROM_ONE.tasks(rows, worker_id, queue)
        reached = Place._make(_PLACE(rows[-1])) if tasks else None
        answered_at = datetime.fromtimestamp(answered, UTC)
        return cls(tasks, answered_at, reached, is_short, bool(has_suspects), due_seconds, bool(has_elsewhere), version)


class MixedClaim(NamedTuple):
    """The answer to a claim from several queues."""

    tasks: list[ClaimedTask]
    answered_at: datetime | None  # by the database's clock; None: nothing came
    reached: str | None  # the last queue that was looked at; None: there are no more behind it
    policy_version: int | None = None  # it is not read

    @classmethod
    def from_rows(cls, rows: list[Row], worker_id: str) -> MixedClaim:
        if not rows:
            return cls([], None, None)
        answered, reached = _OF_MANY(rows[0])
        return cls(_FROM_MANY.tasks(rows, worker_id), datetime.fromtimestamp(answered, UTC), reached)


def read_held(row: Row) -> HeldTask:
    """From a row that begins with `held_columns`, which are the fields of a HeldTask. A test compares them."""
    return HeldTask._make(row[: len(HeldTask._fields)])


class ClaimStatements:
    def __init__(self, config: Config) -> None:
        self._claims = queries("claims", config.schema)
        self._lock_seconds = float(config.lock_timeout_seconds)
        self._lease_seconds = config.lease_seconds

    def claim(
        self,
        worker_id: str,
        queue: str,
        names: Sequence[str],
        limit: int,
        *,
        queues: Sequence[str] | None = None,
        floor: Place | None = None,
        aside: Iterable[UUID] = (),
    ) -> Statement[Claim]:
        """No suspects. `queues` are all that the worker looks at by itself, if it serves others too. `floor`: nothing
        that was submitted before this moment, and nothing of a lower priority. `aside`: rows that PostgreSQL refuses
        to change.
        """
        known = None if queues is None else list(queues)
        parameters = (
            worker_id, queue, list(names), limit, self._lock_seconds, known, *(floor or (None, None)), _texts(aside),
        )  # fmt: skip
        read = functools.partial(Claim.from_rows, worker_id=worker_id, queue=queue)
        return Statement(self._claims["claim"], parameters, read, as_bytes=lambda: as_texts(parameters))

    def claim_aged(
        self,
        worker_id: str,
        queue: str,
        names: Sequence[str],
        limit: int,
        *,
        ageing_seconds: float,
        queues: Sequence[str] | None = None,
        aside: Iterable[UUID] = (),
    ) -> Statement[Claim]:
        """As `claim`, for a queue whose tasks gain priority as they wait."""
        known = None if queues is None else list(queues)
        parameters = (worker_id, queue, list(names), limit, self._lock_seconds, known, ageing_seconds, _texts(aside))

        def read(rows: list[Row]) -> Claim:
            claim = Claim.from_rows(rows, worker_id, queue)
            return claim._replace(tasks=_in_aged_order(rows, claim.tasks, ageing_seconds), reached=None)

        return Statement(self._claims["claim_aged"], parameters, read, as_bytes=lambda: as_texts(parameters))

    def claim_each(
        self,
        worker_id: str,
        after: str,
        names: Sequence[str],
        limit: int,
        *,
        share: int,
        served: Sequence[str] | None,
        apart_from: Sequence[str],
        aside: Iterable[UUID] = (),
    ) -> Statement[MixedClaim]:
        """From the queues behind `after`, at most `share` of each. `served`: only these queues."""
        only = None if served is None else list(served)
        return self._mixed_claim(
            "claim_each", worker_id, after, list(names), limit, share, self._lock_seconds, only, list(apart_from),
            _texts(aside),
        )  # fmt: skip

    def claim_suspects(
        self,
        worker_id: str,
        queues: Sequence[str] | None,
        names: Sequence[str],
        limit: int,
        aside: Iterable[UUID] = (),
        *,
        apart_from: Iterable[str] = (),
    ) -> Statement[MixedClaim]:
        """From these queues; None: from all. They come without their arguments."""
        served = None if queues is None else list(queues)
        return self._mixed_claim(
            "claim_suspects", worker_id, served, list(names), limit, self._lock_seconds, _texts(aside), list(apart_from)
        )

    def _mixed_claim(self, query: str, worker_id: str, *further: Any) -> Statement[MixedClaim]:
        parameters = (worker_id, *further)
        read = functools.partial(MixedClaim.from_rows, worker_id=worker_id)
        return Statement(self._claims[query], parameters, read, as_bytes=lambda: as_texts(parameters))

    def arguments(self, task: HeldTask) -> Statement[tuple[str, str] | None]:
        """Those that did not come with the claim. None: the task belongs to another worker by now."""
        parameters = (task.worker_id, task.id, task.fencing_token)
        return Statement(self._claims["arguments"], parameters, _read_pair, is_change=False)

    def head(
        self, queues: Sequence[str] | None, names: Sequence[str], *, suspects: bool, aside: Iterable[UUID]
    ) -> Statement[tuple[UUID, str] | None]:
        """The task that a claim of one would take, and its name."""
        served = None if queues is None else list(queues)
        return Statement(self._claims["head"], (served, list(names), suspects, list(aside)), _read_pair)

    def held(self, worker_id: str) -> Statement[list[tuple[HeldTask, int]]]:
        """Each with the id of its claim."""
        return Statement(
            self._claims["held"],
            (worker_id,),
            lambda rows: [(read_held(row), row[-2]) for row in rows],
            is_change=False,
        )

    def extend(self, worker_id: str, task_ids: Sequence[UUID]) -> Statement[list[UUID]]:
        return Statement(self._claims["extend"], (worker_id, list(task_ids), self._lock_seconds), read_column)

    def asked_to_stop(self, worker_id: str, task_ids: Sequence[UUID]) -> Statement[list[UUID]]:
        return Statement(self._claims["asked_to_stop"], (worker_id, list(task_ids)), read_column, is_change=False)

    def abandoned(self, after: tuple[str, int]) -> Statement[list[Row]]:
        patience = max(self._lease_seconds, LEAST_PATIENCE_SECONDS)
        return Statement(self._claims["abandoned"], (*after, patience, self._lock_seconds), list, is_change=False)

    def abandoned_tasks(self, worker_id: str, claim_id: int) -> Statement[list[HeldTask]]:
        return Statement(
            self._claims["abandoned_tasks"], (worker_id, claim_id), lambda rows: [read_held(row) for row in rows]
        )

    def forget_claim(self, worker_id: str, claim_id: int) -> Statement[None]:
        return Statement(self._claims["forget"], (worker_id, claim_id), read_nothing)


def _in_aged_order(rows: list[Row], tasks: list[ClaimedTask], ageing_seconds: float) -> list[ClaimedTask]:
    """`from_rows` has put rows and tasks into the order of the queue. The sort is stable: of equal ones, the task with
    the higher priority stays first.
    """

    def effective(pair: tuple[Row, ClaimedTask]) -> int:
        submitted, priority, claimed = _AGE(pair[0])
        steps = min(int(max(claimed - submitted, 0.0) / ageing_seconds), MOST_AGEING_STEPS)
        return -int(priority + steps)

    return [task for _, task in sorted(zip(rows, tasks, strict=False), key=effective)]


def _texts(ids: Iterable[UUID]) -> list[str]:
    return [str(each) for each in ids]


def _read_pair(rows: list[Row]) -> Any:
    return rows[0] if rows else None
