"""What a worker, its fork server and the processes of isolated tasks say to each other. Messages are lines of JSON.

Worker and fork server talk through the control socket: the worker sends its setup and gets one answer, then it sends
`fork`, with two descriptors for the new process, and `stop`.
The fork server reports through one pipe for each process: its pid, then its exit code; or why there is none.
Worker and process talk through the channel: the worker sends the request, then single bytes that tell it to stop; the
process sends its progress, its connection, signs of life and its outcome. User code may write there too, so the worker
believes nothing that it cannot read.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import signal
import sys
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from tasklib.errors import InvalidTaskDefinition
from tasklib.outcomes import (
    CancelInterrupt,
    Cancelled,
    Completed,
    Failed,
    HeldTask,
    Interrupted,
    Snoozed,
    StopInterrupt,
    TimedOut,
    TimeoutInterrupt,
)
from tasklib.statements import ClaimedTask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from tasklib.outcomes import Outcome, TaskInterrupt

    Message: TypeAlias = dict[str, Any]

CHUNK_BYTES = 65_536  # of one read
LARGEST_MESSAGE_BYTES = 8 * 1024 * 1024  # results and errors take two or three at most
NO_ANSWER = 113  # the exit code of a process that could not send its outcome
IMPORTED_MAIN = "__tasklib_main__"  # the module name of the worker's main program, where isolated tasks run

# What a worker tells a process after the request, one byte each.
STOPS: dict[bytes, type[TaskInterrupt]] = {b"t": TimeoutInterrupt, b"c": CancelInterrupt, b"s": StopInterrupt}
DRAINING = b"d"


# --- Messages --------------------------------------------------------------------------------------------------------


def line_of(message: Message) -> bytes:
    return to_json(message) + b"\n"


def read_messages(lines: Sequence[bytes]) -> Iterator[Message]:
    """A line that cannot be read was interrupted, or not written by us. Of several reports of progress, the last."""
    messages = [message for line in lines if line and isinstance(message := _read(line), dict)]
    last = next((message for message in reversed(messages) if "progress" in message), None)
    yield from (message for message in messages if message is last or "progress" not in message)


def _read(line: bytes) -> Any:
    try:
        return from_json(line, allow_inf_nan=False)
    except ValueError:
        return None


# --- The request: run this task --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    claimed: ClaimedTask
    place: str  # of its function: see `place_of`
    started: float
    started_at: datetime
    clock: tuple[datetime, float]  # the database's time, and when it was so
    is_always_isolated: bool  # False: a suspect, whose function usually shares a worker with others

    def encode(self) -> bytes:
        return to_json(self)

    @classmethod
    def decode(cls, data: bytes) -> Request:
        given = from_json(data)
        held, *rest = given["claimed"]
        said, asked_at = given["clock"]
        given["claimed"] = ClaimedTask(_typed(HeldTask._make(held)), *_typed(ClaimedTask(held, *rest))[1:])
        given["clock"] = datetime.fromisoformat(said), asked_at
        given["started_at"] = datetime.fromisoformat(given["started_at"])
        return cls(**given)


def _typed(row: Any) -> Any:
    """JSON has no ids and no times."""
    values = {name: getattr(row, name) for name in row._fields if name in _READ}
    return row._replace(**{name: _READ[name](value) for name, value in values.items() if value is not None})


_READ: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("id", "parent_id"), UUID),
    **dict.fromkeys(
        ("claimed_at", "started_at", "expires_at", "cancel_asked_at", "deadline_at"), datetime.fromisoformat
    ),
}


# --- The outcome -----------------------------------------------------------------------------------------------------

_KINDS = {kind.__name__: kind for kind in (Completed, Failed, TimedOut, Snoozed, Cancelled, Interrupted)}


def encoded_outcome(outcome: Outcome) -> Message:
    values = outcome._asdict() if isinstance(outcome, Completed) else asdict(outcome)
    return {"kind": type(outcome).__name__, **values}


def decoded_outcome(message: Any) -> Outcome | None:
    """None: we did not write this."""
    try:
        kind, values = message["kind"], {name: value for name, value in message.items() if name != "kind"}
        return _reader(kind).validate_python(values)
    except (KeyError, TypeError, AttributeError, ValueError):
        return None


@functools.cache
def _reader(kind: str) -> TypeAdapter[Outcome]:
    return TypeAdapter(_KINDS[kind])


def how_it_ended(exit_code: int) -> str:
    if exit_code == NO_ANSWER:
        return "could not send its outcome: has it closed file descriptors that are not its own?"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        name = f"signal {-exit_code}"
    return f"was killed by {name}{', perhaps out of memory' if -exit_code == signal.SIGKILL else ''}"


# --- Where a function is defined -------------------------------------------------------------------------------------


def place_of(function: Callable[..., Any]) -> str:
    """Where another interpreter finds it: the name of its module, or the file of this one's main program."""
    name = str(function.__module__)
    if name == IMPORTED_MAIN:
        raise InvalidTaskDefinition(
            "the script starts a worker, or runs its tasks, when it is imported, and processes for isolated tasks "
            'import it: put that under `if __name__ == "__main__":`'
        )
    if name != "__main__":
        return name
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    if file is None:
        raise InvalidTaskDefinition(
            f'isolation="process": {function.__qualname__} is defined where no other interpreter can import it. '
            f"Put it into a module."
        )
    return os.path.abspath(str(file))  # noqa: PTH100 - resolves no link: the link's directory is on sys.path


def import_place(place: str) -> None:
    """A module by its name; the worker's main program by its file, under a name that keeps it from running."""
    if not os.path.isabs(place):  # noqa: PTH117 - mostly the name of a module
        importlib.import_module(place)
        return
    spec = importlib.util.spec_from_file_location(IMPORTED_MAIN, place)
    if IMPORTED_MAIN not in sys.modules and spec is not None and spec.loader is not None:
        sys.modules[IMPORTED_MAIN] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[IMPORTED_MAIN])
