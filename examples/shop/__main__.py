"""The shop's worker, until Ctrl-C: `python -m shop` beside this directory, with DATABASE_URL set."""

from __future__ import annotations

import tasklib

from . import tasks  # noqa: F401 - registers them

if __name__ == "__main__":
    config = tasklib.Config.from_environment()
    tasklib.init(config)  # a task may submit others
    print(f"serving {', '.join(tasklib.get_registered_tasks())}", flush=True)
    tasklib.TaskWorker(config, concurrency=4).run_sync()
