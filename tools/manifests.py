"""The manifests that are made from the files of grafana/: `python3 dev.py manifests` writes them; a test compares.

Kustomize reads no file outside of its own directory, and knows no way to put one YAML file into another. So grafana/
has a kustomization.yaml of its own, which lists every dashboard, and the rules are copied into a PrometheusRule.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
LISTED = Path("grafana/kustomization.yaml")
RULE = Path("kubernetes/components/monitoring/prometheus-rule.yaml")
HEAD = "# Made by `python3 dev.py manifests` from the {what} of grafana/.\n"
LABELS = {"app.kubernetes.io/name": "tasklib"}


def made(root: Path = ROOT) -> dict[Path, str]:
    return {
        root / LISTED: HEAD.format(what="dashboards") + _yaml(_dashboards(root / "grafana")),
        root / RULE: HEAD.format(what="rules") + _yaml(_rule(root / "grafana")),
    }


def write(root: Path = ROOT) -> None:
    for path, text in made(root).items():
        path.write_text(text, encoding="utf-8")


def dashboards(directory: Path) -> list[Path]:
    """Every JSON file that has panels."""
    files = sorted(directory.rglob("*.json"))
    return [file for file in files if "panels" in json.loads(file.read_text(encoding="utf-8"))]


def rules(directory: Path) -> list[dict[str, Any]]:
    """The groups of every file whose name ends with rules.yml."""
    files = sorted(directory.rglob("*rules.yml"))
    return [group for file in files for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]]


def _dashboards(directory: Path) -> dict[str, Any]:
    """One ConfigMap for each, by a name that stays: a Grafana sidecar finds them by the label."""
    files = [file.relative_to(directory) for file in dashboards(directory)]
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "generatorOptions": {"disableNameSuffixHash": True, "labels": {**LABELS, "grafana_dashboard": "1"}},
        "configMapGenerator": [
            {"name": f"tasklib-dashboard-{file.stem.removeprefix('tasklib-')}", "files": [str(file)]} for file in files
        ],
    }


def _rule(directory: Path) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tasklib", "labels": LABELS},
        "spec": {"groups": rules(directory)},
    }


def _yaml(value: dict[str, Any]) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120))


if __name__ == "__main__":
    write()
