"""Fork servers that are forked off their worker ahead of time. Each test has an interpreter of its own: this one has
threads.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGINNING = """
import os, signal, socket, subprocess, threading, time
import tasklib
from tasklib.worker.isolation import launching
from tasklib.runtime.database_clock import DatabaseClock
from tasklib.worker.isolation.fork_server_link import ForkServerLink
from tasklib.worker.isolation.process import IsolatedProcess
from tasklib.worker.isolation.processes import IsolatedProcesses
from tasklib.runtime.observer import WorkerObserver
from tests.support import suspect_tasks
from tools.daemons import is_alive

def ready_server():
    server = ForkServerLink(tasklib.Config("postgresql:///nowhere"), [suspect_tasks.attend], [])
    assert server.wait_until_ready(lambda: False)
    return server

def wait_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""


def run(script: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BEGINNING + textwrap.dedent(script)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_first_server_is_the_one_that_was_forked_ahead() -> None:
    """It is the worker's child, has been told to leave behind what is the worker's, and ends with its socket. The next
    one is a fresh interpreter.
    """
    run(
        """
        told, tells = os.pipe()
        launching.fork_ahead(lambda: os.write(tells, str(os.getppid()).encode()))
        assert launching.is_forked_ahead()
        server = ready_server()
        assert server.is_shared and not launching.is_forked_ahead()
        assert int(os.read(told, 20)) == os.getpid()
        assert os.getpgid(server._process.pid) == server._process.pid
        server.stop()
        assert server._process.poll() == 0
        other = ready_server()
        assert not other.is_shared
        other.stop()
        """
    )


def test_one_that_has_died_meanwhile_is_not_used() -> None:
    run(
        """
        launching.fork_ahead(lambda: None)
        process = launching._ahead.process
        process.kill()
        assert process.wait() == -signal.SIGKILL
        server = ready_server()
        assert not server.is_shared
        server.stop()
        """
    )


def test_it_ends_with_its_worker() -> None:
    """Though somebody else has a copy of the worker's end of the socket."""
    run(
        """
        told, tells = os.pipe()
        ends, holds = os.pipe()
        worker = os.fork()
        if worker == 0:
            launching.fork_ahead(lambda: None)
            os.write(tells, str(launching._ahead.process.pid).encode())
            if os.fork() == 0:
                os.close(holds)
                os.read(ends, 1)  # until this test is over
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(worker, 0)
        server = int(os.read(told, 20))
        wait_until(lambda: not is_alive(server))
        """
    )


def test_what_its_children_have_started_ends_with_its_worker() -> None:
    """A subprocess in a child's group: the server must live long enough to kill it."""
    run(
        """
        told, tells = os.pipe()
        worker = os.fork()
        if worker == 0:
            launching.fork_ahead(lambda: None)
            child = IsolatedProcess(ready_server(), 1.0)
            child._read_reports()
            started = subprocess.Popen(["sleep", "60"], process_group=child.pid)
            os.write(tells, f"{child.pid} {started.pid}".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(worker, 0)
        for pid in os.read(told, 40).split():
            wait_until(lambda: not is_alive(int(pid)))
        """
    )


def test_a_server_whose_worker_was_gone_before_it_could_look_ends() -> None:
    """The kernel tells of a parent's death only if it was asked before. The server would have stayed for ever."""
    run(
        """
        ours, theirs = socket.socketpair()
        gone = subprocess.Popen(["true"])
        gone.wait()
        if (server := os.fork()) == 0:
            launching._be_the_server(lambda *_: os._exit(7), theirs, gone.pid, [])
        assert os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) == 0
        """
    )


def test_a_server_for_suspects_that_has_died_is_replaced() -> None:
    run(
        """
        launching.fork_ahead(lambda: None)
        config = tasklib.Config("postgresql:///nowhere")
        processes = IsolatedProcesses(
            config, DatabaseClock(), lambda *_: None, threading.Event(), WorkerObserver(), for_suspects=True
        )
        processes.start([], [suspect_tasks.attend])
        wait_until(processes.is_ready)
        processes._server._process.kill()
        wait_until(lambda: not processes.is_ready())
        processes.prepare()
        wait_until(processes.is_ready)
        assert not processes._server.is_shared
        processes.stop()
        """
    )


def test_what_must_not_be_forked_is_seen() -> None:
    """Threads, which would be missing in the server, and sockets, which it would share."""
    run(
        """
        before = launching.count_sockets()
        assert launching.can_fork(before)
        made = socket.socket()
        assert not launching.can_fork(before)
        made.close()
        assert launching.can_fork(before)
        done = threading.Event()
        thread = threading.Thread(target=done.wait)
        thread.start()
        assert not launching.can_fork(before)
        done.set()
        thread.join()
        """
    )
