"""Claims are bounded by bytes, and by the work that many queues or names make."""

from __future__ import annotations

import asyncio
import random
import string
from collections import Counter
from typing import TYPE_CHECKING

import pytest

import tasklib
from tasklib.statements import Statement, WorkerStatements
from tasklib.worker import buffer
from tasklib.worker.served import MOST_LIKELY_QUEUES
from tests.support.working import ManualWorker, running, wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasklib.outcomes import HeldTask
    from tests.support.raw_sql import Conn

pytestmark = pytest.mark.postgres_versions

MEGABYTE = 1024 * 1024


@pytest.fixture
def worker(config: tasklib.Config) -> Iterator[ManualWorker]:
    made = ManualWorker(config, "manual")
    yield made
    made.close()


def insert(conn: Conn, name: str, text: str, count: int = 1, queue: str = "default") -> None:
    """Past the library's own limit, up to the wall of the schema."""
    conn.execute(
        """insert into tasklib.tasks (name, kwargs, queue)
           select %s, jsonb_build_object('text', %s::text), %s from generate_series(1, %s)""",
        [name, text, queue, count],
    )


def noise(size: int) -> str:
    """That no compression makes smaller by much."""
    return "".join(random.Random(1).choices(string.printable[:90], k=size))


# --- bytes ---


def test_large_arguments_do_not_come_with_the_claim(conn: Conn, worker: ManualWorker) -> None:
    """Neither one that is stored in much, nor many of middling size, nor what is small only as long as it is
    compressed. What is small does come.
    """
    insert(conn, "small", "x")
    insert(conn, "noisy", noise(100_000))
    insert(conn, "even", "x" * 200_000, count=100)
    tasks = worker.claim("small", "noisy", "even", limit=1_000)
    came = Counter((task.held.name, task.args is not None and task.kwargs is not None) for task in tasks)
    assert came == {("small", True): 1, ("noisy", False): 1, ("even", False): 100}


def test_arguments_of_middling_size_come_with_the_claim(conn: Conn, worker: ManualWorker) -> None:
    """To fetch them one by one would take a round trip for each."""
    insert(conn, "even", "x" * 200_000, count=50)
    assert all(task.kwargs for task in worker.claim("even", limit=1_000))


@pytest.mark.parametrize("is_async", [False, True])
def test_tasks_with_large_arguments_run(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, is_async: bool
) -> None:
    """Their arguments are fetched when they start, and let go when they have ended. So many at a time as fit."""
    workers: list[tasklib.TaskWorker] = []
    held: list[int] = []
    texts: list[str] = []

    def measure(text: str) -> None:
        texts.append(text)
        run = workers[0]._run
        assert run is not None
        held.append(sum(each.loaded_bytes for each in run.buffer.held()))

    async def measure_async(text: str) -> None:
        measure(text)

    tasklib.task(name="measure")(measure_async if is_async else measure)
    text = noise(MEGABYTE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffer, "MOST_LOADED_BYTES", 2 * MEGABYTE)
        with running(config, concurrency=8) as measured:
            workers.append(measured)
            insert(conn, "measure", text, count=20)
            wait_until(lambda: len(texts) == 20, "all have run")
    assert set(texts) == {text}
    assert 0 < max(held) <= 4 * MEGABYTE
    assert {task.state for task in client.list_tasks()} == {"completed"}


def test_arguments_that_cannot_be_fetched_fail_their_own_task(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the server says of them."""

    def unreadable(_: WorkerStatements, __: HeldTask) -> Statement[None]:
        return Statement("select (1 / 0)::text", (), lambda _: None, is_change=False)

    monkeypatch.setattr(WorkerStatements, "arguments", unreadable)
    job = tasklib.task(name="job")(lambda text="": len(text))
    insert(conn, "job", noise(100_000))
    (bad,) = client.list_tasks()
    with running(config):
        assert wait_final(client, client.submit_task(job)).state == "completed"
        found = wait_final(client, bad.id)
    assert (found.state, found.error_code, found.retry_count) == ("failed", "UNREADABLE_ARGUMENTS", 0)
    assert "division by zero" in str(found.error)


# --- queues ---


def test_a_claim_from_many_queues_goes_through_all_of_them(conn: Conn, worker: ManualWorker) -> None:
    """A few of each, two hundred queues at a time, from the one that it was told; and not from those that it is told to
    leave out.
    """
    conn.execute("insert into tasklib.tasks (name, queue) select 'job', 'q' || n % 450 from generate_series(1, 1350) n")
    conn.execute("insert into tasklib.tasks (name) values ('job')")
    claimed: Counter[str] = Counter()
    after, pages = "", 0
    while True:
        claim = worker.session.run(
            worker.statements.claim_each(
                worker.id, after, ["job"], 1_000, share=2, served=None, apart_from=["default", "q7"]
            )
        )
        claimed.update(task.held.queue for task in claim.tasks)
        pages += 1
        if claim.reached is None:
            break
        after = claim.reached
    assert pages == 3
    assert claimed == {f"q{number}": 2 for number in range(450) if number != 7}


def test_a_claim_from_many_queues_that_is_full_goes_on_where_it_stopped(conn: Conn, worker: ManualWorker) -> None:
    conn.execute("insert into tasklib.tasks (name, queue) select 'job', 'q' || n from generate_series(1, 9) n")
    claimed: list[str] = []
    after: str | None = ""
    while after is not None:
        statement = worker.statements.claim_each(
            worker.id, after, ["job"], 2, share=5, served=["q1", "q2", "q4", "q8", "q9"], apart_from=[]
        )
        claim = worker.session.run(statement)
        assert len(claim.tasks) <= 2
        claimed += sorted(task.held.queue for task in claim.tasks)
        after = claim.reached
    assert claimed == ["q1", "q2", "q4", "q8", "q9"]


@pytest.mark.parametrize("chosen", [False, True], ids=["all queues", "chosen queues"])
def test_a_worker_of_many_queues_serves_all_of_them(
    client: tasklib.Client, conn: Conn, config: tasklib.Config, chosen: bool
) -> None:
    """With a few claims, and not one for each queue."""
    ran: list[int] = []
    tasklib.task(name="job")(lambda: ran.append(1))
    queues = [f"q{number}" for number in range(500)]
    conn.execute("insert into tasklib.tasks (name, queue) select 'job', unnest(%s::text[])", [queues])
    conn.execute("insert into tasklib.tasks (name, queue) values ('job', 'elsewhere')")
    with running(config, concurrency=10, queues=queues if chosen else None) as worker:
        run = worker._run
        assert run is not None
        wait_until(lambda: len(ran) >= 500 + (not chosen), "all have run")
        assert len(run.basis.served.likely_queues()) <= MOST_LIKELY_QUEUES + 1
    left = [task.queue for task in client.list_tasks(state="pending")]
    assert left == (["elsewhere"] if chosen else [])


def test_queues_that_are_never_empty_do_not_keep_others_waiting(client: tasklib.Client, config: tasklib.Config) -> None:
    """A queue that no function names is looked at once a second, also beside a backlog."""
    done: list[str] = []

    @tasklib.task
    async def note(what: str) -> None:
        await asyncio.sleep(0.01)
        done.append(what)

    client.submit_many([note.new(what="other") for _ in range(4_000)])
    with running(config, concurrency=10):
        wait_until(lambda: len(done) > 100, "the worker is under way")
        client.submit_task(note, what="elsewhere", queue="elsewhere")
        wait_until(lambda: "elsewhere" in done, "the one in another queue")
        assert done.index("elsewhere") < 3_500, "it waited for the backlog"


def test_a_queue_in_which_much_is_found_is_looked_at_by_itself(client: tasklib.Client, config: tasklib.Config) -> None:
    """From then on it costs no more than one that a function names."""
    job = tasklib.task(name="job")(lambda: None)
    client.submit_many([job.options(queue="busy").new() for _ in range(200)])
    with running(config, concurrency=20) as worker:
        run = worker._run
        assert run is not None
        wait_until(lambda: "busy" in run.basis.served.likely_queues(), "it is known")


def test_many_names_and_unserved_tasks_are_passed_over_quickly(conn: Conn, config: tasklib.Config) -> None:
    """Also under a generic plan: a comparison of each row with each name would take the server most of a second."""
    conn.execute("insert into tasklib.tasks (name) select 'unserved_' || n from generate_series(1, 5000) n")
    conn.execute("insert into tasklib.tasks (name) values ('job')")
    worker = ManualWorker(config, "many")
    names = ["job", *(f"served_{number}" for number in range(5_000))]
    worker.session.connection().execute("set plan_cache_mode = force_generic_plan; set statement_timeout = '400ms'")
    assert [task.held.name for task in worker.claim(*names)] == ["job"]
    worker.close()
