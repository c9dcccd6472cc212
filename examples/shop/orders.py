"""Taking orders. What follows from one is submitted in its own transaction: both are committed, or neither."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from . import tasks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

REMIND_AFTER = timedelta(days=3)

_TABLES = """
create schema if not exists shop;
create table if not exists shop.orders (
    id integer primary key generated always as identity,
    email text not null,
    total numeric not null,
    paid_at timestamptz);
"""


def create_tables(conn: psycopg.Connection[Any]) -> None:
    conn.execute(_TABLES)


def place_order(conn: psycopg.Connection[Any], email: str, lines: Sequence[tasks.Line]) -> int:
    total = sum((line.price * line.quantity for line in lines), Decimal(0))
    order = _insert(conn, email, total)
    tasks.send_confirmation.options(connection=conn).submit_sync(order, email, list(lines))
    tasks.charge.options(connection=conn, idempotency_key=f"charge-{order}").submit_sync(order, total)
    tasks.remind.options(connection=conn, delay_seconds=REMIND_AFTER).submit_sync(order, email)
    return order


def is_paid(conn: psycopg.Connection[Any], order: int) -> bool:
    return conn.execute("select paid_at from shop.orders where id = %s", [order]).fetchone() not in {None, (None,)}


def _insert(conn: psycopg.Connection[Any], email: str, total: Decimal) -> int:
    cursor = conn.execute("insert into shop.orders (email, total) values (%s, %s) returning id", [email, total])
    [(order,)] = cursor.fetchall()
    return int(order)
