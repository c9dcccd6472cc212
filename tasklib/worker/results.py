"""What a task function returned, as JSON that PostgreSQL can store. Never fatal: what has no form there is changed,
with a note in the log, because the work has been done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticSerializationError, from_json, to_json

from tasklib.errors import InvalidArguments
from tasklib.log import log
from tasklib.strict_json import check_limits, stable_numbers, storable

if TYPE_CHECKING:
    from tasklib.outcomes import HeldTask

MAX_RESULT_BYTES = 1024 * 1024
MAX_REPR_CHARACTERS = 1_000
_NOTHING = '{"value":null}'
_LETTER_E = ord("e")


def encode_result(task: HeldTask, value: object) -> str:
    if value is None:
        return _NOTHING
    try:
        written = to_json(value, inf_nan_mode="constants")
        data = b'{"value":%b}' % written
        if _LETTER_E in written:  # only a number with an exponent is written otherwise
            data = stable_numbers(data)
        check_limits(task.name, data, MAX_RESULT_BYTES)
        return data.decode()
    except Exception as error:  # noqa: BLE001 - a model's own serializer may raise anything
        log.warning("result.changed", task=task.name, task_id=task.id, reason=_first_line(error))
        return _sanitised(value)


def _sanitised(value: object) -> str:
    """Unknown objects as their repr, NaN as a string, NUL and half surrogates replaced, a note if too large."""
    try:
        data = to_json({"value": value}, inf_nan_mode="strings", serialize_unknown=True, fallback=_repr)
        data = stable_numbers(to_json(_storable(from_json(data))))
        check_limits("result", data, MAX_RESULT_BYTES)
        return data.decode()
    except Exception as error:  # noqa: BLE001 - see above
        return to_json({"value": None, "not_stored": storable(_first_line(error))}).decode()


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, list):
        return [_storable(each) for each in value]
    if isinstance(value, dict):
        return {storable(key): _storable(each) for key, each in value.items()}
    return value


def _repr(value: object) -> str:
    return storable(repr(value), MAX_REPR_CHARACTERS)


def _first_line(error: Exception) -> str:
    """Of our own errors and pydantic's; others' words may quote the value."""
    if isinstance(error, InvalidArguments | PydanticSerializationError):
        return str(error).partition("\n")[0][:300]
    return type(error).__name__
