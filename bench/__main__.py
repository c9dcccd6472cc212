"""tasklib beside other queues on PostgreSQL, and beside what SQL by hand reaches on its own table.

Every workload is run by every system in every round, in an order that turns from round to round, on one PostgreSQL with
fsync and synchronous_commit on. What counts is the median of the ratios of the rounds: absolute figures vary with the
machine by a factor of two from one hour to the next. Ratios are written so that more than 1 means that tasklib is
ahead. The peers are installed where they are missing (bench/systems.py); docs/benchmarks.md says how all is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import report
from bench.catalogue import WORKLOADS
from bench.figures import Results
from bench.harness import SETTINGS, Bench, NotRun, checked_settings
from bench.sizes import QUICK, Size
from bench.systems import BARE, PEERS, TASKLIB, earlier, installed
from tasklib import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.catalogue import Workload
    from bench.systems import System

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
EXAMPLES = """
python3 dev.py bench                                    all workloads, all systems, five rounds: hours
python3 dev.py bench W3 --rounds 3                      drains alone
python3 dev.py bench drain latency --peers pgqueuer     two workloads beside one peer
python3 dev.py bench W9 --peers --finished 1000000      a size of its own, beside no peer
python3 dev.py bench drain --peers --before HEAD~3      beside an earlier commit (named twice: with a control)
python3 dev.py bench --quick                            everything in a minute, in small: do they all work?
python3 dev.py bench --from bench/results/*.json        the report once more, from what was measured (--docs docs)
"""


def main(arguments: Sequence[str] | None = None, peers: Sequence[System] = tuple(PEERS)) -> int:
    options = parse(arguments, [peer.name for peer in peers])
    if options.earlier:
        results = Results.read(options.earlier)
    else:
        chosen_peers = (peer for peer in peers if peer.name in options.peers)
        results = measure(options, [TASKLIB, *versions_before(options.before), BARE, *chosen_peers])
    print(f"\n{report.text(results)}")
    if options.docs is not None:
        print(f"\n{report.write(results, options.docs)}")
    return 1 if results.has_failed(TASKLIB.name, BARE.name) else 0


def versions_before(revisions: Sequence[str]) -> list[System]:
    return [earlier(revision, revisions[: at + 1].count(revision)) for at, revision in enumerate(revisions)]


def measure(options: argparse.Namespace, systems: Sequence[System]) -> Results:
    commands, missing = installed(systems)
    size = Size(**{each.name: getattr(options, each.name) for each in dataclasses.fields(Size)})
    with (
        embedded.postgres(settings=SETTINGS) as server,
        contextlib.closing(Bench(server, commands, size, is_quick=options.quick)) as bench,
    ):
        results = Results(
            about={
                "began": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
                "settings": checked_settings(server.dsn),
                "python": platform.python_version(),
                "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
                "size": dataclasses.asdict(size),
                "rounds": options.rounds,
                "modes": {system.name: system.mode for system in systems},
                "versions": versions(bench),
            },
            missing=missing,
        )
        print(json.dumps(results.about, indent=2), flush=True)
        run_rounds(bench, chosen(options.workloads), options.rounds, results, options.results)
    return results


def run_rounds(bench: Bench, workloads: Sequence[Workload], rounds: int, results: Results, directory: Path) -> None:
    """What was found is written after every round: a run that is cut short has not been for nothing."""
    path = directory / f"bench-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    runs = list(schedule(workloads, list(bench.commands), rounds))
    began = time.monotonic()
    for done, (number, workload, system) in enumerate(runs):
        said = f"[{done + 1}/{len(runs)}] round {number + 1}/{rounds}  {workload.number:4} {workload.title}"
        print(f"{said:80}  {system.name:14}", end=" ", flush=True)
        started = time.monotonic()
        print(f"{run(bench, workload, system, results)}  ({time.monotonic() - started:.1f} s)", flush=True)
        if done + 1 == len(runs) or runs[done + 1][0] != number:
            results.write(path)
            print(f"-- {path}, {(time.monotonic() - began) / 60:.1f} min", flush=True)


def schedule(
    workloads: Sequence[Workload], systems: list[System], rounds: int
) -> Iterator[tuple[int, Workload, System]]:
    """Another system first in each round: none is always the one that comes after a busy disk."""
    for number in range(rounds):
        first = number % len(systems)
        for workload in workloads:
            if number == 0 or not workload.is_once:
                turned = systems[first:] + systems[:first]
                yield from ((number, workload, system) for system in turned if workload.takes(system))


def run(bench: Bench, workload: Workload, system: System, results: Results) -> str:
    """What to say of it. A system that fails does not take the others' results with it."""
    try:
        measured = workload.run(bench, system)
    except NotRun as reason:
        return results.note(workload.key, system.name, f"not run: {reason}")
    except Exception as error:  # noqa: BLE001 - see above; it is told, and the exit code is 1
        return results.note(workload.key, system.name, f"failed: {type(error).__name__}: {error}")
    results.add(workload.key, system.name, measured)
    return workload.show([measured])


def versions(bench: Bench) -> dict[str, dict[str, Any]]:
    found = {}
    for system in bench.commands:
        with bench.process(system) as process:
            found[system.name] = process.ask("versions")
    return found


def chosen(names: Sequence[str]) -> list[Workload]:
    """By number (W3), by name (drain), or all."""
    wanted = {name.lower() for name in names}
    return [each for each in WORKLOADS if not wanted or {each.number.lower(), each.key} & wanted]


def parse(arguments: Sequence[str] | None, peers: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 dev.py bench",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workloads", nargs="*", help=f"all, or some of: {', '.join(known_names())}")
    parser.add_argument("--peers", nargs="*", choices=peers, default=None, help="all, if not given")
    parser.add_argument("--before", nargs="+", default=[], metavar="REV", help="tasklib at these commits, too")
    parser.add_argument("--rounds", type=int, default=None, help="5")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round, no peers")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="directory for the figures as JSON")
    parser.add_argument("--docs", type=Path, default=None, help="directory for the report; docs/ after a full run")
    parser.add_argument("--from", dest="earlier", nargs="+", type=Path, default=[], help="files with earlier results")
    sizes = parser.add_argument_group("sizes")
    for each in dataclasses.fields(Size):
        kind = type(each.default)
        sizes.add_argument(f"--{each.name.replace('_', '-')}", type=kind, metavar=f"{each.default:,}")
    options = parser.parse_args(arguments)
    if unknown := {name.lower() for name in options.workloads} - {name.lower() for name in known_names()}:
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")
    return with_defaults(options, peers)


def with_defaults(options: argparse.Namespace, peers: list[str]) -> argparse.Namespace:
    if not (options.quick or options.workloads or options.earlier or options.docs):
        options.docs = DOCS
    size = QUICK if options.quick else Size()
    defaults = {
        **dataclasses.asdict(size),
        "rounds": 1 if options.quick else 5,
        "peers": [] if options.quick else peers,
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def known_names() -> list[str]:
    return list(dict.fromkeys(name for each in WORKLOADS for name in (each.number, each.key)))


if __name__ == "__main__":
    sys.exit(main())
