"""A worker in a process of its own, to be killed. It writes what its observer sees to its standard output, one event
per line. From that the test makes the report that a supervisor would read from the worker's scoreboard.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any
from uuid import UUID

import tasklib
from tasklib import TaskWorker
from tasklib.runtime.observer import WorkerObserver
from tasklib_daemon.crashes import CrashReport, Done, Executing
from tools.waiting import START_SECONDS, wait_until

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tasklib.worker.execution import Execution
    from tasklib_daemon.plan import Cause


@tasklib.task
def keeper_nap(seconds: float = 60.0) -> None:
    """In short ones, so that it can be told to stop."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)


class _Telling(WorkerObserver):
    """In the worker's process."""

    def named(self, worker_id: str) -> None:
        self._tell("named", worker_id)

    def began(self, execution: Execution) -> None:
        self._tell("began", str(execution.id), execution.task.fencing_token, execution.started)

    def ended(self, execution: Execution) -> None:
        self._tell("ended", str(execution.id), execution.task.fencing_token)

    def settled(self, executions: Collection[Execution]) -> None:
        for each in executions:
            self._tell("settled", str(each.id), each.task.fencing_token)

    def connected(self, role: str, backend_pid: int) -> None:
        self._tell("connected", role, backend_pid)

    def _tell(self, *words: Any) -> None:
        os.write(1, json.dumps(words).encode() + b"\n")


class Worker:
    """In the test's process."""

    def __init__(self, url: str, **options: Any) -> None:
        command = [sys.executable, "-m", "tests.support.keeper_worker", json.dumps({"url": url, **options})]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.worker_id = ""
        self.backends: dict[str, int] = {}
        self.executing: dict[tuple[UUID, int], float] = {}
        self.done: set[tuple[UUID, int]] = set()
        self.began: list[tuple[UUID, float]] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            what, *words = json.loads(line)
            if what == "named":
                self.worker_id = words[0]
            elif what == "connected":
                self.backends[words[0]] = words[1]
            else:
                self._note(what, (UUID(words[0]), words[1]), *words[2:])

    def _note(self, what: str, key: tuple[UUID, int], started: float = 0.0) -> None:
        if what == "began":
            self.executing[key] = started
            self.began.append((key[0], started))
        elif what == "ended" and self.executing.pop(key, None) is not None:
            self.done.add(key)
        elif what == "settled":
            self.done.discard(key)

    def kill(self, cause: Cause = "crash", guilty: UUID | None = None) -> CrashReport:
        """Its report, as its supervisor would write it."""
        self.process.kill()
        self.process.wait(30)
        died = time.monotonic()
        self._thread.join(30)
        return CrashReport(
            worker_id=self.worker_id, name="test", hostname=socket.gethostname(), pid=self.process.pid, slot=0,
            how="killed by SIGKILL", cause=cause, guilty=guilty,
            executing=tuple(Executing(id_, token, died - start) for (id_, token), start in self.executing.items()),
            done=tuple(Done(*key) for key in self.done), backends=tuple(self.backends.values()), died=died,
        )  # fmt: skip

    def status(self, **more: Any) -> dict[str, Any]:
        """As a supervisor tells it to the keeper."""
        return {
            "worker_id": self.worker_id, "slot": 0, "pid": self.process.pid, "running": len(self.executing),
            "claimed": 3, "memory_bytes": 50 * 1024 * 1024, "cpu_percent": 1.5,
            "started_at": "2026-01-01T00:00:00+00:00", "is_hung": False, **more,
        }  # fmt: skip

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self._thread.join(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def worker_process(url: str, **options: Any) -> Iterator[Worker]:
    """Killed at the end, if it is not dead by then."""
    worker = Worker(url, **options)
    try:
        wait_until(lambda: bool(worker.worker_id), "the worker to start", seconds=START_SECONDS)
        yield worker
    finally:
        worker.close()


def main() -> None:
    options = json.loads(sys.argv[1])
    config = tasklib.Config(options.pop("url"), lease_seconds=options.pop("lease_seconds", 15.0))
    TaskWorker(config, observer=_Telling(), **options).run_sync()


if __name__ == "__main__":
    main()
