"""Checks whether a database suits a queue: what is wrong, how bad it is, and what to do about it.

Invariant: the checks change nothing and never wait long, and a fault is a finding and not a traceback.
"""

from tasklib.doctor.findings import EXIT_CODES, UNKNOWN_EXIT_CODE, Finding, Severity, Thresholds, worst
from tasklib.doctor.run import CHECKS, DEEP_CHECKS, SECONDS, run_checks

__all__ = [
    "CHECKS",
    "DEEP_CHECKS",
    "EXIT_CODES",
    "SECONDS",
    "UNKNOWN_EXIT_CODE",
    "Finding",
    "Severity",
    "Thresholds",
    "run_checks",
    "worst",
]
