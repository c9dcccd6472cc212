"""The files of grafana/, as tests read them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "grafana"
DASHBOARDS = sorted(GRAFANA.glob("dashboards/*.json"))
RULES = sorted(GRAFANA.glob("rules/*.rules.yml"))
RULE_TESTS = sorted(GRAFANA.glob("rules/tests/*.test.yml"))

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Expression:
    """One that a panel, a variable or an annotation asks for."""

    where: str
    text: str
    is_instant: bool = False

    def with_values(self, values: Mapping[str, str]) -> str:
        """With what Grafana would put in the place of its variables. KeyError: nobody knows that one."""
        return re.sub(r"\$(\w+)", lambda found: values[found[1]], self.text)


def dashboards() -> dict[str, Json]:
    return {path.stem: json.loads(path.read_text("utf-8")) for path in DASHBOARDS}


def panels(dashboard: Json) -> list[Json]:
    """Without the headings."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[Expression]:
    """Of all panels."""
    for name, dashboard in dashboards().items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                where = f"{name} / {panel['title']} / {target['legendFormat']}"
                yield Expression(where, target["expr"], target["instant"])


def annotation_queries() -> Iterator[Expression]:
    for name, dashboard in dashboards().items():
        for each in dashboard["annotations"]["list"]:
            yield Expression(f"{name} / {each['name']}", each["target"]["expr"])


def variables() -> Iterator[Expression]:
    """The series whose labels they offer."""
    for name, dashboard in dashboards().items():
        for each in dashboard["templating"]["list"]:
            if each["type"] == "query":
                found = re.fullmatch(r"label_values\((.+), (\w+)\)", each["query"]["query"])
                assert found is not None, each
                yield Expression(f"{name} / ${each['name']}", f"count by ({found[2]}) ({found[1]})", is_instant=True)


def rules(kind: str) -> Iterator[Json]:
    """`alert` or `record`."""
    for path in RULES:
        for group in yaml.safe_load(path.read_text("utf-8"))["groups"]:
            yield from (rule for rule in group["rules"] if kind in rule)


def headings(page: Path) -> set[str]:
    """As anchors. Of headings with plain words: in lower case, with hyphens for blanks."""
    found = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in found}
