"""The image and the pods of kubernetes/, run as far as that goes without an engine and a cluster."""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import yaml

import tasklib
from tasklib.embedded import postgres
from tests.support import container, namespaces
from tests.support.working import wait_final
from tools.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(namespaces.why_not() is not None, reason=str(namespaces.why_not())),
    pytest.mark.direct("a server of its own"),
    pytest.mark.long,
]
BASE = container.ROOT / "kubernetes" / "base"
MONITORING = container.ROOT / "kubernetes" / "components" / "monitoring"
TOKEN = "a-token-of-the-test"
APP = 'app = ["shop.tasks"]'


@pytest.fixture
def database() -> Iterator[Database]:
    with postgres(port=0) as server, psycopg.connect(server.dsn, autocommit=True) as conn:
        conn.execute("create database pod")
        yield Database(server.dsn_for("pod"), conn)


class Database:
    """Empty, in a server that a container can reach."""

    def __init__(self, url: str, admin: psycopg.Connection[Any]) -> None:
        self.url = url
        self._admin = admin

    def go_away(self) -> None:
        """For all who use it."""
        self._admin.execute("alter database pod allow_connections false")
        self._admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = 'pod'")

    def come_back(self) -> None:
        self._admin.execute("alter database pod allow_connections true")


def resources(*names: str) -> list[Any]:
    return [each for name in names for each in yaml.safe_load_all((BASE / name).read_text("utf-8"))]


def ask(port: int, path: str, token: str | None = None) -> int | None:
    """As a kubelet does, without a token; or as Prometheus does. None: nobody answers."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=5) as response:  # noqa: S310 - ours
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None


@pytest.mark.slow
def test_a_pod_from_its_image_to_its_end(database: Database) -> None:
    """The steps of Dockerfile give an environment with all that is needed. In it the job migrates an empty database; a
    worker is process 1, has no rights, and can write to nothing but /tmp. Its probes answer, without a token; an outage
    of the database makes it not ready, and not dead; TERM lets tasks finish, within the pod's grace.
    """
    (deployment,), (migration, _) = resources("worker-deployment.yaml"), resources("migration-jobs.yaml")
    pod, job = deployment["spec"]["template"]["spec"], migration["spec"]["template"]["spec"]
    (worker,), port = pod["containers"], free_port()
    dockerfile = (container.ROOT / "Dockerfile").read_text("utf-8")
    settings = (BASE / "tasklibd.toml").read_text("utf-8")
    assert APP in settings
    mounts = {each["name"]: each["mountPath"] for each in worker["volumeMounts"]}
    assert {each["mountPath"] for each in job["containers"][0]["volumeMounts"]} == {mounts["credentials"]}
    parts = [
        container.steps(dockerfile),
        container.volume(
            mounts["settings"], {"tasklibd.toml": settings.replace("shop.tasks", "tests.daemon_app.tasks")}
        ),
        container.volume(mounts["credentials"], {"database_url": database.url, "web_token": TOKEN}),
        f"mount -t tmpfs -o mode=1777 tmpfs {mounts['tmp']}",
        "for each in / /etc /opt /run /var/log; do mount -o remount,bind,ro $each; done",
        container.confined(job, {}),
        "exec " + container.confined(pod, {"TASKLIB_NAME": "worker-0", "TASKLIB_WEB_PORT": str(port)}),
    ]
    (scrape,) = yaml.safe_load((MONITORING / "service-monitor.yaml").read_text("utf-8"))["spec"]["endpoints"]
    probes = {kind: worker[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    with container.container(*parts) as running:
        try:
            wait_until(lambda: running.popen.poll() is not None or ask(port, probes["startup"]) == 200, seconds=180)
            wait_until(lambda: ask(port, probes["readiness"]) == 200, "the worker to be ready")
            assert ask(port, probes["liveness"]) == 200
        except AssertionError as error:
            raise AssertionError(f"{error}\n{running.output()[-5000:]}") from None
        assert (ask(port, scrape["path"]), ask(port, scrape["path"], TOKEN)) == (401, 200)
        user, group = container.instruction(dockerfile, "USER").split(":")
        assert (int(user), int(group)) == (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"])
        with tasklib.Client(tasklib.Config(database.url)) as client:
            found = wait_final(client, client.submit_task("task_context")).result
            assert found is not None
            expected = {"user": int(user), "writable": ["/tmp"], "capabilities": 0, "no_new_privileges": 1, "parent": 1}  # noqa: S108
            assert expected.items() <= found["value"].items()
            healthy = running.run(container.instruction(dockerfile, "HEALTHCHECK"), int(user))
            assert (healthy.returncode, healthy.stderr) == (0, "")
            credentials = f"CREDENTIALS_DIRECTORY={mounts['credentials']}"
            doctor = running.run(["env", credentials, "tasklib", "doctor"], int(user))
            assert doctor.returncode == 0, doctor.stdout + doctor.stderr
            database.go_away()
            wait_until(lambda: ask(port, probes["readiness"]) == 503, "it not to be ready")
            assert ask(port, probes["liveness"]) == 200
            database.come_back()
            wait_until(lambda: ask(port, probes["readiness"]) == 200, "it to be ready again")
            napping = client.submit_task("nap", seconds=2.0)
            wait_until(lambda: client.get_task(napping).state == "running", "it to run")  # type: ignore[union-attr]
            os.kill(running.pid, signal.SIGTERM)
            began = time.monotonic()
            wait_until(lambda: ask(port, probes["readiness"]) in {503, None}, "it not to be ready")
            assert running.popen.wait(pod["terminationGracePeriodSeconds"]) == 0
            assert time.monotonic() - began < pod["terminationGracePeriodSeconds"] - 10
            assert client.get_task(napping).state == "completed"  # type: ignore[union-attr]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
