"""A task's result: from a function's return type to JSON text and back.

Invariant: a value that `encode` accepts comes back equal from `validate_json`, even after it was stored in a jsonb
column. A type whose values cannot come back is refused when the function is registered. A single value that would not
come back (NUL in a string, an instance of a subclass) is refused by `encode`: the worker then stores what it can, with
a note, and `result()` raises instead of returning a changed value.

There is no such promise for `Any`, nor for a function without a return annotation: their results are JSON values.

The types are those of arguments. There are differences, since a result is written and read by this library alone: a
model's fields are stored by name where its aliases for reading and writing differ, and bytes are always base64.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Never, NoReturn, TypeAlias, cast, get_args, get_origin
from uuid import UUID

from pydantic import (
    ConfigDict,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    PydanticUndefinedAnnotation,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticSerializationError, SchemaError, SchemaSerializer, SchemaValidator, core_schema

from tasklib.arguments import UnresolvedAnnotation, globals_of, is_plain, is_same, resolved, unresolved_signature
from tasklib.errors import InvalidResult, InvalidTaskDefinition
from tasklib.strict_json import check_limits, stable_numbers

Node: TypeAlias = dict[str, Any]  # of a pydantic core schema

MAX_RESULT_BYTES = 1024 * 1024
_CONFIG = {
    "ser_json_bytes": "base64",
    "val_json_bytes": "base64",
    "ser_json_timedelta": "iso8601",
    "ser_json_inf_nan": "strings",
    "hide_input_in_errors": True,
}
_UNTYPED = (inspect.Signature.empty, Any, object, None, type(None), NoReturn, Never)
_BY_VALUE = frozenset({int, str, bool})  # values of exactly these types are written to JSON as they are


class ResultSchema:
    """What a task function returns, compiled once."""

    def __init__(self, annotation: Any, task_name: str) -> None:
        self._task_name = task_name
        core = _core_schema(annotation, task_name)
        flaw = next(_flaws(core), None)
        if flaw is not None:
            raise _refusal(task_name, flaw)
        self._is_exact = any(map(_differs_when_read, _nodes(core)))
        self.validator, self.serializer = _compiled(_for_storage(core, is_exact=self._is_exact))
        self._is_checked = not is_plain(annotation) and all(node["type"] != "any" for node in _nodes(core))
        self.plain_type = annotation if annotation in _BY_VALUE else None

    def encode(self, value: object) -> bytes:
        """The object that is stored. Raises `InvalidResult` if the value could not be read back from it."""
        try:
            accepted: dict[str, object] = self.validator.validate_python({"value": value})
        except ValidationError as error:
            raise InvalidResult(f"the returned value does not fit the declared type: {_reasons(error)}") from None
        written = self.serializer.to_json(accepted, by_alias=True, warnings=False, round_trip=self._is_exact)
        data = stable_numbers(written)
        check_limits(self._task_name, data, MAX_RESULT_BYTES)
        if self._is_checked and not self._comes_back(accepted["value"], data):
            raise InvalidResult(
                "the returned value does not come back from JSON as the declared type with the same value"
            )
        return data

    def validate_json(self, data: bytes) -> Any:
        """The value, from the JSON that was stored for it."""
        return self.validator.validate_json(b'{"value":%b}' % data)["value"]

    def _comes_back(self, value: object, data: bytes) -> bool:
        try:
            return is_same(value, self.validator.validate_json(data)["value"])
        except ValidationError:
            return False


def result_schema(function: Callable[..., object], task_name: str) -> ResultSchema | None:
    """None if the function has no return annotation, or one that says nothing about the value, such as Any."""
    annotation = _annotation(function, task_name)
    return None if any(annotation is each for each in _UNTYPED) else ResultSchema(annotation, task_name)


def _annotation(function: Callable[..., object], task_name: str) -> Any:
    said = unresolved_signature(function).return_annotation
    if said is inspect.Signature.empty:
        return said
    parameter = inspect.Parameter("result", inspect.Parameter.KEYWORD_ONLY, annotation=said)
    annotation = resolved(parameter, globals_of(function), task_name)
    if get_origin(annotation) in {Coroutine, Awaitable}:  # of a function that is marked as async
        return get_args(annotation)[-1]
    return annotation


def _core_schema(annotation: Any, task_name: str) -> Node:
    def build(_: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        field = core_schema.typed_dict_field(handler.generate_schema(annotation), required=True)
        return core_schema.typed_dict_schema({"value": field}, config=cast("core_schema.CoreConfig", _CONFIG))

    try:
        adapter = TypeAdapter(Annotated[dict[str, Any], GetPydanticSchema(build)], config=ConfigDict())
    except PydanticUndefinedAnnotation as error:
        raise UnresolvedAnnotation(f"{task_name}: its return type cannot be resolved: {error}") from None
    except (PydanticUserError, SchemaError, TypeError) as error:
        raise _refusal(task_name, str(error).splitlines()[0]) from None
    return cast("Node", adapter.core_schema)


def _refusal(task_name: str, reason: str) -> InvalidTaskDefinition:
    return InvalidTaskDefinition(
        f"task {task_name!r} returns a type that does not come back from JSON: {reason}. Return another type; or "
        f"annotate it as Any, to get the JSON value as it is; or set store_result=False."
    )


def _reasons(error: ValidationError) -> str:
    return "; ".join(each["msg"] for each in error.errors(include_input=False))


# --- The compiled type -----------------------------------------------------------------------------------------------

_NO_SCHEMAS = frozenset(
    {"serialization", "metadata", "config", "default", "expected", "members", "function", "cls", "computed_fields"}
)
_WITH_CONFIG = frozenset({"model", "dataclass", "typed-dict"})
_FIELDS = frozenset({"model-field", "dataclass-field", "typed-dict-field"})


def _children(node: Node) -> Iterator[Node]:
    """The schemas inside a schema that take part in reading JSON."""
    if node["type"] == "json-or-python":
        yield node["json_schema"]
    elif node["type"] == "lax-or-strict":
        yield node["lax_schema"]
    else:
        for key, value in node.items():
            if key not in _NO_SCHEMAS:
                yield from _schemas_in(value)


def _schemas_in(value: Any) -> Iterator[Node]:
    if isinstance(value, dict):
        if isinstance(value.get("type"), str):
            yield value
        else:  # fields by their names, one of which may be "type"
            for each in value.values():
                yield from _schemas_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _schemas_in(each)


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in _children(node):
        yield from _nodes(child)


def _differs_when_read(node: Node) -> bool:
    """If it were written with its aliases and computed fields, it could not be read again: so neither is stored."""
    if node["type"] in _FIELDS:
        return bool(node.get("validation_alias") != node.get("serialization_alias"))
    is_closed = (
        node.get("config", {}).get("extra_fields_behavior") == "forbid" or node.get("extra_behavior") == "forbid"
    )
    has_more = any(each.get("computed_fields") for each in (node, *_children(node)))
    return (is_closed and has_more) or node["type"] == "json"


def _for_storage(value: Any, *, is_exact: bool) -> Any:
    """The schema with our way to write bytes, NaN and times, also inside models, which have settings of their own."""
    if isinstance(value, list | tuple):
        return type(value)(_for_storage(each, is_exact=is_exact) for each in value)
    if not isinstance(value, dict):
        return value
    node = {
        key: each if key in _NO_SCHEMAS and _is_node(value) else _for_storage(each, is_exact=is_exact)
        for key, each in value.items()
    }
    if _is_node(value) and value["type"] in _WITH_CONFIG:
        node["config"] = {**value.get("config", {}), **_CONFIG}
    if _is_node(value) and is_exact:
        gone = ("validation_alias", "serialization_alias") if value["type"] in _FIELDS else ("computed_fields",)
        for key in gone:
            node.pop(key, None)
    return node


def _is_node(value: Node) -> bool:
    return isinstance(value.get("type"), str)


def _compiled(schema: Node) -> tuple[SchemaValidator, SchemaSerializer]:
    """Without the validators that pydantic has compiled for models before: those have the models' own settings."""
    validator, serializer = cast("Any", SchemaValidator), cast("Any", SchemaSerializer)
    try:
        return validator(schema, _CONFIG, _use_prebuilt=False), serializer(schema, _CONFIG, _use_prebuilt=False)
    except TypeError:  # before pydantic 2.12 there is no choice; `encode` refuses what does not come back then
        return validator(schema, _CONFIG), serializer(schema, _CONFIG)


# --- What is refused -------------------------------------------------------------------------------------------------

_NO_JSON = {
    "callable": "a function has no form in JSON",
    "is-subclass": "a class has no form in JSON",
    "generator": "an iterable can be read only once, so return a list",
}


def _flaws(node: Node) -> Iterator[str]:
    """Why some or all values of the type do not come back. For a type with the user's own serializer, only a value can
    show it.
    """
    writer = node.get("serialization", {}).get("function")
    if _hides(writer):
        yield "a secret is written as asterisks"
    if writer is not None:
        return
    kind = node["type"]
    if kind in _NO_JSON:
        yield _NO_JSON[kind]
    if kind == "is-instance":
        yield f"{node['cls'].__name__} has no form in JSON"
    if node.get("serialization_exclude") is True or node.get("init_only"):
        yield "it has a field that is left out when it is written"
    if kind == "union":
        yield from _mix_ups(node)
    if kind == "dict" and node.get("keys_schema", _TEXT)["type"] not in {"str", "any"}:
        yield from _mixed_up_keys(node["keys_schema"])
    if kind not in {"function-before", "function-wrap", "function-plain"}:  # they may make anything of the JSON
        for child in _children(node):
            yield from _flaws(child)


def _hides(writer: Any) -> bool:
    return getattr(writer, "__module__", "") == "pydantic.types" and "secret" in getattr(writer, "__name__", "")


_TEXT = {"type": "str"}


def _mix_ups(union: Node) -> Iterator[str]:
    """A choice of types that JSON writes alike: text such as "1.1" in `Decimal | str` would be read as a Decimal."""
    choices = [each[0] if isinstance(each, tuple) else each for each in union["choices"]]
    for first, second in itertools.combinations(choices, 2):
        if _is_taken_for(second, first):  # where both fit equally well, the first is chosen
            yield f"{_title(first)} and {_title(second)} look alike, so give them a discriminator"
    own = [each for each in choices if not any(node["type"] == "definition-ref" for node in _nodes(each))]
    if len(own) > 1 and all(node["type"] != "any" for each in own for node in _nodes(each)):
        yield from _changed_samples(union | {"choices": own}, [*_samples(), *_members(own)])


def _is_taken_for(one: Node, other: Node) -> bool:
    """An object of the first kind has only fields of the second kind, and all that the second requires. False if the
    type of a field tells them apart.
    """
    mine, theirs = _fields_of(one), _fields_of(other)
    if mine is None or theirs is None or not mine.keys() <= theirs.keys():
        return False
    if any(_is_required(field) for name, field in theirs.items() if name not in mine):
        return False
    return all(_kind(field) == _kind(theirs[name]) not in {"literal", "enum"} for name, field in mine.items())


def _fields_of(node: Node) -> dict[str, Node] | None:
    fields = (node if node["type"] == "typed-dict" else node.get("schema", {})).get("fields")
    return {each["name"]: each for each in fields} if isinstance(fields, list) else fields


def _is_required(field: Node) -> bool:
    return bool(field.get("required", field["schema"]["type"] != "default"))


def _kind(field: Node) -> str:
    schema = field["schema"]
    return str(_kind(schema) if schema["type"] in {"default", "nullable"} else schema["type"])


def _title(node: Node) -> str:
    return str(getattr(node.get("cls"), "__name__", node["type"]))


def _mixed_up_keys(keys: Node) -> Iterator[str]:
    """The keys of an object are text."""
    if not any(node["type"] in {"any", "definition-ref"} for node in _nodes(keys)):
        samples = [{each: None} for each in (*_plain_samples(), (1, 2), *_members([keys]))]
        yield from _changed_samples({"type": "dict", "keys_schema": keys, "values_schema": {"type": "any"}}, samples)


def _members(choices: Iterable[Node]) -> list[object]:
    """Each member of the enumerations among these types, and its value."""
    found = [member for each in choices for node in _nodes(each) for member in node.get("members", ())]
    return found + [member.value for member in found]


def _changed_samples(schema: Node, samples: Iterable[object]) -> Iterator[str]:
    try:
        validator, serializer = _compiled(_for_storage(schema, is_exact=False))
    except SchemaError:  # a part of a type that cannot stand alone
        return
    for sample in samples:
        try:
            accepted = validator.validate_python(sample, strict=True)
        except ValidationError:
            continue  # not a value of this type
        try:
            read = validator.validate_json(serializer.to_json(accepted, by_alias=True, warnings=False))
        except (ValidationError, PydanticSerializationError):
            yield f"{accepted!r} ({type(accepted).__name__}) could not be read again"
        else:
            if not is_same(accepted, read):
                yield f"{accepted!r} ({type(accepted).__name__}) would be read as {read!r} ({type(read).__name__})"


@functools.cache
def _plain_samples() -> tuple[Any, ...]:
    """A value of each type that is written as text or as a number, and text that looks like each of them."""
    from ipaddress import IPv4Address  # noqa: PLC0415 - imported only where a function returns a choice of types
    from pathlib import Path  # noqa: PLC0415 - as above

    from pydantic import AnyUrl  # noqa: PLC0415 - as above

    return (
        "a", "1", "1.5", "true", "2030-01-02", "2030-01-02T03:04:05Z", "03:04:05", "P1D", "YWJj", "127.0.0.1", "a/b",
        "00000000-0000-0000-0000-000000000001", "http://example.com/", 1, 1.5, 2.0, True, 1j, Decimal("1.5"),
        Decimal(1), date(2030, 1, 2), datetime(2030, 1, 2, tzinfo=UTC), datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
        time(3, 4, 5), timedelta(days=1), UUID(int=1), b"abc", b"\xff", Path("a/b"), IPv4Address("127.0.0.1"),
        AnyUrl("http://example.com/"),
    )  # fmt: skip


@functools.cache
def _samples() -> list[Any]:
    found: list[Any] = list(_plain_samples())
    for each in _plain_samples():
        found += [[each], (each,), {each}, frozenset({each}), {"a": each}]
    return found
