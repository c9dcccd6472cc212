"""What the commands of `tasklib` share: the client, and the words that they read and print."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tasklib.errors import InvalidArguments

# As in tasklib/commands.py: help imports no database driver.
# ruff: noqa: PLC0415

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tasklib.client import Client

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
_DURATION = re.compile(r"(\d{1,9}(?:\.\d+)?)([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def open_client() -> Client:
    from tasklib.client import Client
    from tasklib.config import Config

    return Client(Config.from_environment())


def print_answer(word: str | None, otherwise: str) -> None:
    if word is None:
        typer.echo(f"tasklib: {otherwise}", err=True)
        raise typer.Exit(1)
    typer.echo(word)


def read_moment(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a moment such as 2030-01-31T12:00:00+01:00") from None


def read_moment_or_duration(text: str | None) -> datetime | timedelta | None:
    """A duration is a number with s, m, h or d, such as 30m."""
    if text is not None and (found := _DURATION.fullmatch(text.strip())):
        return timedelta(seconds=float(found[1]) * _UNIT_SECONDS[found[2]])
    try:
        return read_moment(text)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error}, nor a duration such as 30m") from None


def read_pairs(words: Iterable[str] | None) -> dict[str, Any]:
    pairs = [_pair(word) for word in words or ()]
    found = dict(pairs)
    if len(found) < len(pairs):
        raise typer.BadParameter("a key is given twice")
    return found


def _pair(word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    if not equals or not key.rstrip(":"):
        raise typer.BadParameter(f"{word!r} is not KEY=VALUE or KEY:=JSON")
    return (key[:-1], read_json(value, key[:-1])) if key.endswith(":") else (key, value)


def read_json(text: str, what: str) -> Any:
    from tasklib.strict_json import parse_json

    try:
        return parse_json(text, what)
    except InvalidArguments as error:
        raise typer.BadParameter(str(error)) from None
