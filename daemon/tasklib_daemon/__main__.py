"""`python -m tasklib_daemon` is `tasklibd`."""

from __future__ import annotations

from tasklib_daemon.cli import main

main()
