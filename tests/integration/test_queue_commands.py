"""The commands `tasklib queue` and `tasklib cluster`, run as an operator runs them."""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from tests.support.commands import run_tasklib

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path
    from typing import TypeAlias

    import tasklib
    from tests.support.raw_sql import Conn, NewDatabase

    Run: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(database_url: str, tmp_path: Path) -> Run:
    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {"DATABASE_URL": database_url, "PATH": os.environ["PATH"], "HOME": str(tmp_path), **environment}
        return run_tasklib(*words, variables=variables, directory=tmp_path)

    return run


def test_set_show_and_list(run: Run, client: tasklib.Client) -> None:
    """What is not named stays; `none` removes."""
    words = ["max_running=10", "rate_limit=100", "rate_seconds=60", "weight=0.5", "audit=true", "breaker_share=0.5"]
    made = run("queue", "set", "mail", *words, "breaker_codes=TIMEOUT,OSError", "--reason", "new contract")
    assert (made.returncode, made.stderr) == (0, "")
    assert re.search(r"^max_running +10$", made.stdout, re.MULTILINE)
    assert re.search(r'^breaker_codes +\["TIMEOUT","OSError"\]$', made.stdout, re.MULTILINE)
    run("queue", "set", "mail", "rate_limit=none", "rank:=3")
    shown = run("queue", "show", "mail").stdout
    assert "rate_" not in shown
    assert re.search(r"^rank +3$", shown, re.MULTILINE)
    assert re.search(r"^audit +true$", shown, re.MULTILINE)
    queue = client.get_queue("mail")
    assert queue is not None
    as_json = json.loads(run("queue", "show", "mail", "--json").stdout)
    assert set(as_json) == set(queue.to_dict())
    assert [as_json] == json.loads(run("queue", "list", "--json").stdout)
    assert as_json == json.loads(run("queue", "set", "mail", "rank=3", "--json").stdout)
    assert client.list_transitions()[-1].reason == "new contract"


def test_a_list_says_what_stops_a_queue(run: Run, client: tasklib.Client, conn: Conn) -> None:
    """One line each: whether it runs, its limits, its order."""
    client.set_queue("api", rate_limit=100, rate_seconds=60, breaker_failures=1)
    client.set_queue("mail", max_running=10, max_per_worker=2)
    conn.execute("select tasklib.permit('mail', 'a', 3, 0), tasklib.report_breaker('api', 1, 0, 1)")
    client.pause_queue("mail", "down")
    client.submit_task("a", queue="other")
    header, *lines = run("queue", "list").stdout.splitlines()
    assert re.split(r" {2,}", header) == [
        "queue", "state", "max running", "permits", "per worker", "rate", "rank", "weight",
    ]  # fmt: skip
    assert [re.split(r" {2,}", line) for line in lines] == [
        ["api", "breaker open", "-", "-", "-", "100 in 60s", "0", "1"],
        ["mail", "paused by postgres: down", "10", "3 in 1", "2", "-", "0", "1"],
        ["other", "runs", "-", "-", "-", "-", "0", "1"],
    ]


def test_pause_and_resume(run: Run, client: tasklib.Client) -> None:
    """Until a moment, or for a time."""
    assert run("queue", "pause", "mail", "--reason", "down").stdout == "paused\n"
    assert run("queue", "resume", "mail", "--reason", "up").stdout == "resumed\n"
    again = run("queue", "resume", "mail")
    assert (again.returncode, again.stdout) == (1, "")
    assert "is not paused" in again.stderr
    assert run("queue", "pause", "mail", "--until", "30m").stdout.startswith("paused until 20")
    paused = client.get_queue("mail")
    assert paused is not None
    assert paused.paused_until is not None
    assert timedelta(minutes=28) < paused.paused_until - datetime.now(UTC) < timedelta(minutes=31)
    until = json.loads(run("queue", "pause", "mail", "--until", "2090-01-31T12:00:00+01:00", "--json").stdout)
    assert until["paused_until"] == "2090-01-31T11:00:00Z"
    reasons = [(each.verb, each.reason) for each in client.list_transitions()]
    assert reasons[2:] == [("resume_queue", "up"), ("pause_queue", "down")]


def test_the_cluster(run: Run) -> None:
    made = run("cluster", "set", "cluster_wide_cap=200", "--reason", "the database is small")
    assert re.search(r"^cluster_wide_cap +200$", made.stdout, re.MULTILINE)
    assert json.loads(run("cluster", "set", "refuses_unknown_queues=true", "--json").stdout)["cluster_wide_cap"] == 200
    shown = json.loads(run("cluster", "show", "--json").stdout)
    assert (shown["cluster_wide_cap"], shown["refuses_unknown_queues"]) == (200, True)
    assert "cluster_wide_cap" not in run("cluster", "set", "cluster_wide_cap=none").stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["queue", "show", "mail"], 1, "nobody has set a policy for queue mail"),
        (["queue", "show", "No Queue"], 2, "queue's name"),
        (["queue", "set", "mail"], 2, "OPTION=VALUE"),
        (["queue", "set", "mail", "max_running"], 2, "KEY=VALUE"),
        (["queue", "set", "mail", "max_running=1", "max_running=2"], 2, "twice"),
        (["queue", "set", "mail", "max_runing=1"], 2, "unknown option max_runing; there are: max_running"),
        (["queue", "set", "mail", "max_running=many"], 2, "max_running must be a whole number from 0 to 1000000"),
        (["queue", "set", "mail", "max_running=-1"], 2, "got -1"),
        (["queue", "set", "mail", "audit=yes"], 2, "audit must be True or False"),
        (["queue", "set", "mail", "rate_limit=5"], 2, "rate_limit needs rate_seconds"),
        (["queue", "pause", "mail", "--until", "soon"], 2, "duration such as 30m"),
        (["queue", "pause", "mail", "--until", "2020-01-01T00:00:00+00:00"], 2, "past"),
        (["queue", "pause", "mail", "--until", "2090-01-01T00:00:00"], 2, "time zone"),
        (["queue", "pause", "mail", "--until", "0m"], 2, "future"),
        (["cluster", "set", "cap=5"], 2, "unknown option cap; there are: cluster_wide_cap"),
        (["cluster", "set", "cluster_wide_cap=-5"], 2, "cluster_wide_cap must be"),
    ],
)
def test_mistakes_are_told_in_one_line(run: Run, words: list[str], code: int, said: str) -> None:
    """As those of all other commands. Nothing is changed."""
    refused = run(*words)
    assert refused.returncode == code
    assert said in " ".join(refused.stderr.split())
    assert "Traceback" not in refused.stderr
    assert run("queue", "list", "--json").stdout == "[]\n"


def test_an_old_worker_is_named(run: Run, conn: Conn) -> None:
    """With what to do."""
    conn.execute(
        """insert into tasklib.workers (worker_id, name, hostname, pid, process_name, task_names, concurrency,
                                        lease_until)
           values ('old-one', 'w', 'host', 1, 'main', '{}', 1, now() + interval '1 hour')"""
    )
    refused = run("queue", "pause", "mail")
    assert refused.returncode == 1
    assert "worker old-one" in refused.stderr
    assert "Upgrade all workers first" in refused.stderr


def test_another_schema_by_environment(run: Run, new_database: NewDatabase) -> None:
    url = new_database()
    run("queue", "set", "mail", "rank=1", DATABASE_URL=url, TASKLIB_SCHEMA="jobs")
    listed = json.loads(run("queue", "list", "--json", DATABASE_URL=url, TASKLIB_SCHEMA="jobs").stdout)
    assert [queue["name"] for queue in listed] == ["mail"]
    assert run("queue", "list", "--json", DATABASE_URL=url).stdout == "[]\n"


def test_help_tells_the_two_pauses_apart(run: Run) -> None:
    """One host, or the whole cluster."""
    said = " ".join(run("queue", "pause", "--help").stdout.split())
    assert "in the whole cluster" in said
    assert "`tasklibd pause` is another command: it pauses all queues, for the workers of this host alone" in said


def test_terminal_codes_in_a_reason_are_shown_not_obeyed(run: Run, client: tasklib.Client) -> None:
    client.pause_queue("mail", "\x1b[2Jgone")
    for output in (run("queue", "list").stdout, run("queue", "show", "mail").stdout):
        assert "\x1b" not in output
        assert r"\x1b[2Jgone" in output
