"""The web child, in a process of its own and by real requests; the test is its supervisor."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tasklib_daemon.channel import Channel
from tasklib_daemon.settings import Web
from tasklib_daemon.status import LIVE_SECONDS, Status, describe, why_not_ready
from tasklib_daemon.web import server
from tasklib_daemon.web.app import HealthApp, LatestReport
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "S3CR3T-token-of-the-test"
RUNNING: Status = {
    "name": "host", "pid": 1, "state": "running", "is_healthy": True, "problems": [], "database": True,
    "listening": True, "elected": False, "unserved": ["forgotten"],
    "workers": [{"slot": 1, "pid": 2, "state": "ready", "running": 3, "is_hung": False}],
}  # fmt: skip

PROGRAM = """
import json, socket, sys
from tasklib_daemon import logs
from tasklib_daemon.channel import Channel
from tasklib_daemon.settings import load
from tasklib_daemon.web import main
descriptor, overrides = int(sys.argv[1]), json.loads(sys.argv[2])
settings = load(None, {"PGHOST": "192.0.2.1", "TASKLIB_WEB_TOKEN": sys.stdin.readline().strip()}, overrides)
logs.configure(settings, "web")
main.run(settings, Channel(socket.socket(fileno=descriptor), blocks=True))
"""


class WebChild:
    """The database that it is given cannot be reached: it has no use for one."""

    def __init__(self, directory: Path, token: str = "", **web: Any) -> None:
        self.log = directory / f"web-{time.monotonic_ns()}.log"
        ours, theirs = socket.socketpair()
        overrides = json.dumps({"web": {"port": 0, **web}, "log": {"file": str(self.log)}})
        command = [sys.executable, "-c", PROGRAM, str(theirs.fileno()), overrides]
        self.popen = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, text=True)
        assert self.popen.stdin is not None
        self.popen.stdin.write(token + "\n")
        self.popen.stdin.close()
        theirs.close()
        self.channel = Channel(ours)
        self.said: list[dict[str, Any]] = []
        wait_until(self._has_spoken, "the web child's first word")
        self.port: int | None = self.said[0].get("port") if self.said else None

    def _has_spoken(self) -> bool:
        self.said += self.channel.receive()
        return bool(self.said) or self.popen.poll() is not None

    def tell(self, status: Status) -> None:
        self.channel.send({"say": "status", **status}, is_status=True)
        wait_until(self._has_sent, "the status to be sent")

    def _has_sent(self) -> bool:
        self.channel.flush()
        return not self.channel.has_output

    def get(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, Any]:
        conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(conn):
            conn.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            response = conn.getresponse()
            body = response.read()
            return response.status, json.loads(body) if body else None

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.channel.close()


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebChild]:
    """One for all questions to a web child of the usual kind."""
    made = WebChild(tmp_path_factory.mktemp("web"))
    yield made
    made.end()


@pytest.fixture
def child(ordinary: WebChild) -> WebChild:
    """Told anew before each test: the report of the one before may be too old to be live."""
    told(ordinary, RUNNING)
    return ordinary


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebChild]:
    """One that many callers beset."""
    made = WebChild(tmp_path_factory.mktemp("web"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebChild]:
    """One that others can reach."""
    made = WebChild(tmp_path_factory.mktemp("web"), TOKEN, host="0.0.0.0")  # noqa: S104 - with a token
    yield made
    made.end()


def told(child: WebChild, status: Status) -> None:
    child.tell(status)
    wait_until(lambda: child.get("/status")[1].items() >= dict(status).items(), "the status to arrive")


def test_status_is_what_the_supervisor_told(child: WebChild) -> None:
    """As JSON, with its age; the same as `tasklibd status --json`."""
    told(child, RUNNING)
    code, status = child.get("/status")
    assert code == 200
    assert 0 <= status.pop("age_seconds") < 20
    assert status == RUNNING
    assert child.get("/status", method="HEAD") == (200, None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"database": False}, "there is no connection to the database"),
        ({"workers": []}, "no worker is ready and claiming"),
        ({"workers": [{"slot": 1, "state": "starting"}]}, "no worker is ready and claiming"),
        ({"workers": [{"slot": 1, "state": "ready", "is_hung": True}]}, "no worker is ready and claiming"),
        ({"state": "draining"}, "the daemon is draining"),
        ({"state": "paused"}, "the daemon is paused"),
        ({"state": "starting"}, "the daemon is starting"),
        ({"is_healthy": False, "problems": ["worker 1 dies again and again"]}, "worker 1 dies again and again"),
    ],
)
def test_ready_means_connected_migrated_claiming_and_not_draining(
    child: WebChild, change: dict[str, Any], reason: str
) -> None:
    """Else 503, with the reasons. None of it makes the daemon less alive: a restart would not help."""
    told(child, RUNNING)
    assert child.get("/readyz") == (200, {"ok": True})
    told(child, {**RUNNING, **change})  # type: ignore[typeddict-item]
    assert child.get("/readyz") == (503, {"ok": False, "reasons": [reason]})
    assert child.get("/livez") == (200, {"ok": True})


def test_live_means_that_the_supervisor_goes_on() -> None:
    """Its status is fresh. Before the first one it counts from the start; a stale daemon is not ready either."""
    now = [100.0]
    report = LatestReport(lambda: now[0])
    app = HealthApp(Web(), report)
    assert app.answer("GET", "/livez", {}).code == 200
    assert app.answer("GET", "/readyz", {}).body == {
        "ok": False,
        "reasons": ["the supervisor has not reported yet"],
    }
    assert app.answer("GET", "/status", {}).code == 503
    report.take_status(RUNNING)
    now[0] += LIVE_SECONDS - 0.1
    assert app.answer("GET", "/livez", {}).code == 200
    now[0] += 0.2
    stale = app.answer("GET", "/livez", {})
    assert (stale.code, stale.body["reasons"]) == (503, ["the supervisor has not reported for 10 s"])
    assert app.answer("GET", "/readyz", {}).code == 503
    report.take_status(RUNNING)
    assert app.answer("GET", "/livez", {}).code == 200


def test_what_there_is_not(child: WebChild) -> None:
    """Other paths and methods are refused, as the standard says."""
    assert child.get("/metric")[0] == 404
    assert child.get("/livez", method="POST")[0] == 405
    assert child.get("/livez?x=1")[0] == 200


def test_names_that_point_here_are_not_answered(child: WebChild) -> None:
    """A scoreboard of the world could otherwise read the status in an operator's browser."""
    for host in ("evil.example.com", "evil.example.com:80", "10.1.2.3"):
        assert child.get("/status", Host=host)[0] == 421
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:80"):
        assert child.get("/livez", Host=host)[0] == 200


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET livez HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /livez HTTP/2\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\nx: " + b"y" * 10000 + b"\r\n\r\n", b"431"),
        (b"GET /livez HTTP/1.0\r\n\r\n", b"200"),
    ],
)
def test_bytes_that_are_no_request(child: WebChild, sent: bytes, code: bytes) -> None:
    """Refused in a line; the next one is answered."""
    with socket.create_connection(("127.0.0.1", child.port or 0), timeout=20) as conn:
        conn.sendall(sent)
        answer = conn.makefile("rb").readline()
    assert answer.startswith(b"HTTP/1.1 " + code)
    assert child.get("/livez")[0] == 200


SILENT = 500
PROBE_SECONDS = 1.0  # Kubernetes' own limit for a probe, unless it is told another


@contextlib.contextmanager
def callers(child: WebChild, number: int, say: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that stay open, and that take no answer."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in made:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.settimeout(20)
            each.connect(("127.0.0.1", child.port or 0))
            each.sendall(say)
        yield made


@pytest.mark.parametrize("say", [b"", b"GET /livez HTTP/1.1\r\n", b"GET /status HTTP/1.1\r\n\r\n"])
def test_probes_are_answered_beside_many_who_say_nothing(crowded: WebChild, say: bytes) -> None:
    """A pod whose probe gets no answer is killed. Silent callers, those who stop in the middle of a request, and those
    who do not take their answer keep no probe waiting, not even for the second that Kubernetes gives it. The best of
    five: machines are shared.
    """
    told(crowded, {**RUNNING, "problems": ["x" * 1000] * 200})
    with callers(crowded, SILENT, say):
        wait_until(lambda: _is_answered(crowded), "the server to have met them all")
        took = []
        for _ in range(5):
            began = time.monotonic()
            assert crowded.get("/livez")[0] == 200
            took.append(time.monotonic() - began)
        assert min(took) < PROBE_SECONDS


def test_many_silent_callers_are_let_go(crowded: WebChild) -> None:
    """Beyond a bound the oldest goes at once: they cannot use up the process."""
    with callers(crowded, server.MAX_SILENT + 1) as made:
        made[0].settimeout(server.REQUEST_SECONDS / 2)
        assert made[0].recv(1) == b""
    wait_until(lambda: _is_answered(crowded), "answers again")


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_who_does_not_take_its_answer_leaves_nothing_behind(crowded: WebChild) -> None:
    """Its connection is gone when its time is over, also if it never reads: they would add up."""
    descriptors = Path(f"/proc/{crowded.popen.pid}/fd")
    told(crowded, {**RUNNING, "problems": ["x" * 1000] * 3000})
    before = len([*descriptors.iterdir()])
    with callers(crowded, 20, b"GET /status HTTP/1.1\r\n\r\n"):
        wait_until(lambda: len([*descriptors.iterdir()]) > before, "the server to accept them")
        wait_until(lambda: len([*descriptors.iterdir()]) <= before, "the server to let them go", seconds=30)


def _is_answered(child: WebChild) -> bool:
    try:
        return child.get("/livez")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def test_an_address_for_others_asks_for_the_token(guarded: WebChild) -> None:
    """On every path; it is in no log, and no argument."""
    told_with_token = {"Authorization": f"Bearer {TOKEN}"}
    guarded.tell(RUNNING)
    wait_until(lambda: guarded.get("/status", **told_with_token)[0] == 200, "the status to arrive")
    assert guarded.get("/readyz", **told_with_token) == (200, {"ok": True})
    wrong = ("", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer", f"Basic {TOKEN}", "Bearer \xe4\xff", TOKEN)
    for path in ("/livez", "/readyz", "/status", "/other"):
        for given in wrong:
            assert guarded.get(path, Authorization=given)[0] == 401, (path, given)
    assert TOKEN not in guarded.log.read_text()
    command = subprocess.run(
        ["ps", "-o", "args=", "-p", str(guarded.popen.pid)], capture_output=True, text=True, check=True
    )
    assert TOKEN not in command.stdout


def test_probes_may_be_public() -> None:
    """For who probes from outside and cannot keep a secret: one word, and nothing else."""
    report = LatestReport()
    report.take_status({**RUNNING, "database": False})
    app = HealthApp(Web(host="0.0.0.0", token=TOKEN, public_probes=True), report)  # noqa: S104
    assert (app.answer("GET", "/livez", {}).code, app.answer("GET", "/readyz", {}).body) == (200, {"ok": False})
    assert app.answer("GET", "/status", {}).code == 401
    known = app.answer("GET", "/readyz", {b"authorization": b"bearer " + TOKEN.encode()})
    assert known.body["reasons"] == ["there is no connection to the database"]


def test_a_taken_port_is_waited_for(tmp_path: Path) -> None:
    """Also that of the web child before it, in a rolling replacement. It is ready meanwhile: nothing waits for it.
    It ends at SIGTERM, with 0; and reopens its log at USR1.
    """
    first = WebChild(tmp_path)
    second = WebChild(tmp_path, port=first.port)
    try:
        where = f"the web child cannot listen on 127.0.0.1:{first.port}: "
        assert [(said["say"], said["port"]) for said in second.said] == [("ready", None)]
        assert second.said[0]["problem"].startswith(where)
        assert "web.waiting" in second.log.read_text()
        first.popen.send_signal(signal.SIGTERM)
        assert first.popen.wait(30) == 0
        second.port = first.port
        wait_until(lambda: _is_answered(second), "the second one to answer")
        wait_until(lambda: second.channel.receive() == [{"say": "listening", "port": first.port}], "it to say so")
        second.log.rename(tmp_path / "renamed")
        second.popen.send_signal(signal.SIGUSR1)
        wait_until(second.log.exists, "a new log")
        second.channel.close()  # as when the supervisor is gone
        assert second.popen.wait(30) == 0
    finally:
        first.end()
        second.end()


def test_a_host_that_is_nowhere_is_a_boot_error(tmp_path: Path) -> None:
    """It ends at once: nobody would find out otherwise."""
    child = WebChild(tmp_path, TOKEN, host="nowhere.invalid")
    try:
        assert child.popen.wait(20) != 0
        assert "web.host nowhere.invalid cannot be found" in child.log.read_text()
    finally:
        child.end()


def test_a_status_in_words() -> None:
    """For people, on a terminal; also where a daemon of another version leaves something out."""
    assert describe({**RUNNING, "is_healthy": False, "problems": ["keeper does not start"]}) == [
        "host (pid 1): running, NOT HEALTHY",
        "  problem: keeper does not start",
        "  database: connected, listening",
        "  cluster duties: elsewhere",
        "  no worker serves: forgotten",
        "  worker 1   ready     pid 2  3 running",
    ]
    assert describe({}) != []
    assert why_not_ready({}, 0.0) == ["the supervisor has not reported yet"]
