"""The daemon's logs: one line per event, as JSON, or for people on a terminal.

Each process calls `configure` once, after its fork. Events of the library, of structlog and of plain logging look
alike, and carry the id, name, queue and attempt of the task that logs them. An attempt ends with one canonical line,
the only one with an `outcome`. Known secrets, and passwords in URLs, are removed from every line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import select
import socket
import stat
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from pydantic_core import to_json

from tasklib.errors import InvalidConfig
from tasklib.log import bounded, printable, task_logger
from tasklib_daemon.redaction import redactor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, MutableMapping, Sequence

    from structlog.typing import Processor

    from tasklib_daemon.settings import Settings

    Event = MutableMapping[str, Any]

OUR_LOGGERS = ("tasklib", "tasklib.tasks", "tasklib_daemon")
_TASK_LEVELS = {"all": logging.NOTSET, "failures": logging.WARNING, "none": logging.CRITICAL + 1}
STUCK_SECONDS = 0.2  # how long a line waits for a reader that does not read; the next lines do not wait
MAX_TEXT = 16 * 1024

_sink: Sink | None = None


def _hand_over(_logger: Any, _method: str, event: Event) -> tuple[tuple[str], dict[str, Any]]:
    """Pass an event from structlog to logging, with its values."""
    exc_info = event.pop("exc_info", None)
    values = {**event, "event": str(event.get("event", ""))}
    return (values["event"].replace("%", "%%"),), {"extra": {"tasklib": values}, "exc_info": exc_info}


log: structlog.stdlib.BoundLogger = structlog.wrap_logger(
    logging.getLogger("tasklib_daemon"),
    processors=[structlog.stdlib.filter_by_level, _hand_over],
    wrapper_class=structlog.stdlib.BoundLogger,
)
"""For the daemon's own events: `log.warning("worker.killed", pid=4711)`."""


class LogPlan(NamedTuple):
    """How a process logs, as plain values, so that it can be sent to another process."""

    process: str
    level: str
    file: str | None
    is_console: bool
    secrets: Sequence[str]
    tasks: str

    @classmethod
    def of(cls, settings: Settings, process: str) -> LogPlan:
        file = None if settings.log.file is None else str(settings.log.file)
        return cls(
            process, settings.log.level.upper(), file, _is_console(settings), settings.secrets(), settings.log.tasks
        )


def configure(settings: Settings, process: str = "supervisor") -> None:
    """Send all logs of this process to one sink. Raises InvalidConfig if the file cannot be opened."""
    _apply(LogPlan.of(settings, process))


def configure_isolated(*plan: Any) -> None:
    """Called in the fork server of a worker, and again in each of its children: the file may have been renamed
    meanwhile, and the application may have set up logging. A forked process has the name of its worker until now.
    """
    if _sink is None:
        _apply(LogPlan(*plan))
        return
    reopen()
    revive()
    with contextlib.suppress(ValueError, OSError):
        faulthandler.enable(fileno())
    for name in (None, *OUR_LOGGERS):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, _Handler):
                handler.use(_processors(LogPlan(*plan)))


def _apply(plan: LogPlan) -> None:
    global _sink  # noqa: PLW0603 - one for the process, like logging itself
    _sink = _sink or Sink(None if plan.file is None else Path(plan.file))
    handler = _Handler(_sink, _processors(plan))
    for name in (None, *OUR_LOGGERS):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(plan.level)
        logger.propagate = False  # our events come out whatever an application does to the root logger
    task_logger.setLevel(max(task_logger.level, _TASK_LEVELS[plan.tasks]))
    logging.captureWarnings(True)  # noqa: FBT003 - its only parameter
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.stdlib.filter_by_level, _hand_over],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    sys.excepthook = _uncaught
    threading.excepthook = lambda args: _uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def revive() -> None:
    """After the import of an application: `logging.config` disables loggers that it does not know."""
    for name in OUR_LOGGERS:
        logging.getLogger(name).disabled = False


def only_errors() -> None:
    """From now on, of this process's own events. At level debug, all are still logged."""
    logger = logging.getLogger("tasklib_daemon")
    if logger.getEffectiveLevel() > logging.DEBUG:
        logger.setLevel(logging.ERROR)


def reopen() -> None:
    """Open the file again, because it may have been renamed. Safe in a signal handler."""
    if _sink is not None:
        _sink.reopen()


def fileno() -> int:
    """The descriptor of the sink, for faulthandler, which writes by itself."""
    return _sink.fileno() if _sink is not None else 2


class Sink:
    """Writes lines. If the reader does not read, lines are dropped, and their number is logged afterwards. Logging
    never blocks the process for long.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._is_stuck = False
        self._is_torn = False
        self.dropped = 0
        self._lock = threading.RLock()  # a signal handler may log while its own thread does
        os.register_at_fork(after_in_child=self._after_fork)
        self._open()

    def fileno(self) -> int:
        return self._fd

    def reopen(self) -> None:
        """The new file takes over the old descriptor in one step, so no lock is needed."""
        if self._path is None:
            return
        try:
            opened = _open_file(self._path)
        except OSError as error:
            self.write(f'{{"level": "error", "event": "log.not_reopened", "error": {json.dumps(error.strerror)}}}\n')
            return
        if not self._is_ours():
            self._fd = os.dup(opened)
        os.dup2(opened, self._fd, inheritable=False)
        os.close(opened)
        self._identity = identity(self._fd)

    def write(self, line: str) -> None:
        data = line.encode("utf-8", "backslashreplace")
        with self._lock:
            if not self._is_ours():
                self._open()
            if self._is_stuck and self._has_room(0):
                self._is_stuck = False
                told, self.dropped = self.dropped, 0
                self._send(f'{{"level": "warning", "event": "log.dropped", "lines": {told}}}\n'.encode())
            if self._is_stuck or not self._send(data):
                self.dropped += 1

    def _send(self, data: bytes) -> bool:
        """False: the line was dropped. If a part of it was sent, the next one begins on a new line."""
        deadline = time.monotonic() + STUCK_SECONDS
        data = b"\n" + data if self._is_torn else data
        whole = len(data)
        while data:
            try:
                data = data[self._put(data) :]
            except BlockingIOError:
                if not self._has_room(max(deadline - time.monotonic(), 0)):
                    self._is_stuck = True
                    break
            except OSError:  # the reader is gone, or the disk is full
                break
        self._is_torn = 0 < len(data) < whole or (self._is_torn and len(data) == whole)
        return not data

    def _put(self, data: bytes) -> int:
        return self._socket.send(data, socket.MSG_DONTWAIT) if self._socket is not None else os.write(self._fd, data)

    def _has_room(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(seconds * 1000))

    def _is_ours(self) -> bool:
        """A task may have closed all descriptors. Then this number may soon be a connection to PostgreSQL."""
        return self._identity == identity(self._fd)

    def _open(self) -> None:
        if self._socket is not None:
            self._socket.detach()  # otherwise it would close a descriptor that another file has now
            self._socket = None
        self._fd = self._new_descriptor()
        self._identity = identity(self._fd)

    def _new_descriptor(self) -> int:
        if self._path is not None:
            try:
                return _open_file(self._path)
            except OSError as error:
                raise InvalidConfig(f"log.file {self._path} cannot be opened: {error.strerror}") from None
        kind = os.fstat(2).st_mode
        if stat.S_ISSOCK(kind):  # systemd's journal
            self._socket = socket.socket(fileno=os.dup(2))
            return self._socket.fileno()
        return _unblocked(2) if stat.S_ISFIFO(kind) else 2

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # another thread of the parent may have held it


def identity(descriptor: int) -> tuple[int, int] | None:
    """Which file this is. Another file may get the number of a closed descriptor."""
    try:
        about = os.fstat(descriptor)
    except OSError:
        return None
    return about.st_dev, about.st_ino


def _open_file(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


def _unblocked(pipe: int) -> int:
    """Other processes share the pipe, and do not expect it to be non-blocking. So open it once more for us alone."""
    try:
        return os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return pipe


class _Handler(logging.Handler):
    """It has nothing to close: an application that sets up logging closes every handler that it finds."""

    def __init__(self, sink: Sink, processors: Iterable[Callable[[Any, str, Any], Any]]) -> None:
        super().__init__()
        self._sink = sink
        self.use(processors)

    def use(self, processors: Iterable[Callable[[Any, str, Any], Any]]) -> None:
        self._processors = tuple(processors)

    def createLock(self) -> None:  # noqa: N802 - logging's name
        self.lock = None  # the sink has its own

    def emit(self, record: logging.LogRecord) -> None:
        try:
            event: Any = _event_of(record)
            for process in self._processors:
                event = process(None, record.levelname.lower(), event)
            self._sink.write(event)
        except Exception:  # noqa: BLE001 - a line that cannot be written must not end its task
            self.handleError(record)


def _event_of(record: logging.LogRecord) -> Event:
    """The record as a structlog event. Those of the library and of structlog carry values; others only have a text."""
    values = record.__dict__.get("tasklib")
    event: Event = dict(values) if isinstance(values, dict) else {"event": record.getMessage()}
    if values is None:
        event.update(structlog.contextvars.get_contextvars())
    event["logger"] = record.name
    event["timestamp"] = record.created
    if record.exc_info:
        event["exc_info"] = record.exc_info
    return event


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: Any) -> None:
    if error is not None and not issubclass(kind, KeyboardInterrupt | SystemExit):
        log.critical("process.failed", exc_info=(kind, error, trace))


# --- what happens to a line ---


def _processors(plan: LogPlan) -> list[Callable[[Any, str, Any], Any]]:
    return [
        _canonical,
        structlog.processors.format_exc_info,
        _in_order(plan.process),
        _console if plan.is_console else _json,
        _redacting(plan.secrets),
    ]


def _is_console(settings: Settings) -> bool:
    is_terminal = settings.log.file is None and os.isatty(2)
    return settings.log.format == "console" or (settings.log.format == "auto" and is_terminal)


def _canonical(_logger: Any, _method: str, event: Event) -> Event:
    """Mark the line that ends an attempt. A task that was given back before it ran had no attempt."""
    noun, _, verb = str(event.get("event")).partition(".")
    if noun == "task" and "attempt" in event and "seconds" in event and verb != "released":
        event["outcome"] = verb
    return event


def _in_order(process: str) -> Processor:
    def in_order(_logger: Any, method: str, event: Event) -> Event:
        moment = datetime.fromtimestamp(event.pop("timestamp"), UTC).isoformat(timespec="milliseconds")
        first = {"timestamp": moment.replace("+00:00", "Z"), "level": method, "event": event.pop("event")}
        logger = event.pop("logger")
        about = {"process": process, "process_id": os.getpid()}
        last = about if logger in OUR_LOGGERS else {"logger": logger, **about}
        return {**first, **{key: _bounded(value) for key, value in event.items() if value is not None}, **last}

    return in_order


def _bounded(value: Any) -> Any:
    return bounded(value, MAX_TEXT) if type(value) is str else value


def _redacting(secrets: Iterable[str]) -> Callable[[Any, str, str], str]:
    redact = redactor(secrets)
    return lambda _logger, _method, line: redact(line)


def _json(_logger: Any, _method: str, event: Event) -> str:
    try:
        return to_json(event, fallback=repr, inf_nan_mode="strings").decode() + "\n"
    except Exception:  # noqa: BLE001 - bytes that are no text, half a character, a list that contains itself
        plain = {key: value if type(value) is str and value.isascii() else ascii(value) for key, value in event.items()}
        return to_json(plain).decode() + "\n"


_COLOURS = {"warning": "33", "error": "31", "critical": "31"}


def _console(_logger: Any, _method: str, event: Event) -> str:
    """Time, level, event, values. Unprintable characters are escaped: a log must not control a terminal."""
    values = dict(event)
    moment, level, name = values.pop("timestamp"), values.pop("level"), values.pop("event")
    trace = values.pop("exception", None)
    has_colour = os.isatty(2) and "NO_COLOR" not in os.environ
    words = " ".join(f"{key}={_shown(value)}" for key, value in values.items())
    line = f"{moment[11:-1]} {level:<8} {printable(str(name))} {words}"
    colour = _COLOURS.get(level) if has_colour else None
    coloured = f"\x1b[{colour}m{line}\x1b[0m" if colour else line
    indented = "".join(f"    {printable(each)}\n" for each in str(trace).splitlines()) if trace else ""
    return f"{coloured}\n{indented}"


def _shown(value: Any) -> str:
    text = printable(value if isinstance(value, str) else str(value))
    return json.dumps(text, ensure_ascii=False) if not text or " " in text else text
