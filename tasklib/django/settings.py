"""Django's settings as a tasklib.Config: a database of DATABASES, and the settings in TASKLIB."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import psycopg
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from psycopg import conninfo

from tasklib.config import Config
from tasklib.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from django.db.backends.base.base import BaseDatabaseWrapper

_OWN = {"DATABASE": "default", "TASK_MODULES": ("tasks",)}
_CONFIG_FIELDS = {field.name.upper(): field.name for field in fields(Config) if field.name != "database_url"}


def database_alias() -> str:
    """The key in DATABASES of the database that holds the tasks."""
    return str(_given()["DATABASE"])


def task_modules() -> list[str]:
    """The modules of each app that may define tasks."""
    return list(_given()["TASK_MODULES"])


def schema() -> str:
    return str(_given().get("SCHEMA", "tasklib"))


def config() -> Config:
    """Read anew each time: a test run replaces the configured database by its own."""
    given = {_CONFIG_FIELDS[key]: value for key, value in _given().items() if key in _CONFIG_FIELDS}
    try:
        return Config(_database_url(connections[database_alias()]), **given)
    except InvalidConfig as error:
        raise ImproperlyConfigured(f"settings.TASKLIB: {error}") from None


def _given() -> dict[str, Any]:
    given: Mapping[str, Any] = getattr(settings, "TASKLIB", {})
    known = {**_OWN, **_CONFIG_FIELDS}
    unknown = sorted(given.keys() - known.keys())
    if unknown:
        raise ImproperlyConfigured(f"settings.TASKLIB has no {', '.join(unknown)}; there are: {', '.join(known)}")
    return {**_OWN, **given}


def _database_url(connection: BaseDatabaseWrapper) -> str:
    """The parameters that Django gives to the driver, if libpq knows them; the others are about Django's cursors."""
    if connection.vendor != "postgresql":
        raise ImproperlyConfigured(
            f"tasklib needs PostgreSQL, and DATABASES[{connection.alias!r}] is {connection.vendor}. Name another "
            f'database with TASKLIB = {{"DATABASE": "..."}}.'
        )
    given = connection.get_connection_params()
    role = connection.settings_dict["OPTIONS"].get("assume_role")
    if role:
        given["options"] = f"{given.get('options', '')} -c role={_escaped(role)}".strip()
    libpq = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
    return conninfo.make_conninfo("", **{key: value for key, value in given.items() if key in libpq})


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")
