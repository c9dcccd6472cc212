"""Encoding of a result: what a task function returned, as JSON that PostgreSQL can store. It never fails, because the
work has been done: a value without a form in JSON is changed, with a note in the log. If the function declares its
return type, the note is stored too, and `result()` raises instead of returning a changed value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticSerializationError, from_json, to_json

from tasklib.errors import InvalidArguments, InvalidResult
from tasklib.log import log
from tasklib.results import MAX_RESULT_BYTES, ResultSchema
from tasklib.strict_json import check_limits, stable_numbers, storable

if TYPE_CHECKING:
    from tasklib.outcomes import HeldTask

MAX_REPR_CHARACTERS = 1_000
_NOTHING = '{"value":null}'
_LETTER_E = ord("e")


def encode_result(task: HeldTask, value: object, returns: ResultSchema | None) -> str:
    if value is None:
        return _NOTHING
    try:
        if returns is None or type(value) is returns.plain_type:
            return _as_json(task.name, value).decode()
        return returns.encode(value).decode()
    except Exception as error:  # noqa: BLE001 - the user's serializer may raise anything
        reason = _first_line(error)
        log.warning("result.changed", task=task.name, task_id=task.id, reason=reason)
        return _sanitised(value, {} if returns is None else {"changed": _note(error, reason)})


def _as_json(task_name: str, value: object) -> bytes:
    written = to_json(value, inf_nan_mode="constants")
    data = b'{"value":%b}' % written
    if _LETTER_E in written:  # only numbers with an exponent have to be written in another way
        data = stable_numbers(data)
    check_limits(task_name, data, MAX_RESULT_BYTES)
    return data


def _note(error: Exception, reason: str) -> str:
    return storable(reason if isinstance(error, InvalidResult) else f"the returned value cannot be stored: {reason}")


def _sanitised(value: object, note: dict[str, str]) -> str:
    """Unknown objects as their repr, NaN as a string, NUL and half surrogates replaced, a note if too large."""
    try:
        data = to_json({"value": value}, inf_nan_mode="strings", serialize_unknown=True, fallback=_repr)
        data = stable_numbers(to_json(_storable(from_json(data)) | note))
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
    """Only of our own errors and pydantic's: other messages may quote the value."""
    if isinstance(error, InvalidArguments | InvalidResult | PydanticSerializationError):
        return str(error).partition("\n")[0][:300]
    return type(error).__name__
