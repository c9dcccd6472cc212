"""The ASGI application behind `/livez`, `/readyz`, `/status` and `/metrics`.

It answers from the supervisor's last report and its age. It never asks the database.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tasklib_daemon.status import Status, why_not_live, why_not_ready
from tasklib_daemon.web.exposition import CONTENT_TYPE, Exposition
from tasklib_daemon.web.samples import Reading

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence

    from tasklib.runtime.metrics import Amounts
    from tasklib_daemon.settings import Web

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PROBES = frozenset({"/livez", "/readyz"})


class LatestReport:
    """What the supervisor last reported, and when. Before the first status, its age counts from the start."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self._at = clock()
        self._read_at = 0.0
        self._gauges: Sequence[Any] = ()
        self.status: Status = {}
        self.totals: Amounts = {}
        self.version = 0  # grows with every report

    def take_status(self, status: Status) -> None:
        self.status = status
        self._at = self.now()
        self.version += 1

    def take_totals(self, totals: Amounts) -> None:
        self.totals = totals
        self.version += 1

    def take_gauges(self, gauges: Sequence[Any], read_at: float) -> None:
        """`read_at` is by the monotonic clock, which all processes of a host share."""
        self._gauges, self._read_at = gauges, read_at
        self.version += 1

    @property
    def cluster(self) -> Reading:
        return Reading(self._gauges, max(self.now() - self._read_at, 0.0))

    @property
    def age_seconds(self) -> float:
        return self.now() - self._at


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    body: Mapping[str, Any]  # sent as JSON
    headers: Mapping[str, str] = field(default_factory=dict)
    text: bytes | None = None  # sent instead


class HealthApp:
    def __init__(self, web: Web, report: LatestReport) -> None:
        self._report = report
        self._host = web.host
        self._token = web.token.get_secret_value().encode() if web.token is not None else None
        self._has_public_probes = web.public_probes
        self._exposition = Exposition(report)
        self._routes = {
            "/livez": self._livez, "/readyz": self._readyz, "/status": self._status, "/metrics": self._metrics,
        }  # fmt: skip

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = self.answer(scope["method"], scope["path"], dict(scope["headers"]))
        body = answer.text if answer.text is not None else json.dumps(answer.body, default=str).encode() + b"\n"
        headers = {"content-type": "application/json", "content-length": str(len(body)), "cache-control": "no-store"}
        pairs = [(name.encode(), value.encode()) for name, value in (headers | dict(answer.headers)).items()]
        await send({"type": "http.response.start", "status": answer.code, "headers": pairs})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def answer(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> Answer:
        if not self._is_host_known(headers.get(b"host", b"")):
            return Answer(421, {"error": "ask this server by its address, or as localhost"})
        is_known = self._may_see(headers.get(b"authorization", b""))
        is_probe = self._has_public_probes and path in PROBES
        if not is_known and not is_probe:
            return Answer(401, {"error": "send the header Authorization: Bearer TOKEN"}, {"www-authenticate": "Bearer"})
        if path not in self._routes:
            return Answer(404, {"error": f"not found; try {', '.join(self._routes)}"})
        if method not in {"GET", "HEAD"}:
            return Answer(405, {"error": "only GET"}, {"allow": "GET, HEAD"})
        answer = self._routes[path]()
        return answer if is_known else Answer(answer.code, {"ok": answer.body["ok"]})

    def _is_host_known(self, host: bytes) -> bool:
        """Without a token, a website whose name resolves to this address could read the answers in a user's browser."""
        if self._token is not None or not host:
            return True
        name = host.decode("latin-1").rpartition(":")[0] if _has_port(host) else host.decode("latin-1")
        try:
            return ipaddress.ip_address(name.strip("[]")).is_loopback
        except ValueError:
            return name.lower() in {"localhost", self._host.lower()}

    def _may_see(self, authorization: bytes) -> bool:
        if self._token is None:
            return True
        scheme, _, given = authorization.partition(b" ")
        is_equal = hmac.compare_digest(given.strip(), self._token)  # takes equally long for every wrong token
        return is_equal and scheme.lower() == b"bearer"

    # --- the answers ---

    def _livez(self) -> Answer:
        return _verdict(why_not_live(self._report.age_seconds))

    def _readyz(self) -> Answer:
        return _verdict(why_not_ready(self._report.status, self._report.age_seconds))

    def _status(self) -> Answer:
        if not self._report.status:
            return Answer(503, {"error": "the supervisor has not reported yet"})
        return Answer(200, {**self._report.status, "age_seconds": round(self._report.age_seconds, 3)})

    def _metrics(self) -> Answer:
        return Answer(200, {}, {"content-type": CONTENT_TYPE}, self._exposition.text())


def _verdict(reasons: list[str]) -> Answer:
    return Answer(503, {"ok": False, "reasons": reasons}) if reasons else Answer(200, {"ok": True})


def _has_port(host: bytes) -> bool:
    return b":" in host and not host.endswith(b"]")
