"""Config keeps the original fields and defaults, refuses nonsense, and never shows the password."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import tasklib
from tasklib.connection_string import connection_string, listen_connection_string
from tasklib_daemon.settings import load

if TYPE_CHECKING:
    from pathlib import Path

URL = "postgresql://app:S3CR3T@db.example/shop"


def test_defaults_are_the_original_ones() -> None:
    """The fields of TaskLib's Config, in order, with their defaults."""
    config = tasklib.Config(database_url=URL)
    assert (config.max_retries, config.base_retry_delay_seconds, config.retry_backoff_multiplier) == (3, 5.0, 2.0)
    assert (config.lock_timeout_seconds, config.default_task_timeout_seconds, config.worker_id) == (600, None, None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"database_url": None}, "Config.database_url"),
        ({"max_retries": -1}, "Config.max_retries"),
        ({"base_retry_delay_seconds": float("inf")}, "Config.base_retry_delay_seconds"),
        ({"lock_timeout_seconds": 0}, "Config.lock_timeout_seconds"),
        ({"max_argument_bytes": 2**30}, "Config.max_argument_bytes"),
        ({"max_retrys": 3}, "Config.max_retrys: Unexpected"),
        ({"schema": "Robert'); drop table"}, "cannot be the schema"),
        ({"schema": "pg_catalog"}, "cannot be the schema"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], said: str) -> None:
    """One clear error, before anything connects."""
    with pytest.raises(tasklib.InvalidConfig, match=said.replace("(", r"\(").replace(")", r"\)")):
        tasklib.Config(**{"database_url": URL, **fields})


def test_the_password_is_never_shown() -> None:
    """Not by repr, not by an error about another field, not by an error about the URL itself."""
    assert "S3CR3T" not in repr(tasklib.Config(URL))
    with pytest.raises(tasklib.InvalidConfig) as wrong:
        tasklib.Config(URL, max_retries=-1)
    assert "S3CR3T" not in str(wrong.value)
    with pytest.raises(tasklib.InvalidConfig) as unreadable:
        connection_string(tasklib.Config("host=x password=S3CR3T and so on"))
    assert "S3CR3T" not in str(unreadable.value)
    assert unreadable.value.__cause__ is None
    with pytest.raises(tasklib.InvalidConfig, match="%40") as doubled:
        connection_string(tasklib.Config("postgresql://app:S3C@R3T@db.example/shop"))
    assert "R3T" not in str(doubled.value)


@pytest.mark.parametrize("use", [tasklib.init, tasklib.Client, tasklib.AsyncClient])
def test_a_url_is_not_a_config(use: Any) -> None:
    """What others take, with a word on what is wanted."""
    with pytest.raises(tasklib.InvalidConfig, match=r"tasklib\.Config"):
        use(URL)


def test_an_sqlalchemy_url_is_understood() -> None:
    """Many applications have their URL in that form."""
    assert tasklib.Config("postgresql+psycopg://u@h/d").database_url == "postgresql://u@h/d"


def test_the_listener_may_have_an_address_of_its_own() -> None:
    """As checked, as complete and as secret as the other; without it, it is the other."""
    config = tasklib.Config("host=pooler", listen_database_url=URL.replace("postgresql:", "postgresql+psycopg:"))
    assert "S3CR3T" not in repr(config)
    made = listen_connection_string(config)
    assert "host=db.example" in made
    assert "keepalives_idle=15" in made
    assert "host=pooler" in listen_connection_string(tasklib.Config("host=pooler"))
    with pytest.raises(tasklib.InvalidConfig, match="listen_database_url cannot be read") as unreadable:
        listen_connection_string(tasklib.Config("", listen_database_url="password=S3CR3T and so on"))
    assert "S3CR3T" not in str(unreadable.value)
    given = {"DATABASE_URL": "host=b", "TASKLIB_LISTEN_DATABASE_URL": "host=c"}
    assert tasklib.Config.from_environment(given).listen_database_url == "host=c"


def test_connections_notice_a_vanished_peer() -> None:
    """Keepalives and tcp_user_timeout are set, unless the URL says otherwise."""
    made = connection_string(tasklib.Config("postgresql://h/d?tcp_user_timeout=1234"))
    assert "tcp_user_timeout=1234" in made
    assert "keepalives_idle=15" in made
    assert "connect_timeout=10" in made


def test_the_environment_names_the_database() -> None:
    """TASKLIB_DATABASE_URL before DATABASE_URL before libpq's own variables."""
    both = {"TASKLIB_DATABASE_URL": "host=a", "DATABASE_URL": "host=b", "TASKLIB_SCHEMA": "jobs"}
    assert tasklib.Config.from_environment(both).database_url == "host=a"
    assert tasklib.Config.from_environment(both).schema == "jobs"
    assert tasklib.Config.from_environment({"PGHOST": "c"}).database_url == ""
    with pytest.raises(tasklib.InvalidConfig, match="DATABASE_URL"):
        tasklib.Config.from_environment({})


def test_using_the_module_before_init_says_what_to_do() -> None:
    """The first mistake of every newcomer."""
    with pytest.raises(tasklib.NotInitialised, match=r"tasklib\.init"):
        tasklib.list_tasks()


def test_a_credential_is_the_same_as_the_daemons(tmp_path: Path) -> None:
    """In a pod, and beside a service, a command finds the database of the daemon. As there, our own variables come
    first, and those that other programs read too come last; an empty file is none.
    """
    given = {"CREDENTIALS_DIRECTORY": str(tmp_path), "DATABASE_URL": "host=b"}
    assert tasklib.Config.from_environment(given).database_url == "host=b"
    (tmp_path / "database_url").write_text("host=a\n")
    (tmp_path / "listen_database_url").write_text("\n")
    for read in (tasklib.Config.from_environment(given), load(None, given).config()):
        assert (read.database_url, read.listen_database_url) == ("host=a", None)
    given["TASKLIB_DATABASE_URL"] = "host=c"
    for read in (tasklib.Config.from_environment(given), load(None, given).config()):
        assert read.database_url == "host=c"
    (tmp_path / "listen_database_url").write_bytes(b"\xff")
    with pytest.raises(tasklib.InvalidConfig, match="credential listen_database_url"):
        tasklib.Config.from_environment(given)
