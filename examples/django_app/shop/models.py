"""What the shop keeps."""

# mypy: disable-error-code="var-annotated"

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Order(models.Model):
    email = models.EmailField()
    receipt_sent = models.BooleanField(default=False)

    objects: ClassVar[models.Manager[Order]] = models.Manager()

    def __str__(self) -> str:
        return f"order {self.pk} of {self.email}"
