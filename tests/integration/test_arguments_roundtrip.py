"""What is accepted comes back equal from a real jsonb column; what is refused is refused before PostgreSQL sees it."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from tasklib.arguments import ArgumentSchema, EncodedArguments, encode_untyped
from tasklib.errors import InvalidArguments
from tasklib.strict_json import MAX_ARGUMENT_BYTES, parse_json

Jsonb = Callable[[str], str]

# The fixture is one connection for all examples, which is what its users have too.
examples = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


class Colour(Enum):
    RED = "red"
    TWO = 2
    TRUE = True
    HALF = 0.5


@dataclass(frozen=True)
class Point:
    x: float
    label: str | None = None


class Line(BaseModel):
    start: Point
    price: Decimal = Field(alias="linePrice")
    anything: Any = None


# --- Strategies ------------------------------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
hostile_text = st.text(
    st.characters() | st.sampled_from('\0\ud800\udfff\x01\x1f\x7f\\"[]{}:,\u2028\u202e')
) | st.sampled_from(["\\u0000", "NaN", '":1e5', "-Infinity", "e\u0301", "\u00e9", "\\", '"', "[" * 99, "1" * 2000])
floats = st.floats(allow_nan=False, allow_infinity=False)
offsets = st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(
    lambda d: timezone(timedelta(minutes=d // timedelta(minutes=1)))
)
moments = st.datetimes(timezones=st.none() | offsets, allow_imaginary=False)
integers = st.integers() | st.integers(min_value=-(10**400), max_value=10**400)
decimals = st.decimals(allow_nan=False, allow_infinity=False)

TYPED: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (str, text),
    (int, integers),
    (bool, st.booleans()),
    (float, floats),
    (bytes, st.binary()),
    (UUID, st.uuids()),
    (Decimal, decimals),
    (datetime, moments),
    (date, st.dates()),
    (time, st.times()),
    (timedelta, st.timedeltas()),
    (Colour, st.sampled_from(Colour)),
    (Point, st.builds(Point, floats, st.none() | text)),
    (
        Line,
        st.builds(
            Line,
            start=st.builds(Point, floats),
            linePrice=decimals,
            anything=floats | integers | st.lists(text, max_size=5),
        ),
    ),
    (list[float] | None, st.none() | st.lists(floats, max_size=5)),
    (dict[str, list[int]], st.dictionaries(text, st.lists(integers, max_size=5), max_size=5)),
    (dict[UUID, Decimal], st.dictionaries(st.uuids(), decimals, max_size=5)),
    (tuple[timedelta, bytes], st.tuples(st.timedeltas(), st.binary())),
    (tuple[date, ...], st.lists(st.dates()).map(tuple)),
    (set[str], st.sets(text, max_size=5)),
    (frozenset[int], st.frozensets(integers, max_size=5)),
    (int | float | str, integers | floats | text),
    (
        Any,
        st.recursive(
            st.none() | st.booleans() | integers | floats | text,
            lambda inner: st.lists(inner, max_size=5) | st.dictionaries(text, inner, max_size=5),
            max_leaves=12,
        ),
    ),
]

ragged_offsets = st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)

hostile = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.sampled_from([1e22, 1e23, -0.0, 5e-324, 1.7976931348623157e308, 2**53 + 1])
    | st.integers(990, 5000).map(lambda digits: 10**digits)
    | integers
    | hostile_text
    | st.binary()
    | moments
    | st.datetimes(timezones=ragged_offsets)
    | decimals
    | st.uuids()
    | st.sampled_from(Colour)
    | st.builds(Point, st.floats(), hostile_text),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(hostile_text | st.integers() | st.booleans() | st.none(), inner)
        | st.lists(inner).map(tuple)
        | inner.map(lambda value: {"a": [[[[[[[[[[value]]]]]]]]]]})
        | st.sets(st.integers() | st.booleans() | hostile_text)
    ),
    max_leaves=12,
)


def identical(one: object, other: object) -> bool:
    """Written apart from the library's own comparison: equal, and of the same types all the way down."""
    if isinstance(one, dict) and isinstance(other, dict):
        typed = {(type(key), key): value for key, value in other.items()}
        return len(one) == len(other) and all(
            (type(key), key) in typed and identical(value, typed[type(key), key]) for key, value in one.items()
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(identical, one, other))
    return type(one) is type(other) and one == other


def stored(jsonb: Jsonb, encoded: EncodedArguments) -> EncodedArguments:
    return EncodedArguments(jsonb(encoded.args), jsonb(encoded.kwargs))


# --- Properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("annotation", "values"), TYPED, ids=[str(annotation) for annotation, _ in TYPED])
def test_every_value_of_a_type_is_accepted_and_comes_back(
    annotation: Any, values: st.SearchStrategy[Any], jsonb: Jsonb
) -> None:
    """Nothing valid is refused, and nothing accepted is changed."""

    def function(first: annotation, /, x: annotation = None, *, y: annotation = None) -> None: ...

    schema = ArgumentSchema(function, "t")

    @examples
    @given(values, values)
    def check(first: object, x: object) -> None:
        there = stored(jsonb, schema.encode((first, x), {}))
        args, kwargs = schema.decode(there.args, there.kwargs)
        assert identical(args, (first,))
        assert identical(kwargs, {"x": x})

    check()


# Where a type lets little through, `hostile` alone seldom reaches the check behind it: without a strategy of their own,
# the guards against NUL, NaN and ragged offsets could be removed and 100 examples stayed green.
HOSTILE: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (str, hostile_text),
    (dict[str, str], st.dictionaries(hostile_text, hostile_text)),
    (float, st.floats()),
    (list[float], st.lists(st.floats())),
    (Point, st.builds(Point, st.floats(), hostile_text)),
    (datetime, st.datetimes(timezones=ragged_offsets)),
    (time, st.times(timezones=ragged_offsets)),
    (int, st.integers(990, 1010).map(lambda digits: 10**digits)),
    (bytes | str, st.binary() | hostile_text),
    (int | str | None, st.integers() | hostile_text),
    (datetime | Decimal | list[Any] | float, hostile),
    (dict[int, Any], st.dictionaries(st.integers(), hostile, max_size=3)),
    (dict[int | bool, Any], st.dictionaries(st.integers(0, 2) | st.booleans(), hostile, max_size=3)),
    (dict[str, Any], st.dictionaries(hostile_text, hostile, max_size=3)),
    (list[Any], st.lists(hostile, max_size=3)),
    (tuple[Any, ...], st.lists(hostile, max_size=3).map(tuple)),
    (set[Any], st.sets(st.integers(0, 2) | st.booleans() | st.floats() | hostile_text)),
    (object, hostile),
    (Any, hostile),
]


@pytest.mark.parametrize(("annotation", "values"), HOSTILE, ids=[str(annotation) for annotation, _ in HOSTILE])
def test_hostile_value_is_refused_or_comes_back(annotation: Any, values: st.SearchStrategy[Any], jsonb: Jsonb) -> None:
    """Never a crash, never an error from PostgreSQL, never a silent change after validation."""

    def function(x: annotation) -> None: ...

    schema = ArgumentSchema(function, "t")

    @examples
    @given(values)
    def check(value: object) -> None:
        try:
            encoded = schema.encode((value,), {})
        except InvalidArguments as error:
            assert str(error).startswith("t: ")  # noqa: PT017 - a refusal is one of two good ends
            return
        there = stored(jsonb, encoded)
        _, kwargs = schema.decode(there.args, there.kwargs)
        assert identical(kwargs, schema._signature().validator.validate_python({"x": value}))

    check()


def test_untyped_value_is_refused_or_comes_back(jsonb: Jsonb) -> None:
    """Without a function, what was sent is what JSON gives back."""

    @examples
    @given(st.lists(hostile, max_size=3), st.dictionaries(hostile_text, st.none() | hostile, max_size=3))
    def check(args: list[object], kwargs: dict[str, object]) -> None:
        try:
            encoded = encode_untyped("t", args, kwargs)
        except InvalidArguments:
            return
        there = stored(jsonb, encoded)
        assert identical(json.loads(there.args) or [], args)
        assert identical(json.loads(there.kwargs), kwargs)

    check()


def test_variadic_arguments_come_back(jsonb: Jsonb) -> None:
    """The call that runs is the call that was submitted."""

    def function(a: int, b: str = "", /, c: float = 0, *rest: Decimal, d: bytes = b"", **more: date) -> None: ...

    schema = ArgumentSchema(function, "t")
    positional = st.tuples(integers, text, floats)
    more = st.dictionaries(text.filter(lambda name: name not in set("abcd") | {"rest"}), st.dates(), max_size=3)

    @examples
    @given(positional, st.lists(decimals, max_size=3), st.binary(), more)
    def check(first: tuple[int, str, float], rest: list[Decimal], d: bytes, more: dict[str, date]) -> None:
        there = stored(jsonb, schema.encode((*first, *rest), {"d": d, **more}))
        args, kwargs = schema.decode(there.args, there.kwargs)
        if not rest:
            args = (*args, kwargs.pop("c"))
        assert identical(args, (*first, *rest))
        assert identical(kwargs, {"d": d, **more})

    check()


numbers = st.from_regex(
    r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][-+]?[0-9]{1,6})?",
    fullmatch=True,
    alphabet=st.characters(codec="ascii"),
)
json_text = st.recursive(
    numbers
    | hostile_text.map(json.dumps)
    | st.sampled_from(
        ["NaN", "-Infinity", "1e131071", "1e400000", "1" * 1001, '"\\ud800"', '"\\u0000"', "null", "[", "nul"]
    ),
    lambda inner: (
        st.lists(inner).map(lambda items: "[" + ",".join(items) + "]")
        | st.lists(st.tuples(st.sampled_from(["a", "b", "\\u0000", "\\u0061"]), inner), max_size=3).map(
            lambda pairs: "{" + ",".join(f'"{key}":{value}' for key, value in pairs) + "}"
        )
    ),
    max_leaves=10,
)


def test_json_from_outside_is_refused_or_can_be_stored(jsonb: Jsonb) -> None:
    """What `parse_json` lets through is accepted by `encode_untyped` and by jsonb, and means the same there."""

    @examples
    @given(json_text)
    def check(source: str) -> None:
        try:
            value = parse_json(source, "body")
        except InvalidArguments as error:
            assert str(error).startswith("body: ")  # noqa: PT017 - a refusal is one of two good ends
            return
        assert identical(value, json.loads(source))
        encoded = encode_untyped("t", [], {"value": value}, max_bytes=10 * MAX_ARGUMENT_BYTES)
        assert identical(json.loads(jsonb(encoded.kwargs)), {"value": value})

    check()


def test_every_float_keeps_its_bits_but_negative_zero(jsonb: Jsonb) -> None:
    """The shortest decimal that names a float, through numeric and back."""
    schema = ArgumentSchema(lambda x: None, "t")  # noqa: ARG005 - only its name matters

    @examples
    @given(st.lists(floats, min_size=20, max_size=20))
    def check(values: list[float]) -> None:
        kwargs = json.loads(jsonb(schema.encode((values,), {}).kwargs))
        assert [value.hex() for value in kwargs["x"]] == [(value + 0.0).hex() for value in values]

    check()
