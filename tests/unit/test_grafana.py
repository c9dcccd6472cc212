"""Dashboards and rules, without Grafana: what they hold, what they refer to, and whether those who know accept them."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import pytest
import yaml

from grafana import build
from grafana.panels import RUNBOOKS, runbook
from tasklib_daemon import metrics
from tests.support import grafana_files as files
from tests.support.grafana_files import ROOT, dashboards, expressions, panels, rules
from tests.support.npm_tools import node, npm_tools
from tests.support.prometheus import needs_prometheus, promtool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.grafana_files import Json

PAGE = ROOT / "docs" / "runbook.md"
VALUES = {
    "namespace": ".*", "job": ".*", "queue": ".*", "task": ".*", "instance": ".*", "__rate_interval": "1m",
    "__range": "1h",
}  # fmt: skip
OF_PROMETHEUS = {"namespace", "job", "instance"}  # labels that every series has from being scraped
SERIES = re.compile(r"\b(tasklib_\w+)(?:\{([^}]*)\})?")
ALERTS = [rule["alert"] for rule in rules("alert")]


def every_panel() -> Iterator[tuple[str, Json]]:
    return ((name, panel) for name, dashboard in dashboards().items() for panel in panels(dashboard))


# --- the files ---


def test_the_dashboards_are_what_is_made() -> None:
    """If this fails: python3 dev.py dashboards."""
    assert build.made() == {path: path.read_text("utf-8") for path in files.DASHBOARDS}


def test_dashboards_can_be_provisioned_and_imported() -> None:
    """A stable uid and no id, so that a newer version takes the place of an older one; no inputs that a provisioned
    dashboard would leave open; Prometheus is chosen by a variable, and nothing else is asked.
    """
    found = dashboards()
    assert [each["uid"] for each in found.values()] == [*found]
    for dashboard in found.values():
        assert dashboard["id"] is None
        assert "__inputs" not in dashboard
        assert dashboard["templating"]["list"][0]["type"] == "datasource"
        asked = [panel["datasource"] for panel in panels(dashboard)]
        asked += [target["datasource"] for panel in panels(dashboard) for target in panel["targets"]]
        asked += [each["datasource"] for each in dashboard["annotations"]["list"]]
        asked += [each["datasource"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
        assert all(each == {"type": "prometheus", "uid": "${datasource}"} for each in asked)


def test_every_panel_says_what_it_shows() -> None:
    """A unit, and a description in a sentence."""
    for where, panel in every_panel():
        assert panel["fieldConfig"]["defaults"]["unit"], (where, panel["title"])
        assert re.fullmatch(r"[A-Z`\w].{20,}\.", panel["description"], re.DOTALL), (where, panel["title"])


def test_panels_do_not_overlap() -> None:
    """And have numbers of their own."""
    for dashboard in dashboards().values():
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
        for one, other in itertools.combinations([panel["gridPos"] for panel in dashboard["panels"]], 2):
            is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
            assert is_beside or is_below, (dashboard["uid"], one, other)
        assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in dashboard["panels"])


def test_provisioning_files_are_for_these_dashboards() -> None:
    """They name the directory that README.md copies them to."""
    there = files.GRAFANA / "provisioning"
    (provider,) = yaml.safe_load((there / "dashboards" / "tasklib.yml").read_text("utf-8"))["providers"]
    assert (provider["type"], provider["name"]) == ("file", "tasklib")
    assert provider["options"]["path"] in (files.GRAFANA / "README.md").read_text("utf-8")
    (source,) = yaml.safe_load((there / "datasources" / "prometheus.yml").read_text("utf-8"))["datasources"]
    assert source["type"] == "prometheus"


def test_dashboards_fit_the_published_types(tmp_path: Path) -> None:
    """Grafana's own package of types, with the options of each kind of panel, and no key that it does not know."""
    place = npm_tools()
    (tmp_path / "node_modules").symlink_to(place / "node_modules")
    (tmp_path / "dashboard.d.ts").symlink_to(ROOT / "tests" / "npm" / "dashboard.d.ts")
    for path in files.DASHBOARDS:
        (tmp_path / f"{path.stem}.ts").write_text(
            "import type { DashboardFile } from './dashboard';\n"
            f"export const made: DashboardFile = {path.read_text('utf-8').strip()};\n",
            "utf-8",
        )
    compiler = place / "node_modules" / "typescript" / "bin" / "tsc"
    options = ["--noEmit", "--strict", "--skipLibCheck", "--target", "es2022", "--module", "nodenext"]
    ended = node(compiler, *options, *sorted(tmp_path.glob("*-*.ts")), cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout


# --- what they refer to ---


def test_dashboards_and_rules_use_metrics_that_there_are() -> None:
    """With the labels that they have. An alert on a misspelt metric never fires."""
    known = {metric.full_name: metric for metric in metrics.ALL}
    for metric in metrics.ALL:
        if metric.kind == "histogram":
            known |= {f"{metric.full_name}_{part}": metric for part in ("bucket", "sum", "count")}
    recorded = {rule["record"] for rule in rules("record")}
    asked = [(each.where, each.text) for each in (*expressions(), *files.annotation_queries(), *files.variables())]
    asked += [
        (rule.get("alert") or rule["record"], rule["expr"]) for kind in ("alert", "record") for rule in rules(kind)
    ]
    for where, text in asked:
        for name in recorded & set(re.findall(r"[\w:]+", text)):
            text = text.replace(name, "recorded")  # noqa: PLW2901 - what is left is not ours to look up
        assert ":tasklib" not in text, f"{where}: a series that nobody records"
        for name, matchers in SERIES.findall(text):
            assert name in known, f"{where}: {name}"
            labels = set(re.findall(r"(\w+)\s*(?:=|!=|=~|!~)\s*\"", matchers))
            assert labels <= OF_PROMETHEUS | {*known[name].labels, "le"}, f"{where}: {name} has no {labels}"


def test_every_metric_is_shown_somewhere() -> None:
    """One that is on no dashboard is found by nobody."""
    text = "\n".join(path.read_text("utf-8") for path in files.DASHBOARDS)
    assert [metric.full_name for metric in metrics.ALL if metric.full_name not in text] == []


def test_links_lead_to_runbooks_and_dashboards() -> None:
    """Each alert has a section of its name, and a panel that leads there."""
    there, linked = files.headings(PAGE), set()
    uids = {dashboard["uid"] for dashboard in dashboards().values()}
    links = [link for dashboard in dashboards().values() for link in dashboard["links"]]
    for link in [*links, *(link for _, panel in every_panel() for link in panel["links"])]:
        page, _, anchor = link["url"].partition("#")
        assert page == RUNBOOKS or page.removeprefix("/d/") in uids, link
        assert not anchor or anchor in there, link
        linked.add(link["url"])
    assert {runbook(alert) for alert in ALERTS} <= linked


def test_alerts_say_what_to_do() -> None:
    """A severity, a summary, a description, and the section of their name."""
    assert len(set(ALERTS)) == len(ALERTS)
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert {"summary", "description", "runbook_url"} == {*rule["annotations"]}
        assert rule["annotations"]["runbook_url"] == runbook(rule["alert"])
    sections = re.split(r"^### ", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    runbooks = {section.partition("\n")[0]: section for section in sections}
    assert {name for name in runbooks if re.fullmatch(r"Tasklib\w+", name)} == {*ALERTS}
    for alert in ALERTS:
        assert all(word in runbooks[alert] for word in ("**Means.**", "**Look at**", "**Do.**")), alert


# --- those who know ---


@needs_prometheus
def test_prometheus_accepts_the_rules() -> None:
    """With every lint, and with the example of a configuration."""
    assert "FAILED" not in promtool("check", "rules", "--lint=all", "--lint-fatal", *files.RULES)
    promtool("check", "config", files.GRAFANA / "prometheus.yml")


@needs_prometheus
def test_the_rules_do_what_they_say() -> None:
    """By promtool's unit tests."""
    promtool("test", "rules", *files.RULE_TESTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_is_seen_to_fire_and_to_stay_silent(alert: str) -> None:
    """In those tests."""
    cases = [
        case
        for path in files.RULE_TESTS
        for test in yaml.safe_load(path.read_text("utf-8"))["tests"]
        for case in test.get("alert_rule_test", [])
        if case["alertname"] == alert
    ]
    assert {bool(case["exp_alerts"]) for case in cases} == {True, False}


@needs_prometheus
def test_every_expression_parses(tmp_path: Path) -> None:
    """Of panels, variables and annotations: as rules, which promtool can read."""
    asked = [*expressions(), *files.variables(), *files.annotation_queries()]
    recorded = [{"record": f"r{number}", "expr": each.with_values(VALUES)} for number, each in enumerate(asked)]
    path = tmp_path / "all.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": recorded}]}), "utf-8")
    assert f"{len(asked)} rules found" in promtool("check", "rules", path)
