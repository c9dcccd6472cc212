"""Verb to statement: what is sent to PostgreSQL, and how the rows that come back are read.

Statements are values. Sync and async, one's own connection and the caller's, all run the same ones.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, LiteralString, NamedTuple, TypedDict, TypeVar, Unpack
from uuid import UUID

from pydantic_core import to_json

from tasklib import arrays
from tasklib.errors import InvalidArguments, InvalidOptions
from tasklib.ids import TaskId
from tasklib.options import check_flag, check_moment, check_text, check_whole, checked_options
from tasklib.outcomes import HeldTask, Settlement
from tasklib.record import Attempt, Task
from tasklib.sql import queries
from tasklib.states import UNSUCCESSFUL, State
from tasklib.strict_json import storable
from tasklib.unfinished import Unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tasklib.config import Config
    from tasklib.submission import NewTask

T_co = TypeVar("T_co", covariant=True)
Row = tuple[Any, ...]

BATCH_ROWS = 1_000
MAX_LIST_LIMIT = 10_000
LEAST_PATIENCE_SECONDS = 10.0  # with a worker that is not registered: it may be about to find that out
# Columns of a claim's answer.
_COUNTS, _EXPIRES_AT, _OF_THE_TASK = slice(2, 11), 11, slice(12, 19)
_ID_TEXT, _OF_THE_CLAIM, _ANSWERED, _PLACE = 17, slice(19, 21), slice(21, 22), slice(22, 24)
_WHEN_SHORT = slice(24, 28)  # of a claim from one queue
_QUEUE, _REACHED = 24, 25  # of a claim from several


@dataclass(frozen=True, slots=True)
class Statement(Generic[T_co]):
    sql: LiteralString
    parameters: Sequence[Any]
    read: Callable[[list[Row]], T_co]
    is_change: bool = True
    as_bytes: Callable[[], Sequence[bytes | None]] | None = None  # the parameters once more: see send_alone
    is_binary: bool = False  # these bytes are PostgreSQL's binary form, and not text
    is_qualified: bool = False  # every name in it has its schema: it means the same on anybody's connection


class ListFilters(TypedDict, total=False):
    queue: str | None
    tags: Mapping[str, Any] | None  # tasks that have all of these
    created_after: datetime | None
    created_before: datetime | None
    final: bool | None  # True: nothing more will happen to them by themselves; False: it will
    after: UUID | str | None  # the id of the last task of the page before


class Statements:
    """The statements of one configuration: its schema and its defaults."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._sql = queries("tasks", config.schema)
        self._defaults = {
            "max_retries": config.max_retries,
            "timeout_seconds": config.default_task_timeout_seconds,
        }

    def submit(self, task: NewTask) -> Statement[TaskId]:
        if task.parent_id is not None or not task.terms.knows_function:
            batch = self._submit_batch([task])
            return Statement(
                batch.sql, batch.parameters, lambda rows: batch.read(rows).get(task.id.int, task.id), is_qualified=True
            )
        self._check_size(task)
        terms = task.terms

        def read(rows: list[Row]) -> TaskId:
            return _read_id(task, rows[0][0]) if rows else task.id

        if task.args == "{}" and terms.is_plain(self._defaults):
            parameters = (task.id, task.name, task.kwargs, terms.queue)
            return Statement(
                self._sql["submit_plain"], parameters, read, as_bytes=lambda: _as_text(parameters), is_qualified=True
            )
        all_parameters = (
            task.id, task.name, task.args, task.kwargs, terms.queue, terms.priority, terms.delay_seconds,
            _iso(terms.scheduled_at), _iso(terms.expires_at),
            terms.value("max_retries", self._defaults), terms.value("timeout_seconds", self._defaults),
            terms.tags, terms.idempotency_key, terms.store_result, terms.on_crash,
        )  # fmt: skip
        return Statement(self._sql["submit"], all_parameters, read, is_qualified=True)

    def submit_many(self, tasks: Iterable[NewTask]) -> list[Statement[dict[int, TaskId]]]:
        """One statement a batch, all in the order of the keys, so that two overlapping submits cannot deadlock. It
        answers which tasks stand for which, where an earlier one existed; by ids as numbers: a UUID is slow to compare.
        """
        unique = {task.id.int: task for task in tasks}.values()
        by_key = sorted(unique, key=lambda task: (task.terms.idempotency_key or "\U0010ffff", task.id.int))
        return [self._submit_batch(by_key[at : at + BATCH_ROWS]) for at in range(0, len(by_key), BATCH_ROWS)]

    def get(self, task_id: UUID | str) -> Statement[Task | None]:
        return Statement(self._sql["get"], (as_uuid(task_id),), _read_one, is_change=False)

    def attempts(self, task_id: UUID | str) -> Statement[list[Attempt]]:
        return Statement(
            self._sql["attempts"], (as_uuid(task_id),), lambda rows: [Attempt(*row) for row in rows], is_change=False
        )

    def ids_between(self, first: UUID, last: UUID) -> Statement[list[UUID]]:
        """The first few of them."""
        return Statement(self._sql["ids_between"], (first, last), _read_column, is_change=False)

    def final(self, task_ids: Sequence[UUID]) -> Statement[list[Task]]:
        """Those of them that are final."""
        return Statement(self._sql["final"], ([*task_ids],), _read_all, is_change=False)

    def missing(self, task_ids: Sequence[UUID]) -> Statement[Sequence[UUID]]:
        return Statement(self._sql["missing"], ([*task_ids],), _read_column, is_change=False)

    def unfinished(self, task_ids: Sequence[UUID]) -> Statement[list[Unfinished]]:
        return Statement(
            self._sql["unfinished"], ([*task_ids],), lambda rows: [*map(Unfinished._make, rows)], is_change=False
        )

    def say_that_somebody_waits(self) -> Statement[None]:
        return Statement(self._sql["say_that_somebody_waits"], (), lambda _: None)

    def list(
        self, state: str | None, name: str | None, limit: int, **filters: Unpack[ListFilters]
    ) -> Statement[list[Task]]:
        unknown = sorted(filters.keys() - _FILTER_CHECKS.keys())
        if unknown:
            raise InvalidOptions(f"unknown filter {', '.join(unknown)}; there are: {', '.join(_FILTER_CHECKS)}")
        given = {"name": name, "state": state, **filters}
        checked = {key: _FILTER_CHECKS[key](value) for key, value in given.items() if value is not None}
        wanted = checked.get("state")
        parameters = (
            checked.get("after"), wanted, checked.get("name"), checked.get("queue"), checked.get("tags"),
            checked.get("created_after"), checked.get("created_before"), _check_limit(limit), checked.get("final"),
        )  # fmt: skip
        sql = self._sql["list_unsuccessful" if wanted in UNSUCCESSFUL else "list"]
        return Statement(sql, parameters, _read_all, is_change=False)

    def cancel(self, task_id: UUID | str, reason: str | None) -> Statement[str | None]:
        text = None if reason is None else check_text("reason", storable)(reason)
        return Statement(self._sql["cancel"], (as_uuid(task_id), text), _read_value)

    def retry(self, task_id: UUID | str) -> Statement[bool]:
        return Statement(self._sql["retry"], (as_uuid(task_id),), _read_value)

    def expire(self) -> Statement[int]:
        return Statement(self._sql["expire"], (), _read_value)

    def _submit_batch(self, batch: Sequence[NewTask]) -> Statement[dict[int, TaskId]]:
        for task in batch:
            self._check_size(task)
        terms = {id(task.terms): task.terms for task in batch}
        terms_json = {key: each.to_json(self._defaults) for key, each in terms.items()}
        tasks_json = "[" + ",".join([task.to_json(terms_json[id(task.terms)]) for task in batch]) + "]"

        def read(rows: list[Row]) -> dict[int, TaskId]:
            existing = ((batch[int(ordinal) - 1], found) for ordinal, found in rows)
            return {task.id.int: _read_id(task, found) for task, found in existing}

        return Statement(self._sql["submit_many"], (tasks_json,), read, is_qualified=True)

    def _check_size(self, task: NewTask) -> None:
        limit = self._config.max_argument_bytes
        # A character is at most four bytes: most payloads need not be encoded to know that they fit.
        if 4 * (len(task.args) + len(task.kwargs)) > limit < len((task.args + task.kwargs).encode()):
            raise InvalidArguments(
                f"{task.name}: the arguments take more than {limit} bytes of JSON (Config.max_argument_bytes). "
                f"Store large data elsewhere and pass where it is."
            )


class ClaimedTask(NamedTuple):
    """A task as it comes out of a claim."""

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
    """Of a task in its queue."""

    submitted: float  # seconds since 1970
    priority: int


class Claim(NamedTuple):
    """What came of one claim; and, if the queue had no more, what its worker has to know before it sleeps."""

    tasks: list[ClaimedTask]
    answered_at: datetime  # by the database's clock
    reached: Place | None  # by the last of them
    is_short: bool
    has_suspects: bool  # somebody should look for them
    due_seconds: float | None  # until the next one is due; None: none is known
    has_elsewhere: bool  # tasks are ready in queues that the worker does not look at by itself

    @classmethod
    def from_rows(cls, rows: list[Row], worker_id: str, queue: str) -> Claim:
        answered, is_short, has_suspects, due_seconds, has_elsewhere = *rows[0][_ANSWERED], *rows[0][_WHEN_SHORT]
        tasks = _claimed_tasks(rows, worker_id, queue)
        answered_at = datetime.fromtimestamp(answered, UTC)
        reached = Place(*rows[-1][_PLACE]) if tasks else None
        return cls(tasks, answered_at, reached, is_short, bool(has_suspects), due_seconds, bool(has_elsewhere))


class MixedClaim(NamedTuple):
    """What came of a claim from several queues."""

    tasks: list[ClaimedTask]
    answered_at: datetime | None  # by the database's clock; None: nothing came
    reached: str | None  # the last queue that was looked at; None: there are no more behind it

    @classmethod
    def from_rows(cls, rows: list[Row], worker_id: str) -> MixedClaim:
        if not rows:
            return cls([], None, None)
        answered_at = datetime.fromtimestamp(rows[0][_ANSWERED][0], UTC)
        reached = rows[0][_REACHED] if len(rows[0]) > _REACHED else None
        return cls(_claimed_tasks(rows, worker_id, None), answered_at, reached)


def _claimed_tasks(rows: list[Row], worker_id: str, queue: str | None) -> list[ClaimedTask]:
    """Sorts the rows, too. Without a queue, each row names its own."""
    claim_id, claimed = rows[0][_OF_THE_CLAIM]
    if claim_id is None:
        return []
    rows.sort(key=_in_order)
    claimed_at = datetime.fromtimestamp(claimed, UTC)
    tasks = []
    for row in rows:
        held = (
            row[0], row[1], queue or row[_QUEUE], State.CLAIMED, worker_id, *row[_COUNTS], claimed_at, None,
            row[_EXPIRES_AT], None,
        )  # fmt: skip
        tasks.append(ClaimedTask._make((HeldTask._make(held), *row[_OF_THE_TASK], claim_id)))
    return tasks


def _in_order(row: Row) -> tuple[int, float, str]:
    """An UPDATE answers in no order, and to sort there would take the server 1.5 us a task: five times as long."""
    submitted, priority = row[_PLACE]
    return -priority, submitted, row[_ID_TEXT]


class WorkerStatements:
    """What workers and duties send. Every write after a claim names the worker, and the token of the claim."""

    def __init__(self, config: Config) -> None:
        self._tasks = queries("tasks", config.schema)
        self._workers = queries("workers", config.schema)
        self._claims = queries("claims", config.schema)
        self._doorbell = queries("doorbell", config.schema)
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
        that was submitted before this moment, and nothing of a lower priority. `aside`: not these, which PostgreSQL
        refuses to change.
        """
        known = None if queues is None else list(queues)
        parameters = (
            worker_id, queue, list(names), limit, self._lock_seconds, known, *(floor or (None, None)), _texts(aside),
        )  # fmt: skip

        def read(rows: list[Row]) -> Claim:
            return Claim.from_rows(rows, worker_id, queue)

        return Statement(self._tasks["claim"], parameters, read, as_bytes=lambda: _as_text(parameters))

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
        """From the queues behind this one, at most `share` of each; `served`: only these queues."""
        only = None if served is None else list(served)
        parameters = (
            worker_id, after, list(names), limit, share, self._lock_seconds, only, list(apart_from), _texts(aside),
        )  # fmt: skip

        def read(rows: list[Row]) -> MixedClaim:
            return MixedClaim.from_rows(rows, worker_id)

        return Statement(self._tasks["claim_each"], parameters, read, as_bytes=lambda: _as_text(parameters))

    def claim_suspects(
        self,
        worker_id: str,
        queues: Sequence[str] | None,
        names: Sequence[str],
        limit: int,
        aside: Iterable[UUID] = (),
    ) -> Statement[MixedClaim]:
        """From these queues; None: from all. Without their arguments."""
        served = None if queues is None else list(queues)
        parameters = (worker_id, served, list(names), limit, self._lock_seconds, _texts(aside))

        def read(rows: list[Row]) -> MixedClaim:
            return MixedClaim.from_rows(rows, worker_id)

        return Statement(self._tasks["claim_suspects"], parameters, read, as_bytes=lambda: _as_text(parameters))

    def arguments(self, task: HeldTask) -> Statement[tuple[str, str] | None]:
        """Those that did not come with the claim. None: the task is somebody else's by now."""
        parameters = (task.worker_id, task.id, task.fencing_token)
        return Statement(
            self._tasks["arguments"], parameters, lambda rows: (rows[0][0], rows[0][1]) if rows else None,
            is_change=False,
        )  # fmt: skip

    def head(
        self, queues: Sequence[str] | None, names: Sequence[str], *, suspects: bool, aside: Iterable[UUID]
    ) -> Statement[tuple[UUID, str] | None]:
        """The task that a claim of one would take, and its name."""
        served = None if queues is None else list(queues)
        parameters = (served, list(names), suspects, list(aside))
        return Statement(self._tasks["head"], parameters, lambda rows: (rows[0][0], rows[0][1]) if rows else None)

    def arm(self, queues: Sequence[str]) -> Statement[tuple[list[str], bool]]:
        """Which of them are held now, and whether nobody is about to commit."""
        return Statement(self._doorbell["arm"], (list(queues),), lambda rows: (rows[0][0], rows[0][1]))

    def disarm(self, queues: Sequence[str]) -> Statement[None]:
        return Statement(self._doorbell["disarm"], (list(queues),), lambda _: None)

    def ready_queues(self) -> Statement[list[str]]:
        return Statement(self._tasks["ready_queues"], (), _read_column, is_change=False)

    def start(self, worker_id: str, started: Sequence[Started]) -> Statement[dict[UUID, bool]]:
        """Whether it was marked as running, for each that is the worker's. One was not if somebody has locked it."""
        columns = [list(column) for column in zip(*started, strict=True)]
        return Statement(self._tasks["start"], (worker_id, *columns), dict)

    def note_progress(self, worker_id: str, said: Sequence[tuple[UUID, int, str]]) -> Statement[list[UUID]]:
        """Those that need not be told again. A row that somebody has locked is not among them."""
        ids, tokens, progress = zip(*said, strict=True)
        parameters = (worker_id, list(ids), list(tokens), list(progress))
        return Statement(self._tasks["note_progress"], parameters, _read_column)

    def settle(self, worker_id: str, settled: Iterable[str], claim_ids: Iterable[int] = ()) -> Statement[list[UUID]]:
        """`settled` are JSON objects, one a task, as `settlement_json` writes them."""
        parameters = (worker_id, f"[{','.join(settled)}]", list(claim_ids))
        return Statement(self._tasks["settle"], parameters, _read_column)

    def complete(self, worker_id: str, completed: Completions, claim_ids: Iterable[int] = ()) -> Statement[list[UUID]]:
        """What succeeded, and needs nothing else."""
        claims = list(claim_ids)
        parameters = (worker_id, *completed, claims)

        def as_bytes() -> list[bytes]:
            ids, tokens, started, finished, results = completed
            times = arrays.doubles(started), arrays.doubles(finished)
            return [
                worker_id.encode(), arrays.uuids(ids), arrays.bigints(tokens), *times, arrays.texts(results),
                arrays.bigints(claims),
            ]  # fmt: skip

        def read(rows: list[Row]) -> list[UUID]:
            return rows[0][0] if rows else completed.ids

        return Statement(self._tasks["complete"], parameters, read, as_bytes=as_bytes, is_binary=True)

    def written(self, worker_id: str, task_ids: Sequence[UUID]) -> Statement[list[tuple[UUID, int]]]:
        """The runs of this worker, with their tokens, whose end is written."""
        return Statement(self._tasks["written"], (worker_id, list(task_ids)), list, is_change=False)

    def unlocked(self, task_ids: Sequence[UUID]) -> Statement[list[UUID]]:
        """Those of them whose rows nobody holds."""
        return Statement(self._tasks["unlocked"], (list(task_ids),), _read_column)

    def promote(self) -> Statement[Promotion]:
        return Statement(self._tasks["promote"], (), lambda rows: Promotion(*rows[0]))

    def promotable(self, aside: Iterable[UUID]) -> Statement[list[UUID]]:
        """Tasks whose time has come, but for those."""
        return Statement(self._tasks["promotable"], (list(aside),), _read_column, is_change=False)

    def promote_given(self, task_ids: Sequence[UUID]) -> Statement[int]:
        return Statement(self._tasks["promote_given"], (list(task_ids),), lambda rows: _read_value(rows) or 0)

    def expire(self) -> Statement[int]:
        return Statement(self._tasks["expire"], (), _read_value)

    def expirable(self, aside: Iterable[UUID]) -> Statement[list[UUID]]:
        """Tasks that were not started in time, but for those."""
        return Statement(self._tasks["expirable"], (list(aside),), _read_column, is_change=False)

    def expire_given(self, task_ids: Sequence[UUID]) -> Statement[int]:
        return Statement(self._tasks["expire_given"], (list(task_ids),), _read_value)

    def has_lockable(self, queues: Sequence[str] | None, old_seconds: float) -> Statement[bool]:
        """There is a task in them that could be claimed. None: in any queue."""
        parameters = (None if queues is None else list(queues), old_seconds)
        return Statement(self._tasks["has_lockable"], parameters, _read_value)

    def waiting_names(self, queues: Sequence[str], served: Sequence[str]) -> Statement[list[str]]:
        return Statement(self._tasks["waiting_names"], (list(queues), list(served)), _read_column, is_change=False)

    def register(self, worker: WorkerDescription) -> Statement[datetime | None]:
        parameters = (
            worker.worker_id, worker.name, worker.hostname, worker.pid, worker.process_name, worker.queues,
            worker.task_names, worker.concurrency, self._lease_seconds,
        )  # fmt: skip
        return Statement(self._workers["register"], parameters, _read_value)

    def declare(self, functions: Sequence[Mapping[str, Any]]) -> Statement[None]:
        return Statement(self._workers["declare"], (to_json(functions).decode(),), lambda _: None)

    def renew(self, worker_id: str, names: Sequence[str], *, stopping: bool) -> Statement[datetime | None]:
        """None: the worker was given up for dead."""
        return Statement(self._workers["renew"], (worker_id, self._lease_seconds, list(names), stopping), _read_value)

    def deregister(self, worker_id: str) -> Statement[None]:
        return Statement(self._workers["deregister"], (worker_id,), lambda _: None)

    def declare_dead(self) -> Statement[list[Row]]:
        return Statement(self._workers["declare_dead"], (self._lease_seconds,), list)

    def forget_dead(self, after_seconds: float | None = 3600.0) -> Statement[None]:
        """None: never."""
        return Statement(self._workers["forget_dead"], (after_seconds,), lambda _: None)

    def held(self, worker_id: str) -> Statement[list[tuple[HeldTask, int]]]:
        """Each with the id of its claim."""
        return Statement(
            self._claims["held"], (worker_id,), lambda rows: [(HeldTask(*row[:-1]), row[-1]) for row in rows],
            is_change=False,
        )  # fmt: skip

    def extend(self, worker_id: str, task_ids: Sequence[UUID]) -> Statement[list[UUID]]:
        return Statement(self._claims["extend"], (worker_id, list(task_ids), self._lock_seconds), _read_column)

    def asked_to_stop(self, worker_id: str, task_ids: Sequence[UUID]) -> Statement[list[UUID]]:
        return Statement(self._claims["asked_to_stop"], (worker_id, list(task_ids)), _read_column, is_change=False)

    def abandoned(self, after: tuple[str, int]) -> Statement[list[Row]]:
        patience = max(self._lease_seconds, LEAST_PATIENCE_SECONDS)
        parameters = (*after, patience, self._lock_seconds)
        return Statement(self._claims["abandoned"], parameters, list, is_change=False)

    def abandoned_tasks(self, worker_id: str, claim_id: int) -> Statement[list[HeldTask]]:
        return Statement(
            self._claims["abandoned_tasks"], (worker_id, claim_id), lambda rows: [HeldTask(*row) for row in rows]
        )

    def forget_claim(self, worker_id: str, claim_id: int) -> Statement[None]:
        return Statement(self._claims["forget"], (worker_id, claim_id), lambda _: None)


class Started(NamedTuple):
    """An execution that has begun, or is about to."""

    id: UUID
    token: int
    started_at: datetime
    is_contained: bool = False  # it has a process of its own
    fails_on_crash: bool = False  # by its function or by who submitted it


class Completions(NamedTuple):
    """Successes, by column."""

    ids: list[UUID]
    tokens: list[int]
    started: list[float]  # seconds since 1970
    finished: list[float]
    results: list[str | None]


class Promotion(NamedTuple):
    promoted: int
    next_due_seconds: float | None  # None: no task is known to become due


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a worker says about itself."""

    worker_id: str
    name: str
    hostname: str
    pid: int
    process_name: str
    queues: list[str] | None
    task_names: list[str]
    concurrency: int


def settlement_json(
    task: HeldTask,
    settlement: Settlement,
    *,
    started_at: datetime | None,
    finished_at: datetime,
    seen: str | None = None,
    progress: str | None = None,
) -> str:
    """One element of what `settle` takes. What is None or False is left out. `seen` is the state that was decided on,
    for who does not hold the task itself.
    """
    problem = settlement.problem
    values: dict[str, Any] = {
        "id": task.id,
        "token": task.fencing_token,
        "state": settlement.state,
        "seen": seen,
        "began": settlement.began,
        "outcome": settlement.outcome,
        "due_at": settlement.due_at,
        "scheduled_at": settlement.scheduled_at,
        "started_at": started_at if settlement.began else None,
        "finished_at": finished_at,
        "error": problem and problem.text,
        "error_code": problem and problem.code,
        "error_message": problem and problem.message,
        "failed_reason": settlement.failed_reason,
        "is_retry": settlement.is_retry,
        "is_crash": settlement.is_crash,
        "is_strike": settlement.is_strike,
        "suspect": settlement.suspect,
    }
    head = to_json({key: value for key, value in values.items() if value or key == "began"}).decode()
    # These are JSON already.
    for key, text in (("result", settlement.result), ("progress", progress)):
        head = head if text is None else f'{head[:-1]},"{key}":{text}}}'
    return head


def as_uuid(value: Any) -> UUID:
    if isinstance(value, UUID):
        return value
    try:
        return UUID(value)
    except (ValueError, AttributeError, TypeError):
        shown = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
        raise InvalidOptions(f"{shown} is not a task id (a UUID)") from None


def _read_id(task: NewTask, found: str) -> TaskId:
    """A submit that met its own row, after an unknown commit, has not met an earlier task."""
    earlier = UUID(found)
    return task.id if earlier == task.id else TaskId(earlier, existed=True)


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _texts(ids: Iterable[UUID]) -> list[str]:
    return [str(each) for each in ids]


def _as_text(values: Iterable[object]) -> list[bytes | None]:
    """As PostgreSQL reads them: for the few types that there are."""
    return [None if value is None else _text_of(value) for value in values]


def _text_of(value: object) -> bytes:
    match value:
        case str():
            return value.encode()
        case UUID():
            return b"%032x" % value.int
        case list():
            return _array(tuple(value))
        case bool():
            return b"t" if value else b"f"
        case int() | float():
            return repr(value).encode()
        case _:
            raise TypeError(f"no text is known for a {type(value).__name__}")


@functools.lru_cache(maxsize=100)
def _array(texts: tuple[str, ...]) -> bytes:
    quoted = (text.replace("\\", "\\\\").replace('"', '\\"') for text in texts)
    return ("{" + ",".join(f'"{text}"' for text in quoted) + "}").encode()


def _read_value(rows: list[Row]) -> Any:
    return rows[0][0] if rows else None


def _read_column(rows: list[Row]) -> list[Any]:
    return [row[0] for row in rows]


def _read_one(rows: list[Row]) -> Task | None:
    return Task.from_row(rows[0]) if rows else None


def _read_all(rows: list[Row]) -> list[Task]:
    return [Task.from_row(row) for row in rows]


def _tags(tags: Mapping[str, Any]) -> Any:
    return checked_options({"tags": tags})["tags"]


def _state(state: str) -> State:
    try:
        return State(state)
    except ValueError:
        raise InvalidOptions(f"{state!r} is not a state; there are: {', '.join(State)}") from None


_check_limit = check_whole("limit", 1, MAX_LIST_LIMIT)
_FILTER_CHECKS: dict[str, Callable[[Any], Any]] = {
    "state": _state,
    "name": check_text("name", str),
    "queue": check_text("queue", str),
    "tags": _tags,
    "created_after": check_moment("created_after"),
    "created_before": check_moment("created_before"),
    "after": as_uuid,
    "final": check_flag("final"),
}
