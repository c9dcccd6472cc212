"""What a task accepts as arguments, what it refuses, and in which words."""

import functools
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from pydantic import BaseModel, BeforeValidator, Field, PlainSerializer, SecretStr, field_validator
from typing_extensions import TypedDict

from tasklib.arguments import ArgumentSchema, EncodedArguments, encode_untyped
from tasklib.errors import InvalidArguments, InvalidTaskDefinition
from tasklib.strict_json import MAX_ARGUMENT_BYTES, MAX_DEPTH, MAX_KEYS, MAX_NUMBER_DIGITS, parse_json

SECRET = "hunter2-S3CR3T"  # a canary


class Colour(Enum):
    RED = "red"
    BLUE = 2


class Size(StrEnum):
    SMALL = "s"


class Level(IntEnum):
    HIGH = 3


@dataclass
class Point:
    x: float
    label: str = ""


class Line(BaseModel):
    start: Point
    weight: Decimal = Field(alias="lineWeight", default=Decimal("1.10"))
    anything: Any = None


class DashedLine(Line):
    gap: int = 1


class Login(BaseModel):
    password: SecretStr


class Pair(NamedTuple):
    first: int
    second: str


class Options(TypedDict, total=False):
    depth: int


class Tree(BaseModel):
    children: "list[Tree]" = []


# Writes 1 as "1" and reads it as True, which Python calls equal.
Fickle = Annotated[Any, PlainSerializer(str), BeforeValidator(lambda value: value == "1" or value)]


class Picky(BaseModel):
    value: str

    @field_validator("value")
    @classmethod
    def never(cls, _: str) -> str:
        raise ValueError("is never right")


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


def short(value: object) -> str:
    """A test id: some of the values are too long, too large or too deep to be one."""
    return type(value).__name__


def takes_anything(x: Any) -> None: ...


def takes_text(to: str) -> None: ...


def call_of(
    function: Callable[..., object], *args: object, **kwargs: object
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The call that a worker makes, for the call that was submitted."""
    schema = ArgumentSchema(function, "send_email")
    encoded = schema.encode(args, kwargs)
    return schema.decode(encoded.args, encoded.kwargs)


def refusal(function: Callable[..., object], *args: object, **kwargs: object) -> str:
    with pytest.raises(InvalidArguments) as caught:
        ArgumentSchema(function, "send_email").encode(args, kwargs)
    return str(caught.value)


def back(annotation: Any, value: object) -> object:
    """One value of an annotated parameter, stored and read again."""

    def function(x: annotation) -> None: ...

    return call_of(function, value)[1]["x"]


def refused(annotation: Any, value: object) -> str:
    def function(x: annotation) -> None: ...

    return refusal(function, value)


# --- How arguments are bound -----------------------------------------------------------------------------------------


def test_positional_arguments_are_stored_under_their_names() -> None:
    """A stored task reads the same however it was submitted."""

    def send(to: str, retries: int) -> None: ...

    assert ArgumentSchema(send, "send").encode(("a@b.c", 3), {}) == EncodedArguments("{}", '{"to":"a@b.c","retries":3}')


def test_omitted_argument_is_not_stored() -> None:
    """The function's own default applies when the task runs, also if it has changed since."""

    def send(to: str, subject: str = "hello") -> None: ...

    assert call_of(send, "a") == ((), {"to": "a"})


def test_values_are_converted_to_the_annotated_type() -> None:
    """A string from a form is fine where an int is wanted."""
    assert back(int, "5") == 5


def test_unannotated_parameter_takes_any_json() -> None:
    """A function without annotations can be a task."""

    def function(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - the point of the test
        ...

    assert call_of(function, {"a": [1, 1.0, True, None, "é"]}) == ((), {"x": {"a": [1, 1.0, True, None, "é"]}})


def test_keyword_only_argument() -> None:
    """Keyword-only parameters come back as keywords."""

    def function(*, x: int) -> None: ...

    assert call_of(function, x=1) == ((), {"x": 1})


def test_positional_only_arguments_come_back_by_position() -> None:
    """They are stored in args, for their names cannot be used in the call."""

    def function(a: date, b: str = "", /, c: int = 0) -> None: ...

    schema = ArgumentSchema(function, "t")
    assert schema.encode((date(2030, 1, 2),), {"c": 1}) == EncodedArguments('["2030-01-02"]', '{"c":1}')
    assert call_of(function, date(2030, 1, 2), "b,]", 3) == ((date(2030, 1, 2), "b,]"), {"c": 3})


def test_variadic_arguments_come_back_by_position() -> None:
    """Whatever precedes *args is then given by position too, as Python demands."""

    def function(a: int, *rest: Decimal, key: str = "") -> None: ...

    assert call_of(function, 1, Decimal("1.10"), "2", key="k") == ((1, Decimal("1.10"), Decimal(2)), {"key": "k"})
    assert call_of(function, 1) == ((), {"a": 1})
    assert call_of(function, a=1) == ((), {"a": 1})


def test_variadic_keywords_are_validated() -> None:
    """The annotation of **kwargs holds for each of them."""

    def function(**prices: Decimal) -> None: ...

    assert call_of(function, tea="1.10") == ((), {"tea": Decimal("1.10")})
    assert refusal(function, tea="x").startswith('send_email: argument "tea": ')


def test_keyword_that_is_not_unicode_is_refused() -> None:
    """Also if its value is None: it would come back under another name."""

    def function(**more: Any) -> None: ...

    assert "unicode" in refusal(function, **{"\ud800": None})
    with pytest.raises(InvalidArguments):
        encode_untyped("t", [], {"\ud800": None})


def test_any_parameter_name_works() -> None:
    """Names that mean something to pydantic mean nothing here."""

    def function(_x: int, json: int, model_config: int, copy: int, args: int) -> None: ...

    assert call_of(function, 1, 2, 3, 4, args=5)[1] == {"_x": 1, "json": 2, "model_config": 3, "copy": 4, "args": 5}


def test_partial_coroutine_and_callable_object() -> None:
    """Whatever has a signature can be a task."""

    async def coroutine(x: int) -> None: ...

    class Callable_:  # noqa: N801 - Callable is a type
        def __call__(self, x: "UUID") -> None: ...

    assert call_of(coroutine, 1) == ((), {"x": 1})
    assert call_of(functools.partial(takes_text), "a") == ((), {"to": "a"})
    assert call_of(Callable_(), UUID(int=1)) == ((), {"x": UUID(int=1)})


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((), {}, 'send_email: argument "to": is missing'),
        (("a",), {"to": "b"}, 'send_email: argument "to": given twice'),
        (("a",), {"too": "b"}, 'send_email: argument "too": is not a parameter'),
        (("a", "b"), {}, "send_email: 2 positional arguments, at most 1 are taken"),
        ((5,), {}, 'send_email: argument "to": Input should be a valid string'),
    ],
)
def test_call_that_does_not_fit(args: tuple[object, ...], kwargs: dict[str, object], expected: str) -> None:
    """The message names the task and the parameter."""
    assert refusal(takes_text, *args, **kwargs) == expected


def test_positional_only_parameter_cannot_be_named() -> None:
    """As in Python; with **kwargs, too, where Python would take it for another argument of the same name."""

    def function(a: int, /, **kwargs: int) -> None: ...

    assert refusal(function, 1, a=2) == 'send_email: argument "a": given twice'
    assert refusal(function, a=2) == 'send_email: argument "a": can be given by position only'


def test_every_error_has_its_line() -> None:
    """One submit shows all that is wrong with it, within bounds."""

    def function(a: int, rows: list[int]) -> None: ...

    assert refusal(function, rows=["x"]).splitlines() == [
        'send_email: argument "a": is missing',
        'send_email: argument "rows[0]": Input should be a valid integer, unable to parse string as an integer',
    ]
    assert refusal(function, 1, ["x"] * 50).splitlines()[-1] == "send_email: and 40 more"


# --- Types that come back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (datetime, datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)),
        (datetime, datetime(2030, 1, 2, 3, 4, 5)),  # naive on purpose
        (datetime, datetime(2030, 1, 2, tzinfo=timezone(timedelta(hours=-9, minutes=-30)))),
        (date, date(1, 1, 1)),
        (time, time(23, 59, 59, 999999)),
        (timedelta, timedelta.min),
        (UUID, UUID(int=2**128 - 1)),
        (Decimal, Decimal("1.10")),
        (bytes, b"\x00\xff"),
        (float, 1e23),
        (float, 5e-324),
        (int, 2**53 + 1),
        (Colour, Colour.BLUE),
        (Size, Size.SMALL),
        (Level, Level.HIGH),
        (Point, Point(1e22, "x")),
        (list[Point] | None, [Point(1.0)]),
        (Line, Line(start=Point(1.0), lineWeight=Decimal("2.50"), anything=[1, 1.5])),
        (Pair, Pair(1, "x")),
        (Options, {"depth": 1}),
        (tuple[int, str], (1, "x")),
        (set[UUID], {UUID(int=1), UUID(int=2)}),
        (frozenset[str], frozenset({"a"})),
        (deque[int], deque([1, 2])),
        (dict[int, dict[UUID, list[date]]], {1: {UUID(int=1): [date(2030, 1, 1)]}}),
        (int | str, "1"),
        (int | float | bool, True),
        (Literal["a", 1], 1),
        (str, "NaN Infinity \\u0000 [[[ 1e5 \x01\x7f\u2028 \U0001f600"),
        (Any, 1e22),
        (Any, -1e-7),
        (Any, [",-1e5", {"a": 1.5e300}]),
        (OrderedDict[str, int], OrderedDict(a=1)),
        (Annotated[int, ["metadata without a hash"]], 1),
        (Tree, Tree(children=[Tree()])),
    ],
)
def test_value_comes_back_with_its_type(annotation: Any, value: object) -> None:
    """What is accepted is what the function gets."""
    result = back(annotation, value)
    assert (result, type(result)) == (value, type(value))


def test_local_time_in_a_repeated_hour_comes_back() -> None:
    """Python calls no two zones equal there; the instant and the offset are."""
    sent = datetime(2030, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Oslo"), fold=1)
    result = back(datetime, sent)
    assert isinstance(result, datetime)
    assert (result.timestamp(), result.utcoffset()) == (sent.timestamp(), sent.utcoffset())


def test_datetime_of_a_subclass_is_a_datetime() -> None:
    """Libraries hand out their own subclasses of datetime."""

    class Moment(datetime): ...

    assert back(datetime, Moment(2030, 1, 1, tzinfo=UTC)) == datetime(2030, 1, 1, tzinfo=UTC)


def test_constraints_of_annotated_hold() -> None:
    """Annotated constraints are checked at submit."""
    assert back(Annotated[int, Field(gt=0)], 1) == 1
    assert refused(Annotated[int, Field(gt=0)], 0) == 'send_email: argument "x": Input should be greater than 0'


def test_floats_stay_floats_in_jsonb() -> None:
    """PostgreSQL prints 1e22 as an integer; it is stored with a fraction instead. Strings are left alone."""
    encoded = ArgumentSchema(takes_anything, "t").encode(([1e22, 1e-7, ":1e22"],), {})
    assert encoded.kwargs == '{"x":[10000000000000000000000.0,0.0000001,":1e22"]}'


# --- Values that would change ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Any, (1, 2)),
        (Any, {1, 2}),
        (Any, {1: "a"}),
        (Any, {1: "a", "1": "b"}),
        (Iterable[int], [1, 2]),
        (Any, [{"price": Decimal("1.10")}]),
        (Any, b"x"),
        (Any, Size.SMALL),
        (Any, Point(1.0)),
        (dict[str, Any], {"at": date(2030, 1, 1)}),
        (dict[str, str], {"\ud800": "a"}),
        (dict[Fickle, int], {1: 0}),
        (list, [UUID(int=1)]),
        (object, 1j),
        (SecretStr, SecretStr(SECRET)),
        (Login, Login(password=SecretStr(SECRET))),
        (Line, DashedLine(start=Point(1.0), gap=2)),
        (Line, Line(start=Point(1.0), anything=(1,))),
        (str | date, date(2030, 1, 1)),
        (dict[int | str, int], {1: 1}),
        (OrderedDict[str, int], OrderedDict(b=1, a=2)),
        (datetime, datetime(1800, 1, 1, tzinfo=ZoneInfo("Europe/Paris"))),
        (time, time(1, tzinfo=timezone(timedelta(seconds=30)))),
    ],
)
def test_value_that_would_come_back_changed_is_refused(annotation: Any, value: object) -> None:
    """Never altered silently: tuples become lists, secrets asterisks, subclasses their base, offsets lose seconds."""
    assert refused(annotation, value) == (
        'send_email: argument "x": does not come back the same from JSON; annotate the parameter with a type that does'
    )


@pytest.mark.parametrize(
    ("value", "place", "words"),
    [
        (float("nan"), "x", "JSON has no NaN"),
        ([1, {"a": float("-inf")}], "x[1].a", "JSON has no Infinity"),
        (["a\0b"], "x[0]", "NUL"),
        ({"a\0b": 1}, "x.a\\u0000b", "NUL"),
        ("\ud800", "x", "surrogate"),
        ({"\udfff": 1}, "x", "surrogate"),
        (10**MAX_NUMBER_DIGITS, "x", f"more than {MAX_NUMBER_DIGITS} digits"),
        (-(10**10_000), "x", f"more than {MAX_NUMBER_DIGITS} digits"),
        (object(), "x", "cannot be written as JSON"),
        (nested(100_000), "x", f"deeper than {MAX_DEPTH} levels"),
    ],
    ids=short,
)
def test_value_that_cannot_be_stored_is_refused(value: object, place: str, words: str) -> None:
    """By us, before SQL, with the place."""
    message = refusal(takes_anything, value)
    assert message.startswith(f'send_email: argument "{place}": ')
    assert words in message


@pytest.mark.parametrize("annotation", [float, list[float], Point])
def test_nan_is_refused_where_a_float_is_wanted(annotation: Any) -> None:
    """Also in types that need no second look."""
    nan = float("nan")
    value = {float: nan, Point: Point(nan)}.get(annotation, [nan])
    assert 'argument "x' in refused(annotation, value)


def test_nul_is_refused_where_text_is_wanted() -> None:
    """Also in types that need no second look."""
    assert "NUL" in refusal(takes_text, "\0")


def test_container_that_contains_itself_is_refused() -> None:
    """Neither a RecursionError nor an endless loop."""
    loop: list[object] = []
    loop.append(loop)
    assert refusal(takes_anything, loop) == 'send_email: argument "x": contains itself'


def test_depth_limit_is_exact() -> None:
    """The object of all arguments is the first level; brackets in strings are none."""
    assert back(Any, nested(MAX_DEPTH - 1)) == nested(MAX_DEPTH - 1)
    assert f"deeper than {MAX_DEPTH} levels" in refusal(takes_anything, nested(MAX_DEPTH))
    assert back(Any, "]" * 100) == "]" * 100
    assert f"deeper than {MAX_DEPTH} levels" in refusal(takes_anything, ["]" * 100, nested(MAX_DEPTH)])
    wide = [nested(2)] * 100
    assert back(Any, wide) == wide


def test_key_limit_is_exact() -> None:
    """The parameter's name is a key as well; colons in strings are none."""
    fits = {str(n): ":" for n in range(MAX_KEYS - 1)}
    assert back(dict[str, str], fits) == fits
    assert f"the limit is {MAX_KEYS}" in refusal(takes_anything, fits | {"more": ":"})


def test_digit_limit_is_exact() -> None:
    """Digits in strings are not counted."""
    assert back(int, 10**MAX_NUMBER_DIGITS - 1) == 10**MAX_NUMBER_DIGITS - 1
    assert back(str, "1" * 5000) == "1" * 5000


def test_size_limit() -> None:
    """The message says how large it was, and how large it may be."""
    fits = "x" * (MAX_ARGUMENT_BYTES - len('{"to":""}'))
    assert call_of(takes_text, fits) == ((), {"to": fits})
    assert refusal(takes_text, fits + "x") == (
        f"send_email: the arguments take {MAX_ARGUMENT_BYTES + 1} bytes, the limit is {MAX_ARGUMENT_BYTES}"
    )


def test_size_limit_counts_floats_as_they_are_stored() -> None:
    """1e300 takes 5 bytes in Python's JSON and 303 in jsonb."""
    with pytest.raises(InvalidArguments, match="the limit is 1000"):
        ArgumentSchema(takes_anything, "t").encode(([1e300] * 10,), {}, max_bytes=1000)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (int, SECRET),
        (Literal["a"], SECRET),
        (datetime, SECRET),
        (Picky, {"value": SECRET}),
        (Any, [SECRET, object()]),
        (Any, [SECRET, "\ud800"]),
        (Any, [SECRET, "\0"]),
        (Any, (SECRET,)),
        (Login, Login(password=SecretStr(SECRET))),
    ],
)
def test_no_message_shows_the_value(annotation: Any, value: object) -> None:
    """Arguments may be secrets, and errors end up in logs: neither the message nor the traceback has them."""

    def function(x: annotation) -> None: ...

    with pytest.raises(InvalidArguments) as caught:
        ArgumentSchema(function, "t").encode((value,), {})
    assert SECRET not in "".join(traceback.format_exception(caught.value))


# --- Decoding --------------------------------------------------------------------------------------------------------


def test_stored_arguments_that_no_longer_fit() -> None:
    """The function may have changed since the task was submitted."""
    with pytest.raises(InvalidArguments, match='send_email: argument "to": is missing'):
        ArgumentSchema(takes_text, "send_email").decode("{}", "{}")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [("{}", "{"), ("{}", b"\xff"), ("[", "{}"), ("0", "{}"), ("[1]", "[]"), ("[" * 9999, "{}")],
    ids=short,
)
def test_corrupt_json_is_refused(args: str, kwargs: str | bytes) -> None:
    """A worker fails the task with a message instead of crashing."""
    with pytest.raises(InvalidArguments, match="send_email"):
        ArgumentSchema(takes_text, "send_email").decode(args, kwargs)


def test_stored_positional_arguments_are_bound_to_names() -> None:
    """Who submits by name alone need not know how the parameters are called."""

    def function(a: int, b: Decimal, c: str = "") -> None: ...

    schema = ArgumentSchema(function, "t")
    assert schema.decode('[1, "1.10"]', b'{"c": "x"}') == (
        (),
        {"a": 1, "b": Decimal("1.10"), "c": "x"},
    )
    with pytest.raises(InvalidArguments, match='argument "a": given twice'):
        schema.decode("[1]", '{"a": 2}')


def test_missing_positional_only_argument_is_refused() -> None:
    """An empty args column is an empty array."""

    def function(a: int, /) -> None: ...

    with pytest.raises(InvalidArguments, match='argument "a": is missing'):
        ArgumentSchema(function, "t").decode("{}", "{}")


# --- Definitions -----------------------------------------------------------------------------------------------------


def test_forward_reference_is_resolved_at_first_use() -> None:
    """A class may be defined below the task, and annotations may all be strings."""

    def function(point: "list[DefinedLater]", returned: "int" = 0) -> "NeverDefined": ...  # type: ignore[name-defined]  # noqa: F821 - the point of the test

    schema = ArgumentSchema(function, "t")
    with pytest.raises(InvalidTaskDefinition, match=r't: .* parameter "point" .*DefinedLater.* module level'):
        schema.encode(([],), {})
    globals()["DefinedLater"] = Point
    try:
        encoded = schema.encode(([Point(1.0)],), {})
        assert schema.decode(encoded.args, encoded.kwargs) == ((), {"point": [Point(1.0)]})
    finally:
        del globals()["DefinedLater"]


def test_model_with_a_forward_reference_is_resolved_at_first_use() -> None:
    """The same for a field of a model."""

    class Unfinished(BaseModel):
        leaf: "DefinedLater"  # type: ignore[name-defined]  # noqa: F821 - the point of the test

    def function(tree: Unfinished) -> None: ...

    schema = ArgumentSchema(function, "t")
    with pytest.raises(InvalidTaskDefinition, match=r'parameter "tree"'):
        schema.encode(([],), {})


def test_type_that_has_no_json_is_refused_at_definition() -> None:
    """At import, not at the first submit."""

    class Socket: ...

    def function(connection: Socket) -> None: ...

    with pytest.raises(InvalidTaskDefinition, match=r'^t: parameter "connection" has a type that cannot be read'):
        ArgumentSchema(function, "t")


def test_annotation_that_is_no_type_is_refused_at_definition() -> None:
    """The message names the parameter."""

    def function(x: "1 +") -> None: ...  # type: ignore[valid-type]  # noqa: F722 - the point of the test

    with pytest.raises(InvalidTaskDefinition, match=r'^t: parameter "x" has an annotation that cannot be evaluated'):
        ArgumentSchema(function, "t")


def test_callable_without_a_signature_is_refused() -> None:
    """Some builtins have none."""
    with pytest.raises(InvalidTaskDefinition, match="cannot be inspected"):
        ArgumentSchema(max, "t")


def test_one_model_in_two_parameters() -> None:
    """Shared and recursive definitions are compiled together."""

    def function(one: Tree, two: list[Tree]) -> None: ...

    assert call_of(function, Tree(), [Tree(children=[Tree()])]) == (
        (),
        {"one": Tree(), "two": [Tree(children=[Tree()])]},
    )


def test_json_schema_lists_the_parameters() -> None:
    """For forms and documentation."""

    def function(a: int, /, b: str = "", *rest: date) -> None: ...

    schema = ArgumentSchema(function, "t").json_schema()
    assert schema["required"] == ["a"]
    assert set(schema["properties"]) == {"a", "b", "rest"}  # type: ignore[call-overload]
    assert schema["additionalProperties"] is False


# --- Without a function ----------------------------------------------------------------------------------------------


def test_untyped_arguments_are_stored_as_they_are() -> None:
    """A task of another program is submitted by its name; any keyword may occur."""
    assert encode_untyped("t", [1, "a,]"], {"args": [1.0], "b": None}) == EncodedArguments(
        '[1,"a,]"]', '{"args":[1.0],"b":null}'
    )
    assert encode_untyped("t", [], {}) == EncodedArguments("{}", "{}")


@pytest.mark.parametrize("value", [(1,), date(2030, 1, 1), {1: 1}, float("nan"), "\0", "\ud800", object()], ids=short)
def test_untyped_arguments_are_json_only(value: object) -> None:
    """Without annotations nobody could tell what a string was before."""
    with pytest.raises(InvalidArguments, match=r'^t: argument "a"'):
        encode_untyped("t", [], {"a": value})
    with pytest.raises(InvalidArguments, match=r'^t: argument "args'):
        encode_untyped("t", [value], {})


def test_untyped_arguments_have_one_size_limit() -> None:
    """For args and kwargs together."""
    with pytest.raises(InvalidArguments, match="the limit is"):
        encode_untyped("t", ["x" * 50], {"a": "x" * 50}, max_bytes=100)


# --- JSON from outside -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": {"b": 1, "b": 2}}', 'at "a": the key "b" occurs twice'),
        ("[NaN]", 'at "[0]": JSON has no NaN'),
        ("-Infinity", "JSON has no Infinity"),
        ('{"a": [1, 1e400000]}', 'at "a[1]": a number beyond the range of a 64-bit float'),
        ("1e131071", "a number beyond the range"),
        ("1e-400", "a number beyond the range"),
        ("0." + "1" * 2000, "a number beyond the range"),
        ("1" * (MAX_NUMBER_DIGITS + 1), f"more than {MAX_NUMBER_DIGITS} digits"),
        ("9" * 100_000, f"more than {MAX_NUMBER_DIGITS} digits"),
        ('{"a": "\\ud800"}', 'at "a": holds half of a surrogate pair'),
        ('{"a": "\ud800"}', 'at "a": holds half of a surrogate pair'),
        ('{"a": "\\u0000"}', 'at "a": holds the character NUL'),
        ('{"\\u0000": 1}', "holds the character NUL"),
        ("[" * 100_000, f"nested deeper than {MAX_DEPTH} levels"),
        ("[" * 65 + "]" * 65, f"nested deeper than {MAX_DEPTH} levels"),
        ("{" + ",".join(f'"{n}":1' for n in range(MAX_KEYS + 1)) + "}", f"the limit is {MAX_KEYS}"),
        ('{"a": ', "not valid JSON: Expecting value: line 1 column 7"),
        (b'"\xff"', "not valid JSON"),
        ("", "not valid JSON"),
    ],
    ids=short,
)
def test_json_that_is_refused(text: str | bytes, words: str) -> None:
    """With the name of the input and the place in it."""
    with pytest.raises(InvalidArguments) as caught:
        parse_json(text, "--kwargs")
    assert str(caught.value).startswith("--kwargs: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, -1.5e3, true, null, "\\ud83d\\ude00"]}', {"a": [1, -1500.0, True, None, "\U0001f600"]}),
        (b" 0.0 ", 0.0),
        ("-0e5", 0.0),
        ("9" * MAX_NUMBER_DIGITS, 10**MAX_NUMBER_DIGITS - 1),
        ("[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH, nested(MAX_DEPTH)),
    ],
    ids=short,
)
def test_json_that_is_accepted(text: str | bytes, value: object) -> None:
    """Ordinary JSON, up to the limits."""
    assert parse_json(text, "--kwargs") == value
