"""The library's settings, checked once. The fields of the original TaskLib come first, with its defaults."""

from __future__ import annotations

import os
import re
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from tasklib.errors import InvalidConfig
from tasklib.names import check_schema
from tasklib.ranges import DAY_SECONDS, LONGEST_TEXT, YEAR_SECONDS, Range, plain
from tasklib.retry import MAX_DELAY_SECONDS, MAX_MULTIPLIER
from tasklib.strict_json import LARGEST_ARGUMENT_BYTES, MAX_ARGUMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

_Address = Annotated[str, Field(max_length=LONGEST_TEXT)]
_SQLALCHEMY_DRIVER = re.compile(r"^(postgres(?:ql)?)\+\w+(?=://)")


@dataclass(frozen=True, config=ConfigDict(extra="forbid", hide_input_in_errors=True))
class Config:
    """Immutable settings. `database_url` is a libpq URL or `key=value` string; "" means libpq's PG* variables."""

    database_url: _Address = field(repr=False)  # it may hold a password
    max_retries: Annotated[int, Range(0, 1_000_000)] = 3
    base_retry_delay_seconds: Annotated[float, Range(0, MAX_DELAY_SECONDS)] = 5.0
    retry_backoff_multiplier: Annotated[float, Range(1, MAX_MULTIPLIER)] = 2.0
    lock_timeout_seconds: Annotated[int, Range(1, 30 * DAY_SECONDS)] = 600
    default_task_timeout_seconds: Annotated[float, Range(0.01, YEAR_SECONDS)] | None = None
    worker_id: Annotated[str, Field(max_length=200)] | None = None

    listen_database_url: _Address | None = field(default=None, repr=False)  # if LISTEN does not work at database_url
    schema: Annotated[str, Field(max_length=63)] = "tasklib"
    auto_migrate: bool = False
    pool_size: Annotated[int, Range(1, 1000)] = 10
    database_timeout_seconds: Annotated[float, Range(0.1, 3600)] = 30.0
    max_argument_bytes: Annotated[int, Range(1, LARGEST_ARGUMENT_BYTES)] = MAX_ARGUMENT_BYTES

    retry_jitter: Annotated[float, Range(0, 1)] = 0.0
    max_retry_delay_seconds: Annotated[float, Range(0, MAX_DELAY_SECONDS)] = 86400.0
    lease_seconds: Annotated[float, Range(0.3, 3600)] = 15.0
    timeout_delta_seconds: Annotated[float, Range(0, DAY_SECONDS)] = 10.0
    bury_after: Annotated[int, Range(1, 1000)] = 3

    @model_validator(mode="wrap")
    @classmethod
    def _raise_our_error(cls, given: Any, validate: ModelWrapValidatorHandler[Config]) -> Config:
        try:
            return validate(given)
        except ValidationError as error:
            lines = [
                f"Config.{'.'.join(map(str, e['loc']))}: {plain(e['msg'])}" for e in error.errors(include_input=False)
            ]
            raise InvalidConfig("; ".join(lines)) from None

    def __post_init__(self) -> None:
        check_schema(self.schema)
        # A lease must be shorter than a lock: otherwise the lock of a live worker could end before it is extended.
        object.__setattr__(self, "lease_seconds", min(self.lease_seconds, self.lock_timeout_seconds / 1.5))
        object.__setattr__(self, "database_url", _SQLALCHEMY_DRIVER.sub(r"\1", self.database_url))
        if self.listen_database_url is not None:
            listen = _SQLALCHEMY_DRIVER.sub(r"\1", self.listen_database_url)
            object.__setattr__(self, "listen_database_url", listen)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Config:
        """The database is TASKLIB_DATABASE_URL, else the credential database_url, else DATABASE_URL, else what libpq's
        PG* variables name. listen_database_url is TASKLIB_LISTEN_DATABASE_URL, else the credential of that name. The
        schema is TASKLIB_SCHEMA. A credential is a file in the directory CREDENTIALS_DIRECTORY. The daemon reads it
        too, so that commands beside a daemon find the same database.
        """
        url = _given(environment, "database_url") or environment.get("DATABASE_URL") or ""
        if not url and not any(name in environment for name in ("PGHOST", "PGDATABASE", "PGSERVICE", "PGUSER")):
            raise InvalidConfig(
                "no database is configured: set DATABASE_URL (postgresql://user@host/database) or libpq's PG* variables"
            )
        return cls(
            database_url=url,
            listen_database_url=_given(environment, "listen_database_url") or None,
            schema=environment.get("TASKLIB_SCHEMA", "tasklib"),
        )


def _given(environment: Mapping[str, str], name: str) -> str:
    """The value of our own variable, else of the credential, else ""."""
    directory = environment.get("CREDENTIALS_DIRECTORY")
    if (given := environment.get(f"TASKLIB_{name.upper()}")) or not directory:
        return given or ""
    try:
        return Path(directory, name).read_text("utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"the credential {name} in {directory} cannot be read: {type(error).__name__}") from None
