"""The app: it sets up the default client of the process, and imports the tasks of every app."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules


class TasklibAppConfig(AppConfig):
    name = "tasklib.django"
    label = "tasklib"
    verbose_name = "Tasks"

    def ready(self) -> None:
        """Opens no connection."""
        from tasklib.django import connection, settings  # noqa: PLC0415 - settings can be read from here on

        connection.set_up()
        autodiscover_modules(*settings.task_modules())
