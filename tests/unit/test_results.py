"""What a task may say that it returns, what is refused when it is registered, and what comes back."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import InitVar, dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from inspect import Signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn
from uuid import UUID

import pytest
from pydantic import (
    AnyUrl,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    PrivateAttr,
    SecretStr,
    computed_field,
    field_serializer,
)
from pydantic_core import from_json
from typing_extensions import TypedDict

import tasklib
from tasklib.errors import InvalidResult, InvalidTaskDefinition
from tasklib.handles import result_of
from tasklib.task import TaskFunction
from tasklib.worker.result_encoding import encode_result

SECRET = "hunter2-S3CR3T"  # a canary


class Colour(Enum):
    RED = "red"
    TWO = 2


class Two(BaseModel):
    number: int = Field(validation_alias="in", serialization_alias="out")
    others: list[Two] = []


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    width: int = Field(validation_alias="w")

    @computed_field  # type: ignore[prop-decorator]  # as pydantic's documentation has it
    @property
    def area(self) -> int:
        return self.width**2


class Computed(BaseModel):
    width: int

    @computed_field  # type: ignore[prop-decorator]  # as above
    @property
    def area(self) -> int:
        return self.width**2


class Blob(BaseModel):
    data: bytes
    weight: float = 1.0


@dataclass
class Packet:
    data: bytes
    delay: timedelta


class Row(TypedDict):
    type: bytes  # a name that means something in pydantic's own schemas


class Parsed(BaseModel):
    items: Json[list[int]]


class Login(BaseModel):
    password: SecretStr


class OpenLogin(BaseModel):
    password: SecretStr

    @field_serializer("password", when_used="json")
    def written(self, value: SecretStr) -> str:
        return value.get_secret_value()


class Partial(BaseModel):
    shown: int
    hidden: int = Field(default=0, exclude=True)


@dataclass
class Started:
    number: int
    by: InitVar[str]


class Cat(BaseModel):
    name: str


class Dog(BaseModel):
    name: str


class Puppy(Dog):
    age: int


class TaggedCat(BaseModel):
    kind: Literal["cat"] = "cat"
    name: str


class TaggedDog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Price(BaseModel):
    amount: Decimal | str


class Noted(BaseModel):
    number: int
    _note: str = PrivateAttr(default="")


def returning(annotation: Any, **options: Any) -> TaskFunction[..., Any]:
    def function() -> Any: ...

    function.__annotations__["return"] = annotation
    return TaskFunction(function, name="t", options=tasklib.options.TaskOptions(**options))


def back(annotation: Any, value: object) -> object:
    """One result, stored by a worker and asked for by a client."""
    returns = returning(annotation).returns
    row: Any = SimpleNamespace(id=UUID(int=1), name="t")
    row.result = from_json(encode_result(row, value, returns))
    return result_of(row, returns)


def noted(number: int, note: str) -> Noted:
    made = Noted(number=number)
    made._note = note
    return made


# --- Types that come back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (bytes, b"\x00\xff"),
        (bytes, b"text"),
        (Two, Two.model_validate({"in": 1, "others": [{"in": 2}]})),
        (list[Closed], [Closed.model_validate({"w": 2})]),
        (Computed, Computed(width=2)),
        (Blob, Blob(data=b"\xff\x00", weight=math.inf)),
        (Packet, Packet(b"\xff", timedelta(microseconds=1))),
        (Row, {"type": b"\xff"}),
        (Parsed, Parsed.model_validate({"items": "[1, 2]"})),
        (OpenLogin, OpenLogin(password=SecretStr("x"))),
        (Cat | Puppy, Puppy(name="a", age=1)),
        (Puppy | Cat, Cat(name="a")),
        (TaggedCat | TaggedDog, TaggedDog(name="a")),
        (int | str | None, "1"),
        (int | float | str, 1.0),
        (date | datetime, datetime(2030, 1, 2, tzinfo=UTC)),
        (list[str] | str, ["a"]),
        (dict[UUID, Colour], {UUID(int=1): Colour.TWO}),
        (Path | None, Path("a/b")),
        (float, -math.inf),
        (OrderedDict[str, int], OrderedDict(a=1)),
        (Coroutine[Any, Any, Decimal], Decimal("1.10")),
        (int, 10**400),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_result_comes_back_with_its_type(annotation: Any, value: object) -> None:
    """As the function returned it, although it was JSON meanwhile."""
    result = back(annotation, value)
    assert (result, type(result)) == (value, type(value))


def test_nan_comes_back() -> None:
    """Also from inside of a model, whose own setting would write null."""
    result = back(Blob, Blob(data=b"", weight=math.nan))
    assert isinstance(result, Blob)
    assert math.isnan(result.weight)


def test_computed_fields_are_stored_where_they_do_no_harm() -> None:
    """Whoever reads the row in SQL finds them."""
    assert returning(Computed).returns.encode(Computed(width=2)) == b'{"value":{"width":2,"area":4}}'  # type: ignore[union-attr]


def test_a_result_is_converted_to_the_type_that_the_function_declares() -> None:
    """As arguments are."""
    assert back(Cat, {"name": "a"}) == Cat(name="a")
    assert back(int, "5") == 5


@pytest.mark.parametrize("annotation", [Signature.empty, Any, object, None, NoReturn, "NotDefinedAnywhere"])
def test_a_function_that_says_nothing_returns_json(annotation: Any) -> None:
    """Nobody could tell what a string was before."""
    assert back(annotation, (date(2030, 1, 2), 1)) == ["2030-01-02", 1]


def test_any_inside_of_a_type_is_json() -> None:
    """As it is for a function that says nothing."""
    assert back(dict[str, Any], {"at": date(2030, 1, 2), "by": ("a",)}) == {"at": "2030-01-02", "by": ["a"]}


# --- Types that are refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [
        (SecretStr, "a secret is written as asterisks"),
        (list[Login] | None, "a secret is written as asterisks"),
        (Decimal | str, r"'1' \(str\) would be read as Decimal\('1'\) \(Decimal\)"),
        (str | Decimal, r"Decimal\('1.5'\) \(Decimal\) would be read as '1.5' \(str\)"),
        (Price, "would be read as Decimal"),
        (list[str | date], "would be read as"),
        (bytes | str, "would be read as"),
        (Path | str, "would be read as"),
        (AnyUrl | str, "would be read as"),
        (Colour | str, "would be read as"),
        (list[int] | set[int], "would be read as"),
        (dict[int | str, int], "would be read as"),
        (dict[tuple[int, int], int], "could not be read again"),
        (Cat | Dog, "Cat and Dog look alike"),
        (Partial, "left out"),
        (Started, "left out"),
        (Callable[[], int], "a function has no form"),
        (type[int], "a class has no form"),
        (Iterable[int], "return a list"),
        (SimpleNamespace, "SimpleNamespace"),
    ],
)
def test_a_type_that_does_not_come_back_is_refused_when_it_is_registered(annotation: Any, reason: str) -> None:
    """At import, and not after the work has been done. Nothing is said of a function whose result is not kept."""
    with pytest.raises(InvalidTaskDefinition, match=f"task 't' returns .*{reason}.*store_result=False"):
        returning(annotation)
    assert returning(annotation, store_result=False).returns is None


def test_a_type_that_is_defined_below_the_task() -> None:
    """It is looked for again when it is first needed."""
    task = returning("DefinedLater")
    globals()["DefinedLater"] = Cat
    try:
        assert task.returns is not None
        assert task.returns.validate_json(b'{"name":"a"}') == Cat(name="a")
    finally:
        del globals()["DefinedLater"]


# --- Values that are refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (str, f"{SECRET}\0"),
        (str, f"{SECRET}\ud800"),
        (int, SECRET),
        (int, 10**1001),
        (Dog, Puppy(name=SECRET, age=1)),
        (dict[str, object], [SECRET]),
        (dict, Cat(name=SECRET)),
        (OrderedDict[str, int], OrderedDict({SECRET: 1, "a": 2})),
        (Noted, noted(1, SECRET)),
        (float | str, math.nan),
        (Cat, object()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_would_come_back_changed_is_told(annotation: Any, value: object) -> None:
    """The work is done and the task is completed, but nobody takes another value for its result."""
    with pytest.raises(InvalidResult, match=r"^t \(.*\) completed, but ") as caught:
        back(annotation, value)
    assert SECRET not in str(caught.value)
