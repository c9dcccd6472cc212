"""What the kubelet and Prometheus ask of a pod, as the manifests say, of a real daemon with the settings of the base.
tests/acceptance/test_container.py does the same in a container, and takes half a minute for it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml

from tests.support.proxy import CuttingProxy
from tools.daemons import daemon
from tools.waiting import wait_until

if TYPE_CHECKING:
    from tests.support.proxy import Fate

pytestmark = pytest.mark.direct("a proxy that goes away is in between")

KUBERNETES = Path(__file__).resolve().parents[2] / "kubernetes"
TOKEN = "a-token-of-the-test"


def manifest(path: str) -> Any:
    return yaml.safe_load((KUBERNETES / path).read_text("utf-8"))


def test_probes_and_scrapes_of_a_pod(database_url: str, open_directory: Path) -> None:
    """Alive, and ready; then without a database still alive, and not ready. The kubelet has no token and is told no
    more than yes or no; Prometheus has one, and gets nothing without.
    """
    (worker,) = manifest("base/worker-deployment.yaml")["spec"]["template"]["spec"]["containers"]
    (scrape,) = manifest("components/monitoring/service-monitor.yaml")["spec"]["endpoints"]
    paths = {kind: worker[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    web = tomllib.loads((KUBERNETES / "base" / "tasklibd.toml").read_text("utf-8"))["web"]
    is_away = [False]

    def decide(_said: object) -> Fate:
        return "before" if is_away[0] else "pass"

    with (
        CuttingProxy(database_url, open_directory, decide) as proxy,
        daemon(proxy.url, web={**web, "port": 0}, environment={"TASKLIB_WEB_TOKEN": TOKEN}) as made,
        httpx.Client(base_url=f"http://127.0.0.1:{made.wait_for('web.listening')['port']}", trust_env=False) as kubelet,
    ):
        wait_until(lambda: kubelet.get(paths["readiness"]).status_code == 200, "it to be ready")
        assert [kubelet.get(paths[kind]).status_code for kind in ("startup", "liveness")] == [200, 200]
        assert all(kubelet.get(path).json() == {"ok": True} for path in paths.values())
        assert kubelet.get(scrape["path"]).status_code == 401
        told = kubelet.get(scrape["path"], headers={"Authorization": f"{scrape['authorization']['type']} {TOKEN}"})
        assert (told.status_code, "tasklib_build_info" in told.text) == (200, True)
        is_away[0] = True
        wait_until(lambda: kubelet.get(paths["readiness"]).status_code == 503, "it not to be ready")
        assert kubelet.get(paths["liveness"]).status_code == 200
        is_away[0] = False
