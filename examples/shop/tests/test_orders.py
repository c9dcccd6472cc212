"""The shop, tested with tasklib's pytest plugin."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

import tasklib
from tasklib.testing import TasksFailed, run_inline

from .. import outside
from ..orders import REMIND_AFTER, is_paid, place_order
from ..tasks import Line, charge, remind, send_confirmation

if TYPE_CHECKING:
    import psycopg

    from tasklib.testing import Queue

    Conn = psycopg.Connection[Any]
    Mailbox = list[tuple[str, str, str]]

LINES = [Line(article="books", price=Decimal("12.90"), quantity=2)]


def test_an_order_submits_what_follows_from_it(conn: Conn, tasklib_queue: Queue) -> None:
    """Which tasks, with which arguments, on which queue, and when."""
    order = place_order(conn, "ann@example.com", LINES)
    conn.commit()
    tasklib_queue.assert_submitted(send_confirmation, order, "ann@example.com", LINES, queue="mail")
    tasklib_queue.assert_submitted(charge, order, amount=Decimal("25.80"), count=1)
    tasklib_queue.assert_submitted(remind, order, "ann@example.com", delay_seconds=REMIND_AFTER)


def test_an_order_that_is_rolled_back_leaves_nothing(conn: Conn, tasklib_queue: Queue) -> None:
    """Neither the order nor its tasks."""
    place_order(conn, "ann@example.com", LINES)
    conn.rollback()
    tasklib_queue.assert_not_submitted()


def test_an_order_is_charged_and_confirmed(conn: Conn, tasklib_queue: Queue, mailbox: Mailbox) -> None:
    """A real worker runs what is due."""
    order = place_order(conn, "ann@example.com", LINES)
    conn.commit()
    ran = tasklib_queue.run_until_empty()
    assert {task.name for task in ran} == {"send_confirmation", "charge"}
    assert is_paid(conn, order)
    assert mailbox == [("ann@example.com", f"Order {order}", "We have received your order: 2 books.")]


def test_who_has_paid_is_not_reminded(conn: Conn, tasklib_queue: Queue, mailbox: Mailbox) -> None:
    """Three days pass without waiting."""
    place_order(conn, "ann@example.com", LINES)
    conn.commit()
    tasklib_queue.run_until_empty()
    mailbox.clear()
    tasklib_queue.travel(REMIND_AFTER)
    [task] = tasklib_queue.run_until_empty()
    assert tasklib.is_cancelled(task)
    assert mailbox == []


def test_a_declined_card_is_not_tried_again(
    conn: Conn, tasklib_queue: Queue, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is part of the test; the customer is reminded in the end."""

    def decline(*_: object) -> str:
        raise outside.CardDeclined("no money")

    monkeypatch.setattr(outside, "charge_card", decline)
    order = place_order(conn, "bob@example.com", LINES)
    conn.commit()
    tasklib_queue.run_until_empty(raise_errors=False)
    [task] = tasklib_queue.submitted(charge)
    assert tasklib.is_failed(task)
    assert task.error_code == "CARD_DECLINED"
    assert not is_paid(conn, order)

    mailbox.clear()
    tasklib_queue.travel(REMIND_AFTER)
    tasklib_queue.run_until_empty()
    assert mailbox == [("bob@example.com", f"Order {order}", "We are still waiting for your payment.")]


def test_an_outage_of_the_card_company_costs_a_minute(
    conn: Conn, tasklib_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected failure is raised in the test, with its traceback; the retry comes after its backoff."""
    answers = iter([ConnectionError("503"), "receipt-1"])

    def charge_card(*_: object) -> str:
        match next(answers):
            case ConnectionError() as error:
                raise error
            case receipt:
                return str(receipt)

    monkeypatch.setattr(outside, "charge_card", charge_card)
    order = place_order(conn, "ann@example.com", LINES)
    conn.commit()
    with pytest.raises(TasksFailed, match="ConnectionError: 503"):
        tasklib_queue.run_until_empty()
    assert not is_paid(conn, order)

    tasklib_queue.travel(seconds=60)
    [task] = tasklib_queue.run_until_empty()
    assert task.result == {"value": "receipt-1"}
    conn.rollback()  # a new look
    assert is_paid(conn, order)


def test_the_words_of_a_confirmation(mailbox: Mailbox) -> None:
    """One function, here and now, without a database; its arguments go through JSON all the same."""
    run_inline(send_confirmation, 7, "ann@example.com", [*LINES, Line(article="pen", price=Decimal(1))])
    assert mailbox[0][2] == "We have received your order: 2 books, 1 pen."


async def test_a_reminder_for_an_order_that_is_gone(conn: Conn) -> None:
    """Async functions are awaited; what they raise comes out."""
    with pytest.raises(tasklib.Cancel, match="gone"):
        await run_inline(remind, 404, "ann@example.com")
