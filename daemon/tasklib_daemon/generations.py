"""The settings that the daemon serves, and those that a reload is about to put in their place.

A generation is a version of the settings together with the children that it asks for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tasklib_daemon.control import MOST_WORKERS
from tasklib_daemon.logs import log
from tasklib_daemon.plan import ChildLimits, Generation

if TYPE_CHECKING:
    from collections.abc import Callable

    from tasklib_daemon.settings import Settings


class Generations:
    def __init__(self, settings: Settings, read_settings: Callable[[], Settings]) -> None:
        self._read_settings = read_settings
        self._settings = {1: settings}
        self._last = 1
        self.serving = Generation(1, settings.workers, has_web=settings.web.port is not None)
        self.coming: Generation | None = None
        self.limits = _limits(settings)

    @property
    def settings(self) -> Settings:
        return self._settings[self.serving.number]

    def settings_of(self, generation: int) -> Settings:
        return self._settings[generation]

    def is_coming(self, generation: int) -> bool:
        return self.coming is not None and generation == self.coming.number

    def scale(self, workers: int) -> None:
        workers = min(max(workers, 1), MOST_WORKERS)
        self.serving = replace(self.serving, workers=workers)
        if self.coming is not None:
            self.coming = replace(self.coming, workers=workers)
        log.info("daemon.scaled", workers=workers)

    # --- reload ---

    def start_reload(self) -> None:
        try:
            settings = self._reread()
        except Exception as error:  # noqa: BLE001 - the old settings serve on, whatever is wrong with the new ones
            log.error("reload.refused", error=str(error), consequence="nothing has changed")
            return
        # A number of workers that an operator has set stays, unless the settings ask for a new one.
        workers = self.serving.workers if settings.workers == self.settings.workers else settings.workers
        self._last += 1
        self._settings[self._last] = settings
        self.coming = Generation(self._last, workers, has_web=settings.web.port is not None)
        log.info("reload.started", generation=self._last, workers=workers)

    def _reread(self) -> Settings:
        """The daemon stays where operators and log readers find it."""
        new, old = self._read_settings(), self.settings
        return new.model_copy(
            update={"runtime_directory": old.runtime_directory, "control_socket": old.control_socket, "log": old.log}
        )

    def fail_reload(self) -> None:
        """A child of the coming generation could not be started, or has died."""
        if self.coming is not None:
            self.coming = replace(self.coming, has_failed=True)

    def finish_reload(self) -> None:
        if self.coming is not None:
            self.serving, self.coming = self.coming, None
            self.limits = _limits(self.settings)
            log.info("reload.done", generation=self.serving.number)

    def abandon_reload(self, why: str | None) -> None:
        self.coming = None
        if why is not None:  # otherwise it is logged already
            log.error("reload.failed", message=why, consequence="the old workers stay")


def _limits(settings: Settings) -> ChildLimits:
    recycle, memory = settings.recycle, settings.recycle.max_memory_mb
    return ChildLimits(
        grace_seconds=settings.grace_seconds,
        boot_seconds=settings.boot_seconds,
        hang_seconds=settings.hang_seconds,
        stall_seconds=settings.stall_seconds,
        connect_seconds=settings.library.database_timeout_seconds,
        max_tasks=recycle.max_tasks,
        max_age_seconds=recycle.max_age_seconds,
        max_memory_bytes=None if memory is None else memory * 1024**2,
    )
