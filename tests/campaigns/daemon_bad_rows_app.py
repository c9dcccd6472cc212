"""What rows with extreme values ask for: it takes whatever it is given, and leaves no journal."""

from __future__ import annotations

import time

import tasklib
from tests.support.extreme_rows import NAME


@tasklib.task(name=NAME)
def extreme(**_given: object) -> None:
    time.sleep(0.05)
