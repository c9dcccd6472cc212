"""What a run has shown: the targets, every figure beside the others', what each costs. As Markdown for the terminal,
and with plots for the documentation.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from bench import plots
from bench.catalogue import WORKLOADS
from bench.systems import BARE, TASKLIB
from bench.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bench.catalogue import Workload
    from bench.figures import Results
    from bench.targets import Target

PAGE = "benchmarks-report.md"
COSTS = (
    ("worker_us", "worker CPU, us", "{:.0f}"),
    ("postgresql_us", "PostgreSQL CPU, us", "{:.0f}"),
    ("wal_bytes", "WAL, bytes", "{:,.0f}"),
    ("commits", "commits", "{:.3f}"),
)
SHOWN_ELSEWHERE = {*(key for key, _, _ in COSTS), "begun_per_second", "p99_ms", "steadiness"}
DRAINS = ("drain", "drain_2p")
SUSTAINED = "sustained"


def text(results: Results) -> str:
    sections = {
        "Targets": targets(results),
        "Figures": figures(results),
        "W12: what a task costs": costs(results),
        "What else was seen": others_seen(results),
        "Not measured": notes(results),
    }
    return "\n\n".join(f"## {title}\n\n{body}" for title, body in sections.items() if body)


def write(results: Results, directory: Path) -> Path:
    """The page and its plots."""
    drawn = draw(results)
    for name, plot in drawn.items():
        path = directory / "plots" / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(plot)
    images = "\n\n".join(f"![{name}](plots/{name}.svg)" for name in drawn)
    page = directory / PAGE
    page.write_text(
        "\n\n".join([_head(results), text(results), f"## Plots\n\n{images}" if images else ""]).rstrip() + "\n"
    )
    return page


def _head(results: Results) -> str:
    about, server = results.about, dict(results.about["settings"])
    version = server.pop("server_version")
    lines = [
        "# Benchmark report",
        "",
        "Written by `python3 dev.py bench`; [benchmarks](benchmarks.md) says how everything is measured.",
        "",
        f"- {about['began']}, {about['rounds']} rounds",
        f"- {about['machine']}, Python {about['python']}, PostgreSQL {version}",
        f"- settings: {', '.join(f'{name} {value}' for name, value in server.items())}",
        f"- sizes: {', '.join(f'{name} {value:,}' for name, value in about['size'].items())}",
        "",
        "| | versions | mode |",
        "|---|---|---|",
    ]
    for name, versions in about["versions"].items():
        said = ", ".join(f"{package} {each}" for package, each in versions.items())
        lines.append(f"| {name} | {said} | {about['modes'][name]} |")
    return "\n".join(lines)


# --- tables ----------------------------------------------------------------------------------------------------------


def targets(results: Results) -> str:
    """Those of which there is a figure."""
    lines = []
    for target in TARGETS:
        measured = target.measured(results)
        if measured is not None:
            verdict = _verdict(target, measured)
            lines.append(f"| {target.number} | {target.text} | {target.bound} | {measured:.2f} | {verdict} |")
    return _table("| | target | bound | measured | |", "|---|---|---|---:|---|", lines)


def _verdict(target: Target, measured: float) -> str:
    met = "met" if target.is_met(measured) else "**missed**"
    return f"aim {met}" if target.is_aim else met


def figures(results: Results) -> str:
    """With the median of the rounds' own ratios; more than 1 means that tasklib is ahead."""
    others = _others(results)
    lines = []
    for workload in _measured(results):
        cells = [workload.number, workload.title, _shown(workload, results, TASKLIB.name)]
        for name in others:
            each = ratios(workload, results, name)
            ratio = f" **{statistics.median(each):.2f}**" if each else ""
            cells.append(_shown(workload, results, name) + ratio)
        lines.append(f"| {' | '.join(cells)} |")
    head = f"| figure **ratio** | | tasklib | {' | '.join(others)} |"
    return _table(head, f"|---|---|---:|{'---:|' * len(others)}", lines)


def ratios(workload: Workload, results: Results, other: str) -> list[float]:
    """Round by round: the machine is the same for both only within one."""
    ours, theirs = results.figures(workload.key, TASKLIB.name), results.figures(workload.key, other)
    return [workload.ratio(one, another) for one, another in zip(ours, theirs, strict=False) if one > 0 and another > 0]


def costs(results: Results) -> str:
    """Of every drain."""
    names = [TASKLIB.name, *_others(results)]
    lines = []
    for workload in _measured(results):
        for key, title, form in COSTS:
            medians = [results.median(workload.key, name, key) for name in names]
            if any(each is not None for each in medians):
                cells = ["" if each is None else form.format(each) for each in medians]
                lines.append(f"| {workload.title} | {title} | {' | '.join(cells)} |")
    return _table(f"| per task | | {' | '.join(names)} |", f"|---|---|{'---:|' * len(names)}", lines)


def others_seen(results: Results) -> str:
    lines = []
    for workload in _measured(results):
        for system, rounds in results.rounds[workload.key].items():
            names = dict.fromkeys(name for each in rounds for name in each.also if name not in SHOWN_ELSEWHERE)
            seen = [f"{name} {results.median(workload.key, system, name):,.4g}" for name in names]
            if seen:
                lines.append(f"| {workload.number} | {workload.title} | {system} | {', '.join(seen)} |")
    return _table("| | | | medians |", "|---|---|---|---|", lines)


def notes(results: Results) -> str:
    """What is not there, and why."""
    missing = [f"- {name} is missing: {reason}" for name, reason in results.missing.items()]
    titles = {workload.key: f"{workload.number}, {workload.title}" for workload in WORKLOADS}
    absent = [
        f"- {titles[key]}: {name} {reason}"
        for key, by_name in results.notes.items()
        for name, reason in by_name.items()
    ]
    return "\n".join(missing + absent)


def _table(head: str, rule: str, lines: Sequence[str]) -> str:
    return "\n".join([head, rule, *lines]) if lines else ""


def _measured(results: Results) -> list[Workload]:
    return [workload for workload in WORKLOADS if results.rounds.get(workload.key)]


def _others(results: Results) -> list[str]:
    """The limit first, then the peers in the order in which they were run."""
    seen = dict.fromkeys([BARE.name, *(name for by_name in results.rounds.values() for name in by_name)])
    return [name for name in seen if name != TASKLIB.name]


def _shown(workload: Workload, results: Results, name: str) -> str:
    measured = results.of(workload.key, name)
    return workload.show(measured) if measured else ""


# --- plots -----------------------------------------------------------------------------------------------------------


def draw(results: Results) -> dict[str, str]:
    """By name; those for which there are figures."""
    drawn = {}
    if rows := _ratio_rows(results):
        drawn["ratios"] = plots.bars(
            "tasklib beside the others: more than 1 is ahead", rows, form="{:.2f}", is_log=True
        )
    if rows := _rate_rows(results):
        drawn["drain"] = plots.bars("W3: tasks a second in a drain", rows)
    if flowed := results.of(SUSTAINED, TASKLIB.name):
        series = flowed[0].series
        late = {name: series[name] for name in ("p50_ms", "p99_ms")}
        drawn["latency"] = plots.lines("W10: submit to start over time", late, unit="ms")
        drawn["size"] = plots.lines("W10: size of the tables", {"tables": series["megabytes"]}, unit="MB")
        drawn["dead-rows"] = plots.lines("W10: dead rows", {"dead rows": series["dead_rows"]}, unit="rows")
    return drawn


def _ratio_rows(results: Results) -> list[plots.Row]:
    rows = []
    for workload in _measured(results):
        each = {name: ratios(workload, results, name) for name in _others(results)}
        medians = {name: statistics.median(found) for name, found in each.items() if found}
        if medians:
            rows.append(plots.Row(f"{workload.number}  {workload.title}", medians))
    return rows


def _rate_rows(results: Results) -> list[plots.Row]:
    rows = []
    for workload in _measured(results):
        if workload.key in DRAINS:
            medians = {name: results.median(workload.key, name) for name in results.rounds[workload.key]}
            rows.append(plots.Row(workload.title, {name: each for name, each in medians.items() if each is not None}))
    return rows
