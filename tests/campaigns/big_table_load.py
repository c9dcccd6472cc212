"""One worker or one submitter of the campaign on a big table. It imports nothing of this repository but `tasklib`, so
that it runs with the library of another commit: PYTHONPATH says which.

It notes the longest time that each kind of statement waited for its answer, and writes that when it is told to stop.

    python big_table_load.py worker URL
    python big_table_load.py submitter URL FILE_FOR_IDS SUBMITS_PER_SECOND
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psycopg

import tasklib
from tasklib.runtime.session import Session

stop = threading.Event()


class Waits:
    """The longest of each kind. A statement that fails and is sent again has waited since it was sent first."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}
        self.count: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        self._since: dict[str, float] = {}

    def run(self, kind: str, call: Any) -> Any:
        since = self._since.setdefault(kind, time.monotonic())
        try:
            answer = call()
        except (psycopg.Error, tasklib.TasklibError):
            self.failed[kind] = self.failed.get(kind, 0) + 1
            raise
        del self._since[kind]
        self.longest[kind] = max(self.longest.get(kind, 0.0), time.monotonic() - since)
        self.count[kind] = self.count.get(kind, 0) + 1
        return answer


waits = Waits()


@tasklib.task
def count(number: int) -> int:
    return number


def work(url: str) -> None:
    run = Session.run

    def timed(self: Session, *values: Any, **options: Any) -> Any:
        return waits.run(self._role, lambda: run(self, *values, **options))

    Session.run = timed  # type: ignore[method-assign]
    worker = tasklib.TaskWorker(tasklib.Config(url), poll_interval_seconds=0.2, concurrency=8)
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    say("ready")
    worker.run_sync()


def submit(url: str, ids: str, per_second: float) -> None:
    with tasklib.Client(tasklib.Config(url)) as client, Path(ids).open("w", encoding="ascii") as file:
        number, begun = 0, time.monotonic()
        say("ready")
        while not stop.wait(max(0.0, begun + number / per_second - time.monotonic())):
            number += 1
            handle = waits.run("submit", lambda number=number: client.submit(count.new(number)))
            file.write(f"{handle}\n")
            file.flush()
            if number % 10 == 0:
                waits.run("read", lambda handle=handle: client.get_task(handle))
                waits.run("list", lambda: client.list_tasks(limit=20))


def say(word: str) -> None:
    print(json.dumps({word: tasklib.__file__}), flush=True)


def main(role: str, url: str, *rest: str) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    if role == "worker":
        work(url)
    else:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        submit(url, rest[0], float(rest[1]))
    print(json.dumps({"longest": waits.longest, "count": waits.count, "failed": waits.failed}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
