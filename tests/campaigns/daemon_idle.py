"""What a daemon costs that has nothing to do: supervisor, two workers, keeper and web, on a processor and in memory.
PostgreSQL's share is told apart.

    python3 dev.py soak daemon idle [--seconds 60]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tasklib
from tasklib import embedded, migrate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run by its path, it finds its neighbours too

from tests.campaigns.soak import say
from tools import measures
from tools.daemons import TASKLIBD, Daemon, daemon

MOST_CPU_PERCENT = 1.0
MOST_PSS_MB = 250.0
CALM_SECONDS = 5.0  # after the start: first polls, first snapshot, the election
MB = 1024**2
ORDINARY: dict[str, Any] = {"workers": 2, "concurrency": 10, "poll_interval_seconds": 1.0, "web": {"port": 0}}


@dataclass(frozen=True)
class Options:
    seconds: float
    settle_seconds: float
    cpu_percent: float
    pss_mb: float


def measure(options: Options, started: Daemon, server: embedded.EmbeddedPostgres) -> list[str]:
    time.sleep(options.settle_seconds)
    meters = [measures.Meter("daemon", started.pid), measures.Meter("PostgreSQL", server.pid)]
    time.sleep(options.seconds)
    for meter in meters:
        say(str(meter))
    cpu_percent = meters[0].percent()
    memory = measures.pss_bytes(measures.family(started.pid))
    parts = ", ".join(f"{measures.name_of(pid)} {each / MB:.0f}" for pid, each in memory.items())
    pss_mb = sum(memory.values()) / MB
    say(f"daemon: {pss_mb:.0f} MB of PSS ({parts})")
    problems = [f"it takes {cpu_percent:.2f} % of a core"] if cpu_percent >= options.cpu_percent else []
    return problems + ([f"it has {pss_mb:.0f} MB of PSS"] if pss_mb >= options.pss_mb else [])


def idle(options: Options) -> list[str]:
    with embedded.postgres() as server:
        migrate.migrate(tasklib.Config(server.dsn))
        with daemon(server.dsn, program=TASKLIBD, **ORDINARY) as started:
            return measure(options, started, server)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle-seconds", type=float, default=CALM_SECONDS, help="before it is measured")
    parser.add_argument("--cpu-percent", type=float, default=MOST_CPU_PERCENT, help="the most that is allowed")
    parser.add_argument("--pss-mb", type=float, default=MOST_PSS_MB, help="the most that is allowed")
    options = Options(**vars(parser.parse_args(arguments)))
    say(f"idle: {options}; {measures.load()}")
    problems = idle(options)
    for problem in problems:
        say(f"VIOLATION {problem}")
    say(f"{'FAILED' if problems else 'all bounds hold'}; {measures.load()}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
