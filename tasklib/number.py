"""One check for numbers that users give. True and False are not numbers, although Python counts them as such."""

from __future__ import annotations

import math
from typing import Any


def is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    """A number from `least` to `most`. NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def is_whole_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    return isinstance(value, int) and is_number(value, least, most)
