"""Is all well, and if not, where to look: one screen for who is on call."""

from __future__ import annotations

from grafana.panels import Dashboard, Query, Row, Variable, graph, quantiles, stat

PLACE = (
    Variable("namespace", "tasklib_build_info", "Namespace"),
    Variable("job", "tasklib_build_info", "Job"),
)
# What concerns the whole cluster is told by the elected daemon alone; after an election, for a moment, by two.
READY = 'max by (namespace, job, queue) (tasklib_queue_tasks{@, state="ready"})'
ENDED = 'tasklib_tasks_finished_total{@, outcome=~"completed|failed|timed_out|worker_failure"}'  # not: snoozed ...

HEADLINES = Row("Now", [
    stat(
        "Alerts",
        "Alerts of tasklib that fire. The red lines in the graphs are the moments at which they did.",
        Query('count(ALERTS{alertname=~"Tasklib.+", alertstate="firing", @}) or vector(0)'),
        unit="none", steps=[(1, "red")],
    ),
    stat(
        "Daemons",
        "Daemons that are scraped. One is enough to run tasks; a second one takes over when a host is lost.",
        Query("count(tasklib_build_info{@})"),
        unit="none", alerts=["TasklibDaemonDown", "TasklibMetricsAbsent"],
    ),
    stat(
        "Workers",
        "Worker processes that are ready, and those that there should be. Fewer for minutes: they die or do not boot.",
        Query('sum(tasklib_workers{@, state="ready"})', "ready"),
        Query("sum(tasklib_workers_wanted{@})", "wanted"),
        unit="none", alerts=["TasklibNoWorkers", "TasklibWorkersMissing"],
    ),
    stat(
        "Slots in use",
        "Tasks that execute, of those that could at once. Near 100 % with a backlog: more workers or more concurrency.",
        Query("sum(tasklib_worker_executing_tasks{@}) / clamp_min(sum(tasklib_slots{@}), 1)"),
        unit="percentunit", steps=[(0.8, "yellow"), (0.95, "orange")],
    ),
    stat(
        "Backlog",
        "Tasks that are ready and that no worker has taken yet.",
        Query(f"sum({READY})"),
        unit="short", alerts=["TasklibBacklogGrowing"],
    ),
    stat(
        "Oldest ready",
        "How long the longest waiting ready task has been waiting: the figure to hold a service level to.",
        Query("max(tasklib_queue_oldest_ready_age_seconds{@})"),
        unit="s", steps=[(60, "yellow"), (300, "red")], alerts=["TasklibQueueLatencyHigh", "TasklibQueueStuck"],
    ),
    stat(
        "Success",
        "Attempts that completed, of those that completed, failed, timed out or lost their worker.",
        Query(
            'sum(rate(tasklib_tasks_finished_total{@, outcome="completed"}[$__rate_interval]))'
            f" / (sum(rate({ENDED}[$__rate_interval])) > 0)"
        ),
        unit="percentunit", no_value="idle", alerts=["TasklibFailureRatioHigh"],
    ),
    stat(
        "Finished",
        "Attempts that ended in a second, however they ended.",
        Query("sum(rate(tasklib_tasks_finished_total{@}[$__rate_interval]))"),
        unit="ops",
    ),
])  # fmt: skip

THROUGHPUT = Row("Throughput", [
    graph(
        "In and out",
        "Tasks submitted, attempts begun and attempts that ended, in a second. Submitted above ended: a backlog grows.",
        Query("sum(rate(tasklib_tasks_submitted_total{@}[$__rate_interval]))", "submitted"),
        Query("sum(rate(tasklib_tasks_started_total{@}[$__rate_interval]))", "started"),
        Query("sum(rate(tasklib_tasks_finished_total{@}[$__rate_interval]))", "ended"),
        unit="ops", alerts=["TasklibBacklogGrowing"],
    ),
    graph(
        "Attempts by outcome",
        "How attempts ended, in a second. interrupted, snoozed and cancelled are no failures; worker_failure: a death.",
        Query("sum by (outcome) (rate(tasklib_tasks_finished_total{@}[$__rate_interval]))", "{{outcome}}"),
        unit="ops", is_stacked=True, alerts=["TasklibFailureRatioHigh"],
    ),
    graph(
        "How tasks were found",
        "By a notification, by the poll, because their time came, or as more of what was there. Much by poll while few "
        "wait: notifications do not arrive.",
        Query("sum by (found) (rate(tasklib_tasks_claimed_total{@}[$__rate_interval]))", "{{found}}"),
        unit="ops", is_stacked=True, alerts=["TasklibListenerDeaf"],
    ),
])  # fmt: skip

LATENCY = Row("Latency", [
    graph(
        "Wait for a worker",
        "From when a task could run until a worker took it. A floor of about the poll interval: nobody is woken.",
        *quantiles("tasklib_queue_wait_seconds_bucket{@}"),
        unit="s", alerts=["TasklibQueueLatencyHigh"],
    ),
    graph(
        "Duration of attempts",
        "How long attempts took, of all tasks together; by task in the dashboard on queues and tasks.",
        *quantiles("tasklib_task_duration_seconds_bucket{@}"),
        unit="s",
    ),
    graph(
        "Oldest ready task by queue",
        "How long the longest waiting ready task of each queue has been waiting. The line is where the alert begins.",
        Query("max by (queue) (tasklib_queue_oldest_ready_age_seconds{@})", "{{queue}}"),
        unit="s", limit=300, alerts=["TasklibQueueLatencyHigh", "TasklibQueueStuck"],
    ),
])  # fmt: skip

TROUBLE = Row("Trouble", [
    graph(
        "Failed, retried, expired",
        "Tasks in a second that failed and will be tried again, failed for good, or were not started in time.",
        Query("sum(rate(tasklib_tasks_retried_total{@}[$__rate_interval]))", "retried"),
        Query("sum(rate(tasklib_tasks_failed_total{@}[$__rate_interval]))", "failed for good"),
        Query("sum(rate(tasklib_tasks_expired_total{@}[$__rate_interval]))", "expired"),
        unit="ops", width=6, alerts=["TasklibFailureRatioHigh"],
    ),
    graph(
        "Deaths and what they cost",
        "In the last hour: workers that died unasked, tasks taken back, tasks that now run alone, tasks buried.",
        Query(
            'sum(increase(tasklib_worker_deaths_total{@, cause=~"crash|hang|hard_timeout|memory"}[1h]))', "workers died"
        ),
        Query("sum(increase(tasklib_tasks_lost_total{@}[1h]))", "tasks taken back"),
        Query("sum(increase(tasklib_tasks_suspected_total{@}[1h]))", "suspects"),
        Query("sum(increase(tasklib_tasks_buried_total{@}[1h]))", "buried"),
        unit="short", width=6, alerts=["TasklibWorkersDying", "TasklibTasksLost", "TasklibBuriedGrowing"],
    ),
    graph(
        "Late tasks",
        "How long a due task or retry has waited to be made ready by a worker with a free slot. Long: none has one.",
        Query("max(tasklib_due_lag_seconds{@})", "late by"),
        unit="s", width=6, limit=60, alerts=["TasklibScheduleMissed"],
    ),
    graph(
        "Names that nobody serves",
        "Names of tasks that wait, and that no live worker has a function for: a deployment that was forgotten.",
        Query("max(tasklib_unserved_names{@})", "names"),
        unit="short", width=6, alerts=["TasklibTasksUnserved"],
    ),
])  # fmt: skip

POLICIES = Row("Policies", [
    stat(
        "Paused queues",
        "Queues that are paused. Their tasks wait until somebody resumes the queue, or the pause ends.",
        Query("sum(max by (namespace, job, queue) (tasklib_queue_paused{@}))"),
        unit="none", width=8, steps=[(1, "yellow")], alerts=["TasklibQueuePausedLong"],
    ),
    stat(
        "Caps in use",
        "Queues whose cap is in use while tasks wait. Workers may have free slots and start nothing of them.",
        Query(
            "sum(max by (namespace, job, queue) (tasklib_queue_waiting{@})"
            " * (max by (namespace, job, queue) (tasklib_queue_permits{@})"
            " >= bool max by (namespace, job, queue) (tasklib_queue_cap{@})))"
        ),
        unit="none", width=8, steps=[(1, "yellow")], alerts=["TasklibQueueGateFull", "TasklibPermitsForgotten"],
    ),
    stat(
        "Open breakers",
        "Queues whose circuit breaker is open or half open, because attempts failed.",
        Query("sum(max by (namespace, job, queue) (tasklib_queue_breaker_state{@}) > bool 0)"),
        unit="none", width=8, steps=[(1, "red")], alerts=["TasklibBreakerOpen"],
    ),
])  # fmt: skip

DATABASE = Row("PostgreSQL", [
    graph(
        "Connected daemons",
        "Daemons that the database answers, and those that hear notifications. Without these they poll.",
        Query("sum(tasklib_database_up{@})", "connected"),
        Query("sum(tasklib_listener_up{@})", "listening"),
        Query("count(tasklib_build_info{@})", "daemons"),
        unit="short", width=6, alerts=["TasklibDatabaseDown", "TasklibListenerDeaf"],
    ),
    graph(
        "Errors",
        "Rounds of loops that failed, in a second: outage (no connection), refused (by the server), bug (of ours).",
        Query("sum by (kind) (rate(tasklib_database_errors_total{@}[$__rate_interval]))", "{{kind}}"),
        unit="ops", width=6, alerts=["TasklibDbErrors"],
    ),
    graph(
        "Oldest transaction",
        "Keeps VACUUM from removing dead rows, for the whole database. The line is where the alert begins.",
        Query("max(tasklib_database_oldest_transaction_age_seconds{@})", "age"),
        unit="s", width=6, limit=900, alerts=["TasklibOldTransactionHoldsVacuum"],
    ),
    graph(
        "Dead rows",
        "Of the rows of each table, those that VACUUM has still to remove. The hot table lives from it.",
        Query(
            "max by (table) (tasklib_database_dead_tuples{@}"
            " / clamp_min(tasklib_database_live_tuples{@} + tasklib_database_dead_tuples{@}, 1))",
            "{{table}}",
        ),
        unit="percentunit", width=6, most=1, alerts=["TasklibDeadTuplesGrowing"],
    ),
])  # fmt: skip

OVERVIEW = Dashboard(
    "tasklib-overview",
    "tasklib / Overview",
    "Is all well, and if not, where to look.",
    PLACE,
    [HEADLINES, THROUGHPUT, LATENCY, TROUBLE, POLICIES, DATABASE],
)
