"""A task's arguments: from a function's signature to JSON text and back.

Invariant: a value that `encode` accepts comes back equal from `decode`, even after it was stored in a jsonb column. Any
other value is refused before any SQL is sent. The `InvalidArguments` names the task and the parameter. It never shows
the value, which may be a secret.

A signature is compiled once into one pydantic validator of an object whose keys are the parameters. An argument that
is left out is not stored, so the function's own default applies when the task runs. Three differences do not count as
changes: -0.0 comes back as 0.0, the keys of a dict in jsonb's order, a ZoneInfo as a fixed offset.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import sys
from collections import OrderedDict, deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from types import NoneType, SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    PydanticUndefinedAnnotation,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticSerializationError, SchemaError, core_schema, from_json, to_json

from tasklib.errors import InvalidArguments, InvalidTaskDefinition
from tasklib.other_queues import SUBMIT
from tasklib.strict_json import (
    MAX_ARGUMENT_BYTES,
    MAX_DEPTH,
    SURROGATE,
    JsonPath,
    check_limits,
    refusal,
    stable_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


MAX_ERRORS_SHOWN = 10


class EncodedArguments(NamedTuple):
    args: str  # a JSON array if the function takes arguments by position only, else '{}'
    kwargs: str  # a JSON object


class ArgumentSchema:
    """What a task function accepts, compiled once."""

    def __init__(self, function: Callable[..., object], task_name: str) -> None:
        self._function = function
        self._task_name = task_name
        self._compiled: _Signature | None = None
        try:
            self._signature()
        except UnresolvedAnnotation:
            return  # a forward reference: its class may be defined below the task, so the first use tries again

    def encode(
        self, args: Sequence[object], kwargs: Mapping[str, object], *, max_bytes: int = MAX_ARGUMENT_BYTES
    ) -> EncodedArguments:
        signature = self._signature()
        values = signature.bind(self._task_name, args, kwargs)
        data = signature.to_json(self._task_name, values, max_bytes)
        return signature.split(data) if signature.by_position_only else EncodedArguments("{}", data.decode())

    def decode(self, args_json: str | bytes, kwargs_json: str | bytes) -> tuple[tuple[object, ...], dict[str, object]]:
        """The positional and keyword arguments to call the function with."""
        signature = self._compiled or self._signature()
        is_plain = not signature.by_position_only and args_json in _NO_ARGS  # nearly always
        text = kwargs_json if is_plain else self._joined(signature, args_json, kwargs_json)
        try:
            values: dict[str, object] = signature.validator.validate_json(text)
        except ValidationError as error:
            raise _invalid_arguments(self._task_name, error) from None
        return ((), values) if is_plain else signature.as_call(self._task_name, values)

    def _joined(self, signature: _Signature, args_json: str | bytes, kwargs_json: str | bytes) -> str | bytes:
        try:
            return signature.join(self._task_name, args_json, kwargs_json)
        except InvalidArguments:
            raise
        except ValueError as error:
            raise InvalidArguments(f"{self._task_name}: the stored arguments are not JSON: {error}") from None

    def json_schema(self) -> dict[str, object]:
        """Every parameter by its name, also those that are stored by position."""
        try:
            return self._signature().adapter.json_schema()
        except PydanticUserError as error:
            raise InvalidTaskDefinition(f"{self._task_name}: no JSON schema: {error.message}") from None

    def _signature(self) -> _Signature:
        if self._compiled is None:
            self._compiled = _Signature(self._function, self._task_name)
        return self._compiled


def encode_untyped(
    task_name: str, args: Sequence[object], kwargs: Mapping[str, object], *, max_bytes: int = MAX_ARGUMENT_BYTES
) -> EncodedArguments:
    """For a task whose function is in another program. Values without a type in JSON are refused."""
    signature = _anything()
    named = signature.to_json(task_name, kwargs, max_bytes)
    if not args:
        return EncodedArguments("{}", named.decode())
    positional = signature.to_json(task_name, {"args": list(args)}, max_bytes - len(named))
    return EncodedArguments(positional.removeprefix(b'{"args":')[:-1].decode(), named.decode())


# --- The signature ---------------------------------------------------------------------------------------------------


class UnresolvedAnnotation(InvalidTaskDefinition):
    """An annotation names something that does not exist, or not yet."""


class _Signature:
    """The parameters of one function, and the validator and serializer that pydantic made of them."""

    def __init__(self, function: Callable[..., object], task_name: str) -> None:
        parameters = _parameters(function, task_name)
        kinds = {p.name: p.kind for p in parameters}
        self.positional_only = [name for name, kind in kinds.items() if kind is kind.POSITIONAL_ONLY]
        either = [name for name, kind in kinds.items() if kind is kind.POSITIONAL_OR_KEYWORD]
        self.positional = self.positional_only + either
        self.variadic = next((name for name, kind in kinds.items() if kind is kind.VAR_POSITIONAL), None)
        self.by_position_only = {*self.positional_only, self.variadic} - {None}
        named = {p.name: p.annotation for p in parameters if p.kind is not p.VAR_KEYWORD}
        self.plain = frozenset(name for name, annotation in named.items() if is_plain(annotation))
        self.without_floats = frozenset(name for name, annotation in named.items() if is_plain(annotation, _NO_FLOAT))
        self.adapter = adapter_of(parameters, task_name)
        self.validator = self.adapter.validator
        self.serializer = self.adapter.serializer

    def bind(self, task_name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        """Each value under its parameter's name. Not by `inspect.Signature.bind`, which takes 4.2 us; validation and
        serialization together take 1.4 us.
        """
        if not args and not self.by_position_only:
            return kwargs
        bound: dict[str, object] = dict(zip(self.positional, args, strict=False))
        if surplus := args[len(self.positional) :]:
            if self.variadic is None:
                raise InvalidArguments(f"{task_name}: {len(args)} positional arguments, at most {len(bound)} are taken")
            bound[self.variadic] = list(surplus)
        for name in kwargs:
            if name in bound or name in self.by_position_only:
                reason = "given twice" if name in bound else "can be given by position only"
                raise refusal(task_name, (name,), reason)
        return bound | dict(kwargs)

    def to_json(self, task_name: str, values: Mapping[str, object], max_bytes: int) -> bytes:
        try:
            accepted: dict[str, object] = self.validator.validate_python(values)
        except ValidationError as error:
            raise _invalid_arguments(task_name, error) from None
        data = self._serialize(task_name, accepted)
        check_limits(task_name, data, max_bytes)
        if self.without_floats.issuperset(accepted):
            return data
        stable = stable_numbers(data)
        if stable is not data:
            data = stable
            check_limits(task_name, data, max_bytes)
        if not self.plain.issuperset(accepted):
            self._check_round_trip(task_name, accepted, data)
        return data

    def _serialize(self, task_name: str, accepted: dict[str, object]) -> bytes:
        try:
            return self.serializer.to_json(accepted, by_alias=True, warnings=False)
        except PydanticSerializationError as error:
            reason = _why_not_json(str(error))
        raise refusal(task_name, self._first_unserializable(accepted), reason)

    def _first_unserializable(self, accepted: dict[str, object]) -> JsonPath:
        for name, value in accepted.items():
            try:
                self.serializer.to_json({name: value}, by_alias=True, warnings=False)
            except PydanticSerializationError:
                return (name,)
        return ()

    def _check_round_trip(self, task_name: str, accepted: dict[str, object], data: bytes) -> None:
        """Types such as Any, a union or a model may write one thing and read another: SecretStr writes asterisks,
        Decimal in Any comes back as str, a subclass as its base, an offset of +00:09:21 as +00:09.
        """
        try:
            stored = self.validator.validate_json(data)
        except ValidationError as error:
            changed = [each["loc"][:1] for each in error.errors(include_input=False)]
        else:
            suspects = [name for name in accepted if name not in self.plain]
            changed = [(name,) for name in suspects if name not in stored or not is_same(accepted[name], stored[name])]
        if changed:
            reason = "does not come back the same from JSON; annotate the parameter with a type that does"
            raise refusal(task_name, changed[0], reason)

    def split(self, data: bytes) -> EncodedArguments:
        """Turn the object of all arguments into the array and the object that a call of the function takes. Before
        *args, every parameter has to be given by position.
        """
        members = from_json(data)
        surplus = members.pop(self.variadic, []) if self.variadic else []
        names = self.positional if surplus else self.positional_only
        taken = [members.pop(name) for name in names if name in members] + surplus
        return EncodedArguments(stable_numbers(to_json(taken)).decode(), stable_numbers(to_json(members)).decode())

    def join(self, task_name: str, args_json: str | bytes, kwargs_json: str | bytes) -> str | bytes:
        """The inverse of `split`. Any function may find an array here: a submit by name alone cannot know which
        parameters are positional-only.
        """
        args = from_json(args_json)
        kwargs = from_json(kwargs_json)
        if not isinstance(args, list) and args != {}:
            raise InvalidArguments(f"{task_name}: the stored args are not an array")
        if not isinstance(kwargs, dict):
            raise InvalidArguments(f"{task_name}: the stored kwargs are not an object")
        return to_json(self.bind(task_name, list(args), kwargs))

    def as_call(self, task_name: str, values: dict[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
        if not self.by_position_only:
            return (), values
        surplus = values.pop(self.variadic, None) if self.variadic else None
        names = self.positional if surplus else [name for name in self.positional_only if name in values]
        missing = [name for name in names if name not in values]
        if missing:
            raise refusal(task_name, (missing[0],), "is missing")
        fixed = [values.pop(name) for name in names]
        return (*fixed, *surplus) if isinstance(surplus, list) else tuple(fixed), values


@functools.cache
def _anything() -> _Signature:
    def takes_anything(**_arguments: object) -> None: ...

    return _Signature(takes_anything, "any task")


def _parameters(function: Callable[..., object], task_name: str) -> list[inspect.Parameter]:
    """The function's parameters, with their annotations resolved to types."""
    try:
        parameters = unresolved_signature(function).parameters.values()
    except (TypeError, ValueError):
        raise InvalidTaskDefinition(f"{task_name}: the signature of {function!r} cannot be inspected") from None
    names = globals_of(function)
    return [p.replace(annotation=resolved(p, names, task_name)) for p in parameters]


def unresolved_signature(function: Callable[..., object]) -> inspect.Signature:
    if sys.version_info >= (3, 14):  # annotations are lazy there, and asking for them would resolve the return type too
        from annotationlib import Format  # noqa: PLC0415 - does not exist before 3.14

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def globals_of(function: Callable[..., object]) -> dict[str, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    method = type(function).__call__  # where the function is an object with such a method
    return getattr(function, "__globals__", None) or getattr(method, "__globals__", {})


def resolved(parameter: inspect.Parameter, names: dict[str, Any], task_name: str) -> Any:
    """One at a time, so that an error can say which one, and so that the return type need not be resolvable."""
    if parameter.annotation is parameter.empty:
        return Any
    only = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        return get_type_hints(only, names, include_extras=True)[parameter.name]
    except NameError as error:
        raise _unresolved(task_name, parameter, error) from None
    except (TypeError, SyntaxError, AttributeError) as error:
        reason = f"has an annotation that cannot be evaluated: {error}"
        raise InvalidTaskDefinition(f'{task_name}: parameter "{parameter.name}" {reason}') from None


def _unresolved(task_name: str, parameter: inspect.Parameter, error: Exception) -> UnresolvedAnnotation:
    return UnresolvedAnnotation(
        f'{task_name}: the annotation of parameter "{parameter.name}" ({parameter.annotation}) cannot be resolved: '
        f"{str(error).splitlines()[0]}. Define the name at module level, not in a function and not only under "
        "TYPE_CHECKING, before the task is first used."
    )


def adapter_of(parameters: list[inspect.Parameter], task_name: str) -> TypeAdapter[dict[str, Any]]:
    """Built from core schemas: `create_model` refuses parameters named `_x` or `model_config`, and a TypedDict cannot
    say of which type its further keys are.
    """

    def build(_: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        fields = {
            p.name: core_schema.typed_dict_field(_schema(p, handler, task_name), required=_is_required(p))
            for p in parameters
            if p.kind is not p.VAR_KEYWORD
        }
        further = next((p for p in parameters if p.kind is p.VAR_KEYWORD), None)
        if further is None:
            return core_schema.typed_dict_schema(fields, config=_READING, extra_behavior="forbid")
        extras = _schema(further, handler, task_name)
        return core_schema.typed_dict_schema(fields, config=_READING, extra_behavior="allow", extras_schema=extras)

    return TypeAdapter(Annotated[dict[str, Any], GetPydanticSchema(build)], config=_WRITING)


_READING = core_schema.CoreConfig(val_json_bytes="base64", hide_input_in_errors=True)
_WRITING = ConfigDict(
    ser_json_bytes="base64",
    ser_json_timedelta="iso8601",
    ser_json_inf_nan="constants",  # written as they are, then refused; "null" would change the value
)


def _schema(parameter: inspect.Parameter, handler: GetCoreSchemaHandler, task_name: str) -> core_schema.CoreSchema:
    try:
        schema = handler.generate_schema(parameter.annotation)
    except PydanticUndefinedAnnotation as error:
        raise _unresolved(task_name, parameter, error) from None
    except (PydanticUserError, SchemaError, TypeError) as error:
        reason = f"has a type that cannot be read from JSON: {str(error).splitlines()[0]}"
        raise InvalidTaskDefinition(f'{task_name}: parameter "{parameter.name}" {reason}') from None
    return core_schema.list_schema(schema) if parameter.kind is parameter.VAR_POSITIONAL else schema


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL


_NO_ARGS = ("{}", "[]")
_NO_FLOAT = (str, int, bool, NoneType, UUID, date, timedelta, Decimal, bytes)
_PLAIN = (*_NO_FLOAT, float)
_PLAIN_CONTAINERS = {list, set, frozenset, tuple}


def is_plain(annotation: Any, known: tuple[type, ...] = _PLAIN) -> bool:
    """Types that pydantic is known to read as it wrote them, whatever the value. Not datetime and time: an offset from
    UTC loses its seconds. Not dict[str, str]: half a surrogate pair in a key is written as U+FFFD.
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in {Union, UnionType}:  # of two types, the wrong one may be read; None cannot be mistaken
        other, *more = [each for each in inner if each is not NoneType]
        return not more and is_plain(other, known)
    if origin in _PLAIN_CONTAINERS:
        return all(each is Ellipsis or is_plain(each, known) for each in inner)
    return any(annotation is each for each in known)  # not `in`: the parts of Annotated need not be hashable


def _why_not_json(message: str) -> str:
    """Why a value has no JSON. Pydantic's own message may quote the value."""
    if "surrogates not allowed" in message:
        return SURROGATE
    if "Circular reference" in message:
        return "contains itself"
    if "depth exceeded" in message:
        return f"nested deeper than {MAX_DEPTH} levels"
    return "cannot be written as JSON; annotate the parameter with its type"


# --- The same or not -------------------------------------------------------------------------------------------------

_JSON_TYPES = {bool, int, float, str, NoneType, list, dict}
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)


def is_same(sent: object, stored: object) -> bool:
    """Equal, and of the same type wherever Python's == is too generous: 1 == 1.0 == True."""
    if isinstance(sent, datetime) and isinstance(stored, datetime):
        is_equal = sent == stored or sent.replace(tzinfo=None) == stored.replace(tzinfo=None)  # == fails in a fold
        return is_equal and sent.utcoffset() == stored.utcoffset()
    if type(sent) is not type(stored):
        return type(stored) not in _JSON_TYPES and bool(sent == stored)
    if isinstance(sent, dict) and isinstance(stored, dict):
        is_ordered = isinstance(sent, OrderedDict) and len(sent) > 1  # jsonb does not keep the order
        return (
            not is_ordered and _typed(sent) == _typed(stored) and all(is_same(sent[key], stored[key]) for key in sent)
        )
    if isinstance(sent, _SEQUENCES) and isinstance(stored, _SEQUENCES):
        return len(sent) == len(stored) and all(map(is_same, sent, stored))
    if isinstance(sent, _SETS) and isinstance(stored, _SETS):
        return _typed(sent) == _typed(stored)
    fields = _fields(sent)
    return is_same(fields, _fields(stored)) if fields else bool(sent == stored) or _are_nan(sent, stored)


def _are_nan(sent: object, stored: object) -> bool:
    return isinstance(sent, float) and isinstance(stored, float) and math.isnan(sent) and math.isnan(stored)


def _typed(values: Iterable[object]) -> set[tuple[type, object]]:
    return {(type(value), value) for value in values}


def _fields(value: object) -> dict[str, object]:
    if isinstance(value, BaseModel):
        return vars(value) | (value.model_extra or {}) | (value.__pydantic_private__ or {})
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return {}


# --- Error messages --------------------------------------------------------------------------------------------------


def _invalid_arguments(task_name: str, error: ValidationError) -> InvalidArguments:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [str(refusal(task_name, each["loc"], _reason(each))) for each in details]
    if len(lines) > MAX_ERRORS_SHOWN:
        lines[MAX_ERRORS_SHOWN:] = [f"{task_name}: and {len(lines) - MAX_ERRORS_SHOWN} more"]
    return InvalidArguments("\n".join(lines))


def _reason(detail: ErrorDetails) -> str:
    reason = _REASONS.get(detail["type"], detail["msg"])
    return reason + (_as_option(str(detail["loc"][0])) if detail["type"] == "extra_forbidden" else "")


def _as_option(name: str) -> str:
    """A hint, if an option was given among the arguments, by its name here or in another task queue."""
    from tasklib.options import RESERVED_PARAMETERS  # noqa: PLC0415 - tags are encoded as arguments are

    option = name if name in RESERVED_PARAMETERS else SUBMIT.get(name)
    return f"; as an option: options({option}{'' if '=' in option else '=...'}).submit(...)" if option else ""


_REASONS = {
    "missing": "is missing",
    "extra_forbidden": "is not a parameter",
    "recursion_loop": "contains itself, or is nested too deeply",
    "union_tag_invalid": "its tag is none of the expected ones",  # pydantic quotes the tag
}
