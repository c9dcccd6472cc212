"""The range of a numeric setting, as part of its type: `Annotated[int, Range(1, 1000)]`.

Every setting has both ends, so that a value that cannot work is refused at once, and not noticed in production.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import core_schema

DAY_SECONDS = 86_400.0
YEAR_SECONDS = 365 * DAY_SECONDS
LONGEST_TEXT = 10_000


@dataclass(frozen=True, slots=True)
class Range:
    """From `least` to `most`. True and false are not numbers. The error does not show a value that is not a number: it
    may be a secret in the wrong place.
    """

    least: float
    most: float

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        kind = "whole number" if source is int else "number"
        wanted = f"must be a {kind} from {_shown(self.least)} to {_shown(self.most)}"

        def validate(value: Any, parse: core_schema.ValidatorFunctionWrapHandler) -> Any:
            try:
                number = parse(value)
            except ValidationError:
                number = None
            if number is None or isinstance(value, bool):
                raise ValueError(f"{wanted}{', got true or false' if isinstance(value, bool) else ''}")
            if not self.least <= number <= self.most:
                raise ValueError(f"{wanted}, got {_shown(number)}")
            return number

        return core_schema.no_info_wrap_validator_function(validate, handler(source))


def plain(message: str) -> str:
    """The message without the words that pydantic puts before ours."""
    return message.removeprefix("Value error, ")


def _shown(number: float) -> str:
    return str(number) if type(number) is int else f"{number:g}"
