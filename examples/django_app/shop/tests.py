"""How an application tests its tasks: python manage.py test."""

# ruff: noqa: S101 - assert is how tests speak

from __future__ import annotations

from http import HTTPStatus

from django.test import TestCase, TransactionTestCase

import tasklib
import tasklib.django
from tasklib import TaskWorker
from tasklib.django.models import Task

from .models import Order
from .tasks import send_receipt


class OrderTests(TestCase):
    """Every test is a transaction that is rolled back: what was submitted is seen in it, and no worker runs it."""

    def test_an_order_submits_its_receipt(self) -> None:
        answer = self.client.post("/orders/", {"email": "alice@example.com"})
        task = Task.objects.get(id=answer.json()["task"])
        assert (task.name, task.queue) == ("send_receipt", "mail")
        assert task.kwargs == {"order_id": answer.json()["order"]}

    def test_a_refused_order_leaves_no_task(self) -> None:
        answer = self.client.post("/orders/", {"email": "nobody"})
        assert answer.status_code == HTTPStatus.BAD_REQUEST
        assert (Order.objects.count(), Task.objects.count()) == (0, 0)

    def test_the_function_itself(self) -> None:
        """It is a function: call it."""
        order = Order.objects.create(email="alice@example.com")
        assert send_receipt(order.pk) == f"order {order.pk} of alice@example.com"
        order.refresh_from_db()
        assert order.receipt_sent


class WorkerTests(TransactionTestCase):
    """Here commits are real, so that a worker can run the tasks."""

    def setUp(self) -> None:
        Task.objects.all().delete()  # tasklib's tables are not Django's: it does not empty them

    def test_the_receipt_is_sent(self) -> None:
        answer = self.client.post("/orders/", {"email": "alice@example.com"})
        TaskWorker(tasklib.django.config()).run_until_empty_sync()
        assert Order.objects.get().receipt_sent
        task = tasklib.get_task(answer.json()["task"])
        assert tasklib.is_completed(task)
        assert task.result == {"value": str(Order.objects.get())}
