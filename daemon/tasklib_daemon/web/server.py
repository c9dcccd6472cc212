"""A small HTTP server for an ASGI application: one request a connection, bounded in size and in time.

It is all that three short answers need, and a tenth of the memory of a full one; an application that needs more can be
served by any other ASGI server instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tasklib_daemon.logs import log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    Application = Callable[[Any, Any, Any], Awaitable[None]]

MAX_HEAD_BYTES = 8192
MAX_CONNECTIONS = 64
REQUEST_SECONDS = 5.0


class Server:
    def __init__(self, application: Application) -> None:
        self._application = application
        self._conversations: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """The port. OSError, if it cannot be had."""
        self._server = await asyncio.start_server(self._meet, host, port, limit=MAX_HEAD_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._conversations:
            _, late = await asyncio.wait(self._conversations, timeout=1.0)
            for each in late:
                each.cancel()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._conversations) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._conversations.add(task)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await self._converse(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # who asked is gone, or too slow
        except Exception:  # noqa: BLE001 - one request must not end the server
            log.exception("request.failed")
        finally:
            self._conversations.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            writer.write(_refusal(431))
        else:
            scope = _scope(head)
            if scope is None:
                writer.write(_refusal(400))
            else:
                await self._application(scope, _no_body, _sender(writer))
        await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()


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
