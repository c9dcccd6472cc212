"""Statements as values: what is sent to PostgreSQL, and how the rows that come back are read.

Sync and async code, our own connections and the caller's all run the same ones. The SQL itself is in `tasklib/sql`.
"""

from tasklib.statements.claims import Claim, ClaimedTask, ClaimStatements, MixedClaim, Place
from tasklib.statements.outcomes import Completions, OutcomeStatements, Started, settlement_json
from tasklib.statements.queues import QueueStatements
from tasklib.statements.statement import Row, Statement
from tasklib.statements.tasks import BATCH_ROWS, MAX_LIST_LIMIT, ListFilters, Statements, as_uuid
from tasklib.statements.worker import Promotion, WorkerDescription, WorkerStatements

__all__ = [
    "BATCH_ROWS",
    "MAX_LIST_LIMIT",
    "Claim",
    "ClaimStatements",
    "ClaimedTask",
    "Completions",
    "ListFilters",
    "MixedClaim",
    "OutcomeStatements",
    "Place",
    "Promotion",
    "QueueStatements",
    "Row",
    "Started",
    "Statement",
    "Statements",
    "WorkerDescription",
    "WorkerStatements",
    "as_uuid",
    "settlement_json",
]
