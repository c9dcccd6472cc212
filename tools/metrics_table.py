"""The table in docs/metrics.md, made from metrics.py. `python3 dev.py metrics` writes it; a test compares."""

from __future__ import annotations

from pathlib import Path

from tasklib_daemon.metrics import ALL, Metric

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
BEGIN, END = "<!-- made from daemon/tasklib_daemon/metrics.py -->\n", "<!-- end -->\n"


def table(metrics: list[Metric]) -> str:
    return "\n".join(["| name | kind | labels | |", "|---|---|---|---|", *map(row, metrics), ""])


def row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.full_name}` | {metric.kind} | {labels} | {metric.help} |"


def made() -> str:
    own = table([metric for metric in ALL if not metric.is_cluster])
    cluster = table([metric for metric in ALL if metric.is_cluster])
    return f"{BEGIN}\n### Of each daemon\n\n{own}\n### Of the cluster, by the elected daemon\n\n{cluster}\n{END}"


def page_with(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return before + made() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
