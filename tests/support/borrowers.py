"""Connections of every kind that a submit can join, each used in its own way, behind one face for the tests."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import uuid
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import psycopg2
import psycopg2.extras
import sqlalchemy
import sqlmodel
from django.conf import settings
from django.db import connections
from django.db import transaction as django_transaction
from django.db.utils import ConnectionHandler
from django.utils.connection import ConnectionProxy
from django.utils.functional import empty
from sqlalchemy import make_url, orm
from sqlalchemy.ext import asyncio as sqlalchemy_asyncio
from sqlmodel.ext.asyncio.session import AsyncSession as SQLModelAsyncSession

import tasklib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Undo(Exception):
    """Leaves a block of theirs, so that it rolls back."""


class Borrower:
    """A connection of one kind, and its users' own way to begin a transaction and a savepoint. Async kinds live on a
    loop of their own, so that one test serves all.
    """

    is_async = False

    def __init__(self, config: tasklib.Config) -> None:
        self.url = config.database_url
        self.sync_client = tasklib.Client(config)
        self.async_client = tasklib.AsyncClient(config)
        self.runner = asyncio.Runner()
        self.ends = contextlib.ExitStack()
        self.connection: Any = self.do(self.open())

    def open(self) -> Any:
        raise NotImplementedError

    def transaction(self) -> Any:
        raise NotImplementedError

    def savepoint(self) -> Any:
        raise NotImplementedError

    def execute(self, sql: str) -> Any:
        """The application's own statement."""
        return self.do(self.connection.execute(sql))

    def do(self, result: Any) -> Any:
        async def awaited() -> Any:
            return await result

        return self.runner.run(awaited()) if inspect.isawaitable(result) else result

    def at_end(self, call: Callable[[], Any]) -> None:
        self.ends.callback(lambda: self.do(call()))

    @contextlib.contextmanager
    def inside(self, block: Any) -> Iterator[None]:
        if hasattr(block, "__enter__"):
            with block:
                yield
            return
        self.do(block.__aenter__())
        try:
            yield
        except BaseException as error:
            self.do(block.__aexit__(type(error), error, error.__traceback__))
            raise
        self.do(block.__aexit__(None, None, None))

    def submit(self, new: tasklib.NewTask) -> tasklib.TaskId:
        client = self.async_client if self.is_async else self.sync_client
        made: tasklib.TaskId = self.do(client.submit(new, connection=self.connection))
        return made

    def submit_many(self, news: list[tasklib.NewTask]) -> list[tasklib.TaskId]:
        client = self.async_client if self.is_async else self.sync_client
        made: list[tasklib.TaskId] = self.do(client.submit_many(news, connection=self.connection))
        return made

    def close(self) -> None:
        self.ends.close()
        self.do(self.async_client.close())
        self.sync_client.close()
        self.runner.close()


class Psycopg(Borrower):
    def open(self) -> Any:
        conn = psycopg.connect(self.url)
        self.at_end(conn.close)
        return conn

    def transaction(self) -> Any:
        return self.connection.transaction()

    savepoint = transaction


class PsycopgInAutocommit(Psycopg):
    def open(self) -> Any:
        conn = super().open()
        conn.autocommit = True
        return conn


class AsyncPsycopg(Psycopg):
    is_async = True

    async def open(self) -> Any:
        conn = await psycopg.AsyncConnection.connect(self.url)
        self.at_end(conn.close)
        return conn


class Psycopg2(Borrower):
    """With a cursor of its own kind, whose rows have no positions."""

    def open(self) -> Any:
        conn = psycopg2.connect(self.url, cursor_factory=psycopg2.extras.RealDictCursor)
        self.at_end(conn.close)
        return conn

    def transaction(self) -> Any:
        return self.connection

    def execute(self, sql: str) -> Any:
        with self.connection.cursor() as cursor:
            cursor.execute(sql)

    @contextlib.contextmanager
    def savepoint(self) -> Iterator[None]:
        self.execute("savepoint mine")
        try:
            yield
        except BaseException:
            self.execute("rollback to savepoint mine")
            raise


class Psycopg2InAutocommit(Psycopg2):
    def open(self) -> Any:
        conn = super().open()
        conn.autocommit = True
        return conn


class Asyncpg(Borrower):
    is_async = True

    async def open(self) -> Any:
        conn = await asyncpg.connect(self.url, statement_cache_size=0)
        self.at_end(conn.close)
        return conn

    def transaction(self) -> Any:
        return self.connection.transaction()

    savepoint = transaction


class AsyncpgFromAPool(Asyncpg):
    async def open(self) -> Any:
        pool = await asyncpg.create_pool(self.url, min_size=1, statement_cache_size=0)
        self.at_end(pool.close)
        conn = await pool.acquire()
        self.at_end(lambda: pool.release(conn))
        return conn


class AsyncpgWithCodecs(Asyncpg):
    """An application that has its own idea of JSON, of UUIDs and of large numbers."""

    async def open(self) -> Any:
        conn = await super().open()
        for name in ("json", "jsonb"):
            await conn.set_type_codec(name, encoder=lambda value: f'"{value}!"', decoder=len, schema="pg_catalog")
        await conn.set_type_codec("uuid", encoder=str, decoder=hash, schema="pg_catalog")
        await conn.set_type_codec("int8", encoder=str, decoder=lambda text: [text], schema="pg_catalog")
        return conn


class SqlAlchemy(Borrower):
    """`make` gets the engine and returns the connection or the session."""

    def __init__(self, config: tasklib.Config, driver: str, make: Callable[[Any], Any]) -> None:
        self.driver = driver
        self.make = make
        super().__init__(config)

    def open(self) -> Any:
        engine = sqlalchemy.create_engine(make_url(self.url).set(drivername=f"postgresql+{self.driver}"))
        self.at_end(engine.dispose)
        made = self.make(engine)
        self.at_end(made.close)
        return made

    def execute(self, sql: str) -> Any:
        is_session = hasattr(self.connection, "get_bind")
        connection = self.do(self.connection.connection()) if is_session else self.connection
        return self.do(connection.execute(sqlalchemy.text(sql)))

    def transaction(self) -> Any:
        return self.connection.begin()

    def savepoint(self) -> Any:
        return self.connection.begin_nested()


class AsyncSqlAlchemy(SqlAlchemy):
    is_async = True

    async def open(self) -> Any:
        arguments: dict[str, Any] = {}
        if self.driver == "asyncpg":  # statements of their own names, as behind a pooler
            arguments = {"prepared_statement_name_func": lambda: f"__asyncpg_{uuid.uuid4()}__"}
        engine = sqlalchemy_asyncio.create_async_engine(
            make_url(self.url).set(drivername=f"postgresql+{self.driver}"), connect_args=arguments
        )
        self.at_end(engine.dispose)
        made = self.make(engine)
        made = await made if inspect.isawaitable(made) else made
        self.at_end(made.close)
        return made


class Django(Borrower):
    """The wrapper itself, under an alias; no settings of a project are needed, and none are left behind."""

    def open(self) -> Any:
        if not settings.configured:
            settings.configure(USE_TZ=True)
            self.ends.callback(setattr, settings, "_wrapped", empty)
        given = psycopg.conninfo.conninfo_to_dict(self.url)
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": given.get("dbname"),
            "USER": given.get("user"),
            "PASSWORD": given.get("password"),
            "HOST": given.get("host"),
            "PORT": given.get("port"),
        }
        connections["borrowed"] = ConnectionHandler({"default": database, "borrowed": database})["borrowed"]
        self.ends.callback(connections.__delitem__, "borrowed")
        self.ends.callback(connections["borrowed"].close)
        return connections["borrowed"]

    def transaction(self) -> Any:
        return django_transaction.atomic(using="borrowed")

    savepoint = transaction

    def execute(self, sql: str) -> Any:
        with self.connection.cursor() as cursor:
            cursor.execute(sql)


class DjangoByProxy(Django):
    """As `from django.db import connection` gives it."""

    def open(self) -> Any:
        super().open()
        return ConnectionProxy(connections, "borrowed")


def _connect(engine: Any) -> Any:
    return engine.connect()


def _scoped(engine: Any) -> Any:
    return orm.scoped_session(orm.sessionmaker(engine))


def _async_scoped(engine: Any) -> Any:
    return sqlalchemy_asyncio.async_scoped_session(
        sqlalchemy_asyncio.async_sessionmaker(engine), scopefunc=lambda: "the test"
    )


def _autocommit(engine: Any) -> Any:
    return engine.execution_options(isolation_level="AUTOCOMMIT").connect()


AUTOCOMMIT: dict[str, Callable[[tasklib.Config], Borrower]] = {
    "psycopg, autocommit": PsycopgInAutocommit,
    "psycopg2, autocommit": Psycopg2InAutocommit,
    "sqlalchemy, autocommit": lambda config: SqlAlchemy(config, "psycopg", _autocommit),
    "sqlalchemy async, autocommit": lambda config: AsyncSqlAlchemy(config, "asyncpg", _autocommit),
}
KINDS: dict[str, Callable[[tasklib.Config], Borrower]] = {
    "psycopg": Psycopg,
    "psycopg, async": AsyncPsycopg,
    "psycopg2": Psycopg2,
    "asyncpg": Asyncpg,
    "asyncpg from a pool": AsyncpgFromAPool,
    "asyncpg with codecs": AsyncpgWithCodecs,
    "sqlalchemy, psycopg": lambda config: SqlAlchemy(config, "psycopg", _connect),
    "sqlalchemy, psycopg2": lambda config: SqlAlchemy(config, "psycopg2", _connect),
    "sqlalchemy session": lambda config: SqlAlchemy(config, "psycopg", orm.Session),
    "sqlalchemy session, psycopg2": lambda config: SqlAlchemy(config, "psycopg2", orm.Session),
    "sqlalchemy scoped session": lambda config: SqlAlchemy(config, "psycopg", _scoped),
    "sqlmodel": lambda config: SqlAlchemy(config, "psycopg", sqlmodel.Session),
    "sqlalchemy async, psycopg": lambda config: AsyncSqlAlchemy(config, "psycopg", _connect),
    "sqlalchemy async, asyncpg": lambda config: AsyncSqlAlchemy(config, "asyncpg", _connect),
    "sqlalchemy async session, psycopg": lambda config: AsyncSqlAlchemy(
        config, "psycopg", sqlalchemy_asyncio.AsyncSession
    ),
    "sqlalchemy async session, asyncpg": lambda config: AsyncSqlAlchemy(
        config, "asyncpg", sqlalchemy_asyncio.AsyncSession
    ),
    "sqlalchemy async scoped session": lambda config: AsyncSqlAlchemy(config, "asyncpg", _async_scoped),
    "sqlmodel async": lambda config: AsyncSqlAlchemy(config, "asyncpg", SQLModelAsyncSession),
    "django": Django,
    "django by proxy": DjangoByProxy,
}
