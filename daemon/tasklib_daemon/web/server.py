"""A small HTTP server for an ASGI application: one request per connection, bounded in size and time.

The number of connections is bounded too. Beyond the bound the oldest is closed, so that clients that send nothing, or
do not read their answer, cannot lock out others.

It is enough for four short answers, and uses a tenth of the memory of a full server. An application that needs more can
be served by any other ASGI server.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import resource
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tasklib_daemon.logs import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, MutableMapping

    Application = Callable[[Any, Any, Any], Awaitable[None]]

MAX_HEAD_BYTES = 8192
MAX_SILENT = 512  # connections without a complete request; more than one turn of the loop accepts
MAX_ANSWERED = 64  # connections whose answer is being sent; each holds a copy of it
BACKLOG = 256  # a client beyond it tries again only after a second
REQUEST_SECONDS = 5.0


class _BoundedTasks:
    """A bounded set of tasks: a new one beyond the bound cancels the oldest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: dict[asyncio.Task[Any], None] = {}  # the oldest first

    @contextlib.contextmanager
    def joined(self, task: asyncio.Task[Any]) -> Iterator[None]:
        if len(self._tasks) >= self._most:
            oldest = next(iter(self._tasks))
            del self._tasks[oldest]
            oldest.cancel()
        self._tasks[task] = None
        try:
            yield
        finally:
            self._tasks.pop(task, None)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter([*self._tasks])


class Server:
    def __init__(self, application: Application) -> None:
        self._application = application
        self._silent = _BoundedTasks(min(MAX_SILENT, _most_descriptors() // 2))
        self._answered = _BoundedTasks(min(MAX_ANSWERED, _most_descriptors() // 4))
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Return the port. Raises OSError if it cannot be used."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES, backlog=BACKLOG)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        left = [*self._silent, *self._answered]
        if left:
            _, late = await asyncio.wait(left, timeout=1.0)
            for each in late:
                each.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:  # asyncio calls this in a task
            raise RuntimeError("a connection needs a task of its own")
        writer.transport.set_write_buffer_limits(0)  # after drain() nothing is left to send at the close
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                with self._silent.joined(task):
                    head = await _read_head(reader)
                with self._answered.joined(task):
                    await self._answer(head, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()  # the client is gone or too slow, and close() would wait for it
        except Exception:  # noqa: BLE001 - an error in one request must not end the server
            log.exception("request.failed")
        finally:
            writer.close()

    async def _answer(self, head: bytes | None, writer: asyncio.StreamWriter) -> None:
        scope = _scope(head) if head is not None else None
        if scope is None:
            writer.write(_refusal(431 if head is None else 400))
        else:
            await self._application(scope, _no_body, _sender(writer))
        await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()


async def _read_head(reader: asyncio.StreamReader) -> bytes | None:
    """None: it is too long."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return None


def _most_descriptors() -> int:
    """How many files this process may open. A server with none left accepts no connection for a second."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def _scope(head: bytes) -> dict[str, Any] | None:
    """None: it is not HTTP."""
    first, *rest = head[:-4].split(b"\r\n")
    words = first.split(b" ")
    pairs = [line.partition(b":") for line in rest]
    if len(words) != 3 or not words[1].startswith(b"/") or not words[2].startswith(b"HTTP/1."):  # noqa: PLR2004
        return None
    if any(not colon or not name or name != name.strip() for name, colon, _ in pairs):
        return None
    path, _, query = words[1].partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": words[2].decode("latin-1").removeprefix("HTTP/"),
        "method": words[0].decode("latin-1"),
        "scheme": "http",
        "path": unquote(path.decode("latin-1")),
        "raw_path": path,
        "query_string": query,
        "headers": [(name.lower(), value.strip()) for name, _, value in pairs],
    }


async def _no_body() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


def _sender(writer: asyncio.StreamWriter) -> Callable[[MutableMapping[str, Any]], Awaitable[None]]:
    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            writer.write(_head(message["status"], message["headers"]))
        else:
            writer.write(message["body"])
            await writer.drain()

    return send


def _head(code: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    lines = [f"HTTP/1.1 {code} {http.HTTPStatus(code).phrase}".encode()]
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join([*lines, b"connection: close", b"", b""])


def _refusal(code: int) -> bytes:
    return _head(code, [(b"content-length", b"0")])
