"""The application of tests/campaigns/daemon_many_queues.py: a few functions, and as many more as it is told to have."""

from __future__ import annotations

import os

import tasklib

NAMES = "CAMPAIGN_NAMES"


@tasklib.task
async def quick() -> None:
    """Nothing to do."""


@tasklib.task
def measure(text: str) -> int:
    return len(text)


for _number in range(int(os.environ.get(NAMES, "0"))):
    tasklib.task(name=f"served_{_number}")(lambda: None)
