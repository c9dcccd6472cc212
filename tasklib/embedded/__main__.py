"""`python -m tasklib.embedded`: serve until Ctrl-C, or run a command with DATABASE_URL set."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from tasklib.embedded import EmbeddedPostgres, postgres
from tasklib.errors import EmbeddedPostgresError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options, command = _parser().parse_args(arguments[:end]), arguments[end + 1 :]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM is a Ctrl-C from another process
    try:
        with postgres(options.directory, options.pg_bin, port=options.port, settings=dict(options.set)) as server:
            return _run(command, server) if command else _serve(server)
    except KeyboardInterrupt:
        return 0
    except (EmbeddedPostgresError, OSError) as error:
        sys.stderr.write(f"tasklib.embedded: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    usage = "python -m tasklib.embedded [options] [-- command ...]"
    parser = argparse.ArgumentParser(usage=usage, description="Run a PostgreSQL for development and tests.")
    parser.add_argument("--directory", help="where the data stay; default: temporary")
    parser.add_argument("--pg-bin", help="directory of postgres and initdb; default: TASKLIB_PG_BIN, then a search")
    parser.add_argument("--port", type=int, help="listen on 127.0.0.1 too, with a password (0: any free port)")
    parser.add_argument("--set", action="append", default=[], type=_setting, metavar="NAME=VALUE", help="a setting")
    return parser


def _setting(text: str) -> tuple[str, str]:
    name, value = text.split("=", 1)  # argparse turns the ValueError of a missing "=" into its usage message
    return name, value


def _serve(server: EmbeddedPostgres) -> int:
    sys.stdout.write(server.dsn + "\n")
    sys.stdout.flush()
    server.wait()
    raise EmbeddedPostgresError("The server has stopped unexpectedly")


def _run(command: Sequence[str], server: EmbeddedPostgres) -> int:
    signal.signal(
        signal.SIGINT, lambda *_: None
    )  # the terminal sends Ctrl-C to the command as well, and the command decides
    early: list[int] = []  # signals that come before the process exists
    signal.signal(signal.SIGTERM, lambda number, _: early.append(number))
    process = subprocess.Popen(command, env=os.environ | {"DATABASE_URL": server.dsn})
    signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    for number in early:
        process.send_signal(number)
    code = process.wait()
    return code if code >= 0 else 128 - code  # as a shell reports death by a signal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
