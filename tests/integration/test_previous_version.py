"""Real workers of the version before, on the schema of this one: they go on, until something is used that they would
break.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import tasklib
from tasklib import migrate
from tests.support import previous_version
from tools.waiting import START_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.raw_sql import Conn, NewDatabase

pytestmark = [
    pytest.mark.postgres_versions,
    pytest.mark.direct("a lock of the session tells that a worker sleeps"),
]
PROGRAM = previous_version.ROOT / "tests/campaigns/big_table_load.py"
CAP = """select tasklib.set_queue('mail', '{"max_running": 1}')"""
LIVE = "select worker_id from tasklib.workers where died_at is null and lease_until > clock_timestamp()"


@pytest.fixture(scope="module")
def old_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not previous_version.is_available():
        pytest.skip(previous_version.WHY_NOT)
    return previous_version.unpack(tmp_path_factory.mktemp("previous"))


@pytest.fixture
def url(new_database: NewDatabase) -> str:
    made = new_database()
    migrate.migrate(tasklib.Config(made))
    return made


@pytest.fixture
def conn(url: str) -> Iterator[Conn]:
    with psycopg.connect(url, autocommit=True) as made:
        yield made


class OldWorker:
    def __init__(self, code: Path, url: str, log: Path) -> None:
        self.log = log
        with log.open("w") as file:
            command = [sys.executable, str(PROGRAM), "worker", url]
            environment = previous_version.environment(code)
            self._process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=file, text=True)
        assert self._process.stdout is not None
        assert str(code) in self._process.stdout.readline()

    def stop(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=60)

    def has_logged(self, text: str) -> bool:
        return text in self.log.read_text()


@pytest.fixture
def start(old_code: Path, url: str, tmp_path: Path) -> Iterator[Callable[[], OldWorker]]:
    with contextlib.ExitStack() as started:

        def make() -> OldWorker:
            made = OldWorker(old_code, url, tmp_path / "log")
            started.callback(made.stop)
            return made

        yield make


def wait_for_worker(conn: Conn) -> str:
    wait_until(lambda: conn.execute(LIVE).fetchone() is not None, "a worker", seconds=START_SECONDS)
    row = conn.execute(LIVE).fetchone()
    assert row is not None
    return str(row[0])


def state(conn: Conn, task_id: Any) -> str:
    row = conn.execute("select state from tasklib.tasks where id = %s", [task_id]).fetchone()
    assert row is not None
    return str(row[0])


def submit(conn: Conn) -> Any:
    row = conn.execute("""select id from tasklib.submit('count', '{"number": 1}')""").fetchone()
    assert row is not None
    return row[0]


def test_it_runs_plain_tasks(conn: Conn, start: Callable[[], OldWorker]) -> None:
    """A rollout needs no pause: workers of both versions share the tasks."""
    start()
    task_id = submit(conn)
    wait_until(lambda: state(conn, task_id) == "completed", "the task", seconds=START_SECONDS)


def test_it_is_refused_while_a_policy_is_in_use(conn: Conn, start: Callable[[], OldWorker]) -> None:
    """It would break the policy. It claims nothing, and its log says what to do."""
    conn.execute(CAP)
    task_id = submit(conn)
    old = start()
    refusal = "this worker does not know policies, which the queues of this database use"
    wait_until(lambda: old.has_logged(refusal), "the refusal", seconds=START_SECONDS)
    assert conn.execute(LIVE).fetchone() is None
    assert state(conn, task_id) == "pending"


def test_it_keeps_a_policy_from_being_switched_on(conn: Conn, start: Callable[[], OldWorker]) -> None:
    """The error names it. When it has gone, the policy can be set."""
    old = start()
    worker_id = wait_for_worker(conn)
    with pytest.raises(
        psycopg.Error, match=f"worker {worker_id} is of a version that does not know policies"
    ) as refused:
        conn.execute(CAP)
    assert refused.value.sqlstate == "TL426"
    assert conn.execute("select count(*) from tasklib.queues").fetchone() == (0,)
    task_id = submit(conn)
    wait_until(lambda: state(conn, task_id) == "completed", "the task")
    old.stop()
    conn.execute(CAP)
    assert conn.execute("select features from tasklib.policy").fetchone() == (["policies"],)


def test_it_does_not_come_back_to_a_policy(conn: Conn) -> None:
    """Frozen until its lease had run out, it did not count as alive when the policy was switched on. Its renewal finds
    no row, as if it had been declared dead; it registers anew, which is refused.
    """
    conn.execute(REGISTER, ["frozen", "{}", -1])
    conn.execute(REGISTER, ["new", "{policies}", -1])
    assert conn.execute(RENEW, ["frozen"]).fetchone() is not None  # nothing is in use yet
    conn.execute(EXPIRE)
    conn.execute(CAP)
    assert conn.execute(RENEW, ["frozen"]).fetchone() is None
    assert conn.execute(RENEW, ["new"]).fetchone() is not None
    conn.execute("update tasklib.workers set died_at = clock_timestamp() where worker_id = 'frozen'")
    with pytest.raises(psycopg.Error, match="does not know policies"):
        conn.execute(REGISTER, ["again", "{}", 60])


REGISTER = """
insert into tasklib.workers (worker_id, name, hostname, pid, process_name, task_names, concurrency, features,
                             lease_until)
values (%s, 'w', 'h', 1, 'p', '{}', 1, %s, clock_timestamp() + %s * interval '1 second')
"""
RENEW = """
update tasklib.workers set renewed_at = clock_timestamp(), lease_until = clock_timestamp() + interval '1 minute'
 where worker_id = %s and died_at is null returning clock_timestamp()
"""
EXPIRE = "update tasklib.workers set lease_until = clock_timestamp() - interval '1 second'"
