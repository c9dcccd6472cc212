"""The world outside: stand-ins for a mail server and a card company. The tests replace them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decimal import Decimal


class CardDeclined(Exception):
    """The card company said no, and will say it again."""


def send_mail(to: str, subject: str, text: str) -> None:
    print(f"to {to}: {subject}: {text}")


def charge_card(order: int, amount: Decimal) -> str:
    """The order's number is the key of the charge: a card company takes the same one once, however often it is sent."""
    print(f"charged for order {order}: {amount}")
    return f"receipt-{order}"
