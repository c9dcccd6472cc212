"""Task functions that tests of the daemon ask for: harmless ones, slow ones, and some that take their worker along."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psycopg

import tasklib
from tests.support import hostile_tasks

PLACES = ("/", "/etc", "/opt", "/tmp", "/usr", "/var")  # noqa: S108 - whether they are writable

# What the import is to do, for tests of boot errors and of preloading: a word, or a file with one, for another time.
_word = os.environ.get("DAEMON_APP_IMPORT", "")
if _word.startswith("/"):
    _word = Path(_word).read_text("utf-8")
if _word == "fail":
    raise RuntimeError("the import fails on purpose")
if _word == "die":
    os._exit(3)
if _word == "thread":
    threading.Thread(target=time.sleep, args=[3600], name="left-behind", daemon=True).start()
if _word == "connect":
    left_open = psycopg.connect(os.environ["DAEMON_APP_URL"])


@tasklib.task
def echo(text: str) -> str:
    return text


@tasklib.task
def frozen_objects() -> int:
    return gc.get_freeze_count()


@tasklib.task
def submit_another(text: str) -> str:
    """By the default client, which nobody has initialised here."""
    return str(echo.submit_sync(text))


@tasklib.task
def pid() -> int:
    return os.getpid()


@tasklib.task
def task_context() -> dict[str, Any]:
    """Where a task finds itself, and what it may do there."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("ascii").splitlines())
    return {
        "variables": sorted(os.environ),
        "user": os.geteuid(),
        "writable": [place for place in PLACES if os.access(place, os.W_OK)],
        "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
        "no_new_privileges": int(status["NoNewPrivs"]),
        "filters": int(status["Seccomp"]),
        "parent": os.getppid(),
    }


@tasklib.task
def nap(seconds: float, journal: str | None = None) -> int:
    """Can be interrupted. Says in the journal when it begins, and as whom."""
    if journal is not None:
        with Path(journal).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {time.monotonic()}\n")
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(0.01)
    return os.getpid()


@tasklib.task
def try_again(journal: str, after_seconds: float) -> None:
    """For as long as it has retries, each after this delay. Says in the journal when it begins, and as whom."""
    with Path(journal).open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {time.monotonic()}\n")
    raise tasklib.Retry("again", delay_seconds=after_seconds)


@tasklib.task
def wait_for_file(path: str) -> None:
    """Can be interrupted."""
    while not Path(path).exists():
        time.sleep(0.01)


@tasklib.task
def wait_for_a_program(seconds: float) -> int:
    """How it ended: a signal that it got is its number, negative."""
    return subprocess.run(["sleep", str(seconds)], check=False).returncode


@tasklib.task
def sleep_in_c(seconds: float) -> None:
    """One call that no exception gets into."""
    time.sleep(seconds)


@tasklib.task
def hold_gil(seconds: float) -> None:
    """No other thread of the process goes on."""
    hostile_tasks.hold_gil(seconds)


@tasklib.task
def crash() -> None:
    hostile_tasks.segfault()


@tasklib.task
def exit_now(code: int) -> None:
    hostile_tasks.exit_process(code)


@tasklib.task
def close_descriptors(seconds: float) -> str:
    """All but the standard ones; goes on for a while."""
    hostile_tasks.close_descriptors(3)
    time.sleep(seconds)
    return "closed"


@tasklib.task
def kill_once(flag: str) -> str:
    """Takes its worker along the first time."""
    hostile_tasks.kill_process_once(flag)
    return "survived"


@tasklib.task
def start_grandchildren(seconds: float, journal: str) -> list[int]:
    """One that execs, one that only forks, and one of each with a session of its own. Their pids go to the journal."""
    program = [sys.executable, "-c", f"import time; time.sleep({seconds})"]
    pids = [
        subprocess.Popen(program).pid,
        subprocess.Popen(program, start_new_session=True).pid,
        _fork_off(seconds, has_session=False),
        _fork_off(seconds, has_session=True),
    ]
    with Path(journal).open("a", encoding="utf-8") as file:
        file.write("".join(f"{each}\n" for each in pids))
    return pids


def _fork_off(seconds: float, *, has_session: bool) -> int:
    made = os.fork()
    if made == 0:
        if has_session:
            os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(seconds)
        os._exit(0)
    return made


@tasklib.task
def leave_an_orphan(journal: str) -> None:
    """A grandchild whose parent ends. It writes down itself and who has taken it in, and ends too."""
    if os.fork() == 0:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.001)
            Path(journal).write_text(f"{os.getpid()} {os.getppid()}", "utf-8")
        os._exit(0)
    os.wait()


@tasklib.task
def inherited() -> dict[str, object]:
    """What this worker sees of its process: for a test of what a fork hands down."""
    descriptors = [_shown(each) for each in sorted(Path("/proc/self/fd").iterdir())]
    return {
        "random": random.random(),
        "descriptors": [each for each in descriptors if each],
        "maps": Path("/proc/self/maps").read_text("utf-8").count("memfd:tasklibd-"),
        "blocked": [line for line in Path("/proc/self/status").read_text("utf-8").splitlines() if "SigBlk" in line],
        "group": os.getpgid(0),
        "pid": os.getpid(),
    }


def _shown(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:
        return ""


@tasklib.task
def eat_memory(megabytes: int, seconds: float = 0.0) -> int:
    hostile_tasks.hold_memory(megabytes)
    time.sleep(seconds)
    return os.getpid()
