"""The shop's tasks: every app's tasks.py is found by itself."""

from __future__ import annotations

from django.db import transaction

import tasklib

from .models import Order


@tasklib.task(queue="mail", timeout_seconds=60)
def send_receipt(order_id: int) -> str:
    """At least once, as every task: what was done already is not done again."""
    with transaction.atomic():
        order = Order.objects.select_for_update().get(pk=order_id)
        if not order.receipt_sent:
            print(f"to {order.email}: thank you for {order}", flush=True)  # where a shop would send an email
            order.receipt_sent = True
            order.save()
    return str(order)
