"""`manage.py tasklib_worker`: runs the tasks of this project until SIGTERM or Ctrl-C, then drains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.core.management.base import BaseCommand, CommandError

from tasklib.django.settings import config
from tasklib.errors import TasklibError
from tasklib.registry import default_registry
from tasklib.worker import TaskWorker

if TYPE_CHECKING:
    from argparse import ArgumentParser


class Command(BaseCommand):
    help = "Run tasks until SIGTERM or Ctrl-C; what executes then is finished. A second signal interrupts it."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--concurrency", type=int, default=1, help="tasks at a time (1)")
        parser.add_argument("--queues", nargs="+", metavar="QUEUE", help="serve only these (all)")
        parser.add_argument(
            "--poll-interval", type=float, default=1.0, help="seconds between polls, if no notification comes (1)"
        )
        parser.add_argument("--grace", type=float, default=30.0, help="seconds to finish in after a signal (30)")
        parser.add_argument("--no-listen", action="store_true", help="only poll, for example behind a pooler")

    def handle(self, *_: Any, **options: Any) -> None:
        try:
            worker = TaskWorker(
                config(),
                concurrency=options["concurrency"],
                poll_interval_seconds=options["poll_interval"],
                queues=options["queues"],
                grace_seconds=options["grace"],
                listen=not options["no_listen"],
            )
            names = ", ".join(sorted(function.name for function in default_registry))
            self.stdout.write(f"serving: {names or 'no tasks. Is there a tasks.py in an installed app?'}")
            self.stdout.flush()
            worker.run_sync()
        except TasklibError as error:
            raise CommandError(str(error)) from error
