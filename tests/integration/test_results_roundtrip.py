"""What a function returns comes back equal from a real jsonb column, or its type is refused when it is registered."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, computed_field
from typing_extensions import TypedDict

from tasklib.errors import InvalidResult, InvalidTaskDefinition
from tasklib.handles import result_of
from tasklib.task import TaskFunction
from tasklib.worker.result_encoding import encode_result
from tests.integration.test_arguments_roundtrip import (
    HOSTILE,
    TYPED,
    Line,
    decimals,
    floats,
    hostile,
    hostile_text,
    identical,
    integers,
    moments,
    text,
)

if TYPE_CHECKING:
    from tasklib.results import ResultSchema

pytestmark = pytest.mark.postgres_versions

Jsonb = Callable[[str], str]
examples = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


class Order(BaseModel):
    """Aliases that differ, a computed field, no further fields; bytes and times, which models write as they like."""

    model_config = ConfigDict(extra="forbid", ser_json_timedelta="float", ser_json_inf_nan="null")
    total: Decimal = Field(validation_alias="in_total", serialization_alias="out_total")
    label: bytes = b""
    pause: timedelta = timedelta()
    weight: float = 0.0
    parts: list[Order] = []

    @computed_field  # type: ignore[prop-decorator]  # as pydantic's documentation has it
    @property
    def count(self) -> int:
        return len(self.parts)


@dataclass
class Packet:
    data: bytes
    at: datetime | None


class Pair(NamedTuple):
    first: UUID
    second: bytes


class Options(TypedDict, total=False):
    type: time
    schema: set[date]


class Square(BaseModel):
    kind: Literal["square"] = "square"
    side: float


class Circle(BaseModel):
    kind: Literal["circle"] = "circle"
    side: float


def order(total: Decimal, label: bytes, pause: timedelta, weight: float, parts: list[Order]) -> Order:
    return Order(in_total=total, label=label, pause=pause, weight=weight, parts=parts)


any_floats = st.floats(allow_nan=False)  # with the infinities
orders = st.recursive(
    st.builds(order, decimals, st.binary(), st.timedeltas(), any_floats, st.just([])),
    lambda inner: st.builds(order, decimals, st.binary(), st.timedeltas(), any_floats, st.lists(inner, max_size=2)),
    max_leaves=4,
)
packets = st.builds(Packet, st.binary(), st.none() | moments)

RETURNED: list[tuple[Any, st.SearchStrategy[Any]]] = [
    *((annotation, values) for annotation, values in TYPED if annotation not in {Any, Line}),
    (float, any_floats),
    (Order, orders),
    (list[Order] | None, st.none() | st.lists(orders, max_size=2)),
    (Packet, packets),
    (dict[str, Packet], st.dictionaries(text, packets, max_size=3)),
    (Pair, st.builds(Pair, st.uuids(), st.binary())),
    (Options, st.fixed_dictionaries({}, optional={"type": st.times(), "schema": st.sets(st.dates(), max_size=3)})),
    (Square | Circle, st.builds(Square, side=floats) | st.builds(Circle, side=floats)),
    (int | str | bool | None, integers | text | st.booleans() | st.none()),
    (date | datetime, st.dates() | moments),
    (dict[date, int] | list[int], st.lists(integers, max_size=3) | st.dictionaries(st.dates(), integers, max_size=3)),
    (dict[date, set[bytes]], st.dictionaries(st.dates(), st.sets(st.binary(), max_size=3), max_size=3)),
    (frozenset[tuple[int, str]], st.frozensets(st.tuples(integers, text), max_size=3)),
]
TOLD: list[tuple[Any, st.SearchStrategy[Any]]] = [
    *HOSTILE,
    (Order, st.builds(order, decimals, st.binary(), st.timedeltas(), st.floats(), st.lists(orders, max_size=1))),
    (dict[str, Packet], st.dictionaries(hostile_text, packets, max_size=2)),
    (Decimal | str, decimals | text),
    (str | UUID | None, st.uuids() | text | st.uuids().map(str)),
]


def schema_of(annotation: Any) -> ResultSchema | None:
    def function() -> Any: ...

    function.__annotations__["return"] = annotation
    return TaskFunction(function, name="t").returns


def stored(jsonb: Jsonb, returns: ResultSchema | None, value: object) -> Any:
    """The row after a worker has finished the task, as far as its result goes."""
    row = SimpleNamespace(id=UUID(int=1), name="t", result=None)
    row.result = json.loads(jsonb(encode_result(row, value, returns)))  # type: ignore[arg-type]
    return row


@pytest.mark.parametrize(("annotation", "values"), RETURNED, ids=[str(annotation) for annotation, _ in RETURNED])
def test_every_value_of_a_type_comes_back(annotation: Any, values: st.SearchStrategy[Any], jsonb: Jsonb) -> None:
    """None of these types is refused, and none of their values is changed."""
    returns = schema_of(annotation)

    @examples
    @given(values)
    def check(value: object) -> None:
        assert identical(result_of(stored(jsonb, returns, value), returns), value)

    check()


@pytest.mark.parametrize(("annotation", "values"), TOLD, ids=[str(annotation) for annotation, _ in TOLD])
def test_a_hostile_value_is_told_or_comes_back(annotation: Any, values: st.SearchStrategy[Any], jsonb: Jsonb) -> None:
    """The worker never fails and PostgreSQL never refuses; nobody is given a value that was not returned."""
    try:
        returns = schema_of(annotation)
    except InvalidTaskDefinition as error:
        assert "store_result=False" in str(error)  # noqa: PT017 - a refusal is one of three good ends
        return
    promises_nothing = "Any" in str(annotation) or annotation is object

    @examples
    @given(values)
    def check(value: object) -> None:
        assert promises_nothing or value is None or is_told_or_same(jsonb, returns, value)

    check()


def test_a_value_of_another_type_is_told_or_converted(jsonb: Jsonb) -> None:
    """A function may return something else than it says."""
    schemas = [schema_of(annotation) for annotation, _ in RETURNED]

    @settings(examples, max_examples=120)
    @given(st.sampled_from(schemas), hostile)
    def check(returns: ResultSchema | None, value: object) -> None:
        assert value is None or is_told_or_same(jsonb, returns, value)

    check()


def is_told_or_same(jsonb: Jsonb, returns: ResultSchema | None, value: object) -> bool:
    row = stored(jsonb, returns, value)
    try:
        result: object = result_of(row, returns)
    except InvalidResult:
        return True
    return same(result, value, returns)


def same(result: object, value: object, returns: ResultSchema | None) -> bool:
    """As the type reads the value: "5" is an int where an int is returned, and a list is a tuple."""
    assert returns is not None
    accepted = returns.validator.validate_python({"value": value})["value"]
    return identical(result, accepted) or repr(result) == repr(accepted)  # NaN is not equal to itself
