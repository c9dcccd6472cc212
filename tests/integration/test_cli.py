"""The command `tasklib`, run as a user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import psycopg
import pytest

import tasklib
from tests.support.commands import COMMAND, run_tasklib

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeAlias

    from tests.support.raw_sql import Conn, NewDatabase

    Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(database_url: str, tmp_path: Path) -> Run:
    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {"DATABASE_URL": database_url, "PATH": os.environ["PATH"], "HOME": str(tmp_path), **environment}
        return run_tasklib(*words, variables=variables, directory=tmp_path)

    return run


def test_submit_list_show(run: Run) -> None:
    """For people: an id, a table, everything about one task."""
    made = run("submit", "resize", "path=a.png", "size:=64", "--queue", "images", "--delay", "90", "--tag", "batch=b")
    task_id = made.stdout.strip()
    assert (made.returncode, made.stderr) == (0, "")
    listed = run("list").stdout
    assert task_id in listed
    assert re.search(r"resize\s+pending in 1\.\dm\s+images", listed)
    shown = run("show", task_id).stdout
    assert re.search(r'kwargs\s+{"path":"a.png","size":64}', shown)
    assert re.search(r'tags\s+{"batch":"b"}', shown)


def test_nothing_is_cut(run: Run, conn: Conn, database_url: str) -> None:
    """In a pipe each row is one line, however long and whatever the terminal around it; on a narrow terminal ids stay
    whole, so that they can be copied.
    """
    name = "n" * 200
    task_id = run("submit", name, f"text={'x' * 1000}", "url=https://example.com/end").stdout.strip()
    conn.execute("update tasklib.tasks set error = repeat('e', 900), error_code = 'X'")
    assert f'{{"url":"https://example.com/end","text":"{"x" * 1000}"}}' in run("show", task_id, COLUMNS="20").stdout
    header, row, *rest = run("list", COLUMNS="20").stdout.splitlines()
    assert (header.split()[0], rest) == ("id", [])
    assert row.split() == [task_id, name, "pending", "default", "0", row.split()[5], "0", "e" * 900]
    command = f"script -qec 'stty cols 60; {COMMAND} list' /dev/null"
    environment = {"DATABASE_URL": database_url, "PATH": os.environ["PATH"], "TERM": "xterm"}
    terminal = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert task_id in terminal.stdout


def test_a_list_can_be_read_on_a_terminal_of_80_columns(run: Run, conn: Conn, database_url: str) -> None:
    """Names and states are whole, and the error stands in a line of its own."""
    task_id = run("submit", "send_email", "--queue", "mail").stdout.strip()
    fail_all(conn, "OSError: is down")
    command = f"script -qec 'stty cols 80; {COMMAND} list' /dev/null"
    environment = {"DATABASE_URL": database_url, "PATH": os.environ["PATH"], "TERM": "xterm", "NO_COLOR": "1"}
    terminal = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
    header, row, error = terminal.stdout.splitlines()
    assert header.split() == ["id", "name", "state", "queue"]
    assert re.split(r"\s{2,}", row.strip()) == [task_id, "send_email", "failed (gave up)", "mail"]
    assert error == "    OSError: is down"


def test_a_task_is_shown_by_what_matters(run: Run, conn: Conn) -> None:
    """What it is and what became of it, its times, then what is unusual. What is as usual is left out."""
    plain, urgent = run("submit", "a").stdout.strip(), run("submit", "a", "--priority", "7").stdout.strip()
    conn.execute("update tasklib.tasks set strikes = 1 where id = %s", [urgent])
    blocks = [[line.split()[0] for line in block.splitlines()] for block in run("show", plain).stdout.split("\n\n")]
    first = ["id", "name", "state", "queue", "kwargs", "attempt", "max_retries"]
    assert blocks == [first, ["created_at", "scheduled_at"], ["ready"]]
    assert re.search(r"\n\npriority +7\nready +true\nstrikes +1\n$", run("show", urgent).stdout)
    fail_all(conn, "E: x")
    assert re.search(r"state +failed \(gave up\)\n", run("show", plain).stdout)
    assert "ready" not in run("show", plain).stdout


def fail_all(conn: Conn, error: str) -> None:
    conn.execute(
        """update tasklib.tasks set state = 'failed', started_at = now(), completed_at = now(), ready = false,
           attempt = 1, error_code = 'E', error = %s""",
        [error],
    )


def test_json_for_programs(run: Run, client: tasklib.Client) -> None:
    """Every command's answer as JSON, with every column."""
    first = json.loads(run("submit", "a", "--idempotency-key", "k", "--json").stdout)
    again = json.loads(run("submit", "a", "--idempotency-key", "k", "--json").stdout)
    assert (first["existed"], again["existed"]) == (False, True)
    assert first["id"] == again["id"]
    task = client.get_task(first["id"])
    assert task is not None
    shown = json.loads(run("show", first["id"], "--json").stdout)
    assert shown.pop("attempts") == []
    assert [shown] == json.loads(run("list", "--json").stdout)
    assert set(shown) == set(task.to_dict())
    assert (shown["state"], shown["payload_digest"]) == ("pending", (task.payload_digest or b"").hex())


def test_filters_and_pages(run: Run) -> None:
    """The page's end says how to go on."""
    for name in ("a", "b", "a"):
        run("submit", name, "--tag", "n:=1")
    page = run("list", "--name", "a", "--tag", "n:=1", "--limit", "1")
    after = re.search(r"next page: --after (\S+)", page.stdout)
    assert after is not None
    rest = json.loads(run("list", "--name", "a", "--after", after[1], "--json").stdout)
    assert len(rest) == 1
    assert run("list", "--state", "failed", "--json").stdout == "[]\n"


def test_an_application_checks_its_arguments(run: Run, tmp_path: Path) -> None:
    """With --app the function is at hand: text is converted, mistakes are named."""
    (tmp_path / "shop.py").write_text("import tasklib\n@tasklib.task\ndef pay(amount: int): ...\n")
    made = json.loads(run("submit", "pay", "amount=5", "--app", "shop", "--json").stdout)
    assert json.loads(run("show", made["id"], "--json").stdout)["kwargs"] == {"amount": 5}
    wrong = run("submit", "pay", "amount=five", "--app", "shop")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith('tasklib: pay: argument "amount"')
    assert "'py'" in run("submit", "py", TASKLIB_APP="shop").stderr
    assert "no_shop" in run("submit", "pay", "--app", "no_shop").stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["show", "42"], 1, "begins with 42"),
        (["show", "00000000-0000-7000-8000-000000000000"], 1, "there is no task"),
        (["show", "report"], 2, "not a task id"),
        (["cancel", "0" * 33], 2, "not a task id"),
        (["list", "--state", "done"], 2, "not a state"),
        (["list", "--limit", "0"], 2, "limit"),
        (["list", "--state", "pending", "--retrying"], 2, "--state pending"),
        (["list", "--after", "x"], 2, "not a task id"),
        (["stats", "--window", "-1"], 2, "window"),
        (["submit", "not a name"], 2, "name"),
        (["submit", "a", "--queue", "Not A Queue"], 2, "queue"),
        (["submit", "a", "--priority", "high"], 2, "priority"),
        (["submit", "a", "--timeout", "-1"], 2, "timeout_seconds"),
        (["submit", "a", "--kwargs", '{"x": 1, "x": 2}'], 2, "twice"),
        (["submit", "a", "--kwargs", "[]"], 2, "JSON object"),
        (["submit", "a", "x:=1e400000"], 2, "x"),
        (["submit", "a", "oops"], 2, "KEY=VALUE"),
        (["submit", "a", "queue=5"], 2, "option of submit"),
        (["submit", "a", "x=1", "x=2"], 2, "twice"),
        (["submit", "a", "x=1", "--kwargs", '{"x": 5}'], 2, "twice"),
        (["submit", "a", "--expires-at", "soon"], 2, "moment"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_mistakes_are_told_in_one_line(run: Run, words: list[str], code: int, said: str) -> None:
    """No traceback; 1 is refused, 2 is wrong usage, such as a value that an option cannot have."""
    refused = run(*words)
    assert refused.returncode == code
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr


def test_terminal_codes_in_stored_text_are_shown_not_obeyed(run: Run, conn: Conn) -> None:
    """Anyone who may submit could otherwise write to an operator's terminal."""
    conn.execute(
        """insert into tasklib.tasks (name, state, completed_at, error, kwargs)
           values ('t', 'failed', now(), E'\\x1b[2Jgone [red]', '{"a": "\\u001b]0;x\\u0007"}')"""
    )
    task_id = json.loads(run("list", "--json").stdout)[0]["id"]
    for output in (run("list").stdout, run("show", task_id).stdout):
        assert "\x1b" not in output
        assert r"\x1b[2Jgone [red]" in output


def test_migrate(run: Run, new_database: NewDatabase) -> None:
    """Check, print, make."""
    url = new_database()
    assert run("migrate", "--check", DATABASE_URL=url).returncode == 1
    assert "create table tasklib.tasks" in run("migrate", "--sql", DATABASE_URL=url).stdout
    assert "applied: 0001_tasks" in run("migrate", DATABASE_URL=url).stdout
    assert run("migrate", "--check", DATABASE_URL=url).returncode == 0


def test_another_schema_by_environment(run: Run, new_database: NewDatabase) -> None:
    """TASKLIB_SCHEMA goes with the URL."""
    url = new_database()
    run("submit", "a", DATABASE_URL=url, TASKLIB_SCHEMA="jobs")
    assert len(json.loads(run("list", "--json", DATABASE_URL=url, TASKLIB_SCHEMA="jobs").stdout)) == 1
    assert json.loads(run("list", "--json", DATABASE_URL=url).stdout) == []


def test_without_a_database_it_says_what_to_set(run: Run) -> None:
    """The first thing that a newcomer meets."""
    refused = run("list", DATABASE_URL="")
    assert refused.returncode == 1
    assert "DATABASE_URL" in refused.stderr


def test_without_the_extra_it_says_what_to_install() -> None:
    """Typer and rich come with the extra `cli`; the library does without."""
    blind = "import sys; sys.modules['typer'] = None; import importlib.util as u; real = u.find_spec\n"
    blind += "u.find_spec = lambda name: None if name == 'typer' else real(name)\n"
    blind += "import tasklib.cli; tasklib.cli.main()"
    refused = subprocess.run([sys.executable, "-c", blind], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "pip install 'tasklib-pg[cli]'" in refused.stderr


def test_cancel_and_retry(run: Run, client: tasklib.Client) -> None:
    """Each says what it did, or why not with exit code 1."""
    task_id = client.submit_task("report")
    assert run("cancel", str(task_id), "--reason", "not needed").stdout == "cancelled\n"
    again = run("cancel", str(task_id))
    assert (again.returncode, again.stdout) == (1, "")
    assert "is final already" in again.stderr
    assert run("retry", str(task_id)).stdout == "retried\n"
    assert run("retry", str(task_id)).returncode == 1


def test_every_attempt_is_shown_with_its_traceback(run: Run, client: tasklib.Client, config: tasklib.Config) -> None:
    """For people and for programs: not only the last one, which the task itself keeps."""
    numbers = iter((1, 2))

    @tasklib.task(max_retries=1, backoff=tasklib.Fixed(0))
    def fragile() -> None:
        raise ValueError(f"number {next(numbers)}")

    task_id = client.submit(fragile.new())
    tasklib.TaskWorker(config).run_until_empty_sync()
    shown = run("show", str(task_id)).stdout
    for number, follows in ((1, "; the task went on"), (2, "")):
        headline = rf"attempt {number}: FAILED after 0\.\ds, begun \S+ \S+ on \S+{follows}\n"
        assert re.search(headline + rf"    ValueError: number {number}\n    Traceback:\n", shown), shown
    assert shown.count("raise ValueError") == 2
    attempts = json.loads(run("show", str(task_id), "--json").stdout)["attempts"]
    assert [(each["attempt"], each["outcome"], each["will_retry"]) for each in attempts] == [
        (1, "FAILED", True),
        (2, "FAILED", False),
    ]
    assert ["raise ValueError" in each["error"] for each in attempts] == [True, True]


def test_who_may_not_read_attempts_sees_the_task(run: Run, conn: Conn, database_url: str) -> None:
    """The rights on tasks are enough for what they were enough for before."""
    task_id = run("submit", "a").stdout.strip()
    conn.execute("create role looker login; grant usage on schema tasklib to looker")
    try:
        conn.execute("grant select on tasklib.tasks to looker")
        url = psycopg.conninfo.make_conninfo(database_url, options="-c role=looker")
        shown = run("show", task_id, DATABASE_URL=url)
        assert shown.returncode == 0
        assert task_id in shown.stdout
        assert "grant select on tasklib.task_attempts" in shown.stderr
        assert json.loads(run("show", task_id, "--json", DATABASE_URL=url).stdout)["attempts"] is None
    finally:
        conn.execute("drop owned by looker; drop role looker")


def test_the_beginning_of_an_id_is_enough(run: Run, client: tasklib.Client, conn: Conn) -> None:
    """If no other begins so; with or without dashes. What is not clear changes nothing, and names the candidates."""
    one, other = "0190aaaa-bbbb-7000-8000-000000000001", "0190aaaa-bbbb-7000-8000-000000000002"
    for task_id in (one, other, "0190aaaa-cccc-7000-8000-000000000000"):
        conn.execute("insert into tasklib.tasks (id, name) values (%s, 'a')", [task_id])
    assert json.loads(run("show", "0190aaaacc", "--json").stdout)["id"].startswith("0190aaaa-cccc")
    assert run("cancel", "0190AAAA-C").stdout == "cancelled\n"
    unclear = run("cancel", "0190aaaa-bb")
    assert (unclear.returncode, unclear.stdout) == (2, "")
    assert one in unclear.stderr
    assert other in unclear.stderr
    assert {task.state for task in client.list_tasks() if str(task.id) in {one, other}} == {"pending"}
    page = json.loads(run("list", "--after", "0190aaaa-cc", "--json").stdout)
    assert [task["id"] for task in page] == [other, one]


def test_failed_for_good_or_not(run: Run, conn: Conn) -> None:
    """The list says which, and can be asked for either."""
    conn.execute(
        """insert into tasklib.tasks (name, state, completed_at, next_retry_at)
           values ('over', 'failed', now(), null), ('soon', 'failed', null, now() + interval '90 s'),
                  ('due', 'failed', null, now() - interval '1 s'), ('done', 'completed', now(), null)"""
    )
    listed = run("list", "--state", "failed").stdout
    assert re.search(r"over +failed \(gave up\) ", listed)
    assert re.search(r"soon +failed \(retry in 1\.\dm\) ", listed)
    assert re.search(r"due +failed \(retry due\) ", listed)

    def names(*words: str) -> set[str]:
        return {task["name"] for task in json.loads(run("list", *words, "--json").stdout)}

    assert names("--state", "failed", "--final") == {"over"}
    assert names("--state", "failed", "--retrying") == names("--retrying") == {"soon", "due"}
    assert names("--final") == {"over", "done"}
