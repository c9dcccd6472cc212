"""The order and the task that follows from it are one transaction: both, or neither."""

from __future__ import annotations

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_POST

from .models import Order
from .tasks import send_receipt


@require_POST
def create_order(request: HttpRequest) -> JsonResponse:
    with transaction.atomic():
        order = Order(email=request.POST.get("email", ""))
        order.save()
        task_id = send_receipt.submit_sync(order.pk)
        if "@" not in order.email:  # too late, on purpose: what is rolled back takes the task along
            transaction.set_rollback(True)
            return JsonResponse({"error": "email"}, status=400)
    return JsonResponse({"order": order.pk, "task": str(task_id)}, status=201)
