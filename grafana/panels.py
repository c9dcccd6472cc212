"""The words in which the dashboards are written, and Grafana's JSON for them.

A panel cannot be made without a unit and a description. In an expression `@` stands for what is chosen at the top of
the dashboard: `{@}` for the namespace and the job, `{@queue+task}` for the queue and the task too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Json = dict[str, Any]
Unit = Literal["none", "short", "ops", "s", "percentunit", "bytes", "dateTimeFromNow"]
Calculation = Literal["lastNotNull", "max", "mean", "min"]

# Where docs/runbook.md is published. RFC 2606 keeps the name free: put your own in its place (README.md says how).
RUNBOOKS = "https://tasklib.example/docs/runbook.md"
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 41  # Grafana 12. The published types of 11.6, 12.0 and 13.2 accept the files
COLUMNS = 24
# A job of Prometheus is one installation: one database. `namespace` is there in Kubernetes, and empty elsewhere.
WHERE = ("namespace", "job")


@dataclass(frozen=True, slots=True)
class Query:
    """`legend` names a line, or a column of a table; a column without one is not shown."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Variable:
    """What can be chosen at the top: the values of a label, of the series that carry it. All of them, at first."""

    label: str
    series: str
    title: str


@dataclass(frozen=True, slots=True)
class Panel:
    """`alerts`: whose runbooks are linked from it."""

    kind: str
    title: str
    description: str
    unit: Unit
    queries: Sequence[Query]
    width: int
    height: int
    options: Json
    custom: Json = field(default_factory=dict)
    defaults: Json = field(default_factory=dict)
    overrides: Sequence[Json] = ()
    transformations: Sequence[Json] = ()
    alerts: Sequence[str] = ()
    is_instant: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    description: str
    variables: Sequence[Variable]
    rows: Sequence[Row]


# --- panels ---


def stat(
    title: str,
    description: str,
    *queries: Query,
    unit: Unit,
    steps: Sequence[tuple[float, str]] = (),
    width: int = 3,
    no_value: str = "none",
    alerts: Sequence[str] = (),
) -> Panel:
    """A number with its recent course. `steps`: from which value on it is of which colour; green below."""
    options = {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showPercentChange": False,
        "textMode": "auto",
        "wideLayout": True,
    }
    defaults = {"color": {"mode": "thresholds"}, "thresholds": _thresholds(steps), "noValue": no_value}
    return Panel("stat", title, description, unit, queries, width, 4, options, defaults=defaults, alerts=alerts)


def graph(
    title: str,
    description: str,
    *queries: Query,
    unit: Unit,
    width: int = 8,
    is_stacked: bool = False,
    most: float | None = None,
    limit: float | None = None,
    legend: Sequence[Calculation] = ("lastNotNull", "max"),
    alerts: Sequence[str] = (),
) -> Panel:
    """Lines over time. `most` ends the scale; `limit` is a line that an alert is about."""
    options = {
        "legend": {
            "calcs": list(legend),
            "displayMode": "table",
            "placement": "bottom",
            "showLegend": True,
            "sortBy": "Last *",
            "sortDesc": True,
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    custom: Json = {
        "drawStyle": "line",
        "fillOpacity": 30 if is_stacked else 8,
        "lineWidth": 1,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "normal" if is_stacked else "none"},
    }
    defaults: Json = {"color": {"mode": "palette-classic-by-name"}, "min": 0}
    if most is not None:
        defaults["max"] = most
    if limit is not None:
        custom["thresholdsStyle"] = {"mode": "dashed"}
        defaults["thresholds"] = _thresholds([(limit, "red")], below="transparent")
    return Panel(
        "timeseries", title, description, unit, queries, width, 8, options, custom, defaults, alerts=alerts
    )  # fmt: skip


def heatmap(title: str, description: str, query: Query, *, unit: Unit, width: int = 12) -> Panel:
    """How often something took how long: a histogram's buckets over time."""
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {
            "exponent": 0.5, "fill": "dark-orange", "mode": "scheme", "reverse": False, "scale": "exponential",
            "scheme": "Oranges", "steps": 64,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": False, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": unit},
    }  # fmt: skip
    custom = {"hideFrom": {"legend": False, "tooltip": False, "viz": False}, "scaleDistribution": {"type": "linear"}}
    return Panel("heatmap", title, description, unit, [query], width, 8, options, custom)


def table(
    title: str,
    description: str,
    *queries: Query,
    unit: Unit,
    units: dict[str, Unit] | None = None,
    by: Sequence[str],
    sort: str,
    width: int = 24,
    alerts: Sequence[str] = (),
) -> Panel:
    """One line for each value of the labels `by`, one column for each query, named by its legend; as of now."""
    # Grafana names a column `Value #A`, and brings the time along.
    columns = {f"Value #{_letter(index)}": query.legend for index, query in enumerate(queries)}
    organize = {
        "excludeByName": dict.fromkeys(["Time", *(column for column, name in columns.items() if not name)], True),
        "indexByName": {name: index for index, name in enumerate([*by, *columns])},
        "renameByName": {column: name for column, name in columns.items() if name},
    }
    return Panel(
        "table",
        title,
        description,
        unit,
        queries,
        width,
        10,
        {"cellHeight": "sm", "frameIndex": 0, "showHeader": True, "sortBy": [{"desc": True, "displayName": sort}]},
        {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False},
        overrides=[_column_unit(name, its) for name, its in (units or {}).items()],
        transformations=[{"id": "merge", "options": {}}, {"id": "organize", "options": organize}],
        alerts=alerts,
        is_instant=True,
    )


def quantiles(buckets: str) -> list[Query]:
    """How long the slowest of so many took: `some_seconds_bucket{@}`."""
    return [
        Query(f"histogram_quantile({each}, sum by (le) (rate({buckets}[$__rate_interval])))", f"p{each * 100:g}")
        for each in (0.5, 0.95, 0.99)
    ]


def _thresholds(steps: Iterable[tuple[float, str]], *, below: str = "green") -> Json:
    made: list[Json] = [{"color": below, "value": None}]
    return {"mode": "absolute", "steps": [*made, *({"color": color, "value": value} for value, color in steps)]}


def _column_unit(name: str, unit: Unit) -> Json:
    return {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}


# --- Grafana's JSON ---


def as_json(dashboard: Dashboard, dashboards: Sequence[Dashboard]) -> Json:
    """With links to the other `dashboards`."""
    return {
        "id": None,
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["tasklib"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "annotations": {"list": [_alerts_annotation()]},
        "links": [
            *(_link(other.title, f"/d/{other.uid}") for other in dashboards if other is not dashboard),
            _link("Runbook", f"{RUNBOOKS}#runbook", is_elsewhere=True),
        ],
        "templating": {"list": [_datasource_variable(), *_query_variables(dashboard.variables)]},
        "panels": _placed(dashboard.rows),
    }


def _chosen(expr: str) -> str:
    """With matchers in the place of `@`, on one line."""
    return " ".join(re.sub(r"@([\w+]*)", lambda found: _matchers(*WHERE, *found[1].split("+")), expr).split())


def _matchers(*labels: str) -> str:
    return ", ".join(f'{label}=~"${label}"' for label in labels if label)


def _placed(rows: Iterable[Row]) -> list[Json]:
    """Row by row, from left to right; a panel that does not fit beside the others begins a new line."""
    placed: list[Json] = []
    top = 0
    for row in rows:
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
        heading = {"type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}
        placed.append({"id": len(placed) + 1, **heading})
        top, left, tallest = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, tallest = top + tallest, 0, 0
            place = {"h": panel.height, "w": panel.width, "x": left, "y": top}
            placed.append(_panel(panel, len(placed) + 1, place))
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest
    return placed


def _panel(panel: Panel, number: int, place: Json) -> Json:
    defaults = {"unit": panel.unit, **panel.defaults, **({"custom": panel.custom} if panel.custom else {})}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "links": [_link(f"Runbook: {each}", runbook(each), is_elsewhere=True) for each in panel.alerts],
        "targets": [_target(panel, index, query) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": defaults, "overrides": list(panel.overrides)},
        "options": panel.options,
        **({"transformations": list(panel.transformations)} if panel.transformations else {}),
    }


def _target(panel: Panel, index: int, query: Query) -> Json:
    formats = {"table": "table", "heatmap": "heatmap"}
    return {
        "refId": _letter(index),
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": _chosen(query.expr),
        "format": formats.get(panel.kind, "time_series"),
        "instant": panel.is_instant,
        "range": not panel.is_instant,
        "legendFormat": query.legend or "__auto",
    }


def _letter(index: int) -> str:
    return chr(ord("A") + index)


def runbook(alert: str) -> str:
    """Where a heading of docs/runbook.md with the alert's name is found: hosts make the anchor in lower case."""
    return f"{RUNBOOKS}#{alert.lower()}"


def _link(title: str, url: str, *, is_elsewhere: bool = False) -> Json:
    """Other dashboards are shown for the same time and choice."""
    return {
        "title": title,
        "type": "link",
        "url": url,
        "icon": "doc" if is_elsewhere else "dashboard",
        "tooltip": "",
        "tags": [],
        "asDropdown": False,
        "includeVars": not is_elsewhere,
        "keepTime": not is_elsewhere,
        "targetBlank": is_elsewhere,
    }


def _datasource_variable() -> Json:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "regex": "",
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "options": [],
        "refresh": 1,
        "skipUrlSync": False,
    }


def _query_variables(variables: Sequence[Variable]) -> Iterable[Json]:
    """Each offers what is there within the choices before it."""
    for index, each in enumerate(variables):
        before = _matchers(*(earlier.label for earlier in variables[:index]))
        query = f"label_values({each.series}{{{before}}}, {each.label})"
        yield {
            "name": each.label,
            "label": each.title,
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": f"{each.label}-values"},
            "regex": "",
            "refresh": 2,
            "sort": 1,
            "hide": 0,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": ["All"], "value": ["$__all"]},
            "options": [],
            "skipUrlSync": False,
        }


def _alerts_annotation() -> Json:
    """When alerts fired, across all graphs."""
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "target": {
            "refId": "Alerts",
            "expr": _chosen('ALERTS{alertname=~"Tasklib.+", alertstate="firing", @}'),
            "interval": "",
        },
    }
