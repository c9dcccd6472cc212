"""`manage.py tasklib_migrate`: creates tasklib's schema, or brings it to this version."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError

from tasklib import migrate
from tasklib.django.settings import config
from tasklib.errors import TasklibError

if TYPE_CHECKING:
    from argparse import ArgumentParser


class Command(BaseCommand):
    help = "Create tasklib's schema in the project's database, or bring it to this version."
    requires_system_checks = ()  # it must run before anything that needs the schema

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if it is not up to date")
        parser.add_argument("--sql", action="store_true", help="print the SQL instead of running it")
        parser.add_argument("--pre", action="store_true", help="only what may run before the new version is rolled out")

    def handle(self, *_: Any, **options: Any) -> None:
        try:
            self._migrate("pre" if options["pre"] else None, options)
        except TasklibError as error:
            raise CommandError(str(error)) from error

    def _migrate(self, phase: migrate.Phase | None, options: dict[str, Any]) -> None:
        settings = config()
        if options["sql"]:
            self.stdout.write(migrate.script(settings, migrate.check(settings), phase=phase))
        elif options["check"]:
            waiting = migrate.check(settings)
            self.stdout.write(f"schema {settings.schema}: waiting: {waiting}")
            if waiting.is_incomplete:
                sys.exit(1)
        else:
            applied = migrate.migrate(settings, phase=phase, say=self.stderr.write)
            self.stdout.write(f"schema {settings.schema}: applied: {applied}")
