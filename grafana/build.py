"""The files in dashboards/, made from the descriptions beside this one. `python3 dev.py dashboards` writes them."""

from __future__ import annotations

import json
from pathlib import Path

from grafana.overview import OVERVIEW
from grafana.panels import as_json
from grafana.tasks import QUEUES_AND_TASKS
from grafana.workers import WORKERS_AND_DATABASE

DASHBOARDS = (OVERVIEW, QUEUES_AND_TASKS, WORKERS_AND_DATABASE)
FILES = Path(__file__).resolve().parent / "dashboards"


def made() -> dict[Path, str]:
    """What each file has to hold."""
    return {
        FILES / f"{each.uid}.json": json.dumps(as_json(each, DASHBOARDS), indent=2, ensure_ascii=False) + "\n"
        for each in DASHBOARDS
    }


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
