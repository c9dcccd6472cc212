"""The lifespan helper, in real FastAPI and Starlette applications."""

# No `from __future__ import annotations`: FastAPI reads the annotations of functions inside functions.

import asyncio
import logging
import os
import signal
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import tasklib
from tasklib.fastapi import lifespan
from tests.support.raw_sql import Conn
from tests.support.serving import served
from tests.support.working import running
from tools.waiting import wait_until


@asynccontextmanager
async def alive(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Started and ended as a server does it, with a client that calls it."""
    async with app.router.lifespan_context(app), calling(app) as http:
        yield http


@asynccontextmanager
async def calling(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Without its lifespan."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
        yield http


@pytest.fixture
def add() -> tasklib.TaskFunction[..., Any]:
    def add(a: int, b: int) -> int:
        return a + b

    return tasklib.task(add)


def routes(app: FastAPI, add: tasklib.TaskFunction[..., Any]) -> FastAPI:
    @app.post("/async")
    async def submit() -> UUID:
        return await add.submit(1, 2)

    @app.post("/sync")
    def submit_sync() -> UUID:
        return add.submit_sync(1, 2)

    return app


def connections(conn: Conn) -> int:
    """Of the library's, to this database."""
    row = conn.execute(
        "select count(*) from pg_stat_activity where datname = current_database() and application_name like 'tasklib%'"
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.direct("counts backends, which a pooler keeps")
async def test_an_application_submits_while_it_lives(
    config: tasklib.Config, conn: Conn, client: tasklib.Client, add: tasklib.TaskFunction[..., Any]
) -> None:
    """Async endpoints and sync ones, which FastAPI runs in threads; after its end no connection is left."""
    async with alive(routes(FastAPI(lifespan=lifespan(config)), add)) as http:
        for path in ("/async", "/sync"):
            response = await http.post(path)
            assert client.get_task(response.json()) is not None
    client.close()
    wait_until(lambda: connections(conn) == 0, "all connections to be closed")
    with pytest.raises(tasklib.NotInitialised):
        await add.submit(1, 2)


async def test_the_environment_names_the_database(
    database_url: str, monkeypatch: pytest.MonkeyPatch, add: tasklib.TaskFunction[..., Any]
) -> None:
    """Read when the application starts, not when it is imported."""
    app = routes(FastAPI(lifespan=lifespan()), add)
    monkeypatch.setenv("DATABASE_URL", database_url)
    async with alive(app) as http:
        assert (await http.post("/async")).status_code == 200


async def test_starlette(config: tasklib.Config, client: tasklib.Client, add: tasklib.TaskFunction[..., Any]) -> None:
    """The same lifespan, without FastAPI."""

    async def submit(_: Any) -> PlainTextResponse:
        return PlainTextResponse(str(await add.submit(1, 2)))

    app = Starlette(lifespan=lifespan(config), routes=[Route("/", submit)])
    async with alive(app) as http:
        assert client.get_task((await http.get("/")).text) is not None


async def test_a_lifespan_of_ones_own(config: tasklib.Config, add: tasklib.TaskFunction[..., Any]) -> None:
    """Ours inside theirs, and their state reaches the requests."""

    @asynccontextmanager
    async def mine(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with lifespan(config)(app):
            await add.submit(1, 2)
            yield {"greeting": "hello"}
            await add.submit(3, 4)

    app = FastAPI(lifespan=mine)

    @app.get("/")
    def greet(request: Request) -> str:
        return str(request.state.greeting)

    async with app.router.lifespan_context(app) as state, calling(app):
        assert state == {"greeting": "hello"}
    with tasklib.Client(config) as client:
        assert len(client.list_tasks()) == 2


async def test_a_mounted_application_opens_what_it_needs(
    config: tasklib.Config, client: tasklib.Client, add: tasklib.TaskFunction[..., Any]
) -> None:
    """Nobody runs a mounted application's lifespan: the first submit does what that would have done."""
    sub = routes(FastAPI(lifespan=lifespan(config)), add)
    app = FastAPI()
    app.mount("/sub", sub)
    async with alive(app) as http:
        try:
            assert client.get_task((await http.post("/sub/async")).json()) is not None
        finally:
            tasklib.close()
    with pytest.raises(tasklib.NotInitialised, match=r"call tasklib\.init"):
        tasklib.get_task(UUID(int=1))


@pytest.mark.direct("counts backends, which a pooler keeps")
async def test_a_worker_lives_with_the_application(
    config: tasklib.Config, conn: Conn, client: tasklib.Client, add: tasklib.TaskFunction[..., Any]
) -> None:
    """And again, when the application is started again; a signal's handler stays the server's."""
    before = signal.getsignal(signal.SIGTERM)
    own = tasklib.TaskWorker(config, concurrency=2, poll_interval_seconds=0.1, handle_signals=False)
    for worker in (True, own, own):
        async with alive(routes(FastAPI(lifespan=lifespan(config, worker=worker)), add)) as http:
            made = (await http.post("/async")).json()
            task = await tasklib.wait_for([made], timeout=20)
            assert task[0].result == {"value": 3}
            assert signal.getsignal(signal.SIGTERM) == before
        assert conn.execute("select count(*) from tasklib.workers").fetchone() == (0,)
    client.close()
    wait_until(lambda: connections(conn) == 0, "all connections to be closed")


async def test_a_worker_that_fails_is_reported_at_once(
    config: tasklib.Config, add: tasklib.TaskFunction[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The application goes on serving; the error is raised when it ends."""
    caplog.set_level(logging.ERROR, "tasklib")
    answers = []

    async def serve(app: FastAPI) -> None:
        async with alive(app) as http, asyncio.timeout(20):
            while "worker.failed" not in caplog.text:  # noqa: ASYNC110 - logging has no event to wait for
                await asyncio.sleep(0.01)
            answers.append((await http.post("/async")).status_code)

    with running(config) as busy:
        with pytest.raises(tasklib.InvalidOptions, match="running already"):
            await serve(routes(FastAPI(lifespan=lifespan(config, worker=busy)), add))
        assert answers == [200]
        assert not busy._stop_asked.is_set()  # who runs it already goes on with it


APPLICATION = """
    import os, pathlib, time
    import tasklib
    from fastapi import FastAPI
    from tasklib.fastapi import lifespan

    config = tasklib.Config(os.environ["DATABASE_URL"])
    app = FastAPI(lifespan=lifespan(config, worker=True))

    @tasklib.task
    def nap(began: str) -> str:
        pathlib.Path(began).touch()
        time.sleep(0.7)
        return "slept"

    @app.post("/nap")
    async def submit(began: str) -> str:
        return str(await nap.submit(began))
"""


def test_a_server_drains_at_sigterm(client: tasklib.Client, conn: Conn, database_url: str, tmp_path: Path) -> None:
    """A real uvicorn: what runs is finished, the worker is off the list, and the process ends in good order."""
    (tmp_path / "application.py").write_text(textwrap.dedent(APPLICATION))
    environment = os.environ | {"DATABASE_URL": database_url}
    began = tmp_path / "began"
    with served("application:app", tmp_path, environment, tmp_path / "socket") as (process, http):
        task_id = http.post("/nap", params={"began": str(began)}).json()
        wait_until(began.exists, "the task to begin")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert "Application shutdown complete" in output
    assert process.returncode in {0, -signal.SIGTERM}  # uvicorn ends by the signal that it was sent
    task = client.get_task(task_id)
    assert task is not None
    assert (task.state, task.result) == ("completed", {"value": "slept"})
    assert conn.execute("select count(*) from tasklib.workers").fetchone() == (0,)
