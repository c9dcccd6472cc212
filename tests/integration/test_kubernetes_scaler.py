"""What the autoscaler asks the database."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    import tasklib
    from tests.support.raw_sql import Conn

ROOT = Path(__file__).resolve().parents[2]
SCALER = ROOT / "kubernetes" / "components" / "autoscaling" / "scaled-object.yaml"


def test_the_scaler_counts_what_is_to_do(client: tasklib.Client, conn: Conn) -> None:
    """Its query runs, and gives one number: tasks that wait for a worker, not those whose time has not come."""
    scaled, _ = yaml.safe_load_all(SCALER.read_text("utf-8"))
    (trigger,) = scaled["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    assert conn.execute(query).fetchall() == [(0,)]
    for queue in ("default", "mail"):
        client.submit_task("anything", queue=queue)
    client.submit_task("anything", delay_seconds=3600)
    assert conn.execute(query).fetchall() == [(2,)]
