"""Looks at a database as a queue needs it, and says what is wrong, how bad that is, and what to do about it.

Invariant: it changes nothing, waits for nobody for long, and whatever is broken is a finding and not a traceback.
"""

from tasklib.doctor.checks import CHECKS, DEEP_CHECKS
from tasklib.doctor.examination import SECONDS, examine
from tasklib.doctor.findings import EXIT_CODES, UNKNOWN_EXIT_CODE, Finding, Severity, worst
from tasklib.doctor.limits import Limits

__all__ = [
    "CHECKS",
    "DEEP_CHECKS",
    "EXIT_CODES",
    "SECONDS",
    "UNKNOWN_EXIT_CODE",
    "Finding",
    "Limits",
    "Severity",
    "examine",
    "worst",
]
