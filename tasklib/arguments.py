"""A task's arguments: from a function's signature to JSON text and back.

The invariant: what `encode` accepts comes back equal from `decode`, also after a stay in a jsonb column; everything
else is refused before any SQL, by an `InvalidArguments` that names the task and the parameter but never the value,
which may be a secret.

A signature is compiled once into one pydantic validator of an object whose keys are the parameters. An argument that
is left out is not stored, so the function's own default applies when the task runs. Two things are equal here that a
reader might tell apart: -0.0 comes back as 0.0, and the keys of a dict come back in jsonb's order.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import re
import sys
from collections import Counter, OrderedDict, deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from itertools import accumulate
from types import NoneType, SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union, get_args, get_origin, get_type_hints
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
from pydantic_core import PydanticSerializationError, SchemaError, core_schema, from_json, to_json

from tasklib.errors import InvalidArguments, InvalidTaskDefinition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

MAX_ARGUMENT_BYTES = 256 * 1024
MAX_DEPTH = 64  # arrays and objects inside each other, the object of all arguments included
MAX_KEYS = 10_000  # of all objects together
MAX_NUMBER_DIGITS = 1_000  # jsonb takes 131,072; eight bytes of `1e131071` would print as 131 kB
MAX_ERRORS_SHOWN = 10
MAX_NAME_SHOWN = 60

_Path: TypeAlias = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedArguments:
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
        except _UnresolvedAnnotation:
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
        signature = self._signature()
        try:
            text = signature.join(self._task_name, args_json, kwargs_json)
        except InvalidArguments:
            raise
        except ValueError as error:
            raise InvalidArguments(f"{self._task_name}: the stored arguments are not JSON: {error}") from None
        try:
            values: dict[str, object] = signature.validator.validate_json(text)
        except ValidationError as error:
            raise _misfit(self._task_name, error) from None
        return signature.as_call(self._task_name, values)

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
    """For a task whose function lives in another program: what JSON has no type for is refused."""
    signature = _anything()
    named = signature.to_json(task_name, kwargs, max_bytes)
    if not args:
        return EncodedArguments("{}", named.decode())
    positional = signature.to_json(task_name, {"args": list(args)}, max_bytes - len(named))
    return EncodedArguments(positional.removeprefix(b'{"args":')[:-1].decode(), named.decode())


def parse_json(text: str | bytes, what: str) -> object:
    """JSON from outside, read more strictly than Python does: nothing in it is dropped, rounded to infinity or left
    for PostgreSQL to refuse.
    """
    try:
        value = _read(text if isinstance(text, str) else text.decode())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidArguments(f"{what}: not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidArguments(f"{what}: nested deeper than {MAX_DEPTH} levels") from None
    flaw = _first_flaw(value, ())
    if flaw is not None:
        raise InvalidArguments(f"{what}: {flaw.describe()}")
    return value


# --- The signature ---------------------------------------------------------------------------------------------------


class _UnresolvedAnnotation(InvalidTaskDefinition):
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
        self.plain = frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD and _is_plain(p.annotation))
        self.adapter = _adapter(parameters, task_name)
        self.validator = self.adapter.validator
        self.serializer = self.adapter.serializer

    def bind(self, task_name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Mapping[str, object]:
        """Each value under its parameter's name. Own code, because `inspect.Signature.bind` takes longer than
        validation and serialization together.
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
                raise _refusal(task_name, (name,), reason)
        return bound | dict(kwargs)

    def to_json(self, task_name: str, values: Mapping[str, object], max_bytes: int) -> bytes:
        try:
            accepted: dict[str, object] = self.validator.validate_python(values)
        except ValidationError as error:
            raise _misfit(task_name, error) from None
        data = self._serialize(task_name, accepted)
        _check_limits(task_name, data, max_bytes)
        if _EXPONENT.search(data):
            data = _stable_numbers(data)
            _check_limits(task_name, data, max_bytes)
        if not self.plain.issuperset(accepted):
            self._check_round_trip(task_name, accepted, data)
        return data

    def _serialize(self, task_name: str, accepted: dict[str, object]) -> bytes:
        try:
            return self.serializer.to_json(accepted, by_alias=True, warnings=False)
        except PydanticSerializationError as error:
            reason = _why_not_json(str(error))
        raise _refusal(task_name, self._first_unserializable(accepted), reason)

    def _first_unserializable(self, accepted: dict[str, object]) -> _Path:
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
            changed = [(name,) for name in suspects if name not in stored or not _same(accepted[name], stored[name])]
        if changed:
            reason = "does not come back the same from JSON; annotate the parameter with a type that does"
            raise _refusal(task_name, changed[0], reason)

    def split(self, data: bytes) -> EncodedArguments:
        """The object of all arguments, as the array and the object that a call of the function would take: before
        *args, every parameter has to be given by position.
        """
        members = from_json(data)
        surplus = members.pop(self.variadic, []) if self.variadic else []
        names = self.positional if surplus else self.positional_only
        taken = [members.pop(name) for name in names if name in members] + surplus
        return EncodedArguments(_stable_numbers(to_json(taken)).decode(), _stable_numbers(to_json(members)).decode())

    def join(self, task_name: str, args_json: str | bytes, kwargs_json: str | bytes) -> str | bytes:
        """The inverse of `split`. Any function may find an array here: who submits by name alone cannot know which
        parameters are positional-only.
        """
        args = from_json(args_json)
        if args in ({}, []) and not self.by_position_only:
            return kwargs_json
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
            raise _refusal(task_name, (missing[0],), "is missing")
        fixed = [values.pop(name) for name in names]
        return (*fixed, *surplus) if isinstance(surplus, list) else tuple(fixed), values


@functools.cache
def _anything() -> _Signature:
    def takes_anything(**_arguments: object) -> None: ...

    return _Signature(takes_anything, "any task")


def _parameters(function: Callable[..., object], task_name: str) -> list[inspect.Parameter]:
    """The function's parameters, with their annotations resolved to types."""
    try:
        parameters = _unresolved_signature(function).parameters.values()
    except (TypeError, ValueError):
        raise InvalidTaskDefinition(f"{task_name}: the signature of {function!r} cannot be inspected") from None
    names = _globals(function)
    return [p.replace(annotation=_resolved(p, names, task_name)) for p in parameters]


def _unresolved_signature(function: Callable[..., object]) -> inspect.Signature:
    if sys.version_info >= (3, 14):  # annotations are lazy there, and asking for them would resolve the return type too
        from annotationlib import Format  # noqa: PLC0415 - does not exist before 3.14

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def _globals(function: Callable[..., object]) -> dict[str, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    method = type(function).__call__  # where the function is an object with such a method
    return getattr(function, "__globals__", None) or getattr(method, "__globals__", {})


def _resolved(parameter: inspect.Parameter, names: dict[str, Any], task_name: str) -> Any:
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


def _unresolved(task_name: str, parameter: inspect.Parameter, error: Exception) -> _UnresolvedAnnotation:
    return _UnresolvedAnnotation(
        f'{task_name}: the annotation of parameter "{parameter.name}" ({parameter.annotation}) cannot be resolved: '
        f"{str(error).splitlines()[0]}. Define the name at module level, not in a function and not only under "
        "TYPE_CHECKING, before the task is first used."
    )


def _adapter(parameters: list[inspect.Parameter], task_name: str) -> TypeAdapter[dict[str, Any]]:
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


_PLAIN = (str, int, bool, float, NoneType, UUID, date, timedelta, Decimal, bytes)
_PLAIN_CONTAINERS = {list, set, frozenset, tuple}


def _is_plain(annotation: Any) -> bool:
    """Types that pydantic is known to read as it wrote them, whatever the value. Not datetime and time: an offset from
    UTC loses its seconds. Not dict[str, str]: half a surrogate pair in a key is written as U+FFFD.
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in {Union, UnionType}:  # a choice of two types may be read as the other one, a choice of None may not
        other, *more = [each for each in inner if each is not NoneType]
        return not more and _is_plain(other)
    if origin in _PLAIN_CONTAINERS:
        return all(each is Ellipsis or _is_plain(each) for each in inner)
    return any(annotation is each for each in _PLAIN)  # not `in`: what is in Annotated may have no hash


# --- What the values must keep to ------------------------------------------------------------------------------------


_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_EXPONENT = re.compile(rb"[:\[,]-?\d[\d.]*e", re.IGNORECASE)
_NUMBER_WITH_EXPONENT = re.compile(_STRING + rb"|-?\d+(?:\.\d+)?e[-+]?\d+", re.IGNORECASE)
_ANY_STRING = re.compile(_STRING)
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_TOO_MANY_DIGITS = b"0" * (MAX_NUMBER_DIGITS + 1)
_NESTING = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(_NESTING))


def _check_limits(task_name: str, data: bytes, max_bytes: int) -> None:
    if len(data) > max_bytes:
        raise InvalidArguments(f"{task_name}: the arguments take {len(data)} bytes, the limit is {max_bytes}")
    if _is_harmless(data) or (b"\\u0000" not in data and _is_harmless(_ANY_STRING.sub(b"", data), look_closely=True)):
        return
    flaw = _first_flaw(_read(data.decode()), ())
    if flaw is not None:
        raise _refusal(task_name, flaw.path, flaw.reason)


def _is_harmless(data: bytes, *, look_closely: bool = False) -> bool:
    """Nearly all payloads pass on searches for single bytes, which are ten times as fast as searches for words."""
    return (
        (b"\\" not in data or b"\\u0000" not in data)
        and (b"N" not in data or b"NaN" not in data)
        and (b"I" not in data or b"Infinity" not in data)
        and (len(data) <= 2 * MAX_DEPTH or _is_shallow(data, look_closely=look_closely))
        and (len(data) <= MAX_NUMBER_DIGITS or _TOO_MANY_DIGITS not in data.translate(_DIGITS_AS_ZEROS))
        and (len(data) <= MAX_KEYS or data.count(b":") <= MAX_KEYS)
    )


def _is_shallow(data: bytes, *, look_closely: bool) -> bool:
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return True
    steps = map(_NESTING.__getitem__, data.translate(None, _ALL_BUT_BRACKETS))
    return look_closely and max(accumulate(steps)) <= MAX_DEPTH


def _stable_numbers(data: bytes) -> bytes:
    return _NUMBER_WITH_EXPONENT.sub(_without_exponent, data)


def _without_exponent(token: re.Match[bytes]) -> bytes:
    """For jsonb prints 1e22 as 10000000000000000000000, an int to Python; with a fraction it stays a float."""
    if token[0].startswith(b'"'):
        return token[0]
    digits = format(Decimal(token[0].decode()), "f").encode()
    return digits if b"." in digits else digits + b".0"


@dataclasses.dataclass(frozen=True, slots=True)
class _Flaw:
    """Takes the place of a value that must not be stored, until it is known where in the whole it stands."""

    reason: str
    path: _Path = ()

    def describe(self) -> str:
        return f"at {_name(self.path)}: {self.reason}" if self.path else self.reason


def _read(text: str) -> object:
    value = json.loads(text, object_pairs_hook=_object, parse_float=_float, parse_int=_int, parse_constant=_constant)
    keys = _ANY_STRING.sub(b"", text.encode(errors="replace")).count(b":")
    return value if keys <= MAX_KEYS else _Flaw(f"{keys} keys in all, the limit is {MAX_KEYS}")


def _object(pairs: list[tuple[str, object]]) -> object:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    return _Flaw(f"the key {_name((twice,))} occurs twice")


def _float(text: str) -> object:
    value = float(text)
    is_rounded_to_zero = value == 0 and text.lower().partition("e")[0].strip("-0.") != ""
    if math.isinf(value) or is_rounded_to_zero or len(text) > MAX_NUMBER_DIGITS:
        return _Flaw("a number beyond the range of a 64-bit float")
    return value


def _int(text: str) -> object:
    if len(text.lstrip("-")) > MAX_NUMBER_DIGITS:
        return _Flaw(f"a number of more than {MAX_NUMBER_DIGITS} digits")
    return int(text)


def _constant(name: str) -> _Flaw:
    return _Flaw(f"JSON has no {name.lstrip('-')}")


def _first_flaw(value: object, path: _Path) -> _Flaw | None:
    if isinstance(value, _Flaw):
        return dataclasses.replace(value, path=path)
    if isinstance(value, str):
        reason = _text_flaw(value)
        return _Flaw(reason, path) if reason else None
    if not isinstance(value, dict | list):
        return None
    if len(path) >= MAX_DEPTH:
        return _Flaw(f"nested deeper than {MAX_DEPTH} levels", path)
    children = value.items() if isinstance(value, dict) else enumerate(value)
    flaws = (_first_flaw(part, (*path, key)) for key, child in children for part in (key, child))
    return next((flaw for flaw in flaws if flaw), None)


def _text_flaw(text: str) -> str | None:
    if "\0" in text:
        return "holds the character NUL, which PostgreSQL cannot store"
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE
    return None


_SURROGATE = "holds half of a surrogate pair, which is not valid Unicode"


def _why_not_json(message: str) -> str:
    """Not pydantic's own words, which may quote the value."""
    if "surrogates not allowed" in message:
        return _SURROGATE
    if "Circular reference" in message:
        return "contains itself"
    if "depth exceeded" in message:
        return f"nested deeper than {MAX_DEPTH} levels"
    return "cannot be written as JSON; annotate the parameter with its type"


# --- The same or not -------------------------------------------------------------------------------------------------

_JSON_TYPES = {bool, int, float, str, NoneType, list, dict}
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)


def _same(sent: object, stored: object) -> bool:
    """Equal, and of the same type wherever Python's == is too generous: 1 == 1.0 == True."""
    if isinstance(sent, datetime) and isinstance(stored, datetime):
        is_equal = sent == stored or sent.replace(tzinfo=None) == stored.replace(tzinfo=None)  # == fails in a fold
        return is_equal and sent.utcoffset() == stored.utcoffset()
    if type(sent) is not type(stored):
        return type(stored) not in _JSON_TYPES and bool(sent == stored)
    if isinstance(sent, dict) and isinstance(stored, dict):
        is_ordered = isinstance(sent, OrderedDict) and len(sent) > 1  # jsonb does not keep the order
        return not is_ordered and _typed(sent) == _typed(stored) and all(_same(sent[key], stored[key]) for key in sent)
    if isinstance(sent, _SEQUENCES) and isinstance(stored, _SEQUENCES):
        return len(sent) == len(stored) and all(map(_same, sent, stored))
    if isinstance(sent, _SETS) and isinstance(stored, _SETS):
        return _typed(sent) == _typed(stored)
    return bool(sent == stored) and (type(sent) in _JSON_TYPES or _same(_fields(sent), _fields(stored)))


def _typed(values: Iterable[object]) -> set[tuple[type, object]]:
    return {(type(value), value) for value in values}


def _fields(value: object) -> dict[str, object]:
    if isinstance(value, BaseModel):
        return vars(value) | (value.model_extra or {})
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return {}


# --- The words -------------------------------------------------------------------------------------------------------


def _refusal(task_name: str, path: _Path, reason: str) -> InvalidArguments:
    return InvalidArguments(f"{task_name}: argument {_name(path)}: {reason}" if path else f"{task_name}: {reason}")


def _misfit(task_name: str, error: ValidationError) -> InvalidArguments:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [str(_refusal(task_name, each["loc"], _WORDS.get(each["type"], each["msg"]))) for each in details]
    if len(lines) > MAX_ERRORS_SHOWN:
        lines[MAX_ERRORS_SHOWN:] = [f"{task_name}: and {len(lines) - MAX_ERRORS_SHOWN} more"]
    return InvalidArguments("\n".join(lines))


_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "is not a parameter",
    "recursion_loop": "contains itself, or is nested too deeply",
    "union_tag_invalid": "its tag is none of the expected ones",  # pydantic quotes the tag
}


def _name(path: _Path) -> str:
    """A path such as "items[3].price", quoted so that a key from outside cannot break the line, and bounded."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    return json.dumps(text if len(text) <= MAX_NAME_SHOWN else text[:MAX_NAME_SHOWN] + "...")
