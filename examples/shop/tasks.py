"""What the shop does in the background."""

from __future__ import annotations

from decimal import Decimal

from pydantic import BaseModel

import tasklib

from . import outside


class Line(BaseModel):
    article: str
    price: Decimal
    quantity: int = 1


@tasklib.task(queue="mail", max_retries=5)
def send_confirmation(order: int, to: str, lines: list[Line]) -> None:
    articles = ", ".join(f"{line.quantity} {line.article}" for line in lines)
    outside.send_mail(to, f"Order {order}", f"We have received your order: {articles}.")


@tasklib.task(queue="payments", max_retries=2, backoff=tasklib.Fixed(60))
def charge(order: int, amount: Decimal) -> str:
    """The order is paid exactly if this task completes: both are one transaction."""
    try:
        receipt = outside.charge_card(order, amount)
    except outside.CardDeclined as error:
        raise tasklib.Fail(str(error), error_code="CARD_DECLINED") from None
    tasklib.current_task().connection.execute("update shop.orders set paid_at = now() where id = %s", [order])
    return receipt


@tasklib.task(queue="mail")
async def remind(order: int, to: str) -> None:
    conn = await tasklib.current_task().async_connection()
    cursor = await conn.execute("select from shop.orders where id = %s and paid_at is null", [order])
    if not await cursor.fetchall():
        raise tasklib.Cancel("it is paid, or gone")
    outside.send_mail(to, f"Order {order}", "We are still waiting for your payment.")
