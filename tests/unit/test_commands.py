"""What the command line prints, without a database."""

from __future__ import annotations

import pytest

from tasklib.log import printable
from tasklib.printing import duration


def test_control_codes_are_written_out() -> None:
    """Stored text must not move the cursor, ring the bell or turn letters around."""
    assert printable("a\x1b[2Jb\x07c\u202ed") == r"a\x1b[2Jb\x07c\u202ed"
    assert printable("plain, äöü, 日本") == "plain, äöü, 日本"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0.0s"), (5, "5.0s"), (90, "1.5m"), (5400, "1.5h"), (172800, "2.0d")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    """One number and one unit."""
    assert duration(seconds) == text
