"""Something of the application's own, to be written in the same transaction as a submit."""

# mypy: disable-error-code="var-annotated"

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Order(models.Model):
    note = models.TextField()

    objects: ClassVar[models.Manager[Order]] = models.Manager()

    def __str__(self) -> str:
        return str(self.note)
